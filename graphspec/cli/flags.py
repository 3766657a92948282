"""Options that commands share, and those made from SpeculativeConfig: a field there is a flag here."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin

import typer
from pydantic import BaseModel

P = ParamSpec("P")
R = TypeVar("R")

Model = Annotated[str, typer.Option("--model", metavar="M", help="The target: a directory, a .gguf file or a hub id.")]
Draft = Annotated[
    str | None,
    typer.Option("--draft-model-path", metavar="D", help="The draft, of the same kinds; none for prompt lookup."),
]
Arch = Annotated[
    str | None, typer.Option("--arch", metavar="NAME", help="The architecture to insist on; else the pair decides.")
]
ArchModules = Annotated[
    list[str] | None,
    typer.Option(
        "--arch-module",
        metavar="MODULE",
        help="A Python module that declares architectures, on the Python path or below this folder. Repeatable.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--debug", help="Print a traceback with an error.")],
)


def deferred(function: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """What typer is given for a command: it takes the command's parameters and --debug, and returns the call."""

    def bound(**values: Any) -> Callable[[], None]:
        del values["debug"]  # main has seen it
        return partial(function, **values)

    signature = inspect.signature(function, eval_str=True)
    _declare(bound, [*signature.parameters.values(), _DEBUG])
    return bound


def with_settings(model: type[BaseModel]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Replaces a command's `**settings` by one flag for each field of `model`; None is a flag not given."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        _declare(function, [p for p in own if p.kind is not p.VAR_KEYWORD] + _settings(model))
        return function

    return decorate


def _declare(function: Callable[..., object], parameters: Sequence[inspect.Parameter]) -> None:
    """Makes a function look as if it had these parameters: where inspect, and so typer, looks."""
    annotations = {p.name: p.annotation for p in parameters}
    vars(function).update(__signature__=inspect.Signature(parameters))
    function.__annotations__ = annotations


def _settings(model: type[BaseModel]) -> list[inspect.Parameter]:
    described = _descriptions(model)
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_flag(name, field.annotation, described.get(name, ""), field.default),
        )
        for name, field in model.model_fields.items()
    ]


def _flag(name: str, annotation: object, description: str, default: object) -> Any:
    flag, allowed = "--" + name.replace("_", "-"), _allowed(annotation)
    if bool in allowed:
        both = f"{flag}/--no-{flag[2:]}"
        return Annotated[bool | None, typer.Option(both, help=description, show_default=False)]
    # The model reads text and says what is wrong with it, so that a file, a call and a flag are told the same.
    text = description if default is None else f"{description} [default: {default}]"
    return Annotated[str | None, typer.Option(flag, metavar=_metavar(allowed), help=text)]


def _allowed(annotation: object) -> list[object]:
    """The types and literal values of an annotation, without None."""
    if get_origin(annotation) in (Union, UnionType):
        return [inner for part in get_args(annotation) for inner in _allowed(part)]
    if get_origin(annotation) is Annotated:
        return _allowed(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [] if annotation is type(None) else [get_origin(annotation) or annotation]


def _metavar(allowed: Sequence[object]) -> str:
    if choices := [value for value in allowed if isinstance(value, str)]:
        return "|".join(choices)
    names: dict[object, str] = {int: "N", float: "X", str: "TEXT"}
    return names.get(allowed[0], "JSON")


def _descriptions(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field; none where the source is not installed."""
    try:
        (declaration,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    except OSError:
        return {}
    found: dict[str, str] = {}
    for field, below in pairwise(cast("ast.ClassDef", declaration).body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            found[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return found
