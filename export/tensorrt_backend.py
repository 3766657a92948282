"""Writing engines and weights for TensorRT: one engine per verify width and batch bucket, weights once.

An engine takes its weights as inputs, so it is a few megabytes and all of them share one copy on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from graphspec.architectures.step import FusedStep

from . import pipeline
from .interface import graph_entry
from .specialise import specialise_prefill, specialise_step
from .tensorrt_compile import TensorRt, TensorRtBackend
from .weights import large_initializers, weights_to_inputs, write_safetensors

PREFILL_CHUNKS = (16, 128)
"""Prompt tokens an engine reads at once: a short one for what is left, a long one for the rest."""


class TensorRtWriter:
    """One of TensorRT and TensorRT-RTX, computing in bfloat16 or float16."""

    def __init__(self, backend: TensorRtBackend, dtype: Literal["bfloat16", "float16"], max_batch_size: int) -> None:
        self._compiler = TensorRt(backend)
        self.dtype = dtype
        self._batches = batch_buckets(max_batch_size)

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
        for folder in ("weights", "engines"):
            (root / folder).mkdir()
        pipeline.run_passes(model, pipeline.PORTABLE, on_pass=lambda name: on_stage(f"pass {name}"), dump=dump)
        capacity, drafts = step.target.capacity, step.num_draft_tokens
        entries, weights = [], dict[str, ir.TensorProtocol]()

        def add(fixed: ir.Model, name: str, role: str, served: tuple[int, ...], batch: int) -> None:
            folder = dump / name if dump is not None else None
            pipeline.run_passes(fixed, pipeline.TENSORRT, on_pass=lambda _: None, dump=folder)
            weights.update(large_initializers(fixed.graph))
            weights_to_inputs(fixed)
            on_stage(f"compiling {name}")
            file = f"engines/{name}.engine"
            (root / file).write_bytes(self._compiler.compile(fixed, name).plan)
            entries.append(graph_entry(name, file, role, served, fixed, step, batch))

        for batch in self._batches:
            for width in widths:
                fixed = specialise_step(model, width=width, num_draft_tokens=drafts, capacity=capacity, batch=batch)
                add(fixed, f"step_w{width}_b{batch}", "step", (width,), batch)
        chunks = tuple(chunk for chunk in PREFILL_CHUNKS if chunk < capacity) or (capacity - 1,)
        for chunk in chunks:
            add(specialise_prefill(model, chunk=chunk, capacity=capacity), f"prefill_{chunk}", "prefill", (0,), 1)
        on_stage("writing weights")
        write_safetensors(root / "weights" / "model.safetensors", weights)
        return {"prefill_chunks": chunks, "row_invariant": None, "graphs": entries}


def batch_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 4, … and the largest: a batch runs in the smallest that holds it."""
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return tuple(sorted({*sizes, largest}))
