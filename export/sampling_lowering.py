"""Sample (architectures/sampling.py) in operators that ONNX Runtime runs fast on a CPU.

Greedy steps must not pay for sampling, so it sits in an If. Sorting a whole vocabulary costs more than a
layer, so the thresholds come from the CANDIDATES most probable tokens, and from a full sort only in the rows whose
filters reach beyond them; both give the same bits, since the candidates are a prefix of the sorted vocabulary.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .builder import Builder

CANDIDATES = 256


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
    """f32[B, R, 1]. Nothing is sorted where no row that is drawn asks for top-k or top-p."""
    op, const = builder.op, builder.constant
    top_k, top_p, min_p = filters  # [B, 1, 1]
    drawn = op("Unsqueeze", [hot, const([1, 2])])
    asks = op("And", [drawn, op("Or", [op("Greater", [top_k, const([0])]), op("Less", [top_p, const(1.0)])])])
    condition = _any(builder, asks)
    outside = builder.take_nodes()

    ranked = _ranked(builder, probabilities, filters, drawn, vocabulary)
    by_order = builder.branch("by_order", [ranked], builder.take_nodes())
    ratio = op("Mul", [min_p, op("ReduceMax", [probabilities, const([-1])], keepdims=1)])
    by_ratio = builder.branch("by_ratio", [ratio], builder.take_nodes())

    builder.adopt(outside)
    return op("If", [condition], then_branch=by_order, else_branch=by_ratio)


def _ranked(
    builder: Builder, probabilities: ir.Value, filters: list[ir.Value], drawn: ir.Value, vocabulary: int
) -> ir.Value:
    """The threshold from the candidates, and from the whole vocabulary in the rows they do not decide."""
    if vocabulary <= CANDIDATES:
        return _from_sorted(builder, *_sorted(builder, probabilities, vocabulary), filters, vocabulary)
    op = builder.op
    ordered, mass = _sorted(builder, probabilities, CANDIDATES)
    by_rank = _by_rank(builder, ordered, filters[0], CANDIDATES)
    few = _from_sorted(builder, ordered, mass, filters, CANDIDATES, by_rank)
    beyond = op("And", [_beyond(builder, ordered, mass, by_rank, filters), drawn])
    condition = _any(builder, beyond)
    outside = builder.take_nodes()

    corrected = _sort_rows(builder, probabilities, filters, beyond, few, vocabulary)
    everything = builder.branch("whole_vocabulary", [corrected], builder.take_nodes())
    same = op("Identity", [few])
    candidates = builder.branch("candidates", [same], builder.take_nodes())

    builder.adopt(outside)
    return op("If", [condition], then_branch=everything, else_branch=candidates)


def _sort_rows(
    builder: Builder,
    probabilities: ir.Value,
    filters: list[ir.Value],
    which: ir.Value,
    thresholds: ir.Value,
    vocabulary: int,
) -> ir.Value:
    """The thresholds f32[B, R, 1] with those of the rows `which` bool[B, R, 1] found among all tokens."""
    op, const = builder.op, builder.constant
    places = op("Transpose", [op("NonZero", [which])], perm=[1, 0])  # i64[n, 3]
    batch, position = (op("Slice", [places, const([0]), const([end]), const([1])]) for end in (1, 2))
    rows = op("Unsqueeze", [op("GatherND", [probabilities, position]), const([1])])  # f32[n, 1, V]
    of_rows = [op("GatherND", [values, batch]) for values in filters]  # [n, 1, 1]
    found = _from_sorted(builder, *_sorted(builder, rows, vocabulary), of_rows, vocabulary)  # [n, 1, 1]
    return op("ScatterND", [thresholds, places, op("Reshape", [found, const([-1])])])


def _any(builder: Builder, where: ir.Value) -> ir.Value:
    """Whether it holds anywhere: bool[]."""
    numbers = builder.op("Cast", [where], to=ir.DataType.INT32)
    return builder.op("Cast", [builder.op("ReduceMax", [numbers], keepdims=0)], to=ir.DataType.BOOL)


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
