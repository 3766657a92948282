"""`graphspec archs`."""

from __future__ import annotations

import json
from collections.abc import Sequence

import typer

from graphspec.registry import registered

from .flags import ArchModules, AsJson
from .modules import importable

_COLUMNS = ("name", "target", "drafter", "methods", "draft checkpoint", "capabilities")


def archs(*, arch_module: ArchModules = None, as_json: AsJson = False) -> None:
    """A table, one line for each architecture."""
    with importable(arch_module):
        architectures = registered(arch_module or ())
    if as_json:
        entries = [
            {
                "name": architecture.name,
                "target": architecture.target.name,
                "drafter": architecture.drafter.name,
                "methods": architecture.methods,
                "draft_checkpoint": architecture.drafter.draft_checkpoint,
                "default_num_speculative_tokens": architecture.drafter.default_num_speculative_tokens,
                "capabilities": sorted(architecture.capabilities),
            }
            for architecture in architectures
        ]
        typer.echo(json.dumps(entries, indent=2))
        return
    rows = [
        (
            architecture.name,
            architecture.target.name,
            architecture.drafter.name,
            ",".join(architecture.methods),
            "needed" if architecture.drafter.draft_checkpoint else "none",
            ",".join(sorted(architecture.capabilities)) or "none",
        )
        for architecture in architectures
    ]
    typer.echo("\n".join(_table([_COLUMNS, *rows])))


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
