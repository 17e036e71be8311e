"""How `serve` opens a model with its options about replicas and clusters."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import cache
from socket import gethostname
from typing import TYPE_CHECKING, Any

from tokenwright.serve.settings import Settings

if TYPE_CHECKING:
    from tokenwright.cluster.processes import ReplicaSource
    from tokenwright.llm.llm import LLM

Load = Callable[[Callable[[int, int], None]], "LLM"]


def clustered(model: str, engine: dict[str, Any], settings: Settings) -> Callable[[], ReplicaSource]:
    """The result takes time. Raises RequestError if Ray is needed and missing."""
    more: dict[str, Any] = {"retries": settings.retries, "drain_s": settings.drain_timeout}
    more["heartbeat_s"] = settings.heartbeat
    if settings.ray_address:
        from tokenwright.cluster.ray_replicas import check_ray

        check_ray()

    @cache
    def source() -> ReplicaSource:
        from tokenwright.cluster.processes import ReplicaSource, processes_of

        if not settings.ray_address:
            return processes_of(model, settings.replicas, engine, **more)
        from tokenwright.cluster.ray_replicas import open_on_ray

        name = f"tokenwright-{gethostname()}-{settings.port}"

        def load(report: Callable[[int, int], None]) -> LLM:
            return open_on_ray(model, settings.replicas, settings.ray_address, name, engine, report=report, **more)

        return ReplicaSource(load, load, lambda _: False)  # which files its machines have is not known here

    return source


def published(load: Load, settings: Settings) -> Load:
    """`load`, after which the model's KV events are published, where the settings say so. Raises RequestError."""
    if not settings.kv_events:
        return load
    from tokenwright.cluster.publisher import KVPublisher, check_address

    check_address(settings.kv_events)

    def loaded(report: Callable[[int, int], None]) -> LLM:
        llm = load(report)
        atexit.register(KVPublisher(llm, settings.kv_events, settings.kv_events_topic).close)
        return llm

    return loaded
