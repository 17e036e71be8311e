"""Which tests coverage watches: the first case of each test that is no property and compares with no other program.

Under coverage a test takes three to ten times as long. Further cases, further examples, and the suites that compare
whole texts run hardly a line that these do not, so leaving them out makes the measured share smaller, never larger.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

UNWATCHED = frozenset(("oracle", "equality", "browser"))  # folders of tests/
WATCHED = pytest.StashKey[bool]()


def choose(items: Sequence[pytest.Item]) -> None:
    """Mark the tests to be watched."""
    seen = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        function = getattr(item, "obj", None)
        named = not UNWATCHED.isdisjoint(item.path.parts) or getattr(function, "is_hypothesis_test", False)
        item.stash[WATCHED] = not named and test not in seen
        seen.add(test)


@contextmanager
def suspended() -> Iterator[None]:
    """Take the tracer of coverage away meanwhile. Where Python needs none to measure, nothing happens."""
    here, threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.settrace(here)
        threading.settrace(threads)  # type: ignore[arg-type]
