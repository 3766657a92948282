"""tokenizer.json, chat template and token ids out of GGUF metadata."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphspec.errors import CheckpointError

from .gguf_config import token_ids
from .gguf_header import GgufHeader
from .listing import listed

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Splitting:
    """How text is cut before byte-pair encoding."""

    pattern: str | None = None
    """Cuts by this expression, or by GPT-2's rules."""
    single_digits: bool = False
    ignore_merges: bool = False
    """A piece that is a token is that token, even if no merges lead to it."""
    normalize: bool = False
    """Unicode NFC first."""
    add_bos: bool = False
    """Where the file does not say; as llama.cpp."""


_GPT2 = _Splitting()
_SMOLLM = _Splitting(single_digits=True)
_LLAMA3 = _Splitting(
    pattern=f"{_CONTRACTIONS}|{_WORDS}|" + r"\p{N}{1,3}" + f"|{_OTHERS}", ignore_merges=True, add_bos=True
)
_QWEN2 = _Splitting(pattern=f"{_CONTRACTIONS}|{_WORDS}|" + r"\p{N}" + f"|{_OTHERS}", normalize=True)
# By tokenizer.ggml.pre.
_SPLITTINGS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def tokenizer_files(header: GgufHeader) -> dict[str, bytes]:
    """The tokenizer files the checkpoint would have under Hugging Face; without the tokenizer's own, if the
    file carries no vocabulary. Raises CheckpointError for a kind of tokenizer that is not supported."""
    ids = token_ids(header)
    files = {"generation_config.json": _json(ids)}
    tokens = header.get_texts("tokenizer.ggml.tokens")
    template = header.get_text("tokenizer.chat_template")
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    if tokens is not None:
        add_bos = _adds_bos(header)
        settings: dict[str, str | bool] = {"add_bos_token": add_bos}
        for name in ("bos", "eos", "pad"):
            token_id = ids.get(f"{name}_token_id")
            # Several ends of generation: the tokenizer's own is the first.
            first = token_id[0] if isinstance(token_id, list) else token_id
            if first is not None:
                settings[f"{name}_token"] = _token(header, tokens, first)
        files["tokenizer_config.json"] = _json(settings)
        files["tokenizer.json"] = _build(header, tokens, add_bos).to_str().encode()
    return files


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=2).encode()


def _token(header: GgufHeader, tokens: list[str], token_id: int) -> str:
    if not 0 <= token_id < len(tokens):
        raise CheckpointError(f"{header.path}: token id {token_id} is outside its {len(tokens)} tokens")
    return tokens[token_id]


def _splitting(header: GgufHeader) -> _Splitting:
    model = header.get_text("tokenizer.ggml.model")
    if model != "gpt2":
        raise CheckpointError(
            f"{header.path}: tokenizers of the kind {model!r} are not supported (only 'gpt2', byte-level "
            "BPE); use the checkpoint's Hugging Face directory instead"
        )
    pre = header.get_text("tokenizer.ggml.pre") or "gpt-2"
    if pre not in _SPLITTINGS:
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.pre {pre!r} is not supported ({listed(list(_SPLITTINGS))} are); "
            "use the checkpoint's Hugging Face directory instead"
        )
    return _SPLITTINGS[pre]


def _adds_bos(header: GgufHeader) -> bool:
    stated = header.get_flag("tokenizer.ggml.add_bos_token")
    return _splitting(header).add_bos if stated is None else stated


def _build(header: GgufHeader, tokens: list[str], add_bos: bool) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE
    from tokenizers.processors import TemplateProcessing

    splitting = _splitting(header)
    types = header.get_integers("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{header.path} has {len(tokens)} tokens and {len(types)} token types")
    try:
        model = BPE(_vocabulary(header, tokens, types), _merges(header), ignore_merges=splitting.ignore_merges)
    except Exception as error:  # the library raises plain Exception, for a merge of tokens that do not exist
        raise CheckpointError(f"{header.path}: its merges do not fit its tokens: {error}") from error
    tokenizer = Tokenizer(model)
    if splitting.normalize:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(splitting)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    bos = header.get_integer("tokenizer.ggml.bos_token_id")
    if add_bos and bos is not None:
        token = _token(header, tokens, bos)
        tokenizer.post_processor = TemplateProcessing(
            single=[token, "$A"], pair=[token, "$A", f"{token}:1", "$B:1"], special_tokens=[(token, bos)]
        )
    return tokenizer


def _pre_tokenizer(splitting: _Splitting) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    if splitting.pattern is not None:
        cut = pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated", invert=False)
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([cut, as_bytes])
    by_rules = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if splitting.single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_rules])
    return by_rules


def _vocabulary(header: GgufHeader, tokens: list[str], types: list[int]) -> dict[str, int]:
    """Token ids, less the unused tokens at the end that only pad the embedding."""
    used = len(tokens)
    while used and types[used - 1] == _UNUSED:
        used -= 1
    vocabulary = {token: index for index, token in enumerate(tokens[:used])}
    if len(vocabulary) != used:
        twice = [token for index, token in enumerate(tokens[:used]) if vocabulary[token] != index]
        raise CheckpointError(f"{header.path}: its vocabulary holds tokens twice: {listed(twice, 5)}")
    return vocabulary


def _merges(header: GgufHeader) -> list[tuple[str, str]]:
    merges = []
    for merge in header.get_texts("tokenizer.ggml.merges") or []:
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise CheckpointError(f"{header.path}: {merge!r} in tokenizer.ggml.merges is not two tokens")
        merges.append((left, right))
    return merges
