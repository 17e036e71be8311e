"""Values of a wrong type or out of range: each option refuses them with a RequestError that names it."""

import pytest

from tests.engine.invariants import check_invariants
from tests.models.fixtures import make_checkpoint
from tokenwright import LLM, Grammar, RequestError, plan

GREEDY = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("wrong") / "model", "llama3")[0]


@pytest.fixture(scope="module")
def run(folder):
    with LLM(folder, pages=64, trace=True) as llm:
        run = llm.run("the and", **GREEDY)
        run.step()
        run.llm = llm
        yield run


def lark(special):
    return Grammar.lark('start: "b"', special=special)


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("special", lambda run: lark(5)),
        ("special", lambda run: lark(["x"])),
        ("special", lambda run: lark([-1])),
        ("special", lambda run: run.llm.generate("the", grammar=lark([10**6]))),
        ("cache", lambda run: run.llm.generate("the", cache="no")),
        ("cache", lambda run: run.llm.run("the", cache=0)),
        ("cache", lambda run: setattr(run, "cache", "no")),
        ("markup", lambda run: run.llm.render([{"role": "user", "content": "the"}], markup="no")),
        ("adapter", lambda run: run.llm.generate("the", adapter=5)),
        ("adapter", lambda run: run.llm.stream("the", adapter={})),
        ("layer", lambda run: run.llm.run("the", layer="x")),
        ("head", lambda run: run.llm.run("the", head=True)),
        ("first_step", lambda run: run.llm.run("the", first_step="x")),
        ("step", lambda run: run.llm.fork(run, "1")),
        ("step", lambda run: run.llm.fork(run, 0.5)),
    ],
)
def test_a_request_refuses_it(run, name, ask):
    with pytest.raises(RequestError, match=rf"\b{name}\b"):
        ask(run)
    run.llm.inspect(lambda engine: check_invariants(engine.scheduler))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv", 8),
        ("kv", None),
        ("weights", 8),
        ("adapters", ["x"]),
        ("adapters", "x"),
        ("adapters", {5: "x"}),
        ("adapters", {"french": 5}),
        ("lora", 5),
        ("lora", [None]),
        ("trace", "no"),
    ],
)
def test_an_llm_refuses_it(folder, name, value):
    with pytest.raises(RequestError, match=rf"\b{name}\b"):
        LLM(folder, **{name: value})


@pytest.mark.parametrize(("name", "value"), [("kv", 8), ("weights", None), ("adapters", 5), ("adapters", [5])])
def test_a_plan_refuses_it(name, value):
    with pytest.raises(RequestError, match=rf"\b{name}\b"):
        plan("stories", **{name: value})
