"""Both ways of a run: the one that it did not go is computed anew, with the same text, and counts its own work."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tokenwright import LLM
from tokenwright.explorer.panels.times import run_halves
from tokenwright.llm.run import Run
from tokenwright.llm.run_trace import trace_of
from tokenwright.trace.summary import RunHalf

PROMPT = "Once upon a time, there was a little fox who"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("stories", trace=True, pages=64) as llm:
        yield llm


def ended(run: Run) -> Run:
    while not run.ended:
        run.step()
    return run


def halves_of(run: Run, **options: object) -> list[RunHalf]:
    *_, found = run_halves(run, **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_cached_run_gets_its_steps_without_the_cache(llm: LLM) -> None:
    run = ended(llm.run(PROMPT, max_tokens=6, seed=1, ignore_eos=True, layer=2, head=1))
    [half] = halves_of(run)
    assert not half.cache
    assert [frame.token for frame in half.frames] == [frame.token for frame in run.frames]
    layers = llm.config.layers
    for own, other in zip(run.frames, half.frames, strict=True):
        context = own.start + own.length
        assert (other.start, other.length, other.cache) == (0, context, False)
        assert other.layer_tokens == layers * context
        assert other.attention is not None and own.attention is not None
        assert (other.attention.layer, other.attention.head) == (2, 1)
    assert half.frames[-1].recomputed == half.frames[-1].length - 1

    values = trace_of(run.engine, run, [half])
    [kept] = values["halves"]
    assert kept["summary"]["layer_tokens"] == kept["summary"]["naive"] == values["state"]["summary"]["naive"]
    assert [step["step"] for step in kept["steps"]] == [step["step"] for step in values["steps"]]


def test_a_mixed_run_and_a_branch_get_what_they_lack(llm: LLM) -> None:
    run = llm.run(PROMPT, max_tokens=5, seed=1, ignore_eos=True)
    run.step()
    run.cache = False
    ended(run)
    with_cache, without = halves_of(run)
    assert with_cache.cache and not without.cache
    ids = [frame.token for frame in run.frames]
    assert [frame.token for frame in with_cache.frames] == [frame.token for frame in without.frames] == ids
    assert with_cache.frames[-1].length == 1

    branch = ended(llm.fork(run, 1, llm.tokenizer.encode("cat")[0], max_tokens=5))
    [half] = halves_of(branch) if not branch.frames[0].cache else [one for one in halves_of(branch) if not one.cache]
    assert [frame.token for frame in half.frames] == [frame.token for frame in branch.frames]
    assert half.frames[0].step == branch.first_step


def test_a_half_ends_with_its_time_and_where_the_text_parts(llm: LLM) -> None:
    run = ended(llm.run(PROMPT, max_tokens=5, seed=1, ignore_eos=True))
    [short] = halves_of(run, budget_s=0.0)
    assert len(short.frames) == 1
    assert trace_of(run.engine, run, [short])["halves"][0]["summary"] is None, "no sum of a part"
    run.start = replace(run.start, params=replace(run.start.params, seed=2, temperature=3.0))
    [parted] = halves_of(run)
    assert len(parted.frames) < 5


def test_a_run_that_has_written_nothing_has_empty_halves(llm: LLM) -> None:
    run = llm.run(PROMPT, max_tokens=5)
    assert halves_of(run) == []
    run.close()
