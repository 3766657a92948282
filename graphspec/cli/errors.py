"""The one place where errors become lines and exit statuses."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from pydantic import ValidationError

from graphspec.errors import GraphspecError

from .signals import ending_signals, line_and_status

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST = 500
"""Characters of a message that others wrote; ours are never cut."""
_EXTRAS = {
    "onnxruntime": "cpu",
    "cryptography": "sign",
    **dict.fromkeys(("prometheus_client", "starlette", "uvicorn"), "serve"),
}
"""The extra that installs a library; those of the build are the rest."""
_BUILD_LIBRARIES = frozenset(
    {"torch", "onnx", "onnx_ir", "onnxscript", "transformers", "safetensors", "gguf", "huggingface_hub"}
)


class UsageError(Exception):
    """A command line that typer can parse and that makes no sense all the same; exit status 2, as for typer's."""


@runtime_checkable
class _TyperError(Protocol):
    """What typer raises for a command line it cannot parse; its class has moved between releases."""

    exit_code: int
    ctx: Any

    def format_message(self) -> str: ...


def guarded(run: Callable[[], int], *, debug: bool, program: str = "graphspec") -> int:
    """`run`'s exit status, or that of its error, which is told on stderr in one line (with `debug`, a traceback
    before it): 1, for usage 2, ended by a signal 128 and its number, nobody reads stdout any more 141. `program`: whose
    --help says more."""
    try:
        with ending_signals():
            status = run()
        sys.stdout.flush()  # here, where a reader that is gone is still quiet
        return status
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt as interrupt:
        return _say(*line_and_status(interrupt))
    except Exception as error:
        if interrupts := [link for link in _chain(error) if isinstance(link, KeyboardInterrupt)]:
            return _say(*line_and_status(interrupts[0]))  # a library wrapped it in an error of its own
        if debug:
            traceback.print_exception(error)
        return _say(*_line(error, program))


def _line(error: Exception, program: str) -> tuple[str, int]:
    if isinstance(error, GraphspecError):
        return f"error: {error}", 1
    if isinstance(error, UsageError):
        return f"error: {error}", 2
    if isinstance(error, _TyperError):
        where = getattr(error.ctx, "command_path", program)
        return f"error: {error.format_message().rstrip('.')}; see {where} --help", error.exit_code
    if isinstance(error, ModuleNotFoundError) and (extra := _extra(error.name or "")):
        return f"error: this needs {error.name}, which is not installed: pip install 'graphspec-llm[{extra}]'", 1
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != "graphspec":
        # Of a module team's own, which names what it needs.
        return f"error: this needs {error.name}, which is not installed{_noted(error)}", 1
    if isinstance(error, OSError) and error.strerror:
        named = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        reason = "disk full" if error.errno in _FULL else error.strerror
        return f"error: {': '.join([*named, reason])}", 1
    if isinstance(error, MemoryError):
        return f"error: out of memory: {_text(error)}", 1
    notes = [*getattr(error, "__notes__", ()), "run with --debug for the traceback"]
    return f"internal error: {_text(error)} ({'; '.join(notes)})", 1


def _noted(error: Exception) -> str:
    notes = getattr(error, "__notes__", ())
    return f" ({'; '.join(notes)})" if notes else ""


def _text(error: Exception) -> str:
    kind = type(error).__name__
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False, include_input=False)
        said = "; ".join(f"{'.'.join(map(str, d['loc']))}: {d['msg']}" for d in details)
        return f"{kind} of {error.title}: {said}"[:_LONGEST]
    message = " ".join(str(error).split())
    return f"{kind}: {message}"[:_LONGEST] if message else kind


def _extra(module: str) -> str | None:
    library = module.partition(".")[0]
    return "build,cpu" if library in _BUILD_LIBRARIES else _EXTRAS.get(library)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _say(line: str, status: int) -> int:
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(line.splitlines()))
    with suppress(OSError):  # the terminal may be what hung up
        print(shown, file=sys.stderr, flush=True)
    return status
