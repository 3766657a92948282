"""POST /v1/chat/completions: messages, through the model's chat template."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from graphspec.errors import RequestError

from ..chat import render_chat
from ..generate import LoadedBundle
from .errors import invalid
from .job import Job, Object, make_job
from .schemas import ChatBody, TokenizeBody

_OURS = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "template")


class ChatForm:
    """`chat.completion` objects and chunks."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def choice(self, text: str) -> Object:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def opening(self) -> Object | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str) -> Object:
        return {"delta": {"content": text} if text else {}}


def chat_job(body: ChatBody, bundle: LoadedBundle, model: str) -> Job:
    """Renders and encodes the messages. Raises ApiError."""
    if not body.messages:
        raise invalid("messages", "messages is missing or empty: give at least one")
    return make_job(
        body,
        ChatForm(),
        bundle,
        [encode_chat(body, bundle)],
        model=model,
        default_max_tokens=None,
        param="messages",
    )


def encode_chat(body: ChatBody | TokenizeBody, bundle: LoadedBundle) -> list[int]:
    """Token ids of a chat. Raises ApiError."""
    variables = body.chat_template_kwargs or {}
    if taken := [name for name in _OURS if name in variables]:
        raise invalid("chat_template_kwargs", f"chat_template_kwargs has {taken[0]}, which the server fills in itself")
    tokenizer = bundle.tokenizer
    if tokenizer.chat_template is None:
        raise invalid("messages", "this model has no chat template: use /v1/completions and write the whole prompt")
    try:
        prompt = render_chat(
            tokenizer.chat_template,
            [_flat(message, index) for index, message in enumerate(body.messages or ())],
            add_generation_prompt=body.add_generation_prompt is not False,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            **variables,
        )
        # The template writes special tokens itself.
        return bundle.encode(prompt, add_special_tokens=bool(body.add_special_tokens))
    except RequestError as error:
        raise invalid("messages", str(error)) from None


def _flat(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Content in parts becomes one text, which is what templates of text models read."""
    if not isinstance(message.get("role"), str):
        raise invalid("messages", f"messages[{index}].role is {reprlib.repr(message.get('role'))}: it must be a string")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, list):
        raise invalid("messages", f"messages[{index}].content is {reprlib.repr(content)}: give a text, or text parts")
    return {**message, "content": "\n".join(_texts(content, index))}


def _texts(parts: Sequence[Any], index: int) -> list[str]:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise invalid("messages", f"messages[{index}].content has {reprlib.repr(part)}: only text is understood")
        texts.append(text)
    return texts
