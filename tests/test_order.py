"""The long test files are there, begin, and are found where the list of them has become wrong."""

from pathlib import Path

import pytest

from tests.order import LONGEST, Clock, misplaced, place

HERE = Path(__file__).parent


def test_the_longest_files_are_there() -> None:
    assert [one for one in LONGEST if not (HERE / one).is_file()] == []
    assert len(set(LONGEST)) == len(LONGEST)


def test_they_begin() -> None:
    others = ["tests/test_api.py", "tests/browser/test_axe.py"]
    paths = sorted([*others, *(f"tests/{one}" for one in reversed(LONGEST))], key=place)
    assert paths == [*(f"tests/{one}" for one in LONGEST), *others]


def test_a_list_that_has_become_wrong_is_told() -> None:
    usual = {f"tests/{one}": 30.0 for one in LONGEST} | {f"tests/test_{n}.py": 5.0 for n in range(90)}
    assert list(misplaced(usual)) == []
    grown, shrunk = "tests/test_7.py", f"tests/{LONGEST[0]}"
    told = list(misplaced(usual | {grown: 80.0, shrunk: 1.0}))
    assert [line.split(":")[1].split()[0] for line in told] == ["add", "remove"]
    assert told[0].startswith(f"{grown} took 80 of ") and told[1].startswith(f"{shrunk} took 1 of ")
    assert list(misplaced({grown: 80.0, shrunk: 1.0})) == [], "a run of some tests"


def test_the_suite_tells_it(pytestconfig: pytest.Config) -> None:
    [clock] = [one for one in pytestconfig.pluginmanager.get_plugins() if isinstance(one, Clock)]
    assert any(path.endswith("tests/test_order.py") for path in clock.seconds)
