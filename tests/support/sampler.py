"""A graph of one Sample node, lowered and run by ONNX Runtime, and what to give it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from drawing import Filters, answers
from graphs import Array, model_of, typed
from hypothesis import strategies as st
from stepping import session

from graphspec.export.dialect import DOMAIN

Sampler = Callable[[Array, Sequence[Filters], Array], Array]
UNIFORM = st.one_of(st.sampled_from([0, 2**24 - 1]), st.integers(0, 2**24 - 1)).map(lambda i: i * 2**-24)
SPREAD = st.sampled_from([0.01, 1.0, 4.0])
STEP = st.sampled_from([0.125, 2.0])
"""Logits are multiples of it: equal ones tie in float32 as in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What rows of two positions each are drawn from."""

    logits: Array
    """f64[B, 2, V]."""
    filters: list[Filters]
    draws: Array
    """f64[B, 2]."""

    @property
    def vocabulary(self) -> int:
        return int(self.logits.shape[-1])


@st.composite
def cases(draw: st.DrawFn, vocabularies: Sequence[int], filters: st.SearchStrategy[Filters]) -> Case:
    """One to three rows."""
    vocabulary = draw(st.sampled_from(vocabularies))
    rows = draw(st.lists(filters, min_size=1, max_size=3))
    uniform = draw(st.lists(UNIFORM, min_size=6, max_size=6))
    spread, step = draw(SPREAD), draw(STEP)
    noise = np.random.default_rng(draw(st.integers(0, 1000))).standard_normal((len(rows), 2, vocabulary)) * spread
    draws = np.array(uniform[: 2 * len(rows)]).reshape(len(rows), 2)
    return Case(logits=np.round(noise / step) * step, filters=rows, draws=draws)


def check_draws(sampler: Sampler, case: Case) -> None:
    """Every position draws what the definition says."""
    tokens = sampler(case.logits, case.filters, case.draws)
    for row, own in enumerate(case.filters):
        for position in range(2):
            possible = answers(case.logits[row, position], own, case.draws[row, position])
            assert int(tokens[row, position]) in possible


def sampler(vocabulary: int, lower: Callable[[ir.Model], object]) -> Sampler:
    """Logits [B, R, V], filters of each row, uniform [B, R] → tokens [B, R], by the lowered node."""
    floats, integers = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.INT64)
    inputs = [
        ir.Value(name="logits", shape=ir.Shape(["batch", "asked", vocabulary]), type=floats),
        *(
            ir.Value(name=name, shape=ir.Shape(["batch"]), type=integers if name == "top_k" else floats)
            for name in ("temperature", "top_k", "top_p", "min_p")
        ),
        ir.Value(name="uniform", shape=ir.Shape(["batch", "asked"]), type=floats),
    ]
    node = ir.node("Sample", inputs, domain=DOMAIN)
    output = typed(node.outputs[0], "tokens", np.zeros((2, 3), np.int64))
    output.shape = ir.Shape(["batch", "asked"])
    model = model_of(inputs, [node], [output])
    lower(model)
    running = session(model, Path("."))

    def sample(logits: Array, filters: Sequence[Filters], uniform: Array) -> Array:
        feeds = {"logits": logits.astype(np.float32), "uniform": uniform.astype(np.float32)}
        for name in ("temperature", "top_k", "top_p", "min_p"):
            values = [getattr(row, name) for row in filters]
            feeds[name] = np.array(values, np.int64 if name == "top_k" else np.float32)
        (tokens,) = running.run(None, feeds)
        assert isinstance(tokens, np.ndarray)
        return tokens

    return sample
