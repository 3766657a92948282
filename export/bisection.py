"""Sample (architectures/sampling.py) without a sort: TensorRT's TopK ends at 3,840 values.

The threshold of the filters is found by halving the interval of probabilities it lies in. The mass and the count of
the tokens above a threshold only grow as it falls, so 40 halvings of [0, 1] pin it between two neighbouring
float32 numbers of the size that matters.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from .builder import Builder
from .lowering import static_size

HALVINGS = 40
UNFUSED_EVERY = 5
"""TensorRT fuses a chain of halvings into one kernel when the vocabulary is small, in time exponential in their
number: 10 took 14 s and 20 over 2 minutes at 1,000 tokens, 1 to 6 s all 40 with a cut after every 5 (RTX 1.7.1)."""


def lower_sample(builder: Builder, inputs: list[ir.Value]) -> ir.Value:
    """logits, temperature, top_k, top_p, min_p, uniform → tokens i64[B, R]."""
    logits, temperature, top_k, top_p, min_p, uniform = inputs
    op, const = builder.op, builder.constant
    greedy = lower_argmax(builder, logits)
    hot = op("Greater", [temperature, const(0.0)])
    scale = op("Unsqueeze", [op("Where", [hot, temperature, const(1.0)]), const([1, 2])])
    probabilities = op("Softmax", [op("Div", [logits, scale])], axis=-1)
    k, p, ratio = (op("Unsqueeze", [value, const([1, 2])]) for value in (top_k, top_p, min_p))

    by_rank = _kth_largest(builder, probabilities, k)
    by_mass = _nucleus(builder, probabilities, by_rank, k, p)
    by_ratio = op("Mul", [ratio, op("ReduceMax", [probabilities, const([-1])], keepdims=1)])
    threshold = op("Max", [by_rank, by_mass, by_ratio])

    kept = op("Where", [op("GreaterOrEqual", [probabilities, threshold]), probabilities, const(0.0)])
    # Running sums in parallel are not ordered to the last bit: only those at tokens that were kept are looked at.
    reached = op("Where", [op("Greater", [kept, const(0.0)]), op("CumSum", [kept, const(-1)]), const(0.0)])
    total = op("ReduceMax", [reached, const([-1])], keepdims=1)
    target = op("Mul", [op("Unsqueeze", [uniform, const([2])]), total])
    drawn = _first(builder, op("Greater", [reached, target]), vocabulary=static_size(logits, -1))
    return op("Where", [op("Unsqueeze", [hot, const([1])]), drawn, greedy])


def lower_argmax(builder: Builder, x: ir.Value) -> ir.Value:
    """[…, V] → the first place of the largest value, i64[…]. TensorRT's ArgMax does not say which of equal values it
    takes, and logits of bfloat16 are often equal: a step of another width must take the same."""
    largest = builder.op("ReduceMax", [x, builder.constant([-1])], keepdims=1)
    return _first(builder, builder.op("Equal", [x, largest]), vocabulary=static_size(x, -1))


def _first(builder: Builder, condition: ir.Value, *, vocabulary: int) -> ir.Value:
    """[…, V] → the first place where it holds, i64[…]; the last one where it holds nowhere."""
    op, const = builder.op, builder.constant
    places = op("Range", [const(0), const(vocabulary), const(1)])
    return op("ReduceMin", [op("Where", [condition, places, const(vocabulary - 1)]), const([-1])], keepdims=0)


def _count(builder: Builder, condition: ir.Value) -> ir.Value:
    ones = builder.op("Cast", [condition], to=ir.DataType.FLOAT)
    return builder.op("ReduceSum", [ones, builder.constant([-1])], keepdims=1)


def _kth_largest(builder: Builder, probabilities: ir.Value, k: ir.Value) -> ir.Value:
    """The largest threshold that at least k tokens reach; 0 where k is 0."""
    op, const = builder.op, builder.constant
    wanted = op("Cast", [k], to=ir.DataType.FLOAT)

    def enough(threshold: ir.Value) -> ir.Value:
        return op("GreaterOrEqual", [_count(builder, op("GreaterOrEqual", [probabilities, threshold])), wanted])

    found = _halve(builder, probabilities, enough)
    return op("Where", [op("Greater", [k, const([0])]), found, const(0.0)])


def _nucleus(builder: Builder, probabilities: ir.Value, by_rank: ir.Value, k: ir.Value, p: ir.Value) -> ir.Value:
    """The largest threshold whose tokens hold p of the mass that top-k left; 0 where p is 1."""
    op, const = builder.op, builder.constant
    ranked = op("Where", [op("GreaterOrEqual", [probabilities, by_rank]), probabilities, const(0.0)])
    mass = op("ReduceSum", [ranked, const([-1])], keepdims=1)
    left = op("Where", [op("Greater", [k, const([0])]), mass, const(1.0)])
    wanted = op("Mul", [p, left])

    def enough(threshold: ir.Value) -> ir.Value:
        above = op("Where", [op("GreaterOrEqual", [ranked, threshold]), ranked, const(0.0)])
        return op("GreaterOrEqual", [op("ReduceSum", [above, const([-1])], keepdims=1), wanted])

    found = _halve(builder, probabilities, enough)
    return op("Where", [op("Less", [p, const(1.0)]), found, const(0.0)])


def _halve(builder: Builder, probabilities: ir.Value, enough: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """The largest threshold in [0, max p] for which `enough` holds; it holds for 0.

    Not a Loop: a CUDA graph is captured of the step.
    """
    op, const = builder.op, builder.constant
    high = op("ReduceMax", [probabilities, const([-1])], keepdims=1)
    low = op("Mul", [high, const(0.0)])
    low = op("Where", [enough(high), high, low])
    for number in range(1, HALVINGS + 1):
        middle = op("Mul", [op("Add", [low, high]), const(0.5)])
        holds = enough(middle)
        low, high = op("Where", [holds, middle, low]), op("Where", [holds, high, middle])
        if number % UNFUSED_EVERY == 0:
            low = op("CumSum", [low, const(-1)])  # over one element: the same value, and a kernel of its own
    return low
