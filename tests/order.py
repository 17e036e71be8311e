"""The order of the test files: the longest first, so that no worker is left alone with one at the end.

LONGEST is written by hand and true of one day; at the end of a run of all tests `misplaced` says what no longer is.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import pytest

# Those in a browser have others between them, because a browser keeps a core busy by itself.
LONGEST = (
    "equality/test_matrix.py",
    "browser/test_figures.py",
    "checkpoints/test_packing.py",
    "browser/test_states.py",
    "cli/test_chat.py",
    "browser/test_scene.py",
    "text/test_stream.py",
    "backends/test_threads.py",
    "engine/test_sharing.py",
    "browser/test_stills.py",
    "oracle/test_families.py",
    "browser/test_embed.py",
    "serve/test_server.py",
    "browser/test_labels.py",
    "checkpoints/test_damaged.py",
    "browser/test_story.py",
    "test_planner.py",
    "oracle/test_counts.py",
    "browser/test_export.py",
    "text/test_chat.py",
)
ALL = 600.0  # seconds: a run that takes less is one of some tests
LONG, SHORT = 1 / 60, 1 / 180  # of the seconds of all tests: what belongs in LONGEST, and what does not


def place(path: str) -> int:
    """Where a test file stands in the order of running."""
    return next((at for at, longest in enumerate(LONGEST) if path.endswith(longest)), len(LONGEST))


def misplaced(seconds: Mapping[str, float]) -> Iterator[str]:
    """What is wrong with LONGEST by the seconds that each file took, by its path; nothing after a run of some tests."""
    total = sum(seconds.values())
    for path, one in sorted(seconds.items(), key=lambda pair: -pair[1]) if total >= ALL else ():
        listed = place(path) < len(LONGEST)
        if one > LONG * total and not listed:
            yield f"{path} took {one:.0f} of {total:.0f} s: add it to LONGEST of tests/order.py"
        if one < SHORT * total and listed:
            yield f"{path} took {one:.0f} of {total:.0f} s: remove it from LONGEST of tests/order.py"


class Clock:
    """A plugin of pytest: the seconds of each file, and at the end of the run whether LONGEST fits them."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in misplaced(self.seconds):
            terminalreporter.write_line(line)
