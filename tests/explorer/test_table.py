"""The table of what the page asks: read without HTTP it says the same as with it, and loads nothing of the server."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from tests.engines import until
from tests.serve.conftest import begin, served
from tokenwright import RequestError
from tokenwright.explorer.batches import Batches
from tokenwright.explorer.dataclass_reader import Between, Length, read
from tokenwright.explorer.explorer import Download, Explorer, NewRun, OpenedModel, PanelError
from tokenwright.explorer.table import TABLE, find, values_of
from tokenwright.explorer.viewer import Viewer
from tokenwright.trace.frame_codec import unpack

FOREIGN = ("fastapi", "starlette", "pydantic", "pydantic_core", "anyio", "uvicorn", "torch")


def modules(code: str) -> set[str]:
    """The modules that code loads in a fresh interpreter."""
    asked = f"import sys\n{code}\nprint(*(name for name, one in sys.modules.items() if one is not None))"
    return set(subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.split())


def test_the_table_needs_nothing_of_the_server():
    loaded = modules("import tokenwright.explorer.table, tokenwright.explorer.viewer")
    assert "tokenwright.explorer.panels.race" in loaded
    assert [name for name in loaded if name.split(".")[0] in FOREIGN] == []
    assert [name for name in loaded if name.startswith(("tokenwright.serve", "tokenwright.cluster"))] == []


def asked(explorer: Explorer, method: str, target: str, body: object = None) -> Any:
    """The answer to a request, as a worker of a browser gives it."""
    path, _, query = target.partition("?")
    route, places = find(method, path)
    given = route.arguments(places, dict(pair.split("=") for pair in query.split("&") if pair), body)
    answer = route.answer(explorer, **given, **({"salt": "s"} if "salt" in route.parameters else {}))
    if route.in_parts:
        *_, answer = answer
    return answer


@pytest.fixture(scope="module")
def door(tiny):
    with served(tiny, pages=64) as (client, explorer):
        yield client, explorer


PLACES = (
    *("/status", "/model", "/chat/model", "/learn", "/pages", "/conversations"),
    *("/runs/{}", "/runs/{}/steps/2", "/runs/{}/attention?step=2&layer=0&head=1", "/runs/{}/heads?step=1"),
    *("/runs/{}/sampler?step=2&top_k=3", "/runs/{}/branches", "/runs/{}/lens?step=1", "/runs/{}/drafts?free=true"),
    *("/runs/{}/block?step=2&layer=1", "/runs/{}/way?step=2&layer=1&head=0&position=1", "/runs/{}/atlas?step=2"),
    *(
        "/runs/{}/matrix?step=2&layer=0&head=0",
        "/runs/{}/trace.json",
        "/runs/{}/perfetto.json",
        "/runs/{}/logits?step=2",
    ),
)


def test_http_says_what_the_functions_say(door):
    client, explorer = door
    run = begin(client, max_tokens=3, temperature=0.0)["run"]
    explorer.player(run).play(None)
    until(lambda: explorer.player(run).phase == "done")
    for place in PLACES:
        answer, reply = asked(explorer, "GET", place.format(run)), client.get(place.format(run))
        if isinstance(answer, bytes):
            assert reply.content == answer
        else:
            content = answer.content if isinstance(answer, Download) else values_of(answer)
            assert reply.json() == json.loads(json.dumps(content)), place


def test_every_row_is_found_by_its_path_and_nothing_else_is():
    for route in TABLE:
        found, places = find(route.method, route.path.replace("{", "").replace("}", ""))
        assert found is route and list(places) == list(places.values())
    with pytest.raises(PanelError, match="there is no /runs/x/y here"):
        find("GET", "/runs/x/y")


def test_a_run_is_played_and_watched_without_a_thread(tiny_llm):
    explorer = Explorer(OpenedModel("tiny", tiny_llm))
    card = explorer.begin(NewRun(prompt="ab", max_tokens=6, ignore_eos=True, temperature=0.0))
    viewer = Viewer(explorer, explorer.player(card.run), 0)
    assert [json.loads(message)["kind"] for message in viewer.news()] == ["run", "state"]
    assert 0 < explorer.runs.turn() <= 600, "paused: until its lease ends"
    viewer.obey('{"op": "step"}')
    assert explorer.runs.turn() == 0
    _labels, frame, state = viewer.news()
    assert unpack(frame).step == 0 and json.loads(state)["state"] == "running"
    assert 0 < explorer.runs.turn() <= 600
    viewer.obey('{"op": "play", "pace": 20}')
    assert explorer.runs.turn() == 0
    assert 0 < explorer.runs.turn() <= 0.05, "the rest of its time at this pace"
    viewer.obey('{"op": "play", "pace": null}')
    while explorer.runs.turn() is not None:
        pass
    steps = [unpack(message).step for message in viewer.news() if isinstance(message, bytes)]
    assert steps == [1, 2, 3, 4, 5] and viewer.player.phase == "done"
    [alone] = tiny_llm.generate(["ab"], max_tokens=6, ignore_eos=True, temperature=0.0)
    assert viewer.player.run.tokens[-6:] == tuple(alone.token_ids)
    assert explorer.runs.remove(card.run) and not explorer.runs.remove(card.run)


def test_a_batch_ends_with_its_lease_without_a_thread(tiny_llm):
    batches = Batches(lease_s=0.05)
    request = tiny_llm.prepare("abc", tiny_llm.sampling(temperature=0.0, max_tokens=4))
    identity = batches.begin(tiny_llm, ["abc"], [request])
    assert 0 < batches.turn() <= 0.05 and batches.get(identity) is not None
    time.sleep(0.06)
    assert batches.turn() is None and batches.get(identity) is None and not batches.remove(identity)


@pytest.fixture(scope="module")
def tiny_llm(tiny):
    from tokenwright import LLM

    with LLM(tiny, trace=True, pages=64) as llm:
        yield llm


@dataclass(frozen=True, slots=True)
class Inner:
    size: Annotated[int, Between(1, 3)]


@dataclass(frozen=True, slots=True)
class Outer:
    kind: Literal["a", "b"]
    share: float | None = None
    each: Annotated[list[Inner], Length(0, 2)] = field(default_factory=list)
    named: dict[Annotated[str, Length(0, 3)], int | str] = field(default_factory=dict)
    on: bool = False


def test_an_object_becomes_a_dataclass():
    found = read(Outer, {"kind": "b", "share": 1, "each": [{"size": 2}], "named": {"x": 1, "y": "z"}, "on": True})
    assert found == Outer("b", 1.0, [Inner(2)], {"x": 1, "y": "z"}, on=True)
    assert read(Outer, {"kind": "a", "share": None}) == Outer("a")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "the body must be an object, not a list"),
        ({}, "kind: this field is required"),
        ({"kind": "c"}, "kind must be 'a' or 'b', not 'c'"),
        ({"kind": "a", "share": True}, "share must be a number, not true"),
        ({"kind": "a", "share": 10**400}, "share must be a finite number, not "),
        ({"kind": "a", "share": float("inf")}, "share must be a finite number, not inf"),
        ({"kind": "a", "each": [{"size": 2}, {"size": 4}]}, "each.1.size must be at most 3, not 4"),
        ({"kind": "a", "each": [{"size": 2, "more": 1}]}, "each.0.more: this API has no such field"),
        ({"kind": "a", "each": [1, 2, 3]}, "each: it has more than 2 entries; leave some out"),
        ({"kind": "a", "named": {"long": 1}}, "named: it has more than 3 characters"),
        ({"kind": "a", "named": {"x": 1.5}}, "named.x must be a whole number, or text, not 1.5"),
        ({"kind": "a", "on": 1}, "on must be true or false, not 1"),
        ({"kind": "a", "\ud800": 1}, "\ud800: this API has no such field; remove it"),
    ],
)
def test_what_a_field_may_not_be_is_said_with_its_path(data, said):
    with pytest.raises(RequestError) as refused:
        read(Outer, data)
    assert str(refused.value).startswith(said)
