"""Figures that tests gather by name, told whole at the end of the run, whichever worker ran which test.

    LEDGER = opened(Families())                  # once, in a harness; Families is a Ledger that says how it is told
    figures = LEDGER.setdefault(kind, Figures())  # in a test
    figures.rows += 1

Each worker sends what it has to the process that prints, by the hooks of pytest at the end (tests/conftest.py imports
them). Two entries of one name become one: the counts (int) are added, and of the measures (float) the largest is kept.
"""

import pickle
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

import pytest

Figures = TypeVar("Figures")


def share(part: int, whole: int, form: str = ".2%") -> str:
    """How large a part is; "-" of nothing, as where a test failed before it counted."""
    return format(part / whole, form) if whole else "-"


class Ledger(dict[Any, Figures]):
    """Figures of one kind, by name: dataclasses of numbers."""

    title: ClassVar[str]

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """What is told of them, where there are any."""


Open = TypeVar("Open", bound=Ledger[Any])
_OPEN: dict[type[Ledger[Any]], Ledger[Any]] = {}


def opened(ledger: Open) -> Open:
    """Have a ledger told at the end of the run."""
    _OPEN[type(ledger)] = ledger
    return ledger


def filled() -> list[Ledger[Any]]:
    """The ledgers in which something stands, in the order of their titles."""
    return sorted((ledger for ledger in _OPEN.values() if ledger), key=lambda ledger: ledger.title)


def packed() -> bytes:
    """What this process has gathered, for another one's `unpack`."""
    return pickle.dumps([(type(ledger), dict(ledger)) for ledger in filled()])


def unpack(data: bytes) -> None:
    """Add what another process has `packed`."""
    for kind, entries in pickle.loads(data):
        ledger = _OPEN.setdefault(kind, kind())
        for name, entry in entries.items():
            ledger[name] = merged(ledger[name], entry) if name in ledger else entry


def merged(one: Figures, other: Figures) -> Figures:
    """Two entries of one name as one."""
    values = {field.name: (getattr(one, field.name), getattr(other, field.name)) for field in fields(one)}
    both = {name: a + b if isinstance(a, int) else max(a, b) for name, (a, b) in values.items()}
    return replace(one, **both)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands over what it has gathered."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["ledgers"] = packed()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The process that prints takes it; a worker that crashed has none, and pytest says that it did."""
    output: dict[str, Any] = getattr(node, "workeroutput", {})
    if "ledgers" in output:
        unpack(output["ledgers"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for ledger in filled():
        terminalreporter.section(ledger.title)
        for line in ledger.lines():
            terminalreporter.write_line(line)
