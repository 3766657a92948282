"""Writing engines and weights for TensorRT: one engine per verify width and batch bucket, weights once.

An engine takes its weights as inputs, so it is a few megabytes and all of them share one copy on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import onnx_ir as ir

from graphspec.architectures.state import FloatType
from graphspec.architectures.step import FusedStep
from graphspec.backends import BACKENDS
from graphspec.manifest import Backend, Encoding

from . import pipeline
from .interface import graph_entry
from .specialise import specialise_prefill, specialise_step
from .weight_quantisation import WEIGHT_TYPES
from .weights import large_initializers, made_of, weights_to_inputs, write_safetensors


class Compiler(Protocol):
    """What turns a lowered graph of fixed sizes into an engine: tensorrt_compile.TensorRt."""

    backend: Backend
    version: str
    device_class: str

    def compile(self, model: ir.Model, name: str) -> bytes:
        """The engine. Raises BuildError."""
        ...


class TensorRtWriter:
    """Engines that compute in bfloat16 or float16, from weights of that type or of fewer bits."""

    quantises_activations = False

    def __init__(
        self, compiler: Compiler, encoding: Encoding, max_batch_size: int, *, bake_weights: bool = False
    ) -> None:
        """`bake_weights`: every engine holds a copy of the weights."""
        self._compiler = compiler
        self.dtype: FloatType = "bfloat16" if encoding in WEIGHT_TYPES else cast("FloatType", encoding)
        self._weights = encoding if encoding in WEIGHT_TYPES else None
        self._batches = batch_buckets(max_batch_size)
        self._bake = bake_weights

    @property
    def info(self) -> dict[str, Any]:
        """The manifest's `backend`: engines run on exactly the release that built them."""
        return {
            "name": self._compiler.backend,
            "version": self._compiler.version,
            "min_version": None,
            "device_class": self._compiler.device_class,
        }

    def write(
        self,
        model: ir.Model,
        step: FusedStep,
        widths: tuple[int, ...],
        root: Path,
        *,
        on_stage: Callable[[str], None],
        dump: Path | None,
    ) -> dict[str, Any]:
        """Writes engines/ and weights/ below `root` → the manifest fields that describe them."""
        (root / "engines").mkdir()
        passes = pipeline.tensorrt(self._weights)
        chunks = BACKENDS[self._compiler.backend].prefill_chunks
        total = len(self._batches) * len(widths) + len(chunks)
        pipeline.run_passes(model, pipeline.PORTABLE, on_pass=lambda name: on_stage(f"pass {name}"), dump=dump)
        capacity, drafts = step.target.capacity, step.num_draft_tokens
        entries = list[dict[str, Any]]()
        weights = dict[str, ir.TensorProtocol]()
        # What is added later belongs to one graph: two graphs may call different constants alike.
        shared = large_initializers(model.graph).keys()
        """What lowering adds to it is of one graph: two graphs may call different values alike."""

        def add(fixed: ir.Model, name: str, role: str, served: tuple[int, ...], batch: int) -> None:
            folder = dump / name if dump is not None else None
            pipeline.run_passes(fixed, passes, on_pass=lambda _: None, dump=folder)
            if not self._bake:
                own = made_of(shared, large_initializers(fixed.graph))
                weights.update(own)
                weights_to_inputs(fixed, own)
            on_stage(f"compiling {name} ({len(entries) + 1} of {total})")
            file = f"engines/{name}.engine"
            (root / file).write_bytes(self._compiler.compile(fixed, name))
            entries.append(graph_entry(name, file, role, served, fixed, step, batch))

        for batch in self._batches:
            for width in widths:
                fixed = specialise_step(model, width=width, num_draft_tokens=drafts, capacity=capacity, batch=batch)
                add(fixed, f"step_w{width}_b{batch}", "step", (width,), batch)
        for chunk in chunks:
            add(specialise_prefill(model, chunk=chunk, capacity=capacity), f"prefill_{chunk}", "prefill", (0,), 1)
        if weights:
            on_stage("writing weights")
            (root / "weights").mkdir()
            write_safetensors(root / "weights" / "model.safetensors", weights)
        return {"prefill_chunks": chunks, "row_invariant": None, "graphs": entries}


def batch_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 4, … and the largest: a batch runs in the smallest that holds it."""
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return tuple(sorted({*sizes, largest}))
