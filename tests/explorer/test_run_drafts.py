"""A run's text with drafts is what an engine with speculation does: its steps, their drafts, what it keeps of them.

The oracle is that engine: it writes the same texts with the model, and its proposer drafts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.models.fixtures import make_checkpoint
from tokenwright import LLM
from tokenwright.engine import Engine
from tokenwright.errors import RequestError
from tokenwright.explorer.explorer import step_costs
from tokenwright.explorer.panels.drafting import FREE, DraftsCard, drafts_of
from tokenwright.llm.model import LoadedModel
from tokenwright.llm.run import Run
from tokenwright.sampling_params import Grammar

STORY = "Once upon a time there was a little girl named Lily. She loved to play in the park. "
PEOPLE = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"first_name": {"type": "string", "maxLength": 4}, "is_hungry": {"type": "boolean"}},
        "required": ["first_name", "is_hungry"],
        "additionalProperties": False,
    }
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (STORY, {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}),
    "seeded": (STORY * 2, {"temperature": 0.9, "seed": 5, "max_tokens": 90}),
    "repeated": (STORY * 3, {"temperature": 0.0, "max_tokens": 70}),
    "to its end": (STORY, {"temperature": 0.6, "seed": 8, "max_tokens": 300}),
    "a stop string": (STORY * 3, {"temperature": 0.0, "max_tokens": 90, "stop": ["to play"]}),
    "penalised": (STORY * 3, {"temperature": 0.5, "seed": 2, "repetition_penalty": 1.1, "max_tokens": 60}),
    "grammar": ("A person: ", {"temperature": 0.8, "seed": 4, "grammar": PEOPLE, "max_tokens": 80}),
    "one token": ("a", {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}),
}


@cache
def loaded(*, traced: bool) -> LoadedModel:
    return LoadedModel("stories", trace=traced)


@contextmanager
def written(prompt: Any, **params: Any) -> Iterator[tuple[LLM, Run]]:
    """A run to its end, in an engine that records."""
    with LLM(loaded(traced=True)) as llm, llm.run(prompt, **params) as run:
        while not run.ended:
            run.step()
        yield llm, run


def really(prompt: Any, *, free: bool, **params: Any) -> tuple[Any, list[tuple[int, tuple[int, ...]]]]:
    """What an engine with speculation makes of a prompt: its completion, and each step's position and drafts."""
    steps: list[tuple[int, tuple[int, ...]]] = []

    def watch(engine: Engine) -> None:
        commit = engine.scheduler.commit

        def noted(step: Any, results: Any) -> Any:
            steps.extend((len(chunk.sequence.tokens), chunk.drafts) for chunk in step.chunks)
            return commit(step, results)

        engine.scheduler.commit = noted  # type: ignore[method-assign]
        if free:
            engine.scheduler.proposer.costs = FREE  # type: ignore[union-attr]

    with LLM(loaded(traced=False)) as llm:
        llm.llm_engine.inspect(watch)
        [done] = llm.generate([prompt], **params)
    return done, steps


def proposed(card: DraftsCard) -> list[tuple[int, tuple[int, ...]]]:
    return [(step.position, tuple(token.id for token in step.drafts)) for step in card.each]


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_an_engine_with_speculation_does(name: str, free: bool) -> None:
    prompt, params = CASES[name]
    with written(prompt, **params) as (llm, run):
        card = drafts_of(run, step_costs(llm.llm_engine), free=free)
        done, steps = really(prompt, free=free, **params)
        ids = run.tokens[len(run.start.prompt) :]
        assert ids == done.token_ids, "drafts change no text"
    assert proposed(card) == steps
    usage = done.usage
    assert (card.drafted, card.kept) == (usage.drafted_tokens, usage.accepted_tokens)
    assert (card.steps, card.tokens) == (len(steps), len(ids))
    assert [token.id for step in card.each for token in step.written] == list(ids)
    assert all(len(step.written) == step.kept + 1 and not step.open for step in card.each)
    assert card.drafting == sum(bool(drafts) for _, drafts in steps)
    if free or name in ("repeated", "grammar"):
        assert card.drafted > 0, "the comparison is one of drafts"


def test_the_costs_are_those_of_an_engine_with_speculation() -> None:
    with written(*CASES["repeated"][:1], **CASES["repeated"][1]) as (traced, run):
        costs = step_costs(traced.llm_engine)
        card = drafts_of(run, costs)
        prompt = len(run.start.prompt)
    with LLM(loaded(traced=False)) as llm:
        proposer: Any = llm.llm_engine.inspect(lambda engine: engine.scheduler.proposer)
        assert proposer.costs == costs
    behind = card.each[1:]  # the first has computed the prompt
    rows = [1 + len(step.drafts) for step in behind]
    cost = sum(costs.of(n) + costs.context * step.position * n for n, step in zip(rows, behind, strict=True))
    assert card.cost == pytest.approx(cost)
    assert card.plain_cost == pytest.approx(sum(1 + costs.context * (prompt + n) for n in range(1, card.tokens)))
    assert card.cost < card.plain_cost


def test_a_text_that_is_being_written_has_the_steps_so_far_and_an_open_one() -> None:
    prompt, params = CASES["repeated"]
    with written(prompt, **params) as (llm, run):
        costs = step_costs(llm.llm_engine)
        whole = drafts_of(run, costs)
    opened = 0
    with LLM(loaded(traced=True)) as llm, llm.run(prompt, **params) as run:
        with pytest.raises(RequestError, match="no token yet"):
            drafts_of(run, costs)
        while not run.ended:
            run.step()
            card = drafts_of(run, costs)
            done = [step for step in card.each if not step.open]
            assert tuple(done) == whole.each[: len(done)]
            assert (card.steps, card.tokens) == (len(done), sum(len(step.written) for step in done))
            for step in card.each[len(done) :]:
                right = whole.each[len(done)]
                assert step.drafts == right.drafts
                assert step.written == right.written[: step.kept] == step.drafts[: step.kept]
                assert step.position + step.kept == len(run.tokens)
                opened += 1
    assert opened > 10


def test_a_fork_drafts_from_the_whole_text_before_it() -> None:
    prompt, params = CASES["repeated"]
    with written(prompt, **params) as (llm, run), llm.fork(run, 30) as fork:
        while not fork.ended:
            fork.step()
        card = drafts_of(fork, step_costs(llm.llm_engine))
        before, ids = fork.sequence.request.prompt, fork.tokens
    done, steps = really(list(before), free=False, **(params | {"max_tokens": len(ids) - len(before)}))
    assert done.token_ids == ids[len(before) :]
    assert proposed(card) == steps
    assert card.drafted == done.usage.drafted_tokens > 0


def test_a_model_with_states_has_no_drafts(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "qwen3-next", "qwen3-next").path
    with LLM(path, trace=True) as llm, llm.run("one two", max_tokens=4) as run:
        run.step()
        with pytest.raises(RequestError, match="cannot go back"):
            drafts_of(run, FREE)
