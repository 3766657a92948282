"""The scheduler: answers as without it, steps launched before the last is read, nobody disturbed by anybody."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from answers import PROMPTS
from callers import WAIT, Caller, reached
from fake_engine import FakeEngine, tokens_after
from pairs import NAMES, K, Pairs

from graphspec.bundle import open_bundle
from graphspec.errors import ConfigError, EngineError, GraphspecError, RequestError
from graphspec.runtime.answer import Generation, Piece
from graphspec.runtime.generate import LoadedBundle
from graphspec.runtime.onnxruntime_engine import OnnxRuntimeEngine, host
from graphspec.runtime.refusals import QueueFullError, ShutDownError
from graphspec.runtime.rows import BatchReport
from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.scheduler import GenerationRequest, Scheduler

pytestmark = pytest.mark.slow


def request(prompt: Sequence[int] = (1, 2, 3), *, speculative: bool = True, **params: Any) -> GenerationRequest:
    return GenerationRequest(prompt=tuple(prompt), params=SamplingParams(**params), speculative=speculative)


def mixed_requests(seed: int, count: int = 20) -> list[GenerationRequest]:
    draw = random.Random(seed)
    return [
        request(
            draw.choice(PROMPTS),
            speculative=draw.random() < 0.7,
            temperature=draw.choice([0.0, 0.7, 1.3]),
            top_k=draw.choice([0, 5]),
            seed=draw.randrange(1000),
            max_new_tokens=draw.choice([0, 1, 2, 5, 17, 40]),
            stop_token_ids=draw.choice([(), (7, 33)]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("name", "chunk"), [(NAMES[0], 4), (NAMES[3], 256)])
def test_answers_are_those_of_each_request_alone(pairs: Pairs, name: str, chunk: int, overlap: bool) -> None:
    loaded = pairs.loaded(name)
    requests = mixed_requests(seed=chunk)
    expected = [loaded.generate([one.prompt], one.params)[0] for one in requests]
    engine = OnnxRuntimeEngine(open_bundle(pairs.bundle(name), host=host()), num_slots=3, num_threads=1)
    own = LoadedBundle(open_bundle(pairs.bundle(name), host=host()), engine, loaded.tokenizer)
    scheduler = Scheduler(own, overlap=overlap, prefill_chunk=chunk)
    callers = [Caller() for _ in requests]
    for one, caller in zip(requests, callers, strict=True):
        scheduler.submit(one, caller)
    for one, caller, alone in zip(requests, callers, expected, strict=True):
        found = caller.generation()
        assert (found.token_ids, found.text, found.finish_reason) == (alone.token_ids, alone.text, alone.finish_reason)
        assert (found.acceptance == alone.acceptance) == one.speculative or not found.token_ids[1:]
    scheduler.close()
    own.close()


@pytest.fixture
def start(pairs: Pairs, request: pytest.FixtureRequest) -> Callable[..., tuple[FakeEngine, Scheduler]]:
    """A scheduler on a fake engine, with the vocabulary of a tiny bundle."""
    loaded = pairs.loaded(NAMES[3])

    def make(engine: FakeEngine | None = None, **options: Any) -> tuple[FakeEngine, Scheduler]:
        engine = engine or FakeEngine()
        bundle = LoadedBundle(open_bundle(pairs.bundle(NAMES[3]), host=host()), engine, loaded.tokenizer)
        scheduler = Scheduler(bundle, **options)
        request.addfinalizer(scheduler.close)
        return engine, scheduler

    return make


Start = Callable[..., tuple[FakeEngine, Scheduler]]


def steps(engine: FakeEngine) -> list[tuple[Any, ...]]:
    return [entry for entry in engine.log if entry[0] == "step"]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_is_launched_before_the_one_before_it_is_read(start: Start, overlap: bool) -> None:
    engine, scheduler = start(overlap=overlap)
    caller = Caller()
    scheduler.submit(request(max_new_tokens=20, ignore_eos=True), caller)
    assert list(caller.generation().token_ids) == tokens_after(0, 20)
    scheduler.close()
    launched = {entry[1]: place for place, entry in enumerate(engine.log) if entry[0] in ("step", "prefill")}
    read = {entry[1]: place for place, entry in enumerate(engine.log) if entry[0] == "read"}
    assert launched.keys() == read.keys()
    ahead = [launched[number + 1] < read[number] for number in sorted(launched)[:-1]]
    assert all(ahead) if overlap else not any(ahead[1:])


@pytest.mark.parametrize("accepted", range(K + 1))
@pytest.mark.parametrize("limit", [1, 2, 7, 20])
def test_no_step_is_launched_that_cannot_add_a_token(start: Start, accepted: int, limit: int) -> None:
    """One step more than needed at most: the one launched before the last was read."""
    engine, scheduler = start(FakeEngine(accept=lambda _: accepted))
    caller = Caller()
    scheduler.submit(request(max_new_tokens=limit, ignore_eos=True), caller)
    found = caller.generation()
    assert list(found.token_ids) == tokens_after(0, limit)
    assert found.finish_reason == "length"
    scheduler.close()
    needed = -(-(limit - 1) // (accepted + 1))
    assert needed <= len(steps(engine)) <= needed + (accepted > 0)


def test_a_row_that_stopped_is_dropped_from_the_step_it_was_in_once_too_often(start: Start) -> None:
    engine, scheduler = start(FakeEngine(num_slots=1, accept=lambda _: 3))
    stops = tokens_after(0, 9)[8]
    callers = [Caller() for _ in range(4)]
    for caller in callers:
        scheduler.submit(request(max_new_tokens=50, ignore_eos=True, stop_token_ids=(stops,)), caller)
    for caller in callers:
        found = caller.generation()
        assert list(found.token_ids) == tokens_after(0, 9)
        assert found.finish_reason == "stop"
        assert found.acceptance.output_tokens == 8  # all but the prompt's own: counted once, and only what was kept
    scheduler.close()
    assert [entry for entry in engine.log if entry[0] == "admit"] == [("admit", 0, 0)] + [("admit", 0, 1)] * 3


def test_a_long_prompt_lets_the_others_step_between_its_chunks(start: Start) -> None:
    engine, scheduler = start(prefill_chunk=2)
    first, second = Caller(), Caller()

    def watched(news: Piece | GraphspecError) -> None:
        if not first.pieces:
            scheduler.submit(request(range(1, 20), max_new_tokens=2, ignore_eos=True), second)
        first(news)

    scheduler.submit(request((1,), max_new_tokens=100, ignore_eos=True), watched)
    first.generation()
    second.generation()
    kinds = [entry[0] for entry in engine.log if entry[0] != "read"]
    chunks = [place for place, kind in enumerate(kinds) if kind == "prefill"][1:]
    assert len(chunks) == 10
    still_running = kinds[: len(kinds) - kinds[::-1].index("prefill")]
    assert all("step" in still_running[a:b] for a, b in pairwise(chunks))


def test_a_cancelled_request_frees_its_slot_and_hears_nothing_more(start: Start) -> None:
    _, scheduler = start(FakeEngine(num_slots=1))
    told = threading.Event()
    heard: list[object] = []

    def caller(news: Piece | GraphspecError) -> None:
        heard.append(news)
        told.set()

    ticket = scheduler.submit(request(max_new_tokens=120, ignore_eos=True), caller)
    queued = scheduler.submit(request(max_new_tokens=120), lambda _: heard.append("queued"))
    queued.cancel()
    assert told.wait(WAIT)
    ticket.cancel()
    ticket.cancel()
    after = Caller()
    scheduler.submit(request(max_new_tokens=3, ignore_eos=True), after)
    assert list(after.generation().token_ids) == tokens_after(0, 3)
    assert "queued" not in heard
    assert not any(isinstance(news, GraphspecError) for news in heard)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_a_full_queue_refuses(start: Start) -> None:
    held = threading.Event()

    _, scheduler = start(FakeEngine(num_slots=1, admitted=lambda: held.wait(WAIT)), max_queue_size=2)
    callers = [Caller() for _ in range(3)]
    scheduler.submit(request(max_new_tokens=2, ignore_eos=True), callers[0])
    assert reached(lambda: scheduler.num_waiting == 0)
    for caller in callers[1:]:
        scheduler.submit(request(max_new_tokens=2, ignore_eos=True), caller)
    with pytest.raises(QueueFullError, match="2 requests are waiting, as many as --max-queue-size allows") as refusal:
        scheduler.submit(request(max_new_tokens=2), Caller())
    assert refusal.value.retry_after > 0
    held.set()
    for caller in callers:
        assert list(caller.generation().token_ids) == tokens_after(0, 2)


def test_a_full_queue_says_when_those_who_wait_will_have_been_served(start: Start) -> None:
    now, permits = [0.0], threading.Semaphore(10)

    def admitted() -> None:  # an answer every 2 seconds, and then no more
        now[0] += 2.0
        assert permits.acquire(timeout=WAIT)

    _, scheduler = start(FakeEngine(num_slots=1, admitted=admitted), max_queue_size=20, clock=lambda: now[0])
    callers = [Caller() for _ in range(20)]
    for caller in callers:
        scheduler.submit(request(max_new_tokens=1, ignore_eos=True), caller)
    assert all(caller.generation() for caller in callers[:10])
    while scheduler.num_waiting < 20:
        scheduler.submit(request(max_new_tokens=1, ignore_eos=True), Caller())
    with pytest.raises(QueueFullError) as refusal:
        scheduler.submit(request(max_new_tokens=1), Caller())
    assert refusal.value.retry_after == 20 * 2.0
    permits.release(100)


def test_while_it_drains_the_rest_of_a_batch_that_was_begun_is_answered(start: Start) -> None:
    held = threading.Event()
    _, scheduler = start(FakeEngine(num_slots=1, admitted=lambda: held.wait(WAIT)))
    batch = [replace(request(max_new_tokens=5, ignore_eos=True), client="batch") for _ in range(3)]
    callers = [Caller() for _ in batch]
    scheduler.submit(batch[0], callers[0])
    closing = threading.Thread(target=lambda: scheduler.close(drain=WAIT))
    closing.start()
    assert reached(lambda: scheduler._closing)
    with pytest.raises(ShutDownError):
        scheduler.submit(request(), Caller())
    for one, caller in zip(batch[1:], callers[1:], strict=True):
        scheduler.submit(one, caller)
    held.set()
    assert all(list(caller.generation().token_ids) == tokens_after(0, 5) for caller in callers)
    closing.join(WAIT)


def test_a_failed_step_ends_the_requests_that_were_in_it_and_no_others(start: Start) -> None:
    _, scheduler = start(FakeEngine(fails_at=frozenset({3})))
    first, second = Caller(), Caller()
    scheduler.submit(request(max_new_tokens=60, ignore_eos=True), first)
    assert first.ended.wait(WAIT)
    assert isinstance(first.error, EngineError)
    assert "the device caught fire" in str(first.error)
    scheduler.submit(request(max_new_tokens=5, ignore_eos=True), second)
    assert list(second.generation().token_ids) == tokens_after(0, 5)


def test_a_caller_that_fails_disturbs_nobody(start: Start) -> None:
    _, scheduler = start()

    def broken(news: Piece | GraphspecError) -> None:
        raise ValueError(f"a bug of the caller's: {news}")

    scheduler.submit(request(max_new_tokens=30, ignore_eos=True), broken)
    fine = Caller()
    scheduler.submit(request(max_new_tokens=30, ignore_eos=True), fine)
    assert list(fine.generation().token_ids) == tokens_after(0, 30)


def test_closing_finishes_what_runs_and_refuses_the_rest(start: Start) -> None:
    engine, scheduler = start(FakeEngine(num_slots=1))
    callers = [Caller() for _ in range(3)]
    for caller in callers:
        scheduler.submit(request(max_new_tokens=20, ignore_eos=True), caller)
    scheduler.close(drain=WAIT)
    assert all(list(caller.generation().token_ids) == tokens_after(0, 20) for caller in callers)
    with pytest.raises(ShutDownError, match="shutting down"):
        scheduler.submit(request(), Caller())
    assert not engine.closed  # the engine is its owner's


def test_closing_without_patience_fails_what_runs(start: Start) -> None:
    held = threading.Event()

    _, scheduler = start(FakeEngine(num_slots=1, admitted=lambda: held.wait(WAIT)))
    callers = [Caller(), Caller()]
    for caller in callers:
        scheduler.submit(request(max_new_tokens=100, ignore_eos=True), caller)
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    held.set()
    closing.join(WAIT)
    for caller in callers:
        assert caller.ended.wait(WAIT)
        assert isinstance(caller.error, ShutDownError)


def test_an_invalid_request_is_refused_before_it_waits(start: Start) -> None:
    _, scheduler = start()
    with pytest.raises(RequestError, match="the prompt is empty"):
        scheduler.submit(request(()), Caller())
    assert scheduler.num_waiting == 0


def test_each_step_is_reported_once_with_what_counted(start: Start) -> None:
    reports: list[BatchReport] = []
    _, scheduler = start(FakeEngine(accept=lambda _: 2), on_batch=reports.append)
    callers = [Caller() for _ in range(3)]
    for caller in callers:
        scheduler.submit(request(max_new_tokens=10, ignore_eos=True), caller)
    kept = [caller.generation() for caller in callers]
    scheduler.close()
    assert sum(report.committed for report in reports) == sum(len(answer.token_ids) for answer in kept) == 30
    verified = [report for report in reports if report.width]
    assert sum(sum(report.accepted) for report in verified) == sum(answer.acceptance.accepted for answer in kept)


@pytest.mark.parametrize("name", NAMES[:4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prefix_in_the_cache_changes_nothing_but_the_time(pairs: Pairs, name: str, temperature: float) -> None:
    """Drafts included: the acceptance of every answer is that of a cold start."""
    loaded = pairs.loaded(name)
    engine = OnnxRuntimeEngine(open_bundle(pairs.bundle(name), host=host()), num_slots=2, num_threads=1)
    own = LoadedBundle(open_bundle(pairs.bundle(name), host=host()), engine, loaded.tokenizer)
    scheduler = Scheduler(own, prefix_store=0)

    def ask(prompt: Sequence[int], seed: int) -> Generation:
        one = request(prompt, temperature=temperature, seed=seed, max_new_tokens=24, ignore_eos=True)
        caller = Caller()
        scheduler.submit(one, caller)
        found = caller.generation()
        (cold,) = loaded.generate([one.prompt], one.params)
        assert (found.token_ids, found.acceptance) == (cold.token_ids, cold.acceptance)
        return found

    base = PROMPTS[6]
    first = ask(base, 1)
    assert first.num_cached_tokens == 0
    again = ask(base, 2)
    assert again.num_cached_tokens == len(base) - 2
    turn = (*base, *again.token_ids, 5, 6, 7)
    assert ask(turn, 3).num_cached_tokens == len(base) + len(again.token_ids) - 2
    assert ask((*turn[:9], 99), 4).num_cached_tokens == 8  # cut back, and everything after it written anew
    assert ask(turn, 5).num_cached_tokens == 8
    assert ask((99, 98), 6).num_cached_tokens == 0
    scheduler.close()
    own.close()


@pytest.mark.parametrize("name", NAMES[:4])
def test_a_prefix_from_a_running_row_or_from_the_store_changes_nothing_but_the_time(pairs: Pairs, name: str) -> None:
    loaded = pairs.loaded(name)
    bundle = open_bundle(pairs.bundle(name), host=host())
    own = LoadedBundle(bundle, OnnxRuntimeEngine(bundle, num_slots=2, num_threads=1), loaded.tokenizer)
    scheduler = Scheduler(own)
    base = tuple(PROMPTS[6]) * 3

    def begin(prompt: Sequence[int], seed: int) -> tuple[GenerationRequest, Caller]:
        one = request(prompt, temperature=1.0, seed=seed, max_new_tokens=20, ignore_eos=True)
        caller = Caller()
        scheduler.submit(one, caller)
        return one, caller

    def check(begun: tuple[GenerationRequest, Caller]) -> int:
        found = begun[1].generation()
        (cold,) = loaded.generate([begun[0].prompt], begun[0].params)
        assert (found.token_ids, found.acceptance) == (cold.token_ids, cold.acceptance)
        return found.num_cached_tokens

    running = begin(base, 1)
    reached(lambda: bool(running[1].pieces))
    beside = begin((*base, 9), 2)
    assert check(beside) in (0, len(base) - 1)  # 0: the first was done by then, and its slot was free
    assert check(running) == 0
    for seed in (3, 4):  # others take the slots
        assert check(begin((seed,) * 20, seed)) == 0
    assert check(begin((*base, 8), 5)) == len(base) - 1
    scheduler.close()
    own.close()


@pytest.mark.parametrize("store", [0, 10**6])
def test_a_store_that_the_engine_cannot_fill_is_refused(pairs: Pairs, store: int) -> None:
    loaded = pairs.loaded(NAMES[0])
    own = LoadedBundle(open_bundle(pairs.bundle(NAMES[0])), FakeEngine(), loaded.tokenizer)
    if store:
        with pytest.raises(ConfigError, match=r"a prefix store of 1000000 bytes: onnxruntime on .* leave it out"):
            Scheduler(own, prefix_store=store)
    else:
        Scheduler(own, prefix_store=store).close()
