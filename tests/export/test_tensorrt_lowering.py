"""The graphs that TensorRT compiles, run by ONNX Runtime in float32, compute what the eager step computes.

The same operators in the same order, islands and all; nothing here has run on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import tiny
import torch
from numpy.typing import NDArray

from graphspec.architectures.step import FusedStep, StepInputs
from graphspec.checkpoints import open_checkpoint
from graphspec.export import pipeline
from graphspec.export.specialise import specialise_prefill, specialise_step
from graphspec.export.trace import trace
from graphspec.export.weight_quantisation import WEIGHT_TYPES, WeightType, quantise
from graphspec.registry import registered
from graphspec.resolution import complete_config, resolve
from graphspec.speculative_config import SpeculativeConfig

CAPACITY = 64
BATCH = 3
CHUNK = 7
Arrays = dict[str, NDArray[Any]]


def fused(target: Path, draft: Path | None, *, greedy: bool) -> FusedStep:
    pair = resolve(open_checkpoint(target), open_checkpoint(draft) if draft else None, None, None, registered())
    config = complete_config(SpeculativeConfig(), pair)
    kinds = pair.architecture
    model = kinds.target.load(pair.target, capacity=CAPACITY)
    drafter = kinds.drafter.load(model, pair.draft, config.draft_width, config)
    return FusedStep(model, drafter, greedy=greedy)


@pytest.fixture(scope="module", params=["ngram", "eagle3", "standalone"])
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[FusedStep, ir.Model]:
    path = tmp_path_factory.mktemp("tensorrt")
    draft = None
    target = tiny.save_llama(path / "target", layers=7 if request.param == "eagle3" else 2)
    if request.param == "eagle3":
        draft = tiny.save_eagle3(path / "draft")
    elif request.param == "standalone":
        draft = tiny.save_llama(path / "draft", layers=2, seed=5)
    step = fused(target, draft, greedy=request.param == "eagle3")
    model = trace(step)
    pipeline.run_passes(model, pipeline.PORTABLE, on_pass=lambda _: None)
    return step, model


def session(model: ir.Model, weights: WeightType | None = None) -> Any:
    pipeline.run_passes(model, pipeline.tensorrt(weights), on_pass=lambda _: None)
    for node in model.graph:
        # An instruction to TensorRT that ONNX's own schema does not know.
        node.attributes.pop("TRT_decomposable", None)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # ONNX Runtime would round activations to 8 bits where weights have so few.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)


def drawn(step: FusedStep, seed: int, batch: int) -> tuple[Arrays, list[NDArray[Any]]]:
    """Sampling settings of a greedy row and two sampled ones, and caches of noise."""
    random = np.random.default_rng(seed)
    sampling = {
        "temperature": np.array([0, 0.8, 1.3], np.float32)[:batch],
        "top_k": np.array([0, 5, 40])[:batch],
        "top_p": np.array([1, 0.9, 0.7], np.float32)[:batch],
        "min_p": np.array([0, 0.02, 0], np.float32)[:batch],
        "uniform": random.random((batch, CAPACITY, 1), np.float32),
    }
    sizes = {"batch": batch, "capacity": CAPACITY}
    shapes = [[sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape] for spec in step.states]
    states = [
        random.integers(0, tiny.VOCABULARY, shape)
        if spec.dtype == "int64"
        else (random.standard_normal(shape) * 0.3).astype(np.float32)
        for spec, shape in zip(step.states, shapes, strict=True)
    ]
    return sampling, states


def compare(step: FusedStep, engine: Any, eager: Arrays, given: Arrays, states: list[NDArray[Any]]) -> None:
    with torch.no_grad():
        inputs = StepInputs(*(torch.from_numpy(eager[name]) for name in StepInputs._fields))
        expected = step(inputs, [torch.from_numpy(state.copy()) for state in states])
    if (active := given.get("active")) is not None:
        rows = torch.from_numpy(active)
        expected = expected._replace(
            next_tokens=torch.where(rows[:, None], expected.next_tokens, torch.from_numpy(given["tokens"])),
            next_kv_len=torch.where(rows, expected.next_kv_len, torch.from_numpy(given["kv_len"])),
        )
    feeds = {**given, **{spec.name: state for spec, state in zip(step.states, states, strict=True)}}
    read = {value.name for value in engine.get_inputs()}
    found = engine.run(None, {name: value for name, value in feeds.items() if name in read})
    for wanted, result in zip([*expected[:-2], *expected.states], found, strict=True):  # without logits
        if wanted.dtype == torch.int64:
            np.testing.assert_array_equal(result, wanted.numpy())
        else:
            np.testing.assert_allclose(result, wanted.numpy(), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [True, False])
def test_a_step_of_fixed_width_equals_the_eager_one(traced: tuple[FusedStep, ir.Model], narrow: bool) -> None:
    step, model = traced
    drafts = step.num_draft_tokens
    width = 0 if narrow else drafts
    engine = session(specialise_step(model, width=width, num_draft_tokens=drafts, capacity=CAPACITY, batch=BATCH))
    for seed in range(10):
        random = np.random.default_rng(seed)
        sampling, states = drawn(step, seed, BATCH)
        tokens = random.integers(0, tiny.VOCABULARY, (BATCH, drafts + 1))
        active = np.array([True, seed % 2 == 0, True])
        given = {"tokens": tokens, "kv_len": random.integers(3, 20, BATCH), "active": active, **sampling}
        fixed = {
            "tokens": tokens[:, : width + 1],
            "n_tokens": np.full(BATCH, width + 1),
            "n_known": np.ones(BATCH, np.int64),
            "next_token": np.full(BATCH, -1),
            "verify_offsets": np.arange(width + 1),
            "key_positions": np.arange(CAPACITY),
        }
        compare(step, engine, {**given, **fixed}, given, states)


@pytest.mark.slow
def test_a_prefill_chunk_equals_the_eager_one(traced: tuple[FusedStep, ir.Model]) -> None:
    step, model = traced
    engine = session(specialise_prefill(model, chunk=CHUNK, capacity=CAPACITY))
    for length, following in ((CHUNK, 9), (3, -1), (1, 4)):
        sampling, states = drawn(step, length, 1)
        given = {
            "tokens": np.random.default_rng(length).integers(0, tiny.VOCABULARY, (1, CHUNK)),
            "kv_len": np.array([4]),
            "n_tokens": np.array([length]),
            "next_token": np.array([following]),
            **sampling,
        }
        fixed = {
            "n_known": given["n_tokens"],
            "verify_offsets": np.arange(1),
            "key_positions": np.arange(CAPACITY),
        }
        compare(step, engine, {**given, **fixed}, given, states)


def one_step(step: FusedStep, sampling: Arrays) -> tuple[Arrays, Arrays]:
    """What the eager step is given, and what an engine of the full width is."""
    drafts = step.num_draft_tokens
    tokens = np.random.default_rng(0).integers(0, tiny.VOCABULARY, (BATCH, drafts + 1))
    given = {"tokens": tokens, "kv_len": np.array([3, 9, 17]), "active": np.ones(BATCH, np.bool_), **sampling}
    fixed = {
        "n_tokens": np.full(BATCH, drafts + 1),
        "n_known": np.ones(BATCH, np.int64),
        "next_token": np.full(BATCH, -1),
        "verify_offsets": np.arange(drafts + 1),
        "key_positions": np.arange(CAPACITY),
    }
    return {**given, **fixed}, given


def widest(step: FusedStep) -> ir.Model:
    model = trace(step)
    pipeline.run_passes(model, pipeline.PORTABLE, on_pass=lambda _: None)
    drafts = step.num_draft_tokens
    return specialise_step(model, width=drafts, num_draft_tokens=drafts, capacity=CAPACITY, batch=BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_weights_in_fewer_bits_give_the_eager_step_of_the_weights_they_stand_for(
    tmp_path: Path, kind: WeightType
) -> None:
    step = fused(tiny.save_llama(tmp_path / "target", layers=2), None, greedy=False)
    fixed = widest(step)
    engine = session(fixed, kind)
    stored = {name.rpartition(".")[0] for name in fixed.graph.initializers if name.endswith(f".{kind}")}
    assert len(stored) >= 8
    for name, parameter in step.named_parameters():
        if name in stored:
            values, scale = (part.astype(np.float32) for part in quantise(parameter.detach().numpy(), kind))
            wide = scale[:, None] if kind == "int8" else scale
            if kind == "int4":
                wide = np.repeat(scale, values.shape[1] // scale.shape[1], axis=1)
            assert not np.array_equal(values * wide, parameter.detach().numpy())
            parameter.data = torch.from_numpy(values * wide)
    sampling, states = drawn(step, 1, BATCH)
    compare(step, engine, *one_step(step, sampling), states)


@pytest.mark.slow
def test_in_float16_the_caches_are_as_exact_as_those_of_the_eager_step_in_float16(tmp_path: Path) -> None:
    """The islands too: statistics of norms, rotations and the softmax of samples are float32 in both."""
    step = fused(tiny.save_llama(tmp_path / "target", layers=2), None, greedy=False)
    sampling, states = drawn(step, 2, BATCH)
    eager, given = one_step(step, sampling)
    inputs = StepInputs(*(torch.from_numpy(eager[name]) for name in StepInputs._fields))
    half = [state if state.dtype == np.int64 else state.astype(np.float16) for state in states]

    def caches() -> list[NDArray[Any]]:
        given_states = [
            torch.from_numpy(state.copy()).to(getattr(torch, s.dtype))
            for state, s in zip(half, step.states, strict=True)
        ]
        with torch.no_grad():
            return [state.float().numpy() for state in step(inputs, given_states).states]

    exact = caches()
    step.cast("float16")
    rounded, engine = caches(), session(widest(step))
    feeds = {**given, **{spec.name: state for spec, state in zip(step.states, half, strict=True)}}
    found = engine.run(None, {value.name: feeds[value.name] for value in engine.get_inputs()})[-len(half) :]
    compared = 0
    for result, wanted, best in zip(found, rounded, exact, strict=True):
        if result.dtype == np.float16:
            assert np.abs(result - best).max() <= 2 * np.abs(wanted - best).max()
            compared += 1
    assert compared == 4
