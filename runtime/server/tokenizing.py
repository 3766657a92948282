"""The tokenizer over HTTP, as vLLM offers it: benchmarks count and cut prompts with it."""

from __future__ import annotations

from ..generate import LoadedBundle
from .chat import encode_chat
from .errors import invalid
from .job import Object
from .schemas import DetokenizeBody, TokenizeBody


def tokenize(body: TokenizeBody, bundle: LoadedBundle) -> Object:
    """Token ids of a text or a chat. Raises RequestError."""
    if body.messages is not None:
        tokens = encode_chat(body, bundle)
    elif body.prompt is not None:
        tokens = bundle.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        raise invalid("prompt", "prompt is missing: give a text, or messages")
    decode = bundle.tokenizer.decode
    strings = [decode([token], skip_special_tokens=False) for token in tokens] if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": bundle.manifest.max_length,
        "tokens": tokens,
        "token_strs": strings,
    }


def detokenize(body: DetokenizeBody, bundle: LoadedBundle) -> Object:
    """The text of token ids, special ones included."""
    check_tokens(body.tokens, bundle, "tokens")
    return {"prompt": bundle.tokenizer.decode(body.tokens, skip_special_tokens=False)}


def tokenizer_info(bundle: LoadedBundle) -> Object:
    """What clients that render chats themselves need to know."""
    tokenizer = bundle.tokenizer
    return {
        "tokenizer_class": "graphspec",
        "bos_token": tokenizer.bos_token or None,
        "eos_token": tokenizer.eos_token or None,
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "vocab_size": bundle.manifest.pair.target.vocab_size,
        "model_max_length": bundle.manifest.max_length,
        "chat_template": tokenizer.chat_template,
    }


def check_tokens(tokens: list[int], bundle: LoadedBundle, param: str) -> None:
    """Raises ApiError for an id outside the vocabulary."""
    size = bundle.manifest.pair.target.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < size]:
        raise invalid(param, f"{param} holds token {wrong[0]}; the vocabulary has tokens 0 to {size - 1}")
