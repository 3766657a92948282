"""Chat messages to the prompt text a model was trained on, through the checkpoint's own Jinja template."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from graphspec.errors import RequestError


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The prompt text for plain JSON `messages`, as transformers' apply_chat_template renders it.

    Special tokens are part of the text: encode it without adding any. `variables` are the template's own,
    such as enable_thinking. Raises RequestError if there is no template, or it fails on these messages.
    """
    if not template:
        raise RequestError("this bundle has no chat template: use --raw and write the whole prompt yourself")
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        said = reprlib.repr(messages)
        raise RequestError(f'the messages are {said}: give a list such as [{{"role": "user", "content": "Hello"}}]')
    compiled = _compile(template)
    # Clients send "content": null beside tool calls; most templates would print "None".
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        return compiled.render(
            {"documents": None, **variables},
            messages=present,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
        )
    except Exception as error:  # a template is a program: it can fail in any way
        raise RequestError(f"the chat template refused the messages: {_one_line(error)}") from error


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here only its body matters."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise RequestError(f"the chat template is not valid Jinja (line {error.lineno}): {_one_line(error)}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter: no HTML escapes, and keys in the order they came in."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
