"""What workers have gathered is told as if one had."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import ledgers

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Seen:
    rows: int = 0
    worst: float = 0.0


class Book(ledgers.Ledger[Seen]):
    title = "what was seen"

    def lines(self) -> Iterator[str]:
        for name, seen in self.items():
            yield f"{name}: {seen.rows} rows, {seen.worst:g} at worst"


def test_counts_are_added_and_of_measures_the_largest_is_kept() -> None:
    assert ledgers.merged(Seen(20, 1e-7), Seen(5, 3e-6)) == ledgers.merged(Seen(5, 3e-6), Seen(20, 1e-7))
    assert ledgers.merged(Seen(20, 1e-7), Seen(5, 3e-6)) == Seen(25, 3e-6)


def test_what_another_process_packed_is_told_here(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Book({"both": Seen(10)})
    monkeypatch.setattr(ledgers, "_OPEN", {Book: mine})
    ledgers.unpack(pickle.dumps([(Book, {"both": Seen(20, 1e-7), "theirs": Seen(4)})]))
    assert mine == {"both": Seen(30, 1e-7), "theirs": Seen(4)}
    assert ledgers.filled() == [mine]


def test_a_kind_that_failed_early_is_told_too() -> None:
    """With nothing counted there are no shares; the tables of other kinds stay whole."""
    from tests.oracle.harness import Families, Figures, Tallies, Tally  # here: the workers below import this file

    none = {"a": Tally(), "b": Tally(4, 3, 2, 1)}
    first, second = Tallies(none).lines()
    assert "0 cases, - qualify; 0 texts, - ended early" in first
    assert "4 cases, 75.0% qualify; 2 texts, 50.0% ended early" in second
    _, row, total = Families({("native", "a"): Figures(texts=1)}).lines()
    assert row.endswith(" -") and total == "0 greedy tokens compared, of which - qualify"


SUITE = """
from tests.ledgers import opened
from tests.test_ledgers import Book, Seen

BOOK = opened(Book())
"""
FILE = """
from suite import BOOK, Seen

def test_it():
    BOOK["shared"] = Seen(10, 0.{n})
    BOOK["{n}"] = Seen(5)
"""


def test_the_suite_has_their_hooks(request: pytest.FixtureRequest) -> None:
    plugins = request.config.pluginmanager.get_plugins()
    for name in ("pytest_sessionfinish", "pytest_testnodedown", "pytest_terminal_summary"):
        assert any(getattr(plugin, name, None) is getattr(ledgers, name) for plugin in plugins), name


def test_every_workers_part_is_printed(tmp_path: Path) -> None:
    """Two files on two workers, and one table of both at the end. No other plugin is loaded: imports take seconds."""
    (tmp_path / "suite.py").write_text(SUITE)
    for n in (1, 2):
        (tmp_path / f"test_{n}.py").write_text(FILE.format(n=n))
    plugins = ["-p", "xdist.plugin", "-p", "tests.ledgers"]
    command = [sys.executable, "-m", "pytest", *plugins, "-n", "2", "--dist=loadfile"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path), *sys.path]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if " rows, " in line]
    assert sorted(told) == ["1: 5 rows, 0 at worst", "2: 5 rows, 0 at worst", "shared: 20 rows, 0.2 at worst"]
