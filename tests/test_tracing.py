"""Coverage watches the first case of each test, and nothing where it is suspended."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import tracing


def item(nodeid: str, property_test: bool = False) -> Any:
    function = SimpleNamespace(is_hypothesis_test=property_test)
    return SimpleNamespace(nodeid=nodeid, path=Path(nodeid.partition("::")[0]), obj=function, stash={})


def test_the_first_case_of_each_test_is_watched() -> None:
    items = [
        item("tests/engine/test_a.py::test_one[x]"),
        item("tests/engine/test_a.py::test_one[y]"),
        item("tests/engine/test_a.py::TestMore::test_one"),
        item("tests/engine/test_b.py::test_one[x]"),
        item("tests/engine/test_b.py::test_drawn", property_test=True),
        item("tests/oracle/test_c.py::test_one"),
    ]
    tracing.choose(items)
    assert [one.stash[tracing.WATCHED] for one in items] == [True, False, True, True, False, False]


def test_a_tracer_comes_back() -> None:
    before = sys.gettrace()

    def mine(frame: object, event: str, argument: object) -> None: ...

    try:
        sys.settrace(mine)
        with tracing.suspended():
            assert sys.gettrace() is None
        assert sys.gettrace() is mine
    finally:
        sys.settrace(before)
