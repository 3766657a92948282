"""What this machine's CPU computes exactly, found by computing."""

from __future__ import annotations

import platform

import numpy as np
import onnx_ir as ir
import onnxruntime

from .builder import MICROSOFT
from .linear import WeightSign


def probe_model() -> bytes:
    """A product uint8 × int8 → float32 whose 16-bit partial sums overflow: 255 · 127 · 2 > 32,767.

    A CPU without VNNI saturates them. The bundle carries this graph, so that a server can ask its own CPU.
    """
    rows = ir.Value(name="rows", shape=ir.Shape([1, 64]), type=ir.TensorType(ir.DataType.UINT8))
    columns = ir.Value(name="columns", const_value=ir.tensor(np.full((64, 16), 127, np.int8), name="columns"))
    one = ir.Value(name="one", const_value=ir.tensor(np.float32(1), name="one"))
    node = ir.node("MatMulIntegerToFloat", [rows, columns, one, one], domain=MICROSOFT)
    product = node.outputs[0]
    product.name, product.type, product.shape = "product", ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, 16])
    graph = ir.Graph(
        [rows],
        [product],
        nodes=[node],
        initializers=[columns, one],
        opset_imports={"": 21, MICROSOFT: 1},
        name="int8_probe",
    )
    model = ir.Model(graph, ir_version=10)
    return bytes(ir.to_proto(model).SerializeToString())


def multiplies_uint8_by_int8_exactly() -> bool:
    """Whether ONNX Runtime's uint8 × int8 product is exact on this CPU."""
    session = onnxruntime.InferenceSession(probe_model(), providers=["CPUExecutionProvider"])
    (product,) = session.run(None, {"rows": np.full((1, 64), 255, np.uint8)})
    return bool((product == 255 * 127 * 64).all())


def int8_weight_sign() -> WeightSign:
    """The faster of the exact forms (export/linear.py)."""
    return "int8" if multiplies_uint8_by_int8_exactly() else "uint8"


def device_class(weight_sign: WeightSign | None) -> str:
    """The class of machines a bundle built here runs on."""
    return platform.machine() + ("-vnni" if weight_sign == "int8" else "")
