"""Prometheus metrics, each under our name, under vLLM's, and some under SGLang's: tools look for those."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..answer import Piece
from ..rows import BatchReport, RequestReport
from ..scheduler import Scheduler

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PREFIX, _ALIAS = "graphspec:", "vllm:"
_SGLANG: Mapping[str, Mapping[str, int]] = {
    "num_requests_running": {"num_running_reqs": 0},
    "num_requests_waiting": {"num_queue_reqs": 0},
    "prompt_tokens": {"prompt_tokens": 0},
    "generation_tokens": {"generation_tokens": 0},
    "spec_decode_num_drafts": {"spec_verify_calls": 0},
    "spec_decode_mean_accepted_length": {"spec_accept_length": 1},
    "spec_decode_draft_acceptance_rate": {"spec_accept_rate": 0},
    "spec_decode_width": {"spec_num_steps": 0, "spec_num_draft_tokens": 1},
}
"""Its names for ours, and what is more in its count: the target's own token."""


@dataclass(slots=True)
class Timing:
    """Of one answer, in seconds of time.monotonic."""

    submitted: float = field(default_factory=time.monotonic)
    first: float | None = None
    newest: float = 0.0


class Metrics:
    """What is counted, for one server. Used on the event loop, but for `answered` and `stepped`."""

    def __init__(self, model: str) -> None:
        own = CollectorRegistry(auto_describe=True)

        def counter(name: str, meaning: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(_PREFIX + name, meaning, labels, registry=own)

        def seconds(name: str, meaning: str) -> Histogram:
            return Histogram(f"{_PREFIX}{name}_seconds", meaning, registry=own, buckets=_SECONDS)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._finished = counter("request_success", "Answers that ended, by reason.", ["finished_reason"])
        self._steps = counter("steps", "Steps that committed tokens, prompts' last ones among them.")
        self._decode_steps = counter("decode_steps", "Steps of answers, by the drafts verified of a row.", ["width"])
        self._device = counter("device_seconds", "That the device was at work, where the engine measures it.")
        self._drafts = counter("spec_decode_num_drafts", "Verification passes.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Drafts verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafts accepted.")
        self._per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by position in the block.", ["position"]
        )
        self._length = Gauge(_PREFIX + "spec_decode_mean_accepted_length", "Drafts accepted a pass.", registry=own)
        self._rate = Gauge(_PREFIX + "spec_decode_draft_acceptance_rate", "Drafts accepted of all.", registry=own)
        self._width = Gauge(_PREFIX + "spec_decode_width", "Drafts verified in the newest pass.", registry=own)
        self._totals = [0, 0, 0]
        self._first_token = seconds("time_to_first_token", "From submission to the first piece.")
        self._between = seconds("inter_token_latency", "From piece to piece, divided by the tokens in the piece.")
        self._per_token = seconds("request_time_per_output_token", "Of one answer, after its first piece.")
        self._whole = seconds("e2e_request_latency", "From submission to the last piece.")
        self._queue_time = seconds("request_queue_time", "From submission to a row.")
        self._prefill_time = seconds("request_prefill_time", "From a row to the first token.")
        self._decode_time = seconds("request_decode_time", "From the first token to the last.")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in caches and the store.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found there, and not run again.")
        self._cache_usage = Gauge(_PREFIX + "kv_cache_usage_perc", "Positions in use; 1 is all.", registry=own)
        self._running = Gauge(_PREFIX + "num_requests_running", "Requests with a row.", registry=own)
        self._waiting = Gauge(_PREFIX + "num_requests_waiting", "Requests in the queue.", registry=own)
        self._registry = CollectorRegistry()
        self._registry.register(_Renamed(own, model))

    def watch(self, scheduler: Scheduler) -> None:
        """Whose requests these are."""
        self._running.set_function(lambda: scheduler.num_running)
        self._waiting.set_function(lambda: scheduler.num_waiting)
        self._cache_usage.set_function(lambda: scheduler.cache_usage)

    def started(self, num_prompt_tokens: int) -> Timing:
        """An answer was submitted."""
        self._prompt_tokens.inc(num_prompt_tokens)
        return Timing()

    def took(self, piece: Piece, timing: Timing) -> None:
        """A piece of it came."""
        now, count = time.monotonic(), len(piece.token_ids)
        self._generation_tokens.inc(count)
        if timing.first is None:
            timing.first = now
            self._first_token.observe(now - timing.submitted)
        elif count:
            self._between.observe((now - timing.newest) / count)
        timing.newest = now
        if piece.generation is not None:
            self._whole.observe(now - timing.submitted)
            if (after := len(piece.generation.token_ids) - 1) > 0:
                self._per_token.observe((now - timing.first) / after)
            self.finished(piece.generation.finish_reason)

    def finished(self, reason: str) -> None:
        """An answer ended, whole or not."""
        self._finished.labels(reason).inc()

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    def answered(self, report: RequestReport) -> None:
        """A request was answered. Called from the scheduler's thread."""
        self._queue_time.observe(report.queue_time)
        self._prefill_time.observe(report.prefill_time)
        self._decode_time.observe(report.decode_time)
        self._prefix_queries.inc(report.num_prompt_tokens)
        self._prefix_hits.inc(report.num_cached_tokens)

    def stepped(self, report: BatchReport) -> None:
        """A step was read. Called from the scheduler's thread: these counters are nobody else's."""
        self._steps.inc()
        if report.is_step:
            self._decode_steps.labels(str(report.width)).inc()
        self._device.inc(report.seconds)
        if not report.width:
            return
        counts = len(report.accepted), len(report.accepted) * report.width, sum(report.accepted)
        for counter, count in zip((self._drafts, self._draft_tokens, self._accepted), counts, strict=True):
            counter.inc(count)
        self._totals = [total + count for total, count in zip(self._totals, counts, strict=True)]
        self._width.set(report.width)
        passes, drafted, accepted = self._totals
        self._length.set(accepted / passes if passes else 0.0)
        self._rate.set(accepted / drafted if drafted else 0.0)
        for position in range(report.width):
            self._per_position.labels(str(position)).inc(sum(count > position for count in report.accepted))


class _Renamed(Collector):
    """Each metric as it is, and as others name it, with the label that their dashboards select by."""

    def __init__(self, source: CollectorRegistry, model: str) -> None:
        self._source, self._model = source, model

    def collect(self) -> Iterable[Metric]:
        for metric in self._source.collect():
            yield metric
            yield self._alias(metric, metric.name.replace(_PREFIX, _ALIAS, 1))
            for name, more in _SGLANG.get(metric.name.removeprefix(_PREFIX), {}).items():
                yield self._alias(metric, f"sglang:{name}", more)

    def _alias(self, metric: Metric, name: str, more: int = 0) -> Metric:
        alias = Metric(name, metric.documentation, metric.type, metric.unit)
        for sample in metric.samples:
            labels = {"model_name": self._model, **sample.labels}
            alias.add_sample(sample.name.replace(metric.name, name, 1), labels, sample.value + more, sample.timestamp)
        return alias
