"""What every engine does, whatever runs it: ONNX Runtime, TensorRT's on a stand-in for the device, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from answers import PROMPTS
from driving import CHUNK, PARAMS, admit
from eager import EagerLoop, Row, Sampling
from fake_device import FakeDevice, FakeLibrary
from gpu import why_no_gpu
from pairs import MAX_LENGTH, NAMES, K, Pairs

from graphspec.bundle import Host, open_bundle
from graphspec.errors import EngineError
from graphspec.runtime.engine import NO_TOKEN, Chunk, Engine
from graphspec.runtime.loading import open_engine
from graphspec.runtime.onnxruntime_engine import OnnxRuntimeEngine, host
from graphspec.runtime.sampling import uniform_table
from graphspec.runtime.tensorrt_engine import TensorRtEngine

pytestmark = pytest.mark.slow

KINDS = ("onnxruntime", "tensorrt-rtx", "tensorrt-rtx, copying caches")
GPU = "gpu"
ON_GPU = pytest.param(GPU, marks=[pytest.mark.gpu, pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu())])
"""The real device, where there is one. It has not been run there yet."""
FAKE = Host(backend="tensorrt-rtx", version="1.0.0", device_classes=frozenset({"rtx"}))

WIDTHS_IN_TURN = (3, 3, 0, 2, 1, 3, 0, 0, 1, 1, 2, 3, 3, 2, 3, 3)


def opened(pairs: Pairs, kind: str, name: str, *, num_slots: int = 4) -> Engine:
    """An engine of `num_slots` rows."""
    if kind == "onnxruntime":
        bundle = open_bundle(pairs.bundle(name), host=host())
        return OnnxRuntimeEngine(bundle, num_slots=num_slots, num_threads=1)
    if kind == GPU:
        return open_engine(pairs.gpu_engines(name), num_slots=num_slots)[1]
    library = FakeLibrary(in_place=kind == "tensorrt-rtx")
    return TensorRtEngine(open_bundle(pairs.engines(name), host=FAKE), library, FakeDevice(), num_slots=num_slots)


@pytest.fixture(params=[*KINDS, ON_GPU])
def engine(request: pytest.FixtureRequest, pairs: Pairs) -> Iterator[Engine]:
    made = opened(pairs, request.param, NAMES[0])
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kind", "name"), [*((KINDS[0], name) for name in NAMES), *((KINDS[1], name) for name in (NAMES[1], NAMES[3]))]
)
def test_drafts_and_tokens_are_those_of_the_eager_step(pairs: Pairs, kind: str, name: str) -> None:
    """Four rows of different lengths in one batch, each beside an eager step that runs it alone."""
    engine, step = opened(pairs, kind, name), pairs.step(name)
    prompts = PROMPTS[2:6]
    loops = []
    for slot, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True)):
        of_prompt = admit(engine, slot, prompt, params).result()
        assert of_prompt.drafts_of(0) == engine.drafts(slot).tolist()[1:]
        uniform = torch.tensor(uniform_table(params.seed or 0, engine.capacity))[:, 0]
        sampling = Sampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            uniform=uniform,
        )
        loop = EagerLoop(step, [Row(prompt=prompt, chunk=CHUNK, sampling=sampling)], capacity=engine.capacity)
        loop.prefill()
        loops.append(loop)
    assert_same_drafts(engine, loops)
    for width in WIDTHS_IN_TURN:
        result = engine.step(range(4), width).result()
        for slot, loop in enumerate(loops):
            (turn,) = loop.advance(width)
            assert result.tokens(slot) == list(turn.committed[: turn.accepted + 1])
            assert result.drafts_of(slot) == engine.drafts(slot).tolist()[1:]
        assert_same_drafts(engine, loops)
    engine.close()


def assert_same_drafts(engine: Engine, loops: Sequence[EagerLoop]) -> None:
    for slot, loop in enumerate(loops):
        (row,) = loop.rows
        assert engine.drafts(slot).tolist() == [row.tokens[-1], *row.drafts]


@pytest.mark.parametrize(("kind", "name"), [*((KINDS[0], name) for name in NAMES), (KINDS[1], NAMES[1])])
def test_a_row_that_is_asked_for_fewer_drafts_has_the_first_of_them(pairs: Pairs, kind: str, name: str) -> None:
    """And commits the same tokens: its next step verifies what was not drafted as wrong."""
    engine = opened(pairs, kind, name, num_slots=K + 1)
    assert engine.drafts_on_demand == (kind == KINDS[0] and "Ngram" not in name)
    for slot in range(K + 1):
        admit(engine, slot, PROMPTS[3], PARAMS[1]).result()
    tokens: list[list[int]] = [[] for _ in range(K + 1)]
    for _ in range(5):
        full = engine.step([K], K).result()
        tokens[K] += full.tokens(0)
    for slot in range(K):
        while len(tokens[slot]) < len(tokens[K]):
            result = engine.step([slot], K, num_drafts=slot).result()
            tokens[slot] += result.tokens(0)
            assert len(result.drafts_of(0)) == (slot if engine.drafts_on_demand else K)
        common = min(len(tokens[slot]), len(tokens[K]))
        assert tokens[slot][:common] == tokens[K][:common]
        if len(tokens[slot]) == len(tokens[K]):
            assert result.drafts_of(0)[:slot] == full.drafts_of(0)[:slot]
            assert {NO_TOKEN, *full.drafts_of(0)} >= {*engine.drafts(slot).tolist()[1 + slot :]}
    assert any(len(tokens[slot]) == len(tokens[K]) for slot in range(K))
    engine.close()


def test_steps_may_be_launched_before_earlier_ones_are_read(engine: Engine) -> None:
    def run(read_at_once: bool) -> list[list[int]]:
        pending = [admit(engine, slot, PROMPTS[slot + 2], PARAMS[slot]) for slot in range(4)]
        launched = []
        for width in WIDTHS_IN_TURN:
            launched.append(engine.step(range(4), width))
            if read_at_once:
                launched[-1].result()
        tokens = [[*first.result().tokens(0)] for first in pending]
        for step in launched:
            for slot in range(4):
                tokens[slot] += [*step.result().tokens(slot), *step.result().drafts_of(slot)]
        return tokens

    assert run(True) == run(False)


def test_a_step_of_some_rows_leaves_the_others_as_they_were(engine: Engine) -> None:
    def run(order: Sequence[Sequence[int]]) -> list[list[int]]:
        tokens = [[*admit(engine, slot, PROMPTS[slot + 2], PARAMS[slot]).result().tokens(0)] for slot in range(4)]
        for slots in order:
            result = engine.step(slots, K).result()
            assert result.slots == tuple(slots)
            for row, slot in enumerate(slots):
                tokens[slot] += result.tokens(row)
        return tokens

    together = run([(0, 1, 2, 3)] * 8)
    alone = run([(slot,) for _ in range(8) for slot in (3, 1, 0, 2)])
    mixed = run([slots for _ in range(8) for slots in ((0, 3), (2,), (1,))])
    assert together == alone == mixed


def test_a_slot_forgets_its_last_request(engine: Engine) -> None:
    def run(slot: int) -> list[int]:
        tokens = admit(engine, slot, PROMPTS[3], PARAMS[1]).result().tokens(0)
        for _ in range(6):
            tokens += engine.step([slot], K).result().tokens(0)
        return list(tokens)

    fresh = run(2)
    admit(engine, 2, PROMPTS[7], PARAMS[3])
    for _ in range(10):
        engine.step([2], K)
    assert run(2) == run(0) == fresh


def test_a_copy_of_a_row_goes_on_as_the_row_itself_would_have(engine: Engine) -> None:
    """From a row that is being stepped, and by way of a place beside the slots where there is one."""
    prompt = PROMPTS[6]
    kept = len(prompt) - 3

    def run(slot: int, kept: int = 0) -> tuple[list[int], list[list[int]]]:
        params = PARAMS[1]
        engine.admit(slot, params, uniform_table(params.seed or 0, engine.capacity), kept=kept)
        tokens = engine.prefill(Chunk(slot=slot, tokens=tuple(prompt[kept:]))).result().tokens(0)
        drafts = []
        for _ in range(6):
            drafts.append(engine.drafts(slot).tolist())
            tokens += engine.step([slot], K).result().tokens(0)
        return tokens, drafts

    fresh = run(0)
    assert engine.num_places >= engine.num_slots
    engine.copy(0, 2, kept)
    assert run(2, kept) == fresh
    assert engine.step([0], K).result().slots == (0,), "the source is still there"
    if engine.num_places > engine.num_slots:
        place = engine.num_places - 1
        engine.copy(2, place, kept + 1)
        admit(engine, 2, PROMPTS[7], PARAMS[3]).result()
        engine.copy(place, 3, kept)
        assert run(3, kept) == fresh


def test_logits_are_given_or_refused_before_anything_is_launched(engine: Engine) -> None:
    admit(engine, 0, PROMPTS[4], PARAMS[0]).result()
    prompt = Chunk(slot=1, tokens=PROMPTS[4], num_logits=len(PROMPTS[4]))
    if isinstance(engine, OnnxRuntimeEngine):
        admit(engine, 2, PROMPTS[3], PARAMS[1])
        result = engine.step([2, 0], 2, logits=True).result()
        assert result.logits is not None
        assert result.logits.shape == (2, 3, 128)
        best = result.logits[1].argmax(axis=-1).tolist()  # slot 0, which is greedy
        assert result.tokens(1) == best[: len(result.tokens(1))]
        chunk = engine.prefill(prompt).result()
        assert chunk.logits is not None
        assert chunk.logits.shape == (1, len(PROMPTS[4]), 128)
        assert chunk.committed.tolist() == [[chunk.logits[0, -1].argmax()]]
    else:
        with pytest.raises(EngineError, match="keep them on the device"):
            engine.step([0], 2, logits=True)
        with pytest.raises(EngineError, match="keep them on the device"):
            engine.prefill(prompt)
    assert engine.step([0], 2).result().logits is None


def test_a_row_at_the_end_of_its_cache_may_lie_between_those_stepped(engine: Engine) -> None:
    """As one does that was launched once more after its last token, before that was known."""
    outer = (0, 2)

    def run() -> list[list[int]]:
        tokens = [list(admit(engine, slot, PROMPTS[slot + 2], PARAMS[0]).result().tokens(0)) for slot in outer]
        for _ in range(8):
            result = engine.step(outer, K).result()
            for row in range(2):
                tokens[row] += result.tokens(row)
        return tokens

    length = MAX_LENGTH - 1
    last = admit(engine, 1, [7] * length, PARAMS[0]).result()
    while length <= MAX_LENGTH + 2 * K:
        last = engine.step([1], K).result()
        length += len(last.tokens(0))
    beside_it = run()
    admit(engine, 1, [7], PARAMS[0])
    assert run() == beside_it
