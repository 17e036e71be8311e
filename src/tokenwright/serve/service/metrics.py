"""Prometheus metrics. No label has a value that a client chooses; nothing is recorded per token."""

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import tokenwright
from tokenwright.llm.prompts.report import Cause
from tokenwright.serve.service.types import NOBODY, Caller, Problem, Timings, TokenCounts

if TYPE_CHECKING:
    from tokenwright.serve.service.service import Service

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TOKENS = {
    "prompt": ("prompt", "Tokens of prompts"),
    "cached": ("cached", "Prompt tokens found in the KV cache"),
    "disk": ("disk", "Prompt tokens found in the KV cache, whose pages were read from a disk"),
    "completion": ("generated", "Tokens generated"),
    "drafted": ("draft", "Drafted tokens"),
    "accepted": ("accepted", "Drafted tokens that texts kept"),
}


class Metrics:
    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # an unused series for each
        self.registry = registry = CollectorRegistry()
        self._caller = NOBODY
        ProcessCollector(registry=registry)
        self._ended = Counter("tokenwright_requests", "Requests that ended", ["outcome"], registry=registry)
        self._refused = Counter("tokenwright_rejections", "Requests that were refused", ["reason"], registry=registry)
        self._ignored = Counter(
            "tokenwright_ignored_fields", "Unknown fields of requests, which had no effect", registry=registry
        )
        self._tokens = {
            name: Counter(f"tokenwright_{series}_tokens", about, registry=registry)
            for name, (series, about) in TOKENS.items()
        }
        about = "Prompt tokens that were computed again, by cause"
        self._again = Counter("tokenwright_recomputed_tokens", about, ["cause"], registry=registry)
        for cause in Cause:  # so every cause has a rate from the start
            self._again.labels(cause.value)
        self._preempted = Counter("tokenwright_preemptions", "Preemptions of requests", registry=registry)
        self._queue = _seconds("queue_seconds", "From a request to its first step", registry)
        self._first = _seconds("time_to_first_token_seconds", "From a request to its first token", registry)
        self._whole = _seconds("request_seconds", "From a request to its last token", registry)
        self._each = Histogram(
            "tokenwright_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )

    def watch(self, services: "Callable[[], Sequence[Service]]", version: Callable[[], int] | None = None) -> None:
        """Sum the gauges of these services at each scrape. version: of the only model."""
        self.registry.register(_Gauges(services, version, lambda: self._caller))

    def ended(self, outcome: str, counts: TokenCounts, timings: Timings) -> None:
        """outcome: "finished", "cancelled" or "failed"."""
        self._ended.labels(outcome).inc()
        numbers = asdict(counts)
        for name, counter in self._tokens.items():
            counter.inc(numbers[name])
        self._preempted.inc(timings.preemptions)
        if timings.cache is not None and timings.cache.cause is not None and timings.cache.known:
            self._again.labels(timings.cache.cause.value).inc(timings.cache.again)
        self._queue.observe(timings.queue_s)
        if counts.completion:
            first = timings.queue_s + timings.prefill_s
            self._first.observe(first)
            self._whole.observe(first + timings.decode_s)
        if counts.completion > 1:
            self._each.observe(timings.decode_s / (counts.completion - 1))

    def refused(self, problem: Problem) -> None:
        self._refused.labels(problem.kind).inc()

    def ignored(self, names: Sequence[str]) -> None:
        self._ignored.inc(len(names))

    def text(self, caller: Caller = NOBODY) -> bytes:
        """The metrics in Prometheus' text format, without models that the caller may not use."""
        self._caller = caller
        return generate_latest(self.registry)


def _seconds(name: str, about: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(f"tokenwright_{name}", about, buckets=_SECONDS, registry=registry)


class _Gauges(Collector):
    def __init__(
        self,
        services: "Callable[[], Sequence[Service]]",
        version: Callable[[], int] | None,
        caller: Callable[[], Caller],
    ) -> None:
        self._services = services
        self._version = version
        self._caller = caller

    def collect(self) -> Iterator[Metric]:
        services = self._services()
        versions = {"version": tokenwright.__version__, "python": platform.python_version()}
        yield InfoMetricFamily("tokenwright_build", "The program", value=versions)
        waiting, running = sum(one.admission.waiting for one in services), sum(one.running for one in services)
        yield _gauge("requests_waiting", "Requests in the queue before the engine", waiting)
        yield _gauge("requests_running", "Requests in the engine", running)
        if self._version is not None:
            yield _gauge(
                "model_version", "The version that takes requests, from 1: SIGHUP may change it", self._version()
            )
        ready = [one for one in services if one.host.loading.phase == "ready"]
        if not ready:
            return
        models = list({one.names[0]: one for one in ready}.values())  # the last of two versions
        models = [one for one in models if self._caller().may_use(*one.names)]
        yield _models(models)
        caches = [one.host.llm.llm_engine.occupancy for one in ready]
        pages, available = sum(one.pages for one in caches), sum(one.available for one in caches)
        cached = sum(one.cached for one in caches)
        replicas = sum(one.host.llm.llm_engine.replicas for one in ready)
        yield _gauge("replicas", "Engines that take requests: the server's own, or its replicas", replicas)
        yield _gauge("pages", "Pages of the KV cache", pages)
        yield _gauge("pages_cached", "Pages of no request whose K and V can be reused", cached)
        used = 1 - available / pages if pages else 0.0
        yield _gauge("kv_usage_ratio", "The share of the KV cache that requests hold", used)
        yield _gauge("pages_available", "Pages that requests can take, cached ones included", available)
        yield _caches(models)
        if counts := [found for one in ready if (found := one.host.llm.llm_engine.expert_counts)]:
            yield _experts(counts)
        yield _warmed(ready)
        if adapters := [name for one in models for name in one.host.llm.prepared.adapters]:
            yield _adapters(adapters)


def _models(services: "Sequence[Service]") -> InfoMetricFamily:
    found = InfoMetricFamily("tokenwright_model", "The model that is served", labels=("served", "model"))
    for service in services:
        llm = service.host.llm
        about = {"context": str(llm.context), "weight_bytes": str(llm.weight_bytes)}
        found.add_metric((service.names[0], service.host.name), about)
    return found


def _caches(services: "Sequence[Service]") -> InfoMetricFamily:
    """The KV cache of each model, in the names of the Gateway API's inference extension."""
    found = InfoMetricFamily("tokenwright_cache_config", "The KV cache: its pages and their slots", labels=("served",))
    for service in services:
        engine = service.host.llm.llm_engine
        about = {"block_size": str(engine.options.page_size), "num_gpu_blocks": str(engine.occupancy.pages)}
        found.add_metric((service.names[0],), about)
    return found


def _experts(counts: Sequence[Mapping[str, int]]) -> CounterMetricFamily:
    about = "Experts in a file: chosen, found in memory, prefetched; reads, failed reads, bytes, ns waited"
    found = CounterMetricFamily("tokenwright_experts", about, labels=("count",))
    for name in counts[0]:
        found.add_metric((name,), sum(one[name] for one in counts))
    return found


def _warmed(services: "Sequence[Service]") -> CounterMetricFamily:
    about = "Tokens of next turns computed ahead, used by a turn, or wasted"
    found = CounterMetricFamily("tokenwright_warm_tokens", about, labels=("outcome",))
    prompts = [one.host.llm.llm_engine.prompts for one in services]
    for outcome in ("computed", "used", "wasted"):
        name = "warmed" if outcome == "computed" else outcome
        found.add_metric((outcome,), sum(getattr(one, name) for one in prompts))
    return found


def _adapters(names: Sequence[str]) -> GaugeMetricFamily:
    """The adapters, in the names of the same protocol; the value is the time."""
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    found = GaugeMetricFamily("tokenwright_lora_requests_info", "The adapters that are served", labels=labels)
    found.add_metric((str(len(names)), ",".join(names), ""), time.time())
    return found


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tokenwright_{name}", about, value)
