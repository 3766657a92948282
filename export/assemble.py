"""The work of a build: load, trace, lower, write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

from graphspec.architectures.step import FusedStep
from graphspec.backends import BACKENDS
from graphspec.checkpoints import Checkpoint, fields
from graphspec.errors import ConfigError
from graphspec.manifest import Manifest
from graphspec.staging import Stage

from .build import BuildOptions, OnStage, Plan
from .rotation import rotate
from .tensorrt_backend import TensorRtWriter
from .tensorrt_compile import TensorRt
from .trace import trace

if TYPE_CHECKING:
    from .linear import Encoding
    from .onnxruntime_backend import OnnxRuntimeBackend


def assemble(plan: Plan, stage: Stage, *, on_stage: OnStage) -> Manifest:
    """Builds the bundle, writes it to the stage and commits it."""
    resolution, options = plan.resolution, plan.options
    backend = _backend(options)
    on_stage("loading weights")
    step = _load(plan)
    if (allowed := _allowed_length(step)) < plan.max_length:
        raise ConfigError(
            f"--max-length {plan.max_length} is more than the {allowed} tokens that the pair was made for"
        )
    if backend.quantises_activations:
        on_stage("turning the residual stream")
        rotate(step.target)
    if backend.dtype != "float32":
        step.cast(backend.dtype)
    model = trace(step, on_stage=on_stage)
    written = backend.write(model, step, plan.widths, stage.path, on_stage=on_stage, dump=options.dump_passes)
    on_stage("writing tokenizer")
    _write_tokenizer(resolution.target, stage.path)
    on_stage("hashing")
    return stage.commit(
        {
            "build_command": options.command,
            "key": plan.key,
            "architecture": resolution.architecture.name,
            "methods": resolution.architecture.methods,
            "capabilities": sorted(resolution.architecture.capabilities - BACKENDS[options.backend].lacks),
            "pair": plan.pair,
            "speculative": plan.config.model_dump(mode="json"),
            "num_draft_tokens": plan.config.draft_width,
            "widths": plan.widths,
            "max_batch_size": options.max_batch_size,
            "capacity": plan.capacity,
            "max_length": plan.max_length,
            "encoding": options.encoding,
            "variants": ("greedy",) if step.greedy else ("sampling",),
            "eos_token_ids": _eos_token_ids(resolution.target),
            "backend": backend.info,
            **written,
            "states": [
                {"input": s.name, "output": f"{s.name}.next", "dtype": s.dtype, "shape": s.shape} for s in step.states
            ],
        }
    )


def _backend(options: BuildOptions) -> OnnxRuntimeBackend | TensorRtWriter:
    if options.backend == "onnxruntime":
        from .onnxruntime_backend import OnnxRuntimeBackend

        return OnnxRuntimeBackend(cast("Encoding", options.encoding), options.device)  # checked_encoding
    return TensorRtWriter(
        TensorRt(options.backend), options.encoding, options.max_batch_size, bake_weights=options.bake_weights
    )


def _load(plan: Plan) -> FusedStep:
    architecture, config = plan.resolution.architecture, plan.config
    target = architecture.target.load(plan.resolution.target, capacity=plan.capacity)
    drafter = plan.resolution.load_drafter(target, config)
    return FusedStep(target, drafter, greedy=config.use_greedy_acceptance)


def _allowed_length(step: FusedStep) -> int:
    """What target and draft LM were made for; heads that only need a longer rotary table set no limit."""
    limits = [step.target.config.max_positions]
    if (model := getattr(step.drafter, "model", None)) is not None:
        limits.append(model.config.max_positions)
    return min(limits)


def _eos_token_ids(target: Checkpoint) -> tuple[int, ...]:
    files = target.tokenizer_files()
    generation = json.loads(files.get("generation_config.json", b"{}"))
    found: set[int] = set()
    for source in (generation, target.config):
        value = source.get("eos_token_id")
        listed = value if isinstance(value, list) or value is None else [value]
        found |= set(fields.whole_numbers({"eos_token_id": listed}, "eos_token_id"))
    # A negative one is how some configs say that there is none.
    return tuple(sorted(token for token in found if token >= 0))


def _write_tokenizer(target: Checkpoint, root: Path) -> None:
    (root / "tokenizer").mkdir()
    for name, content in target.tokenizer_files().items():
        (root / "tokenizer" / name).write_bytes(content)
