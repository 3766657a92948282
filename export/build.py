"""`graphspec build`: from a pair of checkpoints to a bundle, or to the one that is there already.

Nothing here imports torch: a cache hit must not wait for it. What does the work is in assemble.py.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from graphspec import __version__
from graphspec.architecture import Resolution
from graphspec.backends import BACKENDS, BackendKind, Device
from graphspec.bundle import existing_key, input_key, verify_bundle
from graphspec.checkpoints import Checkpoint, fields, fingerprint
from graphspec.detection import number, target_body
from graphspec.errors import BundleError, CheckpointError, ConfigError
from graphspec.machinery import refuse_unsupported
from graphspec.manifest import Backend, Encoding, Manifest
from graphspec.speculative_config import SpeculativeConfig
from graphspec.staging import staging

from .source import source_sha256

OnStage = Callable[[str], None]
DEFAULT_MAX_LENGTH = 4096
UNSTATED_MAX_LENGTH = 2048
"""Of a model whose config does not say, as in transformers."""
_LIBRARIES = ("torch", "onnx", "onnx-ir", "onnxscript")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Everything about a bundle that the pair does not decide."""

    backend: Backend = "onnxruntime"
    device: Device = "cpu"
    """What the backend runs on."""
    encoding: Encoding
    """One of the backend's (graphspec.backends)."""
    max_length: int | None = None
    """Prompt and output tokens of one request; None: what the checkpoints allow, at most DEFAULT_MAX_LENGTH."""
    max_batch_size: int = 8
    widths: tuple[int, ...] | None = None
    """Verify widths; None: all of 0 … K."""
    bake_weights: bool = False
    """TensorRT: a copy of the weights in every engine."""
    dump_passes: Path | None = None
    command: str = "graphspec build"
    """The command line, for the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A build with everything decided."""

    resolution: Resolution
    config: SpeculativeConfig
    """Names its method and K."""
    options: BuildOptions
    widths: tuple[int, ...]
    max_length: int
    pair: dict[str, Any]
    """The manifest's entry."""

    @property
    def capacity(self) -> int:
        """Positions in a cache row. A block that starts at the last token but one may end K beyond max_length; a
        step launched before that is known, K + 1 further; the drafts after it stand at K more positions. An engine
        that reads prompts in chunks of a fixed size writes its padding after them, and runs one row of many, which
        therefore starts at an aligned address."""
        kind = BACKENDS[self.options.backend]
        needed = self.max_length + 3 * self.config.draft_width + 2 + kind.padding
        return -(-needed // kind.capacity_multiple) * kind.capacity_multiple

    @property
    def key(self) -> str:
        """Hash of everything that the bundle depends on."""
        return input_key(
            {
                # By content: the same files are the same inputs, whatever path led to them.
                "pair": [{**model, "name": ""} for model in self.pair.values() if model],
                "architecture": self.resolution.architecture.name,
                "speculative": self.config.model_dump(mode="json"),
                "backend": self.options.backend,
                "encoding": self.options.encoding,
                "max_length": self.max_length,
                "max_batch_size": self.options.max_batch_size,
                "widths": list(self.widths),
                "bake_weights": self.options.bake_weights,
                "machine": _device(self.options),
                "source": source_sha256(self.resolution),
                "capabilities": [*sorted(self.resolution.architecture.capabilities)],
                "versions": _versions(BACKENDS[self.options.backend]),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a build did."""

    manifest: Manifest
    was_cached: bool

    def __repr__(self) -> str:
        """One line: a manifest lists every file."""
        return f"Built({self.manifest.architecture}, key {self.manifest.key[:12]}…, was_cached={self.was_cached})"


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
    max_length = _max_length(options, resolution)
    if config.draft_width >= max_length:
        raise ConfigError(
            f"--num-speculative-tokens {config.draft_width}: a request of this bundle has {max_length} tokens at most "
            "(--max-length), so no more than one fewer can be drafted"
        )
    on_stage("reading checkpoints")
    plan = Plan(
        resolution=resolution,
        config=config,
        options=options,
        widths=_widths(options, config.draft_width),
        max_length=max_length,
        pair=_pair(resolution),
    )
    if existing_key(out) == plan.key:
        on_stage("checking the bundle that is there")
        overwrite = True  # what is made again is the same bundle: it is damaged, or its passes are asked for
        with suppress(BundleError):
            found = verify_bundle(out)
            if options.dump_passes is None:
                return Built(manifest=found, was_cached=True)
    if "tokenizer.json" not in resolution.target.tokenizer_files():
        raise CheckpointError(
            f"target '{resolution.target.name}' has no tokenizer.json, so a bundle of it could read no text; "
            "put the model's tokenizer.json beside its config.json"
        )
    with staging(out, overwrite=overwrite, needed_bytes=_estimated_bytes(resolution)) as stage:
        on_stage("loading torch")
        from .assemble import assemble

        manifest = assemble(plan, stage, on_stage=on_stage)
        # Not committed: an equal build was faster, and its bundle is there.
        return Built(manifest=manifest, was_cached=not stage.committed)


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


def _widths(options: BuildOptions, draft_width: int) -> tuple[int, ...]:
    if options.widths is None:
        return tuple(range(draft_width + 1))
    if wrong := [width for width in options.widths if not 0 <= width <= draft_width]:
        raise ConfigError(f"--widths {wrong[0]} is outside 0 … {draft_width} (--num-speculative-tokens)")
    return tuple(sorted({0, *options.widths}))


def _max_length(options: BuildOptions, resolution: Resolution) -> int:
    """Checked against what the configs say; what loaded models say is checked again in assemble.py."""
    models = [resolution.target]
    if resolution.draft is not None and resolution.architecture.drafter.draft_is_target:
        models.append(resolution.draft)  # heads that only need a longer rotary table set no limit
    stated = [fields.size_or(target_body(model.config), "max_position_embeddings", None) for model in models]
    if options.max_length is None:
        return min(DEFAULT_MAX_LENGTH, *(limit or UNSTATED_MAX_LENGTH for limit in stated))
    if options.max_length < 2:
        raise ConfigError(f"--max-length {options.max_length}: a request needs a prompt token and an answer")
    for model, limit in zip(models, stated, strict=True):
        if limit and options.max_length > limit:
            raise ConfigError(
                f"--max-length {options.max_length} is more than the {limit} tokens that '{model.name}' was made for"
            )
    return options.max_length


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
        "vocab_size": number(config, "vocab_size") or vocabulary,
    }


def _versions(backend: BackendKind) -> dict[str, JsonValue]:
    return {
        "graphspec": __version__,
        **{name: importlib.metadata.version(name) for name in _LIBRARIES},
        backend.name: _first_version(backend.distributions),
    }


def _first_version(distributions: Sequence[str]) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _device(options: BuildOptions) -> list[JsonValue]:
    """What a build is for: this kind of CPU, or a class of GPUs."""
    if options.backend == "onnxruntime":
        return [options.device] if options.device == "cuda" else _machine()
    from .tensorrt_compile import device_class

    return [device_class(options.backend)]


def _machine() -> list[JsonValue]:
    """Which form of int8 is exact depends on the CPU (device.py), so a build is for one kind of CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [f"model name: {platform.processor()}"]
    features = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return [platform.machine(), *sorted(features)]
