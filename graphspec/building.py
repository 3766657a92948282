"""From names of checkpoints to a bundle: `graphspec build` and `graphspec.build`."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from graphspec.architecture import Resolution
from graphspec.backends import BACKENDS, DEFAULT_BACKEND, BackendKind, backend_kind, checked_device, checked_encoding
from graphspec.checkpoints import local_path, open_checkpoint
from graphspec.errors import BuildError, ConfigError, UnsupportedError
from graphspec.machinery import refuse_other_methods
from graphspec.registry import registered
from graphspec.resolution import complete_config, resolve
from graphspec.speculative_config import METHOD_OF, SpeculativeConfig
from graphspec.staging import check_dump_folder, check_place

if TYPE_CHECKING:
    from graphspec.export.build import Built

StrPath = str | os.PathLike[str]
DEFAULT_MAX_BATCH_SIZE = 8
_LIBRARIES = ("torch", "onnx", "onnx_ir", "onnxscript", "safetensors")


def build(
    *,
    model: StrPath,
    out: StrPath,
    draft_model_path: StrPath | None = None,
    arch: str | None = None,
    arch_modules: Sequence[str] = (),
    backend: str = DEFAULT_BACKEND,
    device: str | None = None,
    encoding: str | None = None,
    max_length: int | None = None,
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    widths: Sequence[int] | None = None,
    bake_weights: bool = False,
    dump_passes: StrPath | None = None,
    overwrite: bool = False,
    on_stage: Callable[[str], None] = lambda _: None,
    **speculative: object,
) -> Built:
    """Writes the bundle at `out`, or finds it there, built from the same inputs.

    `speculative` are fields of SpeculativeConfig by name; the pair decides what they leave open. `widths` are
    the numbers of drafts a step may verify; None: all of 0 … K. `encoding`
    or `device` None is the backend's default. `on_stage` is told what is being done. Raises
    GraphspecError; nothing is left behind then.
    """
    kind = backend_kind(backend)
    place_to_run = checked_device(device, kind)
    numeric = checked_encoding(encoding, kind, place_to_run)
    if bake_weights and not kind.prefill_chunks:
        raise UnsupportedError(f"--bake-weights is for engines; backend {kind.name} maps one weights file")
    _check_counts(max_length, max_batch_size)
    verified = None if widths is None else _checked_widths(widths)
    place, dump = _checked_path("out", out), None if dump_passes is None else _checked_path("dump_passes", dump_passes)
    method = _early_method(speculative)
    require_libraries(kind)
    check_place(place)
    if dump is not None:
        check_dump_folder(dump)
    on_stage("opening checkpoints")
    pair = resolve_pair(model, draft_model_path, method=method, arch=arch, arch_modules=arch_modules)
    refuse_other_methods(speculative, pair.architecture)
    # Settings without a method are those of the method that the pair resolved to.
    config = SpeculativeConfig.parse({**speculative, "speculative_method": method or pair.architecture.methods[0]})
    from graphspec.export.build import BuildOptions
    from graphspec.export.build import build as build_bundle

    options = BuildOptions(
        backend=kind.name,
        device=place_to_run,
        encoding=numeric,
        max_length=max_length,
        max_batch_size=max_batch_size,
        widths=verified,
        bake_weights=bake_weights,
        dump_passes=dump,
        command=_command(
            {
                "model": named_anywhere(model),
                "draft_model_path": None if draft_model_path is None else named_anywhere(draft_model_path),
                "arch": arch,
                "arch_module": list(arch_modules),
                "backend": backend if backend != DEFAULT_BACKEND else None,
                "device": place_to_run if place_to_run != kind.devices[0] else None,
                "encoding": numeric,
                "max_length": max_length,
                "max_batch_size": max_batch_size if max_batch_size != DEFAULT_MAX_BATCH_SIZE else None,
                "widths": None if verified is None else ",".join(map(str, verified)),
                "bake_weights": True if bake_weights else None,
                **{name: value for name, value in speculative.items() if value != _default(name)},
                "out": os.path.abspath(place),
            }
        ),
    )
    return build_bundle(pair, complete_config(config, pair), options, place, overwrite=overwrite, on_stage=on_stage)


def resolve_pair(
    model: StrPath,
    draft_model_path: StrPath | None = None,
    *,
    method: str | None = None,
    arch: str | None = None,
    arch_modules: Sequence[str] = (),
) -> Resolution:
    """The architecture of a pair, with both checkpoints open. Raises GraphspecError."""
    architectures = registered(arch_modules)
    target = open_checkpoint(model)
    draft = None if draft_model_path is None else open_checkpoint(draft_model_path)
    return resolve(target, draft, method, arch, architectures)


def require_libraries(kind: BackendKind = BACKENDS[DEFAULT_BACKEND]) -> None:
    """Raises BuildError if a library of the build is not installed: before any work, not in the middle."""
    if missing := [name for name in (*_LIBRARIES, kind.module) if not _is_installed(name)]:
        raise BuildError(f"building needs {', '.join(missing)}, which this installation leaves out: {kind.install}")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def _check_counts(max_length: int | None, max_batch_size: int) -> None:
    for flag, value in (("--max-length", max_length), ("--max-batch-size", max_batch_size)):
        if not _is_integer(value) and not (value is None and flag == "--max-length"):
            raise ConfigError(f"{flag} {value!r}: it must be an integer")
    if max_length is not None and max_length < 2:
        raise ConfigError(f"--max-length {max_length}: a request needs a prompt token and an answer, so at least 2")
    if max_batch_size < 1:
        raise ConfigError(f"--max-batch-size {max_batch_size}: it must be at least 1")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked_widths(widths: object) -> tuple[int, ...]:
    items = tuple(widths) if isinstance(widths, Iterable) and not isinstance(widths, str) else (None,)
    if not all(map(_is_integer, items)):
        raise ConfigError(f"--widths {widths!r}: it must be a list of integers such as 0, 1, 3")
    return cast("tuple[int, ...]", items)


def _checked_path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{name} is {value!r}: it must be a path")
    return Path(value)


def _early_method(speculative: Mapping[str, object]) -> str | None:
    """The method, if one is named; the settings are then checked before any file is opened."""
    method = speculative.get("speculative_method")
    if method is None:
        # Which of them make sense is known when the pair is; that they exist is known now.
        unknown = {name: value for name, value in speculative.items() if name not in SpeculativeConfig.model_fields}
        SpeculativeConfig.parse(unknown)
        return None
    # Those of another method are refused by the architecture's name, which is known later.
    early = {name: value for name, value in speculative.items() if METHOD_OF.get(name, method) == method}
    return SpeculativeConfig.parse(early).speculative_method


def _default(name: str) -> object:
    return SpeculativeConfig.model_fields[name].default


def named_anywhere(model: StrPath) -> str:
    """The name of a model for any working directory: a hub id as it is, else an absolute path."""
    path = local_path(os.fspath(model))
    return os.path.abspath(path) if os.path.exists(path) else os.fspath(model)


def _command(values: Mapping[str, object]) -> str:
    """The command line that does the same."""
    words = ["graphspec", "build"]
    for name, value in values.items():
        flag = "-o" if name == "out" else "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif name == "arch_module":
            words += [word for module in cast("list[str]", value) for word in (flag, module)]
        elif value is not None:
            words += [flag, _word(value)]
    return shlex.join(words)


def _word(value: object) -> str:
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, default=lambda item: item.model_dump())
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
