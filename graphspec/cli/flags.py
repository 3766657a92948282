"""Options that commands share, and those made from SpeculativeConfig: a field there is a flag here."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin

import typer
from pydantic import BaseModel

from graphspec.verify_width import WidthSchedule

from .errors import UsageError
from .help import MACHINE, PAIR, SPECULATION

P = ParamSpec("P")
R = TypeVar("R")

Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="M", help="The target: a directory, a .gguf file or a hub id.", rich_help_panel=PAIR
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft-model-path",
        metavar="D",
        help="The draft, of the same kinds; none for prompt lookup.",
        rich_help_panel=PAIR,
    ),
]
Arch = Annotated[
    str | None,
    typer.Option(
        "--arch",
        metavar="NAME",
        help="The architecture to insist on; else the pair decides.",
        rich_help_panel=PAIR,
    ),
]
ArchModules = Annotated[
    list[str] | None,
    typer.Option(
        "--arch-module",
        metavar="MODULE",
        help="A Python module that declares architectures, on the Python path or below this folder. Repeatable.",
        rich_help_panel=PAIR,
    ),
]
WidthFlag = Annotated[
    str | None,
    typer.Option(
        "--width",
        metavar="W|auto|1:4,8:0",
        help="Drafts verified in a step; auto: what is fastest as it goes; 1:4,8:0: 4, and none from 8 requests at "
        "once on; else the widest.",
        rich_help_panel=SPECULATION,
    ),
]
RequireSignature = Annotated[
    Path | None,
    typer.Option(
        "--require-signature",
        metavar="PUBKEY",
        help="Refuse a bundle that the key of this file did not sign.",
        rich_help_panel=MACHINE,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]

_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--debug", help="Print a traceback with an error.")],
)


def width_of(text: str | None) -> int | Literal["auto"] | WidthSchedule | None:
    """What --width says. Raises UsageError."""
    if text is None or text == "auto":
        return None if text is None else "auto"
    if ":" in text:
        return schedule_of("--width", text)
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"--width is {text!r}: give a whole number from 0, auto, or a schedule such as 1:4,8:0")
    return int(text)


def schedule_of(flag: str, text: str) -> WidthSchedule:
    """A schedule of widths. Raises UsageError."""
    try:
        return WidthSchedule.parse(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def refuse_unhashed_signature(no_verify: bool, require_signature: Path | None) -> None:
    """UsageError where a signature is to vouch for files that are not looked at."""
    if no_verify and require_signature is not None:
        raise UsageError(
            "--no-verify trusts the files, which a signature is required to vouch for: give one of the two"
        )


def deferred(function: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """What typer is given for a command: it takes the command's parameters and --debug, and returns the call."""

    def bound(**values: Any) -> Callable[[], None]:
        del values["debug"]  # main has seen it
        return partial(function, **values)

    signature = inspect.signature(function, eval_str=True)
    _declare(bound, [*signature.parameters.values(), _DEBUG])
    return bound


def with_settings(
    model: type[BaseModel], unsupported: Mapping[str, str], *, panel: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Replaces a command's `**settings` by one flag for each field of `model`; None is a flag not given. Help says
    which fields, or which of their values, are `unsupported`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        _declare(function, [p for p in own if p.kind is not p.VAR_KEYWORD] + _settings(model, unsupported, panel))
        return function

    return decorate


def _declare(function: Callable[..., object], parameters: Sequence[inspect.Parameter]) -> None:
    """Makes a function look as if it had these parameters: where inspect, and so typer, looks."""
    annotations = {p.name: p.annotation for p in parameters}
    vars(function).update(__signature__=inspect.Signature(parameters))
    function.__annotations__ = annotations


def _settings(model: type[BaseModel], unsupported: Mapping[str, str], panel: str) -> list[inspect.Parameter]:
    described = _descriptions(model)
    if described:
        described |= {name: f"{described[name]} {_remark(values)}" for name, values in unsupported.items()}
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_flag(name, field.annotation, described.get(name, ""), field.default, panel),
        )
        for name, field in model.model_fields.items()
    ]


def _remark(values: str) -> str:
    return f"({f'{values}: ' if values else ''}not supported by any architecture yet)"


def _flag(name: str, annotation: object, description: str, default: object, panel: str) -> Any:
    flag, allowed = "--" + name.replace("_", "-"), _allowed(annotation)
    if bool in allowed:
        both = f"{flag}/--no-{flag[2:]}"
        return Annotated[bool | None, typer.Option(both, help=description, show_default=False, rich_help_panel=panel)]
    # The model reads text and says what is wrong with it, so that a file, a call and a flag are told the same.
    text = description if default is None else f"{description} [default: {default}]"
    return Annotated[str | None, typer.Option(flag, metavar=_metavar(allowed), help=text, rich_help_panel=panel)]


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
