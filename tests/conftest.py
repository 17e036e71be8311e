"""For all tests: one thread for torch, no time limits, and what they measured told at the end by `ledgers`.

The models are small: on a busy machine threads would mostly wait for each other. How many examples a property test
draws is a profile's matter (tests/profiles.py). Under pytest-xdist (scripts/test) a file stays on one worker.
"""

from typing import Any

import pytest
import torch

from tests import ledgers, profiles

# What takes longest begins first, so that no worker is left alone with it at the end.
LONGEST = ("oracle/test_families.py", "equality/test_matrix.py")

torch.set_num_threads(1)
profiles.register()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands over what it has gathered."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["ledgers"] = ledgers.packed()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The process that prints takes it; a worker that crashed has none, and pytest says that it did."""
    output: dict[str, Any] = getattr(node, "workeroutput", {})
    if "ledgers" in output:
        ledgers.unpack(output["ledgers"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for ledger in ledgers.filled():
        terminalreporter.section(ledger.title)
        for line in ledger.lines():
            terminalreporter.write_line(line)
