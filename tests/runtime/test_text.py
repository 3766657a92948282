import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from graphspec.errors import BundleError, RequestError
from graphspec.runtime.text import MAX_UNDECIDED, REPLACEMENT, IncrementalDetokenizer, Tokenizer

CORPUS = ["hello world, the cat sat", "世界 世界 你好", "😀 😀 👩‍👩‍👧 naïve café", "ab abc abcd"] * 4


def trained_byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE, as Llama 3 and Qwen: characters may be split over tokens anywhere."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def byte_fallback(decoder: Any) -> tokenizers.Tokenizer:
    """BPE over ▁ words with a token for every byte, as Llama 2 and Gemma."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b", "世", REPLACEMENT]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    vocabulary |= {f"<0x{value:02X}>": len(pieces) + value for value in range(256)}
    vocabulary[""] = len(vocabulary)
    model = models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("▁", "b")], byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def llama2_like() -> tokenizers.Tokenizer:
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    return byte_fallback(decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip]))


def gemma_like() -> tokenizers.Tokenizer:
    return byte_fallback(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def metaspace() -> tokenizers.Tokenizer:
    """No byte fallback: a `<0xE4>` in the vocabulary is plain text."""
    return byte_fallback(decoders.Metaspace())


BUILDERS: list[Callable[[], tokenizers.Tokenizer]] = [trained_byte_level, llama2_like, gemma_like, metaspace]


@cache
def loaded(builder: Callable[[], tokenizers.Tokenizer]) -> Tokenizer:
    return Tokenizer({"tokenizer.json": builder().to_str().encode()})


def files(**others: Any) -> dict[str, bytes]:
    content = {"tokenizer.json": trained_byte_level().to_str().encode()}
    names = {"tokenizer_config": "tokenizer_config.json", "generation_config": "generation_config.json"}
    return content | {names[name]: json.dumps(value).encode() for name, value in others.items()}


def byte_level_ids(text: str) -> list[int]:
    return loaded(trained_byte_level).encode(text, add_special_tokens=False)


def byte_ids(content: bytes) -> list[int]:
    """One token for each byte, in the byte-fallback vocabularies."""
    return [10 + value for value in content]


@st.composite
def id_lists(draw: st.DrawFn, builder: Callable[[], tokenizers.Tokenizer]) -> list[int]:
    """Any tokens at all, mixed with the tokens of real text and pieces of it."""
    tokenizer = loaded(builder)
    anything = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=8)
    words = st.sampled_from(["世界", "😀", "ab ab", "é", " a", "👩‍👩‍👧"])
    encoded = words.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    part = encoded.flatmap(lambda ids: st.integers(0, len(ids)).map(lambda size: ids[:size]))
    pieces: list[list[int]] = draw(st.lists(st.one_of(anything, encoded, part), max_size=6))
    return [token_id for piece in pieces for token_id in piece]


@st.composite
def splits(draw: st.DrawFn, token_ids: list[int]) -> list[list[int]]:
    """The same ids, cut into pushes at any places; some pushes are empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(token_ids)), max_size=8)))
    edges = [0, *cuts, len(token_ids)]
    return [token_ids[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("builder", [trained_byte_level, llama2_like, gemma_like, metaspace])
@settings(deadline=None, max_examples=100)
@given(text=st.one_of(st.text(max_size=300), st.text("ab hello", max_size=300), st.text(" ", max_size=300)))
def test_a_text_has_no_fewer_tokens_than_its_length_says(
    builder: Callable[[], tokenizers.Tokenizer], text: str
) -> None:
    tokenizer = loaded(builder)
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.fewest_tokens("a" * 10**6) > 1000


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("skip", [True, False])
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_the_pieces_joined_are_the_text_of_all_tokens(
    builder: Callable[[], tokenizers.Tokenizer], skip: bool, data: st.DataObject
) -> None:
    tokenizer = loaded(builder)
    token_ids = data.draw(id_lists(builder))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(part) for part in data.draw(splits(token_ids))]
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("builder", BUILDERS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_after_a_prompt_the_pieces_are_what_the_tokens_add_to_it(
    builder: Callable[[], tokenizers.Tokenizer], data: st.DataObject
) -> None:
    tokenizer = loaded(builder)
    prompt = data.draw(id_lists(builder))
    token_ids = data.draw(id_lists(builder))
    detokenizer = IncrementalDetokenizer(tokenizer, prompt=prompt)
    pieces = [detokenizer.push(part) for part in data.draw(splits(token_ids))]
    # The prompt's own text is out already, except an unfinished character at its end.
    before = tokenizer.decode(prompt).rstrip(REPLACEMENT)
    after = tokenizer.decode(prompt + token_ids)
    added = "".join(pieces) + detokenizer.finish()
    assert added == after[len(before) :] if tokenizer.visible(token_ids, tokenizer.hidden()) else added == ""


@pytest.mark.parametrize("builder", BUILDERS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_undecided_text_is_all_of_the_text_that_is_whole_so_far(
    builder: Callable[[], tokenizers.Tokenizer], data: st.DataObject
) -> None:
    tokenizer = loaded(builder)
    token_ids = data.draw(id_lists(builder))
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = detokenizer.push(token_ids)
    whole = tokenizer.decode(token_ids).rstrip(REPLACEMENT)
    assert (text + detokenizer.undecided).rstrip(REPLACEMENT) == whole


def test_a_character_split_over_tokens_comes_out_once_and_whole() -> None:
    tokenizer = loaded(trained_byte_level)
    vocabulary = trained_byte_level().get_vocab()
    mapped = [vocabulary[token] for token in ("ð", "Ł", "ĺ", "Ģ")]  # the bytes F0 9F 98 80
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in mapped] == ["", "", "", "😀"]


def test_a_chunk_edge_in_cjk_text_loses_and_repeats_nothing() -> None:
    tokenizer = loaded(trained_byte_level)
    token_ids = byte_level_ids("A 世ab 界")
    for edge in range(len(token_ids) + 1):
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces = [detokenizer.push(token_ids[:edge]), detokenizer.push(token_ids[edge:])]
        assert "".join(pieces) == "A 世ab 界"


def test_invalid_bytes_come_out_as_replacement_characters() -> None:
    tokenizer = loaded(llama2_like)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(byte_ids(b"\xff\xe4")) == ""
    assert detokenizer.push([4]) == f"{REPLACEMENT * 2}a"


def test_the_tail_held_back_comes_out_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(loaded(llama2_like))
    assert detokenizer.push([4, *byte_ids("世".encode())]) == "a"
    assert detokenizer.finish() == "世"
    unfinished = IncrementalDetokenizer(loaded(trained_byte_level))
    assert unfinished.push(byte_level_ids("界")[:1]) == ""
    assert unfinished.finish() == REPLACEMENT


def test_a_real_replacement_character_is_text() -> None:
    detokenizer = IncrementalDetokenizer(loaded(gemma_like))
    assert detokenizer.push([4, 9]) == "a"
    assert detokenizer.push([5]) == f"{REPLACEMENT}b"


def test_a_byte_run_is_undecided_until_it_ends() -> None:
    detokenizer = IncrementalDetokenizer(loaded(llama2_like))
    assert detokenizer.push(byte_ids("世".encode())) == ""
    assert detokenizer.undecided == "世"
    assert detokenizer.push([6]) == "世 a"
    assert detokenizer.undecided == ""


def test_the_first_word_keeps_its_space_after_a_prompt_only() -> None:
    tokenizer = loaded(llama2_like)
    assert IncrementalDetokenizer(tokenizer).push([6, 7]) == "a b"
    assert IncrementalDetokenizer(tokenizer, prompt=[1, 4]).push([6, 7]) == " a b"


def test_a_token_without_text_changes_nothing_around_it() -> None:
    nothing = llama2_like().get_vocab()[""]
    detokenizer = IncrementalDetokenizer(loaded(llama2_like))
    assert [detokenizer.push([token_id]) for token_id in (4, nothing, 7)] == ["a", "", " b"]


@pytest.mark.parametrize(("builder", "token"), [(llama2_like, "<0xFF>"), (trained_byte_level, "ÿ")])
def test_endless_garbage_is_let_go_rather_than_kept_for_ever(
    builder: Callable[[], tokenizers.Tokenizer], token: str
) -> None:
    detokenizer = IncrementalDetokenizer(loaded(builder))
    garbage = [builder().get_vocab()[token]] * (5 * MAX_UNDECIDED)
    text = detokenizer.push(garbage)
    assert len(text) >= 4 * MAX_UNDECIDED
    assert text + detokenizer.finish() == REPLACEMENT * len(garbage)


@settings(deadline=None, max_examples=50)
@given(text=st.text())
def test_byte_level_text_survives_encoding_and_decoding(text: str) -> None:
    tokenizer = loaded(trained_byte_level)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("builder", [trained_byte_level, llama2_like, gemma_like, metaspace])
@given(text=st.text("ab 世é😀", min_size=1))
@settings(max_examples=50, deadline=None)
def test_the_bytes_of_tokens_joined_are_the_text(builder: Callable[[], tokenizers.Tokenizer], text: str) -> None:
    """As far as a vocabulary can say it; some add a space in front, and take it away again."""
    tokenizer = loaded(builder)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    whole = b"".join(map(tokenizer.token_bytes, token_ids)).decode()
    decoded = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert whole in (decoded, " " + decoded)


def test_a_token_that_is_no_character_has_bytes_all_the_same() -> None:
    tokenizer = loaded(trained_byte_level)
    first, *_ = map(tokenizer.token_bytes, byte_level_ids("🎉"))
    assert first in ("🎉".encode()[:size] for size in (1, 2, 3))
    assert loaded(llama2_like).token_bytes(byte_ids(b"\xe4")[0]) == b"\xe4"
    assert tokenizer.token_bytes(0) == b"<s>"
    assert tokenizer.token_bytes(10**6) == b""


def test_special_tokens_are_added_only_when_asked() -> None:
    raw = trained_byte_level()
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))]
    )
    tokenizer = Tokenizer({"tokenizer.json": raw.to_str().encode()})
    plain = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("ab", add_special_tokens=True) == [0, *plain]
    assert tokenizer.decode([0, *plain]) == "ab"
    assert tokenizer.decode([0, *plain], skip_special_tokens=False) == "<s>ab"


def test_a_special_token_that_is_named_is_text() -> None:
    raw = trained_byte_level()
    raw.add_special_tokens(["<|python_tag|>", "<|eom|>"])
    tokenizer = Tokenizer({"tokenizer.json": raw.to_str().encode()})
    token_ids = tokenizer.encode("<|python_tag|>世<|eom|>ab", add_special_tokens=False)
    for shown, text in (((), "世ab"), (("<|python_tag|>", "<no token>"), "<|python_tag|>世ab")):
        detokenizer = IncrementalDetokenizer(tokenizer, shown=shown)
        pieces = [detokenizer.push([token_id]) for token_id in token_ids]
        assert "".join(pieces) + detokenizer.finish() == text


def test_truncation_and_padding_left_in_the_file_are_ignored() -> None:
    raw = trained_byte_level()
    raw.enable_truncation(2)
    raw.enable_padding(length=50)
    tokenizer = Tokenizer({"tokenizer.json": raw.to_str().encode()})
    assert tokenizer.encode("no, it is not", add_special_tokens=False) == byte_level_ids("no, it is not")


def test_half_a_surrogate_pair_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="at character 1"):
        loaded(trained_byte_level).encode("a\ud83d", add_special_tokens=False)


def test_end_tokens_are_those_of_the_tokenizer_and_of_the_generation_config() -> None:
    config = {"eos_token": "</s>", "bos_token": {"content": "<s>", "special": True}}
    tokenizer = Tokenizer(files(tokenizer_config=config, generation_config={"eos_token_id": [7, 1, 5]}))
    assert tokenizer.eos_token_ids == (1, 5, 7)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    single = Tokenizer(files(tokenizer_config=config, generation_config={"eos_token_id": 0}))
    assert single.eos_token_ids == (0, 1)


def test_a_tokenizer_alone_has_no_end_tokens_and_no_template() -> None:
    tokenizer = Tokenizer(files())
    assert tokenizer.eos_token_ids == ()
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == ("", "", None)


def test_the_chat_template_file_wins_over_the_tokenizer_config() -> None:
    content = files(tokenizer_config={"chat_template": "old"})
    assert Tokenizer(content).chat_template == "old"
    assert Tokenizer(content | {"chat_template.jinja": "neu ü".encode()}).chat_template == "neu ü"


def test_of_several_named_templates_the_default_one_is_taken() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert Tokenizer(files(tokenizer_config={"chat_template": named})).chat_template == "d"
    assert Tokenizer(files(tokenizer_config={"chat_template": named[:1]})).chat_template is None


def test_a_bundle_directory_is_read_with_files_in_and_beside_its_tokenizer_folder(tmp_path: Path) -> None:
    content = files(tokenizer_config={"eos_token": "</s>"}, generation_config={"eos_token_id": 4})
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tokenizer" / name).write_bytes(content[name])
    (tmp_path / "generation_config.json").write_bytes(content["generation_config.json"])
    (tmp_path / "chat_template.jinja").write_text("hi")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_ids == (1, 4)
    assert tokenizer.chat_template == "hi"
    assert tokenizer.vocab_size == loaded(trained_byte_level).vocab_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, r"no tokenizer\.json.*graphspec build"),
        ({"tokenizer.json": b"{"}, r"tokenizer\.json cannot be read"),
        (files() | {"tokenizer_config.json": b"{"}, r"tokenizer_config\.json is not JSON"),
        (files() | {"tokenizer_config.json": b"\xff"}, r"tokenizer_config\.json is not JSON"),
        (files() | {"generation_config.json": b"[]"}, r"generation_config\.json is not a JSON object"),
        (files() | {"chat_template.jinja": b"\xff"}, r"chat_template\.jinja is not UTF-8"),
    ],
)
def test_a_damaged_file_is_a_bundle_error_that_names_it(content: dict[str, bytes], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        Tokenizer(content)
