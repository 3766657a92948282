"""Log-probabilities: those of another implementation, and the same bits however the tokens came about."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import reference
import torch
from answers import PROMPTS, greedy_answer
from forced import ForcedBundle
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from pairs import FORCED, NAMES, K, Pairs
from restaging import restage
from scipy.special import log_softmax

from graphspec.bundle import Host, open_bundle
from graphspec.errors import BundleError, GraphspecError, RequestError
from graphspec.runtime.answer import Generation, Piece, new_answer
from graphspec.runtime.generate import load
from graphspec.runtime.logprobs import TokenLogprob, token_logprobs
from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.scheduler import GenerationRequest, Scheduler

pytestmark = pytest.mark.slow

TOP = 4
BOTH: dict[str, Any] = {"logprobs": TOP, "prompt_logprobs": TOP}
WARM = SamplingParams(temperature=1.3, top_k=20, seed=3, max_new_tokens=12, **BOTH)
GREEDY = SamplingParams(max_new_tokens=12, **BOTH)


@cache
def _model(checkpoint: Path) -> Any:
    return reference.load_model(checkpoint)


def expected(checkpoint: Path, tokens: Sequence[int]) -> NDArray[np.float64]:
    """transformers' log-probabilities after each of the tokens, f64[n, V]."""
    with torch.no_grad():
        logits = _model(checkpoint)(torch.tensor([tokens])).logits[0]
    return np.asarray(log_softmax(logits.numpy(), axis=-1))


def check(found: TokenLogprob | None, token: int, row: NDArray[np.float64]) -> None:
    assert found is not None
    assert found.token_id == token
    assert found.logprob == pytest.approx(row[token], abs=1e-4)
    values = [value for _, value in found.top]
    assert values == pytest.approx(sorted(row, reverse=True)[: len(values)], abs=1e-4)
    assert [value for _, value in found.top] == pytest.approx([row[best] for best, _ in found.top], abs=1e-4)
    assert dict(found.top).get(token, found.logprob) == found.logprob  # the very same number


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [NAMES[1], NAMES[3], NAMES[4]])
def test_prompt_and_answer_have_transformers_log_probabilities(pairs: Pairs, name: str, params: SamplingParams) -> None:
    """Of the model itself: what sampling leaves of the distribution changes nothing."""
    answers = pairs.loaded(name).generate(PROMPTS, params)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        rows = expected(pairs.pair(name).target, (*prompt, *answer.token_ids))
        assert answer.logprobs is not None
        assert answer.prompt_logprobs is not None
        first, *inside = answer.prompt_logprobs
        assert first is None
        assert (len(inside), len(answer.logprobs)) == (len(prompt) - 1, len(answer.token_ids))
        tokens = (*prompt[1:], *answer.token_ids)
        for token, found, row in zip(tokens, (*inside, *answer.logprobs), rows, strict=False):
            check(found, token, row)
            assert found is not None
            assert len(found.top) == TOP


def given_logprobs(answers: Sequence[Generation]) -> list[Any]:
    """Everything that must be the same, in every bit."""
    return [(one.token_ids, one.logprobs, one.prompt_logprobs) for one in answers]


@pytest.mark.parametrize("encoding", ["float32", "int8", "int4"])
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_width_batch_and_chunks_change_no_bit(pairs: Pairs, encoding: Any, params: SamplingParams) -> None:
    loaded = pairs.loaded(NAMES[2], encoding)
    alone = [loaded.generate([prompt], params, width=0)[0] for prompt in PROMPTS]
    assert any(one.acceptance.accepted for one in loaded.generate(PROMPTS, params))
    for width in range(K + 1):
        assert given_logprobs(loaded.generate(PROMPTS, params, width=width)) == given_logprobs(alone)
    for chunk in (1, 2, 5, 64):
        assert given_logprobs(loaded.generate(PROMPTS, params, prefill_chunk=chunk)) == given_logprobs(alone)


def test_a_batch_may_want_different_things(pairs: Pairs) -> None:
    loaded = pairs.loaded(NAMES[0])
    wants: list[dict[str, Any]] = [
        {},
        {"logprobs": 0},
        {"logprobs": 20},
        {"prompt_logprobs": 2},
        {},
        {"logprobs": 1, "prompt_logprobs": 0},
    ]
    each = [SamplingParams(max_new_tokens=9, **want) for want in wants]
    prompts = PROMPTS[2:]
    together = loaded.generate(prompts, each)
    for prompt, params, answer in zip(prompts, each, together, strict=True):
        (alone,) = loaded.generate([prompt], params, width=0)
        assert given_logprobs([answer]) == given_logprobs([alone])
        assert (answer.logprobs is None) == (params.logprobs is None)
        assert (answer.prompt_logprobs is None) == (params.prompt_logprobs is None)
        assert [len(one.top) for one in answer.logprobs or ()] == [params.logprobs] * len(answer.logprobs or ())


@pytest.mark.parametrize("right", range(K + 1))
def test_they_end_with_the_token_that_ends_the_answer(pairs: Pairs, right: int) -> None:
    """At every place of a block whose drafts are all right, by a stop token, a stop string and the limit."""
    prompt, target = PROMPTS[5], pairs.pair(FORCED).target
    answer = greedy_answer(target, prompt, 3 * K)
    end = 1 + right
    with ForcedBundle(pairs.bundle(FORCED), num_slots=1) as bundle:
        whole = bundle.generate([prompt], SamplingParams(max_new_tokens=3 * K, logprobs=2), [answer])[0]
        asked: list[dict[str, Any]] = [{"stop_token_ids": (answer[end],)}, {"max_new_tokens": end + 1}]
        for rules in asked:
            params = SamplingParams(logprobs=2, **{"max_new_tokens": 3 * K, **rules})
            (cut,) = bundle.generate([prompt], params, [answer])
            assert whole.logprobs is not None
            assert cut.token_ids == answer[: answer.index(answer[end]) + 1 if "stop_token_ids" in rules else end + 1]
            assert cut.logprobs == whole.logprobs[: len(cut.token_ids)]


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_pieces_carry_each_once(pairs: Pairs, params: SamplingParams) -> None:
    loaded = pairs.loaded(NAMES[1])
    pieces: dict[int, list[Piece]] = {}
    for piece in loaded.stream(PROMPTS, params):
        pieces.setdefault(piece.index, []).append(piece)
    for parts in pieces.values():
        generation = parts[-1].generation
        assert generation is not None
        assert generation.logprobs == tuple(one for part in parts for one in part.logprobs or ())
        assert [len(part.token_ids) for part in parts] == [len(part.logprobs or ()) for part in parts]
        assert [part.prompt_logprobs for part in parts] == [generation.prompt_logprobs, *[None] * (len(parts) - 1)]


@pytest.mark.parametrize("new", [0, 1])
@pytest.mark.parametrize("chunk", [3, 256])
def test_a_prompt_can_be_all_that_is_asked_about(pairs: Pairs, new: int, chunk: int) -> None:
    loaded = pairs.loaded(NAMES[3])
    whole = loaded.generate(PROMPTS, GREEDY)
    params = SamplingParams(max_new_tokens=new, **BOTH)
    for full, answer in zip(whole, loaded.generate(PROMPTS, params, prefill_chunk=chunk), strict=True):
        assert (answer.text, answer.token_ids) == (full.text[:new], full.token_ids[:new]) or new
        assert answer.prompt_logprobs == full.prompt_logprobs
        assert full.logprobs is not None
        assert answer.logprobs == full.logprobs[:new]
        assert answer.finish_reason == "length"


@pytest.mark.parametrize("overlap", [True, False])
def test_a_scheduler_gives_the_same_whatever_its_rows_held_before(pairs: Pairs, overlap: bool) -> None:
    """Prompts that begin alike are run whole where their own log-probabilities are wanted, and not otherwise."""
    loaded = load(pairs.bundle(NAMES[2]), num_threads=1, max_batch_size=2)
    scheduler = Scheduler(loaded, overlap=overlap, prefill_chunk=4)
    prompts = [PROMPTS[-1][:length] for length in (34, 20, 34, 27, 34)]
    kinds: list[dict[str, Any]] = [
        {"prompt_logprobs": 1, "logprobs": 1},
        {"logprobs": 3},
        {"prompt_logprobs": 1, "max_new_tokens": 0},
    ]
    asked = [
        GenerationRequest(prompt=prompt, params=SamplingParams(**{"max_new_tokens": 6, "ignore_eos": True, **kind}))
        for prompt in prompts
        for kind in kinds
    ]

    def submitted(request: GenerationRequest) -> SimpleQueue[Piece | GraphspecError]:
        news = SimpleQueue[Piece | GraphspecError]()
        scheduler.submit(request, news.put)
        return news

    one_by_one = [answer_of(submitted(request)) for request in asked]  # so that prompts are in the cache
    together = [answer_of(news) for news in [submitted(request) for request in asked]]
    scheduler.close()
    expected = [loaded.generate([request.prompt], request.params, width=0)[0] for request in asked]
    assert given_logprobs(one_by_one) == given_logprobs(together) == given_logprobs(expected)
    reads = [request.params.prompt_logprobs is not None for request in asked]
    assert not any(one.num_cached_tokens for one, read in zip(one_by_one, reads, strict=True) if read)
    assert all(one.num_cached_tokens for one, read in zip(one_by_one, reads, strict=True) if not read)
    loaded.close()


def answer_of(news: SimpleQueue[Piece | GraphspecError]) -> Generation:
    """Waits for the end of one request."""
    while True:
        piece = news.get(timeout=60)
        assert isinstance(piece, Piece)
        if piece.generation is not None:
            return piece.generation


def test_steps_that_nobody_asks_give_no_logits(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = pairs.loaded(NAMES[3])
    seen: list[tuple[Any, ...] | None] = []
    step = loaded.engine.step

    def watched(*args: Any, **options: Any) -> Any:
        pending = step(*args, **options)
        logits = pending.result().logits
        seen.append(None if logits is None else logits.shape)
        return pending

    monkeypatch.setattr(loaded.engine, "step", watched)
    loaded.generate(PROMPTS[:3], SamplingParams(max_new_tokens=5, prompt_logprobs=1))
    assert set(seen) == {None}
    seen.clear()
    loaded.generate(PROMPTS[:3], SamplingParams(max_new_tokens=5, logprobs=1), width=2)
    assert seen[0] == (3, 3, 128)


def test_a_bundle_that_gives_none_says_why_and_what_to_do(pairs: Pairs, tmp_path: Path) -> None:
    old = restage(pairs.bundle(NAMES[3]), tmp_path / "old", capabilities=("greedy_acceptance",))
    with load(old, num_threads=1) as loaded:
        for params in (SamplingParams(logprobs=0), SamplingParams(prompt_logprobs=0)):
            with pytest.raises(RequestError, match=r"^(prompt_)?logprobs cannot be given: .*build it again"):
                loaded.generate("abc", params)
        assert loaded.generate("abc", SamplingParams(max_new_tokens=2))[0].logprobs is None
    engines = open_bundle(
        pairs.engines(NAMES[1]),
        host=Host(backend="tensorrt-rtx", version="1.0.0", device_classes=frozenset({"rtx"})),
    )
    assert "logprobs" not in engines.manifest.capabilities
    with pytest.raises(RequestError, match=r"logprobs cannot be given: .*tensorrt-rtx.*build for onnxruntime"):
        new_answer(engines.manifest, pairs.loaded(NAMES[1]).tokenizer, (1, 2), SamplingParams(logprobs=1))


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21, True, 1.0, "5"])
def test_a_number_that_cannot_be_asked_for_is_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field} is .*from 0 to 20$"):
        SamplingParams(**{field: value})


def test_a_bundle_that_claims_them_without_the_output_is_refused(pairs: Pairs, tmp_path: Path) -> None:
    bundle = pairs.bundle(NAMES[3])
    graphs = [graph.model_dump() for graph in pairs.loaded(NAMES[3]).manifest.graphs]
    for graph in graphs:
        graph["outputs"] = [spec for spec in graph["outputs"] if spec["name"] != "logits"]
    with pytest.raises(BundleError, match=r"\(output logits\)"):
        load(restage(bundle, tmp_path / "out", graphs=graphs))


ROWS = arrays(np.float32, (3, 40), elements=st.floats(-30, 30, width=32) | st.sampled_from([0.0, 1.0]))


@settings(max_examples=100, deadline=None)
@given(logits=ROWS, tokens=st.lists(st.integers(0, 39), max_size=3), count=st.integers(0, 20))
def test_numbers_are_those_of_a_softmax_in_double_precision(
    logits: NDArray[np.float32], tokens: list[int], count: int
) -> None:
    found = token_logprobs(logits, tokens, count)
    rows = log_softmax(logits.astype(np.float64), axis=-1)
    assert [one.token_id for one in found] == tokens
    for one, row, own in zip(found, rows, logits, strict=False):
        assert one.logprob == pytest.approx(row[one.token_id], abs=1e-5)
        ranked = sorted(range(40), key=lambda token: (-own[token], token))[:count]
        assert [token for token, _ in one.top] == ranked
        assert [value for _, value in one.top] == pytest.approx([row[token] for token in ranked], abs=1e-5)
        assert dict(one.top).get(one.token_id, one.logprob) == one.logprob


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    (one,) = token_logprobs(np.zeros((1, 3), np.float32), [1], 20)
    assert [token for token, _ in one.top] == [0, 1, 2]
    assert one.logprob == pytest.approx(-np.log(3))
