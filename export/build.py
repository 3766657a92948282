"""`graphspec build`: from a pair of checkpoints to a bundle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx_ir as ir
import onnxruntime
import torch
from pydantic import JsonValue

from graphspec import __version__
from graphspec.architecture import Resolution
from graphspec.architectures.step import FusedStep
from graphspec.bundle import existing_key, input_key, read_manifest
from graphspec.checkpoints import Checkpoint, fingerprint
from graphspec.errors import ConfigError
from graphspec.manifest import Manifest
from graphspec.speculative_config import SpeculativeConfig, refuse_unsupported
from graphspec.staging import staging

from .onnxruntime_backend import OnnxRuntimeBackend
from .trace import trace

OnStage = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Everything about a bundle that the pair does not decide."""

    encoding: Literal["float32", "int8"]
    max_length: int | None = None
    """Prompt and output tokens of one request; None: what the checkpoints allow, at most DEFAULT_MAX_LENGTH."""
    max_batch_size: int = 8
    widths: tuple[int, ...] | None = None
    """Verify widths; None: all of 0 … K."""
    dump_passes: Path | None = None
    command: str = "graphspec build"
    """The command line, for the manifest."""


DEFAULT_MAX_LENGTH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a build did."""

    manifest: Manifest
    was_cached: bool


def build(
    resolution: Resolution,
    config: SpeculativeConfig,
    options: BuildOptions,
    out: Path,
    *,
    overwrite: bool = False,
    on_stage: OnStage = lambda _: None,
) -> Built:
    """Writes the bundle at `out`, or finds that it is there already.

    `config` names its method and K. Raises GraphspecError; nothing is left behind then.
    """
    refuse_unsupported(config, resolution.architecture)
    on_stage("reading checkpoints")
    widths = _widths(options, config.draft_width)
    max_length = _max_length(options, resolution)
    backend = OnnxRuntimeBackend(options.encoding)
    pair = _pair(resolution)
    key = input_key(
        {
            "pair": pair,
            "architecture": resolution.architecture.name,
            "speculative": config.model_dump(mode="json"),
            "encoding": options.encoding,
            "max_length": max_length,
            "max_batch_size": options.max_batch_size,
            "widths": list(widths),
            "backend": backend.info,
            "versions": _versions(),
        }
    )
    if existing_key(out) == key:
        return Built(manifest=read_manifest(out), was_cached=True)
    with staging(out, overwrite=overwrite, needed_bytes=_estimated_bytes(resolution)) as stage:
        capacity = max_length + config.draft_width + 2
        on_stage("loading weights")
        step = _load(resolution, config, capacity)
        if (allowed := _allowed_length(step)) < max_length:
            raise ConfigError(f"--max-length {max_length} is more than the {allowed} tokens that the pair was made for")
        on_stage("tracing")
        model = trace(step)
        written = backend.write(model, step, widths, stage.path, on_stage=on_stage, dump=options.dump_passes)
        on_stage("writing tokenizer")
        _write_tokenizer(resolution.target, stage.path)
        on_stage("hashing")
        manifest = stage.commit(
            {
                "build_command": options.command,
                "key": key,
                "architecture": resolution.architecture.name,
                "methods": resolution.architecture.methods,
                "capabilities": sorted(resolution.architecture.capabilities),
                "pair": pair,
                "speculative": config.model_dump(mode="json"),
                "num_draft_tokens": config.draft_width,
                "widths": widths,
                "max_batch_size": options.max_batch_size,
                "capacity": capacity,
                "max_length": max_length,
                "encoding": options.encoding,
                "variants": ("greedy",) if step.greedy else ("sampling",),
                "eos_token_ids": _eos_token_ids(resolution.target),
                "backend": backend.info,
                **written,
                "states": [
                    {"input": s.name, "output": f"{s.name}.next", "dtype": s.dtype, "shape": s.shape}
                    for s in step.states
                ],
            }
        )
    return Built(manifest=manifest, was_cached=False)


def _load(resolution: Resolution, config: SpeculativeConfig, capacity: int) -> FusedStep:
    architecture = resolution.architecture
    target = architecture.target.load(resolution.target, capacity=capacity)
    drafter = architecture.drafter.load(target, resolution.draft, config.draft_width, config)
    return FusedStep(target, drafter, greedy=config.use_greedy_acceptance)


def _widths(options: BuildOptions, draft_width: int) -> tuple[int, ...]:
    if options.widths is None:
        return tuple(range(draft_width + 1))
    if wrong := [width for width in options.widths if not 0 <= width <= draft_width]:
        raise ConfigError(f"--widths {wrong[0]} is outside 0 … {draft_width} (--num-speculative-tokens)")
    return tuple(sorted({0, *options.widths}))


def _max_length(options: BuildOptions, resolution: Resolution) -> int:
    if options.max_length is not None:
        if options.max_length < 2:
            raise ConfigError(f"--max-length {options.max_length}: a request needs a prompt token and an answer")
        return options.max_length
    limits = [DEFAULT_MAX_LENGTH, int(resolution.target.config.get("max_position_embeddings") or DEFAULT_MAX_LENGTH)]
    if resolution.draft is not None and resolution.architecture.drafter.name == "standalone":
        limits.append(int(resolution.draft.config.get("max_position_embeddings") or DEFAULT_MAX_LENGTH))
    return min(limits)


def _allowed_length(step: FusedStep) -> int:
    """What target and draft LM were made for; heads that only need a longer rotary table set no limit."""
    limits = [step.target.config.max_positions]
    if (model := getattr(step.drafter, "model", None)) is not None:
        limits.append(model.config.max_positions)
    return min(limits)


def _pair(resolution: Resolution) -> dict[str, Any]:
    target = _model_entry(resolution.target)
    draft = _model_entry(resolution.draft, target["vocab_size"]) if resolution.draft else None
    return {"target": target, "draft": draft}


def _model_entry(checkpoint: Checkpoint, vocabulary: int = 0) -> dict[str, Any]:
    config = dict(checkpoint.config)
    text = json.dumps(config, sort_keys=True, default=str)
    return {
        "name": checkpoint.name,
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "weights_sha256": fingerprint(checkpoint),
        "model_type": str(config.get("model_type") or config.get("speculators_model_type") or "unknown"),
        "vocab_size": int(config.get("vocab_size") or vocabulary),
    }


def _versions() -> dict[str, JsonValue]:
    return {
        "graphspec": __version__,
        "torch": torch.__version__,
        "onnx": onnx.__version__,
        "onnx_ir": ir.__version__,
        "onnxruntime": onnxruntime.__version__,
    }


def _estimated_bytes(resolution: Resolution) -> int:
    """A float32 bundle's size: enough to refuse a full disk before minutes of work."""
    checkpoints = [c for c in (resolution.target, resolution.draft) if c is not None]
    total = 0
    for checkpoint in checkpoints:
        for info in checkpoint.tensors.values():
            size = 4
            for dim in info.shape:
                size *= dim
            total += size
    return total


def _eos_token_ids(target: Checkpoint) -> tuple[int, ...]:
    files = target.tokenizer_files()
    generation = json.loads(files.get("generation_config.json", b"{}"))
    found: set[int] = set()
    for source in (generation, target.config):
        value = source.get("eos_token_id")
        found |= set(value if isinstance(value, list) else [value] if value is not None else [])
    return tuple(sorted(found))


def _write_tokenizer(target: Checkpoint, root: Path) -> None:
    (root / "tokenizer").mkdir()
    for name, content in target.tokenizer_files().items():
        (root / "tokenizer" / name).write_bytes(content)
