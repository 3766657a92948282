"""Each dialect operator, lowered for ONNX Runtime, against its definition in torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from graphs import Array, constant, float32, model_of, run, typed, value_of

from graphspec.export.dialect import DOMAIN, OPERATORS
from graphspec.export.onnxruntime_lowering import lower


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operator with its arguments in order."""

    arguments: Mapping[str, Array]
    attributes: Mapping[str, float | int] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()
    """Arguments that are initializers."""
    exact: bool = False


def integers(seed: int, limit: int, *shape: int) -> Array:
    return np.random.default_rng(seed).integers(0, limit, shape)


def causal(starts: list[int], length: int, visible: int) -> Array:
    """f32[B, T, L]: 0 up to each token's own position, else -inf."""
    last = np.array(starts)[:, None, None] + np.arange(length)[None, :, None]
    return np.where(np.arange(visible) <= last, 0, -np.inf).astype(np.float32)


def attention(kv_heads: int, *, length: int = 3, dim: int = 8, value_dim: int = 8) -> Case:
    """4 query heads over kv_heads key heads, caches of 20 positions of which 12 are visible."""
    return Case(
        arguments={
            "q": float32(0, 2, 4, length, dim),
            "keys": float32(1, 2, kv_heads, 20, dim),
            "values": float32(2, 2, kv_heads, 20, value_dim),
            "mask": causal([4, 9], length, 12),
        },
        attributes={"scale": dim**-0.5},
    )


def draft_attention(kv_heads: int, drafted: int, *, dim: int = 8, value_dim: int = 8) -> Case:
    case = attention(kv_heads, length=1, dim=dim, value_dim=value_dim)
    new = {
        "new_keys": float32(3, 2, kv_heads, drafted, dim),
        "new_values": float32(4, 2, kv_heads, drafted, value_dim),
    }
    return Case(arguments={**case.arguments, **new}, attributes=case.attributes)


ANGLES = np.random.default_rng(5).uniform(0, 6, (2, 3, 4)).astype(np.float32)
CASES: dict[str, dict[str, Case]] = {
    "Linear": {
        name: Case(
            arguments={"x": float32(0, *shape), "weight": float32(1, 5, 16)},
            attributes={"bound": bound},
            weights=frozenset({"weight"}),
        )
        for name, shape, bound in (("", (2, 3, 16), 0.0), ("one row", (1, 1, 16), 0.0), ("bounded", (2, 3, 16), 4.0))
    },
    "RmsNorm": {
        "": Case(
            arguments={"x": float32(0, 2, 3, 16), "weight": float32(1, 16)},
            attributes={"eps": 1e-5},
            weights=frozenset({"weight"}),
        ),
        "of heads": Case(
            arguments={"x": float32(0, 2, 4, 3, 8), "weight": float32(1, 8)},
            attributes={"eps": 1e-6},
            weights=frozenset({"weight"}),
        ),
        "of small values": Case(
            arguments={"x": float32(0, 2, 3, 16) * np.float32(1e-3), "weight": float32(1, 16)},
            attributes={"eps": 1e-5},
            weights=frozenset({"weight"}),
        ),
    },
    "SplitHeads": {"": Case(arguments={"x": float32(0, 2, 3, 32)}, attributes={"heads": 4}, exact=True)},
    "Rotary": {
        f"{heads} heads": Case(
            arguments={"x": float32(0, 2, heads, 3, 8), "cos": np.cos(ANGLES), "sin": np.sin(ANGLES)}
        )
        for heads in (1, 4, 6)
    },
    "SwiGlu": {"": Case(arguments={"x": float32(0, 2, 3, 32) * 4})},
    "WriteCache": {
        "": Case(
            arguments={"cache": float32(0, 2, 3, 20, 8), "update": float32(1, 2, 3, 4, 8), "start": np.array([0, 16])},
            exact=True,
        )
    },
    "WriteHistory": {
        "": Case(
            arguments={"history": integers(0, 99, 2, 20), "tokens": integers(1, 99, 2, 4), "start": np.array([3, 16])},
            exact=True,
        )
    },
    "Attention": {
        "group of 1": attention(4),
        "group of 2": attention(2),
        "group of 4": attention(1),
        "one token, group of 1": attention(4, length=1),
        "one token, group of 4": attention(1, length=1),
        "values of another size, group of 1": attention(4, value_dim=6),
        "values of another size, group of 2": attention(2, value_dim=6),
        "heads of two blocks": attention(2, dim=256),
        "heads of a block and a part": attention(4, dim=200),
    },
    "DraftAttention": {
        "group of 1": draft_attention(4, 2),
        "group of 2": draft_attention(2, 2),
        "group of 4": draft_attention(1, 3),
        "the first drafted token": draft_attention(2, 1),
        "the first drafted token, group of 1": draft_attention(4, 1),
        "values of another size": draft_attention(2, 2, value_dim=6),
        "heads of a block and a part": draft_attention(2, 2, dim=200),
    },
    "TakeRows": {
        "": Case(arguments={"x": float32(0, 2, 5, 8), "rows": np.array([[4, 0, 0], [1, 2, 3]])}, exact=True),
        "of tokens": Case(arguments={"x": integers(0, 99, 2, 5), "rows": np.array([[4], [1]])}, exact=True),
    },
    "Sample": {
        "greedy": Case(
            arguments={
                "logits": float32(0, 2, 3, 50),
                "temperature": np.zeros(2, np.float32),
                "top_k": np.array([5, 0]),
                "top_p": np.array([0.5, 1], np.float32),
                "min_p": np.array([0.1, 0], np.float32),
                "uniform": np.random.default_rng(1).random((2, 3), np.float32),
            },
            exact=True,
        )
    },
}
"""test_sampling_lowering.py has more of Sample, test_linear.py int8."""


def lowered(operator: str, case: Case, expected: Array, *, whole_caches: bool = False) -> ir.Model:
    values = {
        name: constant(name, array) if name in case.weights else value_of(name, array)
        for name, array in case.arguments.items()
    }
    node = ir.node(operator, list(values.values()), dict(case.attributes), domain=DOMAIN)
    output = typed(node.outputs[0], "y", expected)
    weights = [value for name, value in values.items() if name in case.weights]
    inputs = [value for name, value in values.items() if name not in case.weights]
    model = model_of(inputs, [node], [output], weights)
    lower(model, "float32", "uint8", whole_caches=whole_caches)
    return model


def eager(operator: str, case: Case) -> Array:
    (definition,) = (op.torch_name for op in OPERATORS if op.name == operator)
    tensors = [torch.from_numpy(array.copy()) for array in case.arguments.values()]
    result: Array = getattr(torch.ops.graphspec, definition)(*tensors, *case.attributes.values()).numpy()
    return result


def test_every_operator_has_a_case() -> None:
    assert set(CASES) == {operator.name for operator in OPERATORS}
    for operator in OPERATORS:
        for case in CASES[operator.name].values():
            assert tuple(case.arguments) == operator.inputs
            assert tuple(case.attributes) == tuple(name for name, _ in operator.attributes)


@pytest.mark.parametrize("optimise", [False, True], ids=["as lowered", "as ONNX Runtime optimises it"])
@pytest.mark.parametrize(
    ("operator", "name"), [(operator, name) for operator, cases in CASES.items() for name in cases]
)
def test_a_lowered_operator_computes_what_torch_does(operator: str, name: str, optimise: bool) -> None:
    case = CASES[operator][name]
    expected = eager(operator, case)
    model = lowered(operator, case, expected)
    assert all(node.domain != DOMAIN for node in model.graph)
    feeds = {key: array for key, array in case.arguments.items() if key not in case.weights}
    (result,) = run(model, feeds, optimise=optimise)
    assert result.dtype == expected.dtype
    if case.exact:
        np.testing.assert_array_equal(result, expected)
    else:
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("operator", "name"), [(operator, name) for operator in ("Attention", "DraftAttention") for name in CASES[operator]]
)
def test_a_cache_of_just_the_positions_looked_at_is_not_copied(operator: str, name: str) -> None:
    case = CASES[operator][name]
    cut = {key: array[:, :, :12].copy() for key, array in case.arguments.items() if key in ("keys", "values")}
    packed = Case(arguments={**case.arguments, **cut}, attributes=case.attributes)
    expected = eager(operator, case)
    model = lowered(operator, packed, expected, whole_caches=True)
    caches = {value for value in model.graph.inputs if value.name in cut}
    blocks = "heads of" in name  # a head of more than BLOCK terms is multiplied in parts
    assert blocks or not any(node.op_type == "Slice" and node.inputs[0] in caches for node in model.graph)
    (result,) = run(model, dict(packed.arguments), optimise=True)
    np.testing.assert_array_equal(
        result, run(lowered(operator, case, expected), dict(case.arguments), optimise=True)[0], "the same bits"
    )


def test_masked_positions_have_no_weight_whatever_they_hold() -> None:
    """What a cache holds beyond a row's length is finite and wrong."""
    case = attention(2)
    clean = eager("Attention", case)
    dirty: dict[str, Any] = {name: array.copy() for name, array in case.arguments.items()}
    for cache in (dirty["keys"], dirty["values"]):
        cache[0, :, 7:] = 1e4
        cache[1, :, 12:] = 1e4
    feeds = Case(arguments=dirty, attributes=case.attributes)
    (result,) = run(lowered("Attention", feeds, clean), dirty)
    np.testing.assert_allclose(result, clean, rtol=1e-5, atol=1e-6)


def test_a_weight_read_twice_is_stored_once_and_an_input_quantised_once() -> None:
    """A tied head; q, k and v of one input."""
    x, weight, other = float32(0, 2, 3, 16), float32(1, 16, 16), float32(2, 16, 16)
    entry, shared, second = value_of("x", x), constant("shared", weight), constant("second", other)
    first = ir.node("Linear", [entry, shared], domain=DOMAIN)
    again = ir.node("Linear", [typed(first.outputs[0], "a", x), shared], domain=DOMAIN)
    beside = ir.node("Linear", [entry, second], domain=DOMAIN)
    outputs = [typed(again.outputs[0], "b", x), typed(beside.outputs[0], "c", x)]
    model = model_of([entry], [first, again, beside], outputs, [shared, second])
    lower(model, "int8", "uint8")
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("MatMulIntegerToFloat") == 3
    assert kinds.count("QuantizeLinear") == 2
    stored = [name for name, value in model.graph.initializers.items() if value.dtype == ir.DataType.UINT8]
    assert sorted(name for name in stored if name.endswith(".uint8")) == ["second.uint8", "shared.uint8"]
