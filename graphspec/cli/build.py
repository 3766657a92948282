"""`graphspec build`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphspec.backends import BACKENDS, DEFAULT_BACKEND
from graphspec.building import DEFAULT_MAX_BATCH_SIZE
from graphspec.building import build as build_bundle
from graphspec.machinery import unsupported
from graphspec.manifest import summary
from graphspec.registry import registered
from graphspec.speculative_config import SpeculativeConfig

from .errors import UsageError
from .flags import Arch, ArchModules, Draft, Model, with_settings
from .help import NUMERICS, OUTPUT, SPECULATION
from .modules import importable
from .progress import stages

if TYPE_CHECKING:
    from graphspec.export.build import Built


def _unsupported() -> dict[str, str]:
    """What no installed architecture can honour; empty where one cannot be loaded, which the build itself tells."""
    try:
        return unsupported(registered())
    except Exception:
        return {}


def _encodings() -> str:
    return (
        "; ".join(f"{name}: {', '.join(kind.encodings)}" for name, kind in BACKENDS.items()) + " (the first: default)."
    )


@with_settings(SpeculativeConfig, _unsupported(), panel=SPECULATION)
def build(
    *,
    model: Model,
    draft_model_path: Draft = None,
    arch: Arch = None,
    arch_module: ArchModules = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config-file",
            metavar="FILE",
            help="A .json or .toml file of the settings below; flags override it.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    section_name: Annotated[
        str | None,
        typer.Option(
            "--section-name", metavar="S", help="The section of that file to read.", rich_help_panel=SPECULATION
        ),
    ] = None,
    widths: Annotated[
        str | None,
        typer.Option(
            "--widths",
            metavar="0,1,3",
            help="How many drafts a step may verify; else every number to K.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option("--backend", metavar="|".join(BACKENDS), help="What runs it.", rich_help_panel=NUMERICS),
    ] = DEFAULT_BACKEND,
    encoding: Annotated[
        str | None,
        typer.Option(
            "--encoding",
            metavar="E",
            help=f"The type of weights and matrix products. {_encodings()}",
            rich_help_panel=NUMERICS,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="cpu|cuda",
            help="onnxruntime: cpu, or cuda in float32, which has not been run yet.",
            rich_help_panel=NUMERICS,
        ),
    ] = None,
    bake_weights: Annotated[
        bool,
        typer.Option(
            "--bake-weights",
            help="TensorRT: a copy of the weights in every engine, not one for all.",
            rich_help_panel=NUMERICS,
        ),
    ] = False,
    max_length: Annotated[
        int | None,
        typer.Option(
            "--max-length",
            metavar="N",
            help="Prompt and answer tokens of one request; else what the pair allows, at most 4096.",
            rich_help_panel=NUMERICS,
        ),
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option("--max-batch-size", metavar="B", help="Requests in one step.", rich_help_panel=NUMERICS)
    ] = DEFAULT_MAX_BATCH_SIZE,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="OUT", help="Where the bundle goes.", rich_help_panel=OUTPUT)
    ],
    dump_passes: Annotated[
        Path | None,
        typer.Option(
            "--dump-passes", metavar="DIR", help="Write the graph after every pass there.", rich_help_panel=OUTPUT
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another bundle at OUT.", rich_help_panel=OUTPUT)
    ] = False,
    **settings: str | bool | None,
) -> None:
    """Parses what is text, builds, and prints one line about the bundle."""
    started = time.monotonic()
    verified = None if widths is None else _parse_widths(widths)
    speculative = _speculative(settings, config_file, section_name)
    with importable(arch_module), stages() as stage:
        built = build_bundle(
            model=model,
            out=out,
            draft_model_path=draft_model_path,
            arch=arch,
            arch_modules=arch_module or (),
            backend=backend,
            device=device,
            encoding=encoding,
            max_length=max_length,
            max_batch_size=max_batch_size,
            widths=verified,
            bake_weights=bake_weights,
            dump_passes=dump_passes,
            overwrite=overwrite,
            on_stage=stage,
            **speculative,
        )
    typer.echo(_line(built, out, time.monotonic() - started))


def _speculative(settings: dict[str, str | bool | None], file: Path | None, section: str | None) -> dict[str, object]:
    """The settings of the file, and over them those of the command line."""
    if file is None and section is not None:
        raise UsageError("--section-name is the section of a --config-file, and none is given")
    read = {} if file is None else SpeculativeConfig.settings_in_file(file, section)
    return {**read, **{name: value for name, value in settings.items() if value is not None}}


def _parse_widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(entry) for entry in text.split(","))
    except ValueError:
        raise UsageError(f"--widths {text!r} is not a list of numbers such as 0,1,3") from None


def _line(built: Built, out: Path, seconds: float) -> str:
    manifest = built.manifest
    size = dict(summary(manifest))["size on disk"]
    widths = " ".join(map(str, manifest.widths))
    how = f"cached ({seconds:.1f} s)" if built.was_cached else f"built in {seconds:.1f} s"
    return (
        f"{out}: {manifest.architecture}, K {manifest.num_draft_tokens}, widths {widths}, {manifest.encoding}, {size}, "
        f"{how}"
    )
