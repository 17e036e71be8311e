"""The server as an application of Ray Serve (`pip install 'ray[serve]'`):

    serve run tokenwright.serve.cluster:app model=Qwen/Qwen3-0.6B replicas=2

Serve's proxies pass requests to ingresses, each of which routes to all replicas. If a replica dies, its texts continue
on another; if an ingress dies, Serve's proxy ends its streams without an error.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tokenwright.checks import check_whole
from tokenwright.cluster.cluster_llm import ReplicatedModel, cluster_of
from tokenwright.cluster.ray_replicas import DEPLOYMENT, ServeApplication, check_ray
from tokenwright.errors import RequestError
from tokenwright.llm.llm import LLM
from tokenwright.serve.settings import Settings, read_settings
from tokenwright.units import read_bytes

if TYPE_CHECKING:
    from fastapi import FastAPI

MOST_REPLICAS = 1000
AT_ONCE = 100_000  # requests of an ingress, whose own queue refuses more
COUNTS = ("replicas", "min_replicas", "max_replicas", "ingresses")
BYTES = ("kv_memory", "kv_disk_size", "expert_memory")
NUMBERS = ("threads", "window", "sinks", "page_size", "token_budget")
TEXTS = ("revision", "device", "dtype", "weights", "kv", "kv_disk", "speculate")
OWN = ("replicas", "revision", "lora", "adapter", "memory", "explorer", "kv_events", "kv_events_topic")


def app(args: Mapping[str, str]) -> Any:
    """The application. args: `model`, `replicas` or `min_replicas` and `max_replicas`, `ingresses`, others as text.

    The others are options of LLM, `threads`, and settings of `tokenwright serve`; `host` and `port` are Serve's.
    Raises RequestError for any that cannot be used.
    """
    check_ray()
    from ray import serve

    given = {name.replace("-", "_"): str(value) for name, value in args.items()}
    counts = {name: _whole(name, given.pop(name)) for name in COUNTS if name in given}
    model = given.pop("model", "stories")
    engine: dict[str, Any] = {name: read_bytes(given.pop(name), name) for name in BYTES if name in given}
    engine |= {name: _whole(name, given.pop(name)) for name in NUMBERS if name in given}
    engine |= {name: given.pop(name) for name in TEXTS if name in given}
    known = {one.name for one in fields(Settings)} - set(OWN)
    if unknown := given.keys() - known:
        raise RequestError(f"the application has no argument {min(unknown)[:200]}", min(unknown))
    settings = read_settings(None, {name.upper(): text for name, text in given.items()}, {"replicas": 1})
    wanted = ServeApplication(ReplicatedModel.of(model, engine), _replicas(counts))

    def ingress() -> "FastAPI":
        return ingress_app(wanted, settings)

    made = serve.deployment(serve.ingress(ingress)(Ingress)).options(
        name="ingress", num_replicas=counts.get("ingresses", 1), max_ongoing_requests=AT_ONCE
    )
    return made.bind(wanted.bound())


class Ingress:
    """The deployment of the HTTP app. replicas: a handle, which makes them part of this application."""

    def __init__(self, replicas: object) -> None:
        self.replicas = replicas


def ingress_app(wanted: ServeApplication, settings: Settings) -> "FastAPI":
    from ray import serve

    from tokenwright.llm.web_page import page_folder
    from tokenwright.serve.app import make_app, policy_of, served_of
    from tokenwright.serve.service.model_host import ModelHost

    handle = serve.get_deployment_handle(DEPLOYMENT, app_name=serve.get_replica_context().app_name)

    def load(report: Callable[[int, int], None]) -> LLM:
        llm = wanted.wanted.opened(
            wanted.launcher(handle),
            retries=settings.retries,
            drain_s=settings.drain_timeout,
            heartbeat_s=settings.heartbeat,
            report=report,
        )
        if (cluster := cluster_of(llm)) is not None:
            cluster.loop.watched.append(lambda: os._exit(1))  # Serve starts another ingress
        return llm

    try:
        page = page_folder()
    except RequestError:
        page = None
    return make_app(ModelHost(wanted.wanted.model, load), policy_of(settings), page, served_of(settings))


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise RequestError(f"{name} must be a whole number, not {text[:200]!r}", name)
    return int(text)


def _replicas(counts: Mapping[str, int]) -> int | tuple[int, int]:
    for name, count in counts.items():
        check_whole(name, count, 1, MOST_REPLICAS)
    most = counts.get("max_replicas")
    if most is None:
        return counts.get("replicas", 1)
    check_whole("min_replicas", fewest := counts.get("min_replicas", 1), 1, most)
    return fewest, most
