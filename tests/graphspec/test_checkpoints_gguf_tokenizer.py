"""Tokenizer files made from GGUF metadata; the vocabulary is written here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from graphspec.checkpoints import open_checkpoint
from graphspec.errors import CheckpointError

START, END, THINK = "<|im_start|>", "<|im_end|>", "<think>"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["1 2", "12 3", "123 4", "Ġ w", "h i", "a b", "Ċ Ċ", "ĠĠ Ġ", "Ġ Ġ"]
# "zebra" is a token that no merges lead to.
TOKENS = [START, END, *BYTES, *(merge.replace(" ", "") for merge in MERGES), "zebra", THINK, "[PAD0]", "[PAD1]"]
TYPES = [3, 3] + [1] * (len(TOKENS) - 5) + [4, 5, 5]


def tokenizer_files(
    folder: Path,
    *,
    pre: str | None = "gpt-2",
    model: str = "gpt2",
    tokens: Sequence[str] = TOKENS,
    types: Sequence[int] | None = TYPES,
    merges: Sequence[str] = MERGES,
    bos: int | None = 0,
    add_bos: bool | None = None,
    template: str | None = None,
) -> dict[str, bytes]:
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(4)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(1)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if types is not None:
        writer.add_token_types(types)
    if bos is not None:
        writer.add_bos_token_id(bos)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if template is not None:
        writer.add_chat_template(template)
    writer.add_tensor("token_embd.weight", np.ones((len(tokens), 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(open_checkpoint(folder).tokenizer_files())


def tokenizer(folder: Path, pre: str | None = "gpt-2", **options: object) -> Tokenizer:
    files = tokenizer_files(folder, pre=pre, **options)  # type: ignore[arg-type]
    return Tokenizer.from_str(files["tokenizer.json"].decode())


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "hi 1234", ["hi", "Ġ", "1234"]),
        (None, "hi 1234", ["hi", "Ġ", "1234"]),
        ("smollm", "hi w 1234", ["hi", "Ġw", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", "hi 1234", ["hi", "Ġ", "123", "4"]),
        ("llama3", "1234", ["123", "4"]),
        ("qwen2", "hi 1234", ["hi", "Ġ", "1", "2", "3", "4"]),
        ("deepseek-r1-qwen", "12", ["1", "2"]),
        ("gpt-2", "zebra", list("zebra")),
        ("qwen2", "zebra", list("zebra")),
        ("llama-bpe", "zebra", ["zebra"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),
        ("llama-bpe", "e\u0301", ["e", "Ì", "ģ"]),
        ("gpt-2", "!\n\n", ["!", "ĊĊ"]),
        ("qwen2", "?!\n\nab", ["?", "!", "ĊĊ", "ab"]),
        ("gpt-2", "    w", ["ĠĠĠ", "Ġw"]),
        ("qwen2", "(ab", ["(", "ab"]),
    ],
)
def test_text_is_cut_as_the_pre_tokenizer_says(tmp_path: Path, pre: str | None, text: str, expected: list[str]) -> None:
    assert tokenizer(tmp_path, pre, add_bos=False).encode(text).tokens == expected


def test_control_and_user_defined_tokens_are_one_token_wherever_they_stand(tmp_path: Path) -> None:
    built = tokenizer(tmp_path)
    encoded = built.encode(f"{START}hi{THINK}{END}")
    assert encoded.ids == [0, TOKENS.index("hi"), TOKENS.index(THINK), 1]
    assert built.decode(encoded.ids, skip_special_tokens=True) == f"hi{THINK}"
    assert built.decode(encoded.ids, skip_special_tokens=False) == f"{START}hi{THINK}{END}"


def test_every_token_keeps_its_id_and_padding_has_none(tmp_path: Path) -> None:
    built = tokenizer(tmp_path)
    assert [built.token_to_id(token) for token in TOKENS[:-2]] == list(range(len(TOKENS) - 2))
    assert built.token_to_id("[PAD0]") is None
    assert built.encode("[PAD0]").tokens == list("[PAD0]")


def test_an_unused_token_before_others_keeps_its_place(tmp_path: Path) -> None:
    types = [*TYPES[:-2], 5, 1]
    built = tokenizer(tmp_path, types=types)
    assert built.token_to_id("[PAD1]") == len(TOKENS) - 1


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
def test_any_text_comes_back(built: dict[str, Tokenizer], pre: str, text: str) -> None:
    assert built[pre].decode(built[pre].encode(text).ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    pres = ("gpt-2", "smollm", "llama-bpe", "qwen2")
    return {pre: tokenizer(tmp_path_factory.mktemp("built"), pre, add_bos=False) for pre in pres}


@pytest.fixture(scope="module")
def qwen2_of_transformers() -> Tokenizer:
    from transformers import Qwen2Tokenizer

    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in MERGES)]
    vocabulary = {token: index for index, token in enumerate(TOKENS[:-2])}
    names = {"unk_token": END, "eos_token": END, "pad_token": END}
    backend = Qwen2Tokenizer(vocab=vocabulary, merges=merges, **names).backend_tokenizer  # type: ignore[arg-type]
    assert isinstance(backend, Tokenizer)
    return backend


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("ab1234hiw 'sS\n\r\t.,!é\u0301½日😀"), max_size=30))
def test_qwen2_agrees_with_transformers(
    built: dict[str, Tokenizer], qwen2_of_transformers: Tokenizer, text: str
) -> None:
    assert built["qwen2"].encode(text).ids == qwen2_of_transformers.encode(text).ids


@pytest.mark.parametrize(
    ("pre", "stated", "expected"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("gpt-2", False, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_the_first_token_is_added_if_the_file_says_so_or_llama3_by_default(
    tmp_path: Path, pre: str, stated: bool | None, expected: bool
) -> None:
    files = tokenizer_files(tmp_path, pre=pre, add_bos=stated)
    assert json.loads(files["tokenizer_config.json"])["add_bos_token"] is expected
    encoded = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert encoded.encode("hi").tokens == [START, "hi"][not expected :]
    assert encoded.encode("hi", add_special_tokens=False).tokens == ["hi"]


def test_a_first_token_the_file_does_not_name_is_not_added(tmp_path: Path) -> None:
    assert tokenizer(tmp_path, add_bos=True, bos=None).encode("hi").tokens == ["hi"]


def test_settings_ids_and_template_come_along(tmp_path: Path) -> None:
    files = tokenizer_files(tmp_path, template="{{ méssages }}")
    assert set(files) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    assert files["chat_template.jinja"].decode() == "{{ méssages }}"
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": 0, "eos_token_id": 1}
    assert json.loads(files["tokenizer_config.json"]) == {
        "add_bos_token": False,
        "bos_token": START,
        "eos_token": END,
    }


def test_no_template_in_the_file_is_no_entry(tmp_path: Path) -> None:
    assert "chat_template.jinja" not in tokenizer_files(tmp_path)


def test_sentencepiece_is_not_supported_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizers of the kind 'llama' are not supported"):
        tokenizer_files(tmp_path, model="llama")


def test_an_unknown_pre_tokenizer_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre 'tekken' is not supported \(gpt-2, smollm, "):
        tokenizer_files(tmp_path, pre="tekken")


@pytest.mark.parametrize("merge", ["ab", "a b c", "x"])
def test_a_merge_that_is_not_two_tokens_is_refused(tmp_path: Path, merge: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{merge}' in tokenizer.ggml.merges is not two tokens"):
        tokenizer_files(tmp_path, merges=[merge])


def test_a_merge_of_tokens_that_are_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its merges do not fit its tokens"):
        tokenizer_files(tmp_path, merges=["q q"])


def test_a_token_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds tokens twice: hi"):
        tokenizer_files(tmp_path, tokens=["hi", "x", "hi"], types=None, merges=[])


def test_types_that_do_not_match_the_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"has {len(TOKENS)} tokens and 2 token types"):
        tokenizer_files(tmp_path, types=[1, 1])


def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="token id 9999 is outside its"):
        tokenizer_files(tmp_path, bos=9999)
