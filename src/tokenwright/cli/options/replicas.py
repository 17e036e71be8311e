"""Options of `serve` about replicas and clusters, and how a model is opened with them."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import cache
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from tokenwright.cli.options.shared import SERVER
from tokenwright.serve.settings import Settings

if TYPE_CHECKING:
    from tokenwright.cluster.cluster_llm import ClusterLLM
    from tokenwright.cluster.processes import ReplicaSource
    from tokenwright.llm.llm import LLM

Load = Callable[[Callable[[int, int], None]], "LLM"]

Replicas = Annotated[
    int | None,
    Option(
        help="Processes that write the texts and are replaced when they die; 0: the server itself writes them.",
        rich_help_panel=SERVER,
    ),
]
RayAddress = Annotated[
    str | None,
    Option(
        metavar="ADDRESS",
        help="A Ray cluster for the replicas, such as auto or HOST:PORT; local starts one.",
        rich_help_panel=SERVER,
    ),
]
Retries = Annotated[
    int | None, Option(help="How many replicas may die with a text before its request fails.", rich_help_panel=SERVER)
]
KvEvents = Annotated[
    str | None,
    Option(
        metavar="ADDRESS",
        help="The address, such as tcp://*:5557, of vLLM's KV events for routers; replays are at the next port.",
        rich_help_panel=SERVER,
    ),
]
KvEventsTopic = Annotated[
    str | None, Option(help="The topic of these events, such as kv@pod@model.", rich_help_panel=SERVER)
]


def clustered(model: str, engine: dict[str, Any], settings: Settings) -> Callable[[], ReplicaSource]:
    """A function that makes the source of replicas. It takes time. Raises RequestError if Ray is needed and missing."""
    more: dict[str, Any] = {"retries": settings.retries, "drain_s": settings.drain_timeout}
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

        def load(report: Callable[[int, int], None]) -> ClusterLLM:
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
