"""The server under drawn requests: twenty seconds of one seed each time, and ten minutes of another one as a sweep.

Planted faults prove that the fuzzer finds what it looks for.
"""

from pathlib import Path

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.fuzzer import Fuzzer, reductions
from tests.fuzz.operations import Asked, operations_of
from tests.fuzz.served import PLANTS
from tests.fuzz.values import Draw
from tests.serve.talking import make_talker

SCHEMAS = "tools|functions|.*schema|.*format|text|output_config|guided_json|parameters|.*pattern|.*regex"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.slow
def test_some_drawn_requests_break_no_server(folder: Path) -> None:
    assert not fuzz(folder, 1 / 3, "a minute", "one,many,cluster")  # the sweep has all kinds of servers


@pytest.mark.sweep
def test_ten_minutes_of_drawn_requests_break_no_server(folder: Path) -> None:
    assert not fuzz(folder, 10.0, "ten minutes")


@pytest.mark.sweep
@pytest.mark.parametrize("fault", PLANTS)
def test_a_planted_fault_is_found_within_a_minute(folder: Path, fault: str, tmp_path: Path) -> None:
    """The first violation is that of the plant, and comes down to one request: a small one, but for what adds up."""
    fuzzer = Fuzzer("one", folder, "plants", fault, SCHEMAS, tmp_path)
    [found] = fuzzer.run(60, first=True)
    slow = {"memory", "files", "threads", "stop"}
    assert found.kind in {"late", "log", "no answer", "status 500", *slow}
    assert len(found.asked) == 1
    assert found.kind in slow or len(found.asked[0].body) < 100_000


def test_every_route_is_asked_and_a_seed_gives_the_same_requests() -> None:
    operations = operations_of("many")
    asked = [operations.ask(Draw(f"same {at}"), (), "") for at in range(1200)]
    assert asked[:50] == [operations.ask(Draw(f"same {at}"), (), "") for at in range(50)]
    met = {one.path.partition("{")[0] for one in operations.every}
    assert all(any(one.target.startswith(path) for one in asked) for path in met)
    assert {"/api/copy", "/v1/responses", "/runs", "/calculate", "/ping"} <= {one.path for one in operations.every}
    assert all(one == Asked.loaded(one.dumped()) for one in asked)


def test_a_request_is_made_as_small_as_it_can_be() -> None:
    """By a predicate in the place of a server: the body has a text that begins so, in a list of a list."""
    body = b'{"a": {"b": 1}, "list": [1, ["abcdef", 3]], "c": []}'
    asked = Asked("POST", "/x", (("X-More", "1"),), body, chunked=True)
    while one := next((one for one in reductions(asked) if b'[["abc' in one.body.replace(b"[1, ", b"[")), None):
        asked = one
    assert asked == Asked("POST", "/x", (), b'{"list": [["abc"]]}')
