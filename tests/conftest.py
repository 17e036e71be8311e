"""For all tests: one thread for torch, no time limits, and what they measured told at the end by `ledgers`.

The models are small: on a busy machine threads would mostly wait for each other. How many examples a property test
draws is a profile's matter (tests/profiles.py). Under pytest-xdist (scripts/test) a file stays on one worker.
"""

from collections.abc import Generator
from contextlib import nullcontext

import pytest
import torch

from tests import profiles, tracing
from tests.ledgers import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown

__all__ = ["pytest_sessionfinish", "pytest_terminal_summary", "pytest_testnodedown"]

# The files that take longest, the longest first: they begin, so that no worker is left alone with one at the end. The
# two files in a browser are apart, because a browser keeps a core busy by itself.
LONGEST = (
    "browser/test_figures.py",
    "recipes/test_stories_recipe.py",
    "browser/test_states.py",
    "text/test_stream.py",
    "oracle/test_counts.py",
    "oracle/test_beams.py",
    "equality/test_matrix.py",
    "engine/test_sharing.py",
    "engine/test_machine.py",
)

torch.set_num_threads(1)
profiles.register()


def place(path: str) -> int:
    """Where a test file stands in the order of running."""
    return next((at for at, longest in enumerate(LONGEST) if path.endswith(longest)), len(LONGEST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.path.as_posix()))
    tracing.choose(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Under --cov, without it where the test is not to be watched."""
    unwatched = item.config.pluginmanager.hasplugin("_cov") and not item.stash[tracing.WATCHED]
    with tracing.suspended() if unwatched else nullcontext():
        return (yield)
