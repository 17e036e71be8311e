"""Turns the settings of a server into what the app takes: the policy of callers, and the limits."""

from pathlib import Path
from typing import cast

from tokenwright.environment import Environment
from tokenwright.serve.app import Served, apis_named
from tokenwright.serve.service.next_turns import Warm
from tokenwright.serve.service.service import ServiceLimits
from tokenwright.serve.settings import Settings
from tokenwright.serve.transport.guard import Policy, read_keys
from tokenwright.serve.transport.telemetry import spans_of


def policy_of(settings: Settings) -> Policy:
    """The policy for callers of a server. Raises RequestError for keys that cannot be read."""
    keys = list(settings.api_key)
    if settings.api_key_file:
        keys += read_keys(Path(settings.api_key_file))
    return Policy.of(hosts_of(settings), keys, origins=frozenset(settings.cors_origin), body=settings.max_body)


def served_of(settings: Settings) -> Served:
    """How a model is served, without its names."""
    limits = ServiceLimits(
        queue=settings.max_queue,
        deadline_s=settings.request_timeout or None,
        reader_s=settings.reader_timeout or None,
        prompt_memory=settings.prompt_memory,
        retokenise=settings.retokenise,
        warm=cast("Warm", settings.warm),
    )
    return Served(
        (),
        limits,
        settings.timings,
        spans_of(Environment.read().otel),
        alone=True,
        strict_fields=settings.strict_fields,
        stored_responses=settings.stored_responses,
        apis=apis_named([name.strip() for one in settings.apis for name in one.split(",") if name.strip()]),
    )


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def hosts_of(settings: Settings) -> list[str] | None:
    """The names that the Host header may have; None: any, as a key is demanded."""
    if not (settings.local or settings.no_key or settings.allowed_host):
        return None
    names = ["127.0.0.1", "localhost", "[::1]", *settings.allowed_host]
    if not settings.local and not settings.everywhere:
        names.append(in_url(settings.host))
    return names
