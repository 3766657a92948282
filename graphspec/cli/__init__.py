"""The command line: parse, delegate, report.

Only the module of the command that is run gets imported, so that `graphspec --help` answers at once. Typer parses
and returns the command bound to its arguments; `main` runs it inside the one place that turns errors into lines.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from graphspec import __version__

from .errors import guarded
from .flags import deferred
from .help import Panels

COMMANDS = {
    "build": "Build a bundle from a target and a draft.",
    "generate": "Answer prompts with a bundle.",
    "run": "Serve a bundle to OpenAI's clients.",
    "bench": "Measure what speculation gains, by width and batch size.",
    "distill": "Train a draft for a target on the target's own answers.",
    "inspect": "Show what a bundle holds and how it was built.",
    "verify": "Check every file of a bundle.",
    "sign": "Sign a bundle, or make a key to sign with.",
    "archs": "List the registered architectures.",
    "resolve": "Say which architecture a pair resolves to.",
}
"""Each is the function of that name in the module of that name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status: 0 done, 1 an error, 2 usage, 128 + n ended by signal n."""
    args = list(sys.argv[1:] if argv is None else argv)
    chosen = next((arg for arg in args if arg in COMMANDS), None)
    program = " ".join(["graphspec", chosen] if chosen else ["graphspec"])
    return guarded(lambda: _run(args, chosen), debug="--debug" in args, program=program)


def application(command: str | None) -> typer.Typer:
    """Every command by name and summary, with the parameters of `command` only."""
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.callback(invoke_without_command=True)(_global)
    for name, summary in COMMANDS.items():
        function = getattr(import_module(f".{name}", __package__), name) if name == command else _not_loaded
        app.command(name, cls=Panels, help=summary)(deferred(function))
    return app


def _run(args: Sequence[str], chosen: str | None) -> int:
    command = typer.main.get_command(application(chosen))
    parsed = command.main(list(args), prog_name="graphspec", standalone_mode=False)
    if callable(parsed):
        parsed()
        return 0
    return parsed if isinstance(parsed, int) else 0


def _global(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback with an error.")] = False,  # noqa: ARG001
) -> None:
    """Compile a target LLM and its draft into one fused speculative-decoding graph, and run it."""
    if version:
        typer.echo(f"graphspec {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def _not_loaded() -> None:
    raise AssertionError("only the module of the chosen command is loaded")
