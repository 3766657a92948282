"""`graphspec resolve`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from graphspec.building import resolve_pair
from graphspec.resolution import complete_config
from graphspec.speculative_config import METHODS, SpeculativeConfig

from .flags import Arch, ArchModules, AsJson, Draft, Model
from .modules import importable


def resolve(
    *,
    model: Model,
    draft_model_path: Draft = None,
    speculative_method: Annotated[
        str | None,
        typer.Option("--speculative-method", metavar="|".join(METHODS), help="The method to insist on."),
    ] = None,
    arch: Arch = None,
    arch_module: ArchModules = None,
    as_json: AsJson = False,
) -> None:
    """Reads headers only; what `build` would use."""
    asked = SpeculativeConfig.parse({"speculative_method": speculative_method})
    with importable(arch_module):
        pair = resolve_pair(
            model,
            draft_model_path,
            method=asked.speculative_method,
            arch=arch,
            arch_modules=arch_module or (),
        )
    config = complete_config(asked, pair)
    found = {
        "architecture": pair.architecture.name,
        "method": config.speculative_method,
        "num_speculative_tokens": config.draft_width,
        "target": {"name": pair.target.name, "kind": pair.architecture.target.name},
        "draft": pair.draft and {"name": pair.draft.name, "kind": pair.architecture.drafter.name},
    }
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    drafter = pair.architecture.drafter.name
    typer.echo(
        f"{pair.architecture.name}\n"
        f"target  {pair.target.name} ({pair.architecture.target.name})\n"
        f"draft   {f'{pair.draft.name} ({drafter})' if pair.draft else f'none ({drafter})'}\n"
        f"method  {config.speculative_method}, K {config.draft_width}"
    )
