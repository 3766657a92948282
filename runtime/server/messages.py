"""Messages as clients send them → as chat templates of text models read them."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import invalid

Message = dict[str, Any]


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Content in parts becomes one text; the arguments of calls, JSON in a string, become objects. Raises ApiError."""
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message.get("role"), str):
        raise invalid("messages", f"{where}.role is {reprlib.repr(message.get('role'))}: it must be a string")
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""  # as vLLM has it: beside calls there is often none, and many templates add it to a string
    changed: Message = {"content": _text(content, where)}
    if message.get("reasoning") is not None:  # vLLM's newer name for it; templates have the older one
        changed["reasoning_content"] = message["reasoning"]
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise invalid("messages", f"{where}.tool_calls is {reprlib.repr(calls)}: it must be a list")
        # Templates ask whether there is such a list, not whether anything is in it.
        changed["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)] or None
    return {**message, **changed}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid("messages", f"{where}.content is {reprlib.repr(content)}: give a text, or text parts")
    return "\n".join(_part(part, where) for part in content)


def _part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise invalid("messages", f"{where}.content has {reprlib.repr(part)}: only text is understood")
    return text


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("messages", f"{where} is {reprlib.repr(call)}: it must have a function with a name")
    arguments = function.get("arguments")
    if arguments in (None, ""):
        arguments = {}
    elif isinstance(arguments, str):
        arguments = _object(arguments)
    if not isinstance(arguments, dict):
        said = reprlib.repr(function["arguments"])
        raise invalid("messages", f"{where}.function.arguments is {said}: it must be a JSON object in a string")
    return {**call, "function": {**function, "arguments": arguments}}


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
