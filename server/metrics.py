"""Metrics in the text format of Prometheus: ``hocket_*``, and the ``llamacpp:*`` names of llama-server."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..frontends.serving.requests import RequestTiming
from ..frontends.serving.service import ModelService
from .streams import ChoiceFinish, PromptProgress, Update

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Bucket bounds of the histograms of seconds."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineMetricsCollector:
    """A Prometheus collector that reads the counts of an engine at each scrape."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """Yield the current metrics of the engine."""
        status = self._service.status
        gauges = {
            "slots": ("Sequences that can run at once", status.slots),
            "context_tokens": ("Tokens of a slot", status.context),
            "requests_running": ("Requests that have a slot", status.running),
            "requests_queued": ("Requests that wait for a slot", status.queued),
            "slot_tokens": ("Tokens that the slots hold, those of the prefix cache included", sum(status.slot_tokens)),
            "engine_up": ("Whether the engine runs", int(not self._service.engine_end_reason)),
            "heartbeat_age_seconds": ("Seconds since the last sign of life", self._service.seconds_since_heartbeat),
        }
        for name, (text, gauge) in gauges.items():
            yield GaugeMetricFamily(f"hocket_{name}", text, value=gauge)
        counters = {
            "prompt_tokens": ("Prompt tokens, cached ones included", status.sums.prompt_tokens),
            "cached_tokens": ("Prompt tokens from the prefix cache", status.sums.cached_tokens),
            "new_tokens": ("Sampled tokens", status.sums.new_tokens),
            "finished_requests": ("Requests that have ended in the engine", status.sums.finished_requests),
            "prompt_seconds": ("Seconds of prompt steps", status.sums.prompt_seconds),
            "decode_seconds": ("Seconds of decode steps", status.sums.decode_seconds),
            "decode_steps": ("Decode steps", status.sums.decode_steps),
            "drafted_tokens": ("Draft tokens that were evaluated", status.sums.drafted_tokens),
            "accepted_tokens": ("Draft tokens that were sampled", status.sums.accepted_tokens),
            "engine_restarts": ("Restarts of the engine after failures", status.sums.restarts),
            "preemptions": ("Running requests that gave their cache blocks to older ones", status.sums.preemptions),
        }
        for name, (text, count) in counters.items():
            yield CounterMetricFamily(f"hocket_{name}", text, value=count)


class ServerMetrics:
    """The Prometheus metrics of one server: responses, latencies, embeddings, and the counts of the engine."""

    def __init__(self, service: ModelService) -> None:
        self._service, self.start_time = service, time.time()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineMetricsCollector(service))
        registry = self._registry
        self.responses = Counter(
            "hocket_responses", "Responses by path and status", ["path", "status"], registry=registry
        )
        self._queue = Histogram("hocket_queue_seconds", "Wait for a slot", buckets=SECONDS_BUCKETS, registry=registry)
        self._first = Histogram(
            "hocket_first_token_seconds", "From submission to first token", buckets=SECONDS_BUCKETS, registry=registry
        )
        self._gap = Histogram(
            "hocket_token_seconds", "Mean time between tokens", buckets=SECONDS_BUCKETS, registry=registry
        )

        self._embedding_tokens = Counter("hocket_embedding_tokens", "Tokens of embedded texts", registry=registry)
        self._embedding_token_count = self._embedding_steps = 0

    def record_embedding(self, token_count: int) -> None:
        """Add the token count of an embedding request."""
        self._embedding_tokens.inc(token_count)
        self._embedding_token_count += token_count
        self._embedding_steps += 1

    def record_timing(self, timing: RequestTiming, token_count: int) -> None:
        """Add the queue, first-token and inter-token seconds of a request."""
        self._queue.observe(timing.queue_seconds)
        self._first.observe(timing.queue_seconds + timing.prompt_seconds)
        if token_count > 1:
            self._gap.observe(timing.decode_seconds / (token_count - 1))

    def format_metrics(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry) + self._format_llama_server_metrics().encode()

    def _format_llama_server_metrics(self) -> str:
        """Return the metrics with the names and types of llama-server, which its tools expect."""
        status = self._service.status
        read = status.sums.prompt_tokens - status.sums.cached_tokens
        steps = status.sums.decode_steps + self._embedding_steps
        counters = {
            "prompt_tokens_total": ("Number of prompt tokens processed", read + self._embedding_token_count),
            "prompt_tokens_cached_total": ("Number of prompt tokens reused from the cache", status.sums.cached_tokens),
            "prompt_seconds_total": ("Prompt process time", status.sums.prompt_seconds),
            "tokens_predicted_total": ("Number of generation tokens processed", status.sums.new_tokens),
            "tokens_predicted_seconds_total": ("Predict process time", status.sums.decode_seconds),
            "n_decode_total": ("Total number of decode steps", steps),
            "n_tokens_max": ("Largest observed number of tokens of a slot", max(status.slot_tokens, default=0)),
            "spec_decode_num_draft_tokens_total": ("Number of drafted tokens", status.sums.drafted_tokens),
            "spec_decode_num_accepted_tokens_total": (
                "Number of accepted drafted tokens",
                status.sums.accepted_tokens,
            ),
            "spec_decode_num_drafts_total": ("Number of drafts", status.sums.drafts),
        }
        gauges = {
            "prompt_tokens_seconds": (
                "Average prompt throughput in tokens/s",
                divide_or_zero(read, status.sums.prompt_seconds),
            ),
            "predicted_tokens_seconds": (
                "Average generation throughput in tokens/s",
                divide_or_zero(status.sums.new_tokens, status.sums.decode_seconds),
            ),
            "requests_processing": ("Number of requests processing", status.running),
            "requests_deferred": ("Number of requests deferred", status.queued),
            "n_busy_slots_per_decode": (
                "Average number of busy slots per decode step",
                divide_or_zero(status.sums.new_tokens, status.sums.decode_steps),
            ),
        }
        lines = []
        for kind, group in (("counter", counters), ("gauge", gauges)):
            for name, (text, value) in group.items():
                lines += [
                    f"# HELP llamacpp:{name} {text}",
                    f"# TYPE llamacpp:{name} {kind}",
                    f"llamacpp:{name} {value}",
                ]
        return "\n".join(lines) + "\n"


def divide_or_zero(count: float, by: float) -> float:
    """Return ``count / by``; return 0 if `by` is not positive."""
    return count / by if by > 0 else 0.0


def describe_timing(timing: RequestTiming, token_count: int) -> dict[str, float]:
    """Return the object ``timings`` of llama-server: token counts, milliseconds and rates of a request.

    The first new token counts as part of the prompt time, so it does not count for the rate.
    """
    read, decoded = timing.prompt_tokens - timing.cached_tokens, max(0, token_count - 1)
    drafts = {"draft_n": timing.drafted_tokens, "draft_n_accepted": timing.accepted_tokens}
    return {
        "cache_n": timing.cached_tokens,
        "prompt_n": read,
        "prompt_ms": timing.prompt_seconds * 1e3,
        "prompt_per_token_ms": divide_or_zero(timing.prompt_seconds * 1e3, read),
        "prompt_per_second": divide_or_zero(read, timing.prompt_seconds),
        "predicted_n": token_count,
        "predicted_ms": timing.decode_seconds * 1e3,
        "predicted_per_token_ms": divide_or_zero(timing.decode_seconds * 1e3, decoded),
        "predicted_per_second": divide_or_zero(decoded, timing.decode_seconds) if decoded else 0.0,
        "queue_ms": timing.queue_seconds * 1e3,
        **(drafts if timing.drafted_tokens else {}),
    }


def describe_draft_usage(timings: Sequence[RequestTiming]) -> dict[str, dict[str, int]]:
    """Return the part of OpenAI's ``usage`` about draft tokens of some requests. Without drafts, the part is empty."""
    drafted, accepted = sum(one.drafted_tokens for one in timings), sum(one.accepted_tokens for one in timings)
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {"completion_tokens_details": details} if drafted else {}


class StreamedChoiceStopwatch:
    """Measures the times of one choice while it is streamed, for the object ``timings`` of each stream event.

    The engine reports its own times only at the end of the choice.
    """

    def __init__(self) -> None:
        self._read_tokens = self._cached_tokens = self._new_tokens = 0
        self._start: float | None = None
        self._first_token: float | None = None

    def describe_update(self, update: Update) -> dict[str, float]:
        """Return the object ``timings`` for an update: times measured here, or at the end the engine's times."""
        now = time.perf_counter()
        if isinstance(update, ChoiceFinish):
            return describe_timing(update.timing, update.token_count)
        if self._start is None:
            self._start = now
            self._cached_tokens = update.read_tokens if isinstance(update, PromptProgress) else 0
        if isinstance(update, PromptProgress):
            self._read_tokens = update.read_tokens
        else:
            self._new_tokens += len(update.tokens)
            self._first_token = self._first_token or now
        decode_seconds = 0.0 if self._first_token is None else now - self._first_token
        prompt_seconds = now - self._start - decode_seconds
        counts = self._read_tokens, self._cached_tokens, self._new_tokens
        return describe_timing(RequestTiming(*counts, 0.0, prompt_seconds, decode_seconds), self._new_tokens)
