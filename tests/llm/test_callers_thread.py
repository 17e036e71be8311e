"""An engine without a thread: the one that waits computes, and every text is that of an engine with its thread."""

import threading
from dataclasses import replace

import pytest

from tests.engines import assert_at_rest
from tests.models.fixtures import make_checkpoint
from tokenwright import LLM, EngineError, RequestError, SamplingParams
from tokenwright.llm.model import LoadedModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ([5, 6, 7], [5, 6, 7, 8, 9, 10, 11, 12, 13], [40], list(range(20, 70)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path, _ = make_checkpoint(tmp_path_factory.mktemp("llm") / "model", "llama3")
    return LoadedModel(path, trace=True)


@pytest.fixture
def engines(model, monkeypatch):
    """An LLM with its thread, and one of a process that can start none."""
    options = {"pages": 40, "page_size": 4, "token_budget": 16}
    with LLM(model, **options) as usual, monkeypatch.context() as patched:
        start = threading.Thread.start

        def of_torch(thread):  # which has its number of threads set in a short-lived one
            assert not thread.name.startswith("tokenwright"), "a thread of ours was started"
            start(thread)

        patched.setattr(threading.Thread, "start", of_torch)
        with LLM(model, **options, threads=0) as alone:
            yield usual, alone
            assert_at_rest(alone)


def texts(completions):
    return [(one.token_ids, one.logprobs, one.finish_reason) for one in completions]


def test_texts_alone_and_in_a_batch_are_equal(engines):
    sampled = replace(GREEDY, temperature=1.0, seed=3, n=2)
    each = [texts(llm.generate(list(PROMPTS), [GREEDY, sampled, GREEDY, sampled])) for llm in engines]
    assert each[0] == each[1]
    preempted = [llm.generate(list(PROMPTS) * 3, replace(GREEDY, max_tokens=40)) for llm in engines]
    assert texts(preempted[0]) == texts(preempted[1])
    assert any(one.usage.preemptions for one in preempted[1]), "the pages suffice for all, so that none is preempted"
    assert texts(engines[0].generate([5, 6, 7], GREEDY, cache=False)) == texts(engines[1].generate([5, 6, 7], GREEDY))


def test_threads_that_ask_take_turns(engines):
    usual, alone = engines
    params, found = replace(GREEDY, max_tokens=30), {}

    def ask(at):
        found[at] = alone.generate(PROMPTS[at % 4], params)

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [texts(usual.generate(prompt, params)) for prompt in PROMPTS]
    assert [texts(found[at]) for at in range(8)] == expected * 2


def test_streams_that_interleave_and_end_early_leave_others_as_they_are(engines):
    usual, alone = engines
    expected = usual.generate(list(PROMPTS), replace(GREEDY, max_tokens=30))
    streams = [alone.stream(prompt, replace(GREEDY, max_tokens=30)) for prompt in PROMPTS]
    got = [[], [], [], []]
    for _ in range(8):
        for stream, tokens in zip(streams, got, strict=True):
            tokens.append(next(stream).token_id)
    streams[1].close()  # cancelled
    for at in (0, 2, 3):
        got[at] += [piece.token_id for piece in streams[at]]
    for at in (0, 2, 3):
        assert tuple(got[at]) == expected[at].token_ids
    assert tuple(got[1]) == expected[1].token_ids[:8]


def test_runs_and_their_forks_are_equal(engines):
    found = []
    for llm in engines:
        with llm.run([5, 6, 7, 8, 9], GREEDY) as run:
            for _ in range(6):
                run.step()
            run.cache = False
            run.step()
            run.cache = True
            fork = llm.fork(run, 3, token=77)
            while not fork.ended:
                fork.step()
            while not run.ended:
                run.step()
            rows = [run.attention(step, 1, 1) for step in (0, 5)]
            found.append((run.tokens, fork.tokens, rows, [frame.layer_tokens for frame in run.frames]))
            fork.close()
    assert found[0] == found[1]


def test_an_engine_that_fails_or_is_closed_says_so(engines):
    _, alone = engines
    with LLM(alone.llm_engine.loaded, pages=40, threads=0) as other:
        stream = other.stream([5, 6, 7], GREEDY)
        next(stream)

        def broken():
            raise MemoryError("planted")

        other.llm_engine.loop.engine.scheduler.schedule = broken
        with pytest.raises(EngineError, match="planted"):
            list(stream)
        with pytest.raises(EngineError, match="planted"):
            other.generate([5], GREEDY)
    with pytest.raises(RequestError, match="closed"):
        other.generate([5], GREEDY)


def test_a_listener_that_waits_for_its_own_engine_is_told(engines):
    loop = engines[1].llm_engine.loop
    with pytest.raises(AssertionError, match="must not wait"):
        loop.call(lambda _: loop.call(lambda _: None))
