"""For all tests: one thread for torch, no time limits, and the tests that coverage watches (tests/tracing.py).

The models are small: on a busy machine threads would mostly wait for each other. tests/profiles.py sets how many
examples a property test draws.
"""

import asyncio
import gc
from collections.abc import Generator
from contextlib import nullcontext, suppress
from functools import cache
from importlib import import_module
from types import SimpleNamespace

import pytest
import uvicorn.server

from tests import profiles, tracing
from tokenwright.backends.device import compute_with

with suppress(ImportError):  # tests/without_torch.py
    import torch  # noqa: F401  (compute_with sets its threads too, once it is loaded)

profiles.register()

# Each HTTP client, and so each `httpx.get`, reads all certificates of this machine for a TLS context, which takes 50 ms
# of CPU; tests make thousands of clients, for servers without TLS. They share one context.
for client in ("httpx", "httpx2"):
    with suppress(ImportError):  # scripts/install dev
        transports = import_module(f"{client}._transports.default")
        transports.create_ssl_context = cache(transports.create_ssl_context)  # type: ignore[attr-defined]

# uvicorn sleeps 0.1 s before each look at whether it is to end, and again while it ends: 0.3 s for each of the hundreds
# of servers that tests start.
uvicorn.server.asyncio = SimpleNamespace(  # type: ignore[assignment]
    **vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 10)}
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tracing.choose(items)


def pytest_collection_finish() -> None:
    """A full collection, as servers make them at their end, need not visit a million objects of tests and libraries."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A module that leaves a connection unclosed fails one of its own tests, not one that runs later."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With one thread, whatever an earlier test asked for; under --cov, without it where it is not to be watched."""
    compute_with(1)
    unwatched = item.config.pluginmanager.hasplugin("_cov") and not item.stash[tracing.WATCHED]
    with tracing.suspended() if unwatched else nullcontext():
        return (yield)
