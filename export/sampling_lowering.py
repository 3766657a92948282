"""Sample (architectures/sampling.py) in operators that ONNX Runtime runs fast on a CPU.

Greedy steps must not pay for sampling, so it sits in an If. Sorting a whole vocabulary costs more than a
layer, so the thresholds come from the CANDIDATES most probable tokens, and from a full sort only if a row's
filters reach beyond them; both give the same bits, since the candidates are a prefix of the sorted vocabulary.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .builder import Builder

CANDIDATES = 1024


def lower_sample(builder: Builder, inputs: list[ir.Value], vocabulary: int) -> ir.Value:
    """logits, temperature, top_k, top_p, min_p, uniform → tokens i64[B, R]."""
    logits, temperature = inputs[:2]
    greedy = builder.op("ArgMax", [logits], axis=-1, keepdims=0)
    hottest = builder.op("ReduceMax", [temperature], keepdims=0)
    sampled = builder.op("Greater", [hottest, builder.constant(0.0)])
    outside = builder.take_nodes()

    tokens = _draw(builder, inputs, greedy, vocabulary)
    sampling = builder.branch("sampling", [tokens], builder.take_nodes())
    same = builder.op("Identity", [greedy])
    argmax = builder.branch("argmax", [same], builder.take_nodes())

    builder.adopt(outside)
    return builder.op("If", [sampled], then_branch=sampling, else_branch=argmax)


def _draw(builder: Builder, inputs: list[ir.Value], greedy: ir.Value, vocabulary: int) -> ir.Value:
    logits, temperature, top_k, top_p, min_p, uniform = inputs
    op, const = builder.op, builder.constant
    hot = op("Greater", [temperature, const(0.0)])
    scale = op("Unsqueeze", [op("Where", [hot, temperature, const(1.0)]), const([1, 2])])
    probabilities = op("Softmax", [op("Div", [logits, scale])], axis=-1)
    filters = [op("Unsqueeze", [value, const([1, 2])]) for value in (top_k, top_p, min_p)]
    threshold = _threshold(builder, probabilities, filters, hot, vocabulary)

    kept = op("GreaterOrEqual", [probabilities, threshold])
    cumulative = op("CumSum", [op("Where", [kept, probabilities, const(0.0)]), const(-1)])
    total = op("Gather", [cumulative, const([-1])], axis=-1)
    target = op("Mul", [op("Unsqueeze", [uniform, const([2])]), total])
    below = op("Cast", [op("LessOrEqual", [cumulative, target])], to=ir.DataType.INT32)
    drawn = op("Cast", [op("ReduceSum", [below, const([-1])], keepdims=0)], to=ir.DataType.INT64)
    return op("Where", [op("Unsqueeze", [hot, const([1])]), drawn, greedy])


def _threshold(
    builder: Builder, probabilities: ir.Value, filters: list[ir.Value], hot: ir.Value, vocabulary: int
) -> ir.Value:
    if vocabulary <= CANDIDATES:
        return _from_sorted(builder, *_sorted(builder, probabilities, vocabulary), filters, vocabulary)
    op = builder.op
    ordered, mass = _sorted(builder, probabilities, CANDIDATES)
    by_rank = _by_rank(builder, ordered, filters[0], CANDIDATES)
    beyond = op(
        "And", [_beyond(builder, ordered, mass, by_rank, filters), op("Unsqueeze", [hot, builder.constant([1, 2])])]
    )
    any_beyond = op("ReduceMax", [op("Cast", [beyond], to=ir.DataType.INT32)], keepdims=0)
    condition = op("Cast", [any_beyond], to=ir.DataType.BOOL)
    outside = builder.take_nodes()

    whole = _from_sorted(builder, *_sorted(builder, probabilities, vocabulary), filters, vocabulary)
    everything = builder.branch("whole_vocabulary", [whole], builder.take_nodes())
    few = _from_sorted(builder, ordered, mass, filters, CANDIDATES, by_rank)
    candidates = builder.branch("candidates", [few], builder.take_nodes())

    builder.adopt(outside)
    return op("If", [condition], then_branch=everything, else_branch=candidates)


def _sorted(builder: Builder, probabilities: ir.Value, count: int) -> tuple[ir.Value, ir.Value]:
    """The `count` largest, in order, and their running sum."""
    ordered, _ = builder.op_with_outputs("TopK", [probabilities, builder.constant([count])], 2, axis=-1)
    return ordered, builder.op("CumSum", [ordered, builder.constant(-1)])


def _beyond(
    builder: Builder, ordered: ir.Value, mass: ir.Value, by_rank: ir.Value, filters: list[ir.Value]
) -> ir.Value:
    """Where the candidates do not decide the threshold: bool[B, R, 1].

    top-k reaches past them; or top-p does, alone or by the tokens that tie with the last one top-k keeps.
    """
    op, const = builder.op, builder.constant
    top_k, top_p, _ = filters
    reached, smallest = (op("Gather", [values, const([-1])], axis=-1) for values in (mass, ordered))
    beyond_k = op("Greater", [top_k, const([CANDIDATES])])
    limited, nucleus = op("Greater", [top_k, const([0])]), op("Less", [top_p, const(1.0)])
    tied = op("And", [limited, op("Equal", [by_rank, smallest])])
    short = op("And", [op("Not", [limited]), op("Less", [reached, top_p])])
    return op("Or", [beyond_k, op("And", [nucleus, op("Or", [tied, short])])])


def _by_rank(builder: Builder, ordered: ir.Value, top_k: ir.Value, count: int) -> ir.Value:
    """The probability of the last token that top-k keeps, or 0: f32[B, R, 1]."""
    op, const = builder.op, builder.constant
    limited = op("Greater", [top_k, const([0])])
    rank = op("Sub", [op("Where", [limited, op("Min", [top_k, const([count])]), const([count])]), const([1])])
    return op("Where", [limited, _at(builder, ordered, rank, count, const(0.0)), const(0.0)])


def _from_sorted(
    builder: Builder,
    ordered: ir.Value,
    mass: ir.Value,
    filters: list[ir.Value],
    count: int,
    by_rank: ir.Value | None = None,
) -> ir.Value:
    op, const = builder.op, builder.constant
    top_k, top_p, min_p = filters  # [B, 1, 1]
    if by_rank is None:
        by_rank = _by_rank(builder, ordered, top_k, count)

    # The nucleus: the fewest tokens whose mass reaches top-p of what top-k left, ties included.
    last = op("Sub", [_count(builder, op("GreaterOrEqual", [ordered, by_rank])), const([1])])
    limited = op("Greater", [top_k, const([0])])
    left = op("Where", [limited, _at(builder, mass, last, count, const(0.0)), const(1.0)])
    size = op("Min", [_count(builder, op("Less", [mass, op("Mul", [top_p, left])])), last])
    in_nucleus = _at(builder, ordered, size, count, const(0.0))
    by_mass = op("Where", [op("Less", [top_p, const(1.0)]), in_nucleus, const(0.0)])

    by_ratio = op("Mul", [min_p, op("Gather", [ordered, const([0])], axis=-1)])
    return op("Max", [by_rank, by_mass, by_ratio])


def _count(builder: Builder, here: ir.Value) -> ir.Value:
    """How many of bool[B, R, count] hold: i64[B, R, 1]."""
    ones = builder.op("Cast", [here], to=ir.DataType.INT64)
    return builder.op("ReduceSum", [ones, builder.constant([-1])], keepdims=1)


def _at(builder: Builder, values: ir.Value, index: ir.Value, count: int, zero: ir.Value) -> ir.Value:
    """values[..., index] as a masked sum: values f32[B, R, count], index i64[B, 1 or R, 1] → [B, R, 1].

    One term is not zero, so the sum is exact; it broadcasts where GatherElements would need an Expand.
    """
    here = builder.op("Equal", [builder.constant(np.arange(count)), index])
    return builder.op("ReduceSum", [builder.op("Where", [here, values, zero]), builder.constant([-1])], keepdims=1)
