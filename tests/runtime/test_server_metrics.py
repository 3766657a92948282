"""/metrics, under our names and vLLM's, and the line about steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from pairs import NAMES, Pairs
from prometheus_client.parser import text_string_to_metric_families
from served import Served, model, serve

from graphspec.runtime.generate import LoadedBundle
from graphspec.runtime.rows import BatchReport
from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.server.metrics import Metrics
from graphspec.runtime.server.model import LOG_SECONDS, BatchLog

PROMPTS = ["abc", "xyz", "abab"]


@pytest.fixture(scope="module")
def served(pairs: Pairs) -> Iterator[Served]:
    bundle = pairs.bundle(NAMES[1])
    with serve(lambda metrics: model(bundle, metrics)) as running:
        yield running


def exposed(text: str) -> dict[str, float]:
    """Values by name and labels, but for the model's name."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[sample.name + (str(labels) if labels else "")] = sample.value
    return found


def samples(served: Served) -> dict[str, float]:
    """Likewise, of a running server."""
    return exposed(served.get("/metrics").text)


@pytest.mark.parametrize("prefix", ["graphspec", "vllm"])
def test_counters_are_those_of_the_answers(served: Served, pairs: Pairs, prefix: str) -> None:
    offline: LoadedBundle = pairs.loaded(NAMES[1])
    begun = time.monotonic()
    before = samples(served)
    served.post("/v1/completions", {"prompt": PROMPTS, "max_tokens": 30, "temperature": 0})
    served.post("/v1/completions", {"prompt": "abc", "max_tokens": 4, "stream": True, "speculative": False})
    after = samples(served)
    answers = offline.generate(PROMPTS, SamplingParams(max_new_tokens=30))
    accepted = [sum(counts) for counts in zip(*(one.acceptance.accepted_per_position for one in answers), strict=True)]

    def grown(name: str) -> float:
        return after[f"{prefix}:{name}"] - before.get(f"{prefix}:{name}", 0)

    assert grown("steps_total") >= max(len(one.token_ids) for one in answers) / 4
    assert 0 < grown("device_seconds_total") < time.monotonic() - begun
    assert grown("prompt_tokens_total") == 3 + 3 + 4 + 3
    assert grown("generation_tokens_total") == 3 * 30 + 4
    assert grown("request_success_total{'finished_reason': 'length'}") == 4
    assert grown("spec_decode_num_drafts_total") == sum(one.acceptance.verifications for one in answers)
    assert grown("spec_decode_num_draft_tokens_total") == sum(one.acceptance.drafted for one in answers)
    assert grown("spec_decode_num_accepted_tokens_total") == sum(accepted) > 0
    for position, count in enumerate(accepted):
        assert grown(f"spec_decode_num_accepted_tokens_per_pos_total{{'position': '{position}'}}") == count
    for name in (
        "time_to_first_token",
        "e2e_request_latency",
        "request_time_per_output_token",
        "request_queue_time",
        "request_prefill_time",
        "request_decode_time",
    ):
        assert grown(f"{name}_seconds_count") == 4
    parts = sum(grown(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert 0 < parts <= grown("e2e_request_latency_seconds_sum")
    assert grown("prefix_cache_queries_total") == 3 + 3 + 4 + 3
    assert after[f"{prefix}:kv_cache_usage_perc"] == 0
    passes, drafted, taken = (
        after[f"{prefix}:spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert after[f"{prefix}:spec_decode_mean_accepted_length"] == taken / passes
    assert after[f"{prefix}:spec_decode_draft_acceptance_rate"] == taken / drafted
    assert after[f"{prefix}:num_requests_running"] == after[f"{prefix}:num_requests_waiting"] == 0


def test_steps_are_counted_by_width_and_ends_of_prompts_are_none() -> None:
    metrics = Metrics("model")
    for width, is_step in ((0, False), (0, True), (3, True), (3, True)):
        metrics.stepped(BatchReport(width=width, accepted=(0,), committed=1, is_step=is_step))
    found = exposed(metrics.exposition().decode())
    for prefix in ("graphspec", "vllm"):
        assert {name: value for name, value in found.items() if name.startswith(f"{prefix}:decode_steps_total")} == {
            f"{prefix}:decode_steps_total{{'width': '0'}}": 1,
            f"{prefix}:decode_steps_total{{'width': '3'}}": 2,
        }
        assert found[f"{prefix}:steps_total"] == 4


def test_sglangs_dashboards_find_their_names(served: Served) -> None:
    served.post("/v1/completions", {"prompt": "abc", "temperature": 0})
    told = samples(served)
    for theirs, ours in (
        ("num_running_reqs", "num_requests_running"),
        ("num_queue_reqs", "num_requests_waiting"),
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generation_tokens_total", "generation_tokens_total"),
        ("spec_verify_calls_total", "spec_decode_num_drafts_total"),
        ("spec_accept_rate", "spec_decode_draft_acceptance_rate"),
    ):
        assert told[f"sglang:{theirs}"] == told[f"graphspec:{ours}"]
    assert told["sglang:spec_accept_length"] == 1 + told["graphspec:spec_decode_mean_accepted_length"]
    assert (told["sglang:spec_num_steps"], told["sglang:spec_num_draft_tokens"]) == (3, 4)


def test_prompt_tokens_found_in_the_cache_are_counted(served: Served) -> None:
    for prompt in ("abcdefghij", "abcdefghijk"):
        before = samples(served)
        served.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "temperature": 0})
    assert samples(served)["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"] == 9


def test_what_vllm_bench_reads_begins_its_line(served: Served) -> None:
    served.post("/v1/completions", {"prompt": "abc"})
    lines = [line for line in served.get("/metrics").text.splitlines() if line.startswith("vllm:spec_decode")]
    names = {line.split("{")[0] for line in lines if "_total" in line}
    assert names == {
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    }


def test_the_line_about_steps_comes_every_few_seconds_and_when_all_is_done() -> None:
    now, lines = [0.0], list[str]()
    log = BatchLog(lines.append, clock=lambda: now[0])
    step = BatchReport(width=2, accepted=(2, 0), committed=4)
    for num_running in (2, 2, 2):
        log.take(step, num_running, 5)
        now[0] += LOG_SECONDS / 2
    assert len(lines) == 1
    assert lines[0].startswith("3 steps, 12 toks, 4.0 toks/s | Running: 2 reqs, Pending: 5 reqs | Draft Tokens: 6/12 (")
    assert "Per-Pos: [p0=50%, p1=100%] |" in lines[0]
    now[0] = 10.0
    log.take(BatchReport(width=0, accepted=(0,), committed=1), 0, 0)
    assert lines[1].startswith("1 steps, 1 toks, ")
    assert lines[1].endswith("Pending: 0 reqs |")


def test_short_requests_share_a_line_and_the_last_of_them_are_told_in_time() -> None:
    now, lines, later = [0.0], list[str](), list[tuple[float, Callable[[], None]]]()
    log = BatchLog(lines.append, clock=lambda: now[0], later=lambda *call: later.append(call))
    step = BatchReport(width=2, accepted=(2,), committed=3)

    def request(seconds: float) -> None:
        log.take(step, 0, 1)  # the step of another is read before this one has its row
        now[0] += seconds
        log.take(step, 0, 0)

    request(0.5)
    assert [line.split(" |")[0] for line in lines] == ["2 steps, 6 toks, 12.0 toks/s"]
    for _ in range(3):
        now[0] += 0.25
        request(0.5)
    assert len(lines) == 1
    ((seconds, tell),) = later
    assert seconds == LOG_SECONDS - 0.75
    tell()
    assert lines[1].startswith("6 steps, 18 toks, 12.0 toks/s | Running: 0 reqs, Pending: 0 reqs | ")
    log.flush()
    assert len(lines) == 2
    now[0] += 0.25
    request(0.5)
    assert len(later) == 2
    log.flush()
    assert lines[2].startswith("2 steps, 6 toks, ")
