"""What happens to a traced graph, in order, for each backend.

Each pass changes a graph in place and keeps what it computes; `--dump-passes` writes the graph after every one.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnxscript import optimizer

from graphspec.backends import Device
from graphspec.errors import BuildError

from . import tensorrt_lowering
from .drafting import draft_on_demand
from .fusion import fuse_residual_norms
from .linear import Encoding, WeightSign
from .onnxruntime_lowering import lower
from .weight_quantisation import WeightType
from .weights import large_initializers, weights_to_inputs

OnPass = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pass:
    """A named change of a graph."""

    name: str
    run: Callable[[ir.Model], object]


def fold_constants(model: ir.Model) -> None:
    """Computes what does not depend on inputs; weights are left alone."""
    # Its shape inference would drop the types of operators that ONNX does not know.
    optimizer.optimize_ir(model, onnx_shape_inference=False, input_size_limit=1024, output_size_limit=4096)


def fold_sizes(model: ir.Model) -> None:
    """Computes what does not depend on inputs, in a graph whose sizes have become known.

    Without the rewriting rules of `fold_constants`, which have done their work on the traced graph: on the hundreds
    of nodes of a sampler they take seconds for each engine.
    """
    optimizer.fold_constants(model, onnx_shape_inference=False, input_size_limit=1024, output_size_limit=4096)


def remove_unused(model: ir.Model) -> None:
    """Drops nodes and initializers that nothing reads."""
    ir.passes.common.RemoveUnusedNodesPass()(model)


def share_subexpressions(model: ir.Model) -> None:
    """Computes equal expressions once."""
    ir.passes.common.CommonSubexpressionEliminationPass()(model)


PORTABLE = (
    Pass("fold_constants", fold_constants),
    Pass("share_subexpressions", share_subexpressions),
    Pass("remove_unused", remove_unused),
)
"""What every backend starts from."""


def onnxruntime(encoding: Encoding, weight_sign: WeightSign, device: Device = "cpu") -> tuple[Pass, ...]:
    """From the portable graph to one that ONNX Runtime's CPU provider runs, or its CUDA one."""
    return (
        Pass("lower", lambda model: lower(model, encoding, weight_sign, whole_caches=device == "cpu")),
        Pass("share_lowered", share_subexpressions),
        Pass("fuse_residual_norms", fuse_residual_norms),
        Pass("remove_unused", remove_unused),
        Pass("draft_on_demand", draft_on_demand),
    )


def tensorrt(weights: WeightType | None = None) -> tuple[Pass, ...]:
    """From a graph of fixed sizes (specialise.py) to one that TensorRT compiles."""
    return (
        Pass("fold_sizes", fold_sizes),
        Pass("lower_tensorrt", lambda model: tensorrt_lowering.lower(model, weights)),
        Pass("share_lowered", share_subexpressions),
        Pass("fold_lowered", fold_sizes),
        Pass("remove_unused", remove_unused),
    )


def run_passes(
    model: ir.Model, passes: Sequence[Pass], *, on_pass: OnPass, dump: Path | None = None, start: int = 0
) -> None:
    """Runs the passes in order; with `dump`, writes NN_name.onnx (without weights) after each."""
    for number, step in enumerate(passes, start=start):
        on_pass(step.name)
        step.run(model)
        if dump is not None:
            _dump(model, dump, f"{number:02}_{step.name}.onnx")


def _dump(model: ir.Model, folder: Path, file: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_without_weights(model, folder / file)
    except OSError as error:
        reason = "disk full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or error
        # Not `from error`: a full disk behind it would be taken for the bundle's.
        raise BuildError(f"--dump-passes {folder}: {file} cannot be written: {reason}; choose another folder") from None


def write_without_weights(model: ir.Model, path: Path) -> None:
    """Writes the graph for people to look at: large initializers become inputs of the same name."""
    clone = model.clone()
    weights_to_inputs(clone, large_initializers(clone.graph))
    ir.save(clone, path)
