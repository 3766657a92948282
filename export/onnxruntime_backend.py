"""Writing graphs and weights for ONNX Runtime: one dynamic graph serves every width (design §5)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime

from graphspec.architectures.state import FloatType
from graphspec.architectures.step import FusedStep
from graphspec.backends import Device

from . import pipeline
from .device import device_class, int8_weight_sign, probe_model
from .interface import graph_entry
from .invariance import is_row_invariant
from .linear import Encoding, WeightSign
from .specialise import specialise_step
from .weights import externalise

MIN_VERSION = "1.32"
"""The release that every claim about operators and equal bits was measured on."""
CUDA_MIN_VERSION = "1.31"
"""onnxruntime-gpu's releases come later; on a CPU this one loads and runs the same operators. Not run on a GPU."""


class OnnxRuntimeBackend:
    """One encoding on this machine's CPU, or float32 on CUDA, whose graph nothing here runs."""

    name = "onnxruntime"
    dtype: FloatType = "float32"
    """What the graph is traced in."""

    def __init__(self, encoding: Encoding, device: Device = "cpu") -> None:
        self._encoding = encoding
        self._device = device
        self._sign: WeightSign | None = int8_weight_sign() if encoding == "int8" else None
        self.quantises_activations = encoding == "int8"
        self._fewest_tokens = 2 if encoding == "int4" else 1
        """Of one row, MLAS has 4-bit products on AVX2 that add up in another order."""

    @property
    def info(self) -> dict[str, Any]:
        """The manifest's `backend`."""
        return {
            "name": self.name,
            "version": onnxruntime.__version__,
            "min_version": CUDA_MIN_VERSION if self._device == "cuda" else MIN_VERSION,
            "device_class": "cuda" if self._device == "cuda" else device_class(self._sign),
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
        """Writes graphs/ and weights/ below `root` → the manifest fields that describe them.

        The step has no weights afterwards: what runs the bundle to check it loads them from the file.
        """

        def run(passes: Sequence[pipeline.Pass], start: int) -> None:
            on_pass = lambda name: on_stage(f"pass {name}")  # noqa: E731
            pipeline.run_passes(model, passes, on_pass=on_pass, dump=dump, start=start)

        for folder in ("weights", "graphs"):
            (root / folder).mkdir()
        run(pipeline.PORTABLE, 0)
        portable = []
        for width in widths:
            on_stage(f"writing the portable graph of width {width}")
            portable.append(self._write_portable(model, step, width, root))
        run(pipeline.onnxruntime(self._encoding, self._sign or "uint8", self._device), len(pipeline.PORTABLE))
        on_stage("writing weights")
        externalise(model, root / "weights" / "model.safetensors", "weights/model.safetensors")
        ir.save(model, root / "graphs" / "any.onnx")
        if self._sign == "int8":
            (root / "graphs" / "int8_probe.onnx").write_bytes(probe_model())
        return {
            "prefill_chunks": "dynamic",
            "fewest_tokens": self._fewest_tokens,
            "row_invariant": self._is_row_invariant(root, step, on_stage),
            "graphs": [graph_entry("any", "graphs/any.onnx", "any", widths, model, step), *portable],
        }

    def _is_row_invariant(self, root: Path, step: FusedStep, on_stage: Callable[[str], None]) -> bool | None:
        """None where this machine's CPU cannot tell."""
        if self._device == "cuda":
            return None
        _forget_weights(step)
        on_stage("comparing rows bit by bit")
        return is_row_invariant(
            root,
            step.states,
            step.target.config.vocabulary,
            positions=step.target.capacity - 2 * step.num_draft_tokens - 2,
            fewest_tokens=self._fewest_tokens,
            num_threads=min(os.cpu_count() or 1, step.target.config.kv_heads),
        )

    def _write_portable(self, model: ir.Model, step: FusedStep, width: int, root: Path) -> dict[str, Any]:
        """The fused graph of one width, before any backend's lowering, with its weights as inputs."""
        capacity = step.target.capacity
        fixed = specialise_step(model, width=width, num_draft_tokens=step.num_draft_tokens, capacity=capacity)
        pipeline.fold_sizes(fixed)
        name = f"portable_{width}"
        file = f"graphs/{name}.onnx"
        pipeline.write_without_weights(fixed, root / file)
        return graph_entry(name, file, "portable", (width,), fixed, step)


def _forget_weights(step: FusedStep) -> None:
    for tensor in (*step.parameters(), *step.buffers()):
        tensor.data = tensor.data.new_empty(0)
