"""For all tests: one thread for torch, no time limits, and what they measured told at the end by `ledgers`.

The models are small: on a busy machine threads would mostly wait for each other. How many examples a property test
draws is a profile's matter (tests/profiles.py). Under pytest-xdist (scripts/test) a file stays on one worker.
"""

from collections.abc import Generator
from contextlib import nullcontext

import pytest
import torch

from tests import order, profiles, tracing
from tests.ledgers import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown

__all__ = ["pytest_sessionfinish", "pytest_terminal_summary", "pytest_testnodedown"]

torch.set_num_threads(1)
profiles.register()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(order.Clock())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: order.place(item.path.as_posix()))
    tracing.choose(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Under --cov, without it where the test is not to be watched."""
    unwatched = item.config.pluginmanager.hasplugin("_cov") and not item.stash[tracing.WATCHED]
    with tracing.suspended() if unwatched else nullcontext():
        return (yield)
