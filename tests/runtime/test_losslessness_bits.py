"""Logits and caches have the same bits however tokens are split over steps and rows over batches (design §5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny
from stepping import LOGITS, Array, Row, Stepper, session

from graphspec.architectures.state import StateSpec
from graphspec.architectures.step import FusedStep
from graphspec.building import resolve_pair
from graphspec.export import pipeline
from graphspec.export.device import multiplies_uint8_by_int8_exactly
from graphspec.export.linear import Encoding, WeightSign
from graphspec.export.trace import trace
from graphspec.export.weights import externalise
from graphspec.speculative_config import SpeculativeConfig

pytestmark = pytest.mark.slow

K = 3
CAPACITY, LONG = 64, 800
TOKENS = tuple(int(token) for token in np.random.default_rng(0).integers(0, 128, 24))
SPLITS = (
    (1,) * 24,
    (2,) * 12,
    (3,) * 8,
    (4,) * 6,
    (8,) * 3,
    (1, 4, 2, 3, 1, 1, 4, 8),
    (23, 1),
    (1, 23),
)
ENCODINGS: tuple[tuple[Encoding, WeightSign], ...] = (
    ("float32", "uint8"),
    ("int8", "uint8"),
    *((("int8", "int8"),) if multiplies_uint8_by_int8_exactly() else ()),
)


@dataclass(frozen=True, slots=True)
class Portable:
    """A traced pair, before it is lowered."""

    model: ir.Model
    states: tuple[StateSpec, ...]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A pair in a session."""

    session: Any
    states: tuple[StateSpec, ...]

    def rows(self, batch: int = 1, *, capacity: int = CAPACITY) -> Stepper:
        return Stepper(self.session, self.states, batch=batch, capacity=capacity)


class Pairs:
    """A target of 4 query heads as its own draft LM: every draft of a greedy row is accepted."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._portable = cache(self._trace)
        self.lowered = cache(self._lower)

    def _trace(self, kv_heads: int) -> Portable:
        path = tiny.save_llama(self._root / str(kv_heads), layers=2, num_key_value_heads=kv_heads)
        return traced(path, path, CAPACITY)

    def _lower(self, kv_heads: int, encoding: Encoding, sign: WeightSign) -> Lowered:
        return lowered(self._portable(kv_heads), encoding, sign, self._root / f"{kv_heads}-{encoding}-{sign}")


def traced(target: Path, draft: Path | None, capacity: int) -> Portable:
    method = "standalone" if draft else "ngram"
    resolution = resolve_pair(target, draft, method=method)
    config = SpeculativeConfig.parse({"speculative_method": method, "num_speculative_tokens": K})
    architecture = resolution.architecture
    module = architecture.target.load(resolution.target, capacity=capacity)
    step = FusedStep(module, architecture.drafter.load(module, resolution.draft, K, config))
    model = trace(step)
    pipeline.run_passes(model, pipeline.PORTABLE, on_pass=lambda _: None)
    return Portable(model, step.states)


def lowered(portable: Portable, encoding: Encoding, sign: WeightSign, root: Path, *, num_threads: int = 1) -> Lowered:
    root.mkdir(exist_ok=True)
    model = portable.model.clone()
    pipeline.run_passes(model, pipeline.onnxruntime(encoding, sign), on_pass=lambda _: None)
    externalise(model, root / "weights", "weights")
    return Lowered(session(model, root, num_threads=num_threads), portable.states)


@pytest.fixture(scope="module")
def pairs_of_groups(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("groups"))


@pytest.fixture(params=[4, 2, 1], ids=["group 1", "group 2", "group 4"])
def kv_heads(request: pytest.FixtureRequest) -> int:
    heads: int = request.param
    return heads


@pytest.fixture(params=ENCODINGS, ids="-".join)
def pair(request: pytest.FixtureRequest, pairs_of_groups: Pairs, kv_heads: int) -> Lowered:
    encoding, sign = request.param
    return pairs_of_groups.lowered(kv_heads, encoding, sign)


def judge(rows: Stepper, pieces: Sequence[tuple[int, ...]], *, visible: int = CAPACITY) -> tuple[Array, Stepper]:
    """Runs one row's tokens, the first of each piece known and the others drafts → their logits [T, V]."""
    found = []
    for piece in pieces:
        outputs = rows.step([Row(tokens=piece, num_known=1)], asked=len(piece), visible=visible)
        found.append(outputs[LOGITS][0])
        rows.kv_len = rows.kv_len + len(piece)
    return np.concatenate(found), rows


def cut(tokens: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    ends = np.cumsum(sizes)
    return [tuple(tokens[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def same_bits(left: Array, right: Array) -> bool:
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()


def written(rows: Stepper, index: int, length: int, prefix: str = "") -> dict[str, Array]:
    """A row's states at its first positions."""
    return {
        name: np.take(state[index], np.arange(length), axis=0 if state.ndim == 2 else 1)
        for name, state in rows.states.items()
        if name.startswith(prefix)
    }


def same_states(left: dict[str, Array], right: dict[str, Array]) -> bool:
    return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)


def test_at_every_split_of_a_block(pair: Lowered) -> None:
    whole, rows = judge(pair.rows(), [TOKENS])
    assert np.isfinite(whole).all()
    for sizes in SPLITS:
        logits, others = judge(pair.rows(), cut(TOKENS, sizes))
        assert same_bits(logits, whole), sizes
        assert same_states(written(others, 0, 24, "target"), written(rows, 0, 24, "target")), sizes


def test_for_prompt_chunks_and_drafts_alike(pair: Lowered) -> None:
    whole, judged = judge(pair.rows(), [TOKENS])
    for sizes in SPLITS:
        rows, end = pair.rows(), 0
        for piece in cut(TOKENS, sizes):
            end += len(piece)
            following = TOKENS[end] if end < len(TOKENS) else -1
            row = Row(tokens=piece, num_known=len(piece), next_token=following)
            outputs = rows.step([row], asked=1, visible=CAPACITY)
            assert same_bits(outputs[LOGITS][0, 0], whole[end - 1]), sizes
            rows.kv_len = outputs["next_kv_len"]
        assert same_states(written(rows, 0, 24, "target"), written(judged, 0, 24, "target")), sizes


def test_at_every_number_of_visible_positions(pair: Lowered) -> None:
    whole, _ = judge(pair.rows(), [TOKENS])
    for visible in (26, 27, 32, 33, 48):
        assert same_bits(judge(pair.rows(), cut(TOKENS, (20, 4)), visible=visible)[0], whole)


@pytest.mark.parametrize("width", range(K + 1))
def test_beside_rows_of_other_lengths(pair: Lowered, width: int) -> None:
    starts = (0, 3, 9, 17)
    block = width + 1
    sequences = [tuple(reversed(TOKENS[: start + block])) for start in starts]
    together = pair.rows(4)
    prompts = [Row(tokens=sequence[:start], num_known=start) for sequence, start in zip(sequences, starts, strict=True)]
    # an empty row has nothing to run: a token of padding, written where the next step writes
    prompts[0] = Row(tokens=(0,), num_known=1)
    together.step(prompts, asked=1, visible=CAPACITY)
    together.kv_len = np.array(starts)
    asked = [Row(tokens=sequence[start:], num_known=1) for sequence, start in zip(sequences, starts, strict=True)]
    outputs = together.step(asked, asked=block, visible=CAPACITY)
    for index, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        logits, alone = judge(pair.rows(), [sequence])
        assert same_bits(outputs[LOGITS][index], logits[start:])
        ours, its = written(together, index, start + block, "target"), written(alone, 0, start + block, "target")
        assert same_states(ours, its)


def test_in_every_cache_after_text_of_any_width(pair: Lowered) -> None:
    """The draft's caches too: they hold what was committed, whatever was drafted in between."""
    prompt = TOKENS[:7]
    runs = [generated(pair, prompt, width, chunk) for width, chunk in ((0, 7), (1, 1), (2, 3), (3, 4), (3, 6))]
    first_tokens, first_rows = runs[0]
    for tokens, rows in runs[1:]:
        common = int(min(first_rows.kv_len[0], rows.kv_len[0]))
        assert common > len(prompt) + 20
        assert tokens[:20] == first_tokens[:20]
        assert same_states(written(rows, 0, common), written(first_rows, 0, common))


def generated(pair: Lowered, prompt: tuple[int, ...], width: int, chunk: int) -> tuple[list[int], Stepper]:
    rows, tokens = pair.rows(), list[int]()
    for start in range(0, len(prompt), chunk):
        piece, end = prompt[start : start + chunk], start + chunk
        following = prompt[end] if end < len(prompt) else -1
        row = Row(tokens=piece, num_known=len(piece), next_token=following)
        outputs = rows.step([row], asked=1, visible=CAPACITY)
        rows.kv_len = outputs["next_kv_len"]
    while len(tokens) < 25:
        carried = tuple(int(token) for token in outputs["next_tokens"][0, : width + 1])
        outputs = rows.step([Row(tokens=carried, num_known=1)], asked=width + 1, visible=CAPACITY)
        tokens += [int(token) for token in outputs["committed"][0, : outputs["accepted"][0] + 1]]
        rows.kv_len = outputs["next_kv_len"]
    return tokens, rows


@pytest.fixture(scope="module")
def real_shape(tmp_path_factory: pytest.TempPathFactory) -> tuple[Portable, Path]:
    """One layer of SmolLM2-135M's shape: its products are large enough to be shared by threads."""
    root = tmp_path_factory.mktemp("real")
    target = tiny.save_llama(
        root / "target",
        layers=1,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=3000,
        max_position_embeddings=LONG,
        initializer_range=0.05,
    )
    return traced(target, None, LONG), root


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("encoding", "sign"), ENCODINGS)
def test_at_a_real_model_s_sizes(
    real_shape: tuple[Portable, Path], encoding: Encoding, sign: WeightSign, num_threads: int
) -> None:
    portable, root = real_shape
    pair = lowered(portable, encoding, sign, root / f"{encoding}-{sign}", num_threads=num_threads)
    tokens = np.random.default_rng(1).integers(0, 3000, (4, 24))
    alone = [judge(pair.rows(), [tuple(row)])[0] for row in tokens.tolist()]
    for sizes in SPLITS:
        assert same_bits(judge(pair.rows(), cut(tokens[0].tolist(), sizes))[0], alone[0]), sizes
    together = pair.rows(4)
    outputs = together.step(
        [Row(tokens=tuple(row), num_known=1) for row in tokens.tolist()], asked=24, visible=CAPACITY
    )
    for index in range(4):
        assert same_bits(outputs[LOGITS][index], alone[index])


@pytest.mark.parametrize(("encoding", "sign"), ENCODINGS)
def test_at_the_end_of_a_long_context(real_shape: tuple[Portable, Path], encoding: Encoding, sign: WeightSign) -> None:
    portable, root = real_shape
    pair = lowered(portable, encoding, sign, root / f"{encoding}-{sign}-long", num_threads=2)
    tokens = tuple(int(token) for token in np.random.default_rng(2).integers(0, 3000, 712))
    whole, _ = judge(pair.rows(capacity=LONG), cut(tokens, (700, 12)), visible=736)
    for sizes, visible in (((256, 256, 188, 4, 4, 4), 714), ((300, 400, 1, 1, 6, 2, 2), 768), ((712,), LONG)):
        logits, _ = judge(pair.rows(capacity=LONG), cut(tokens, sizes), visible=visible)
        assert same_bits(logits, whole), sizes
