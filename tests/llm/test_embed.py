"""Embeddings: the mean of transformers' hidden states, the same in any batch, on both backends."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.invariants import check_invariants
from tests.engine.scripted import scripted_engine
from tests.engines import assert_at_rest, held, reached, until
from tests.models.fixtures import make_checkpoint
from tests.oracle.harness import prompt_of
from tokenwright import LLM, ContextError, EngineError, RequestError, SamplingParams
from tokenwright.engine import Failed, Finished, HiddenStates, LogitsNeeded, Output, Request, Step

KERNELS = ("native", "reference")
TEXTS = [prompt_of(length, seed) for seed, length in enumerate((1, 40, 7, 23))]


@pytest.fixture(scope="module", params=["llama3", "gpt2", "qwen3", "dynamic"])
def made(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("embed") / "model", request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path, _ = make_checkpoint(tmp_path_factory.mktemp("embed") / "llama", "llama3")
    return path


@pytest.mark.parametrize("kernels", KERNELS)
def test_it_is_the_mean_of_transformers_hidden_states(made, kernels, monkeypatch):
    if kernels == "reference":
        monkeypatch.setattr("tokenwright.llm.model.find_kernels", lambda: None)
    path, oracle = made
    with LLM(path, page_size=4, token_budget=11, dtype="float32") as llm:
        found = llm.embed(TEXTS)
        assert_at_rest(llm)
    assert found.dtype == np.float32
    for text, ours in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            theirs = oracle.base_model(torch.tensor([text]), use_cache=False).last_hidden_state[0].mean(0)
        assert np.abs(ours - theirs.numpy()).max() < 1e-4


@pytest.mark.parametrize("weights", ["native", "int8"])
def test_what_a_text_gets_depends_on_that_text_alone(llama, weights):
    """Alone in one chunk; then cut, beside others, while other texts are generated, and preempted by them."""
    with LLM(llama, weights=weights) as llm:
        alone = [llm.embed(text) for text in TEXTS]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with LLM(llama, weights=weights, page_size=4, pages=24, token_budget=9) as llm:
        with held(llm):
            streams = [llm.stream(text, params) for text in TEXTS[1:3]]
            found: list[np.ndarray] = []
            embedding = threading.Thread(target=lambda: found.append(llm.embed(TEXTS)))
            embedding.start()
            until(lambda: llm.llm_engine.loop._mailbox.qsize() >= 3)
        embedding.join()
        beside = [list(stream) for stream in streams]
        assert_at_rest(llm)
        assert [len(pieces) for pieces in beside] == [30, 30]
        assert np.array_equal(llm.embed(TEXTS[::-1])[::-1], found[0])
    assert np.array_equal(found[0], np.concatenate(alone))


def test_text_is_tokenised_as_a_prompt_is(llama):
    with LLM(llama) as llm:
        assert llm.embed("the and of").shape == (1, llm.graph.width)
        assert np.array_equal(llm.embed(["the and of"]), llm.embed([llm.tokenizer.encode("the and of")]))
        assert llm.embed([]).shape == (0, llm.graph.width)


def test_the_form_for_asyncio_gives_the_same(llama):
    with LLM(llama, token_budget=9) as llm:

        async def several() -> list[np.ndarray]:
            return await asyncio.gather(llm.aembed(TEXTS), llm.aembed(TEXTS[1]), llm.aembed([]))

        whole, one, none = asyncio.run(several())
        assert np.array_equal(whole, llm.embed(TEXTS))
        assert np.array_equal(one[0], whole[1])
        assert none.shape == (0, llm.graph.width)
        assert_at_rest(llm)


def test_a_cancelled_task_frees_its_pages(llama):
    with LLM(llama, token_budget=4) as llm:

        async def cancelled() -> None:
            with held(llm):
                task = asyncio.create_task(llm.aembed(TEXTS))
                await reached(lambda: llm.llm_engine.streams._receivers)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        asyncio.run(cancelled())
        assert_at_rest(llm)


def test_texts_that_cannot_be_embedded_are_refused(llama):
    with LLM(llama) as llm:
        with pytest.raises(RequestError, match="a text to embed has no tokens"):
            llm.embed([[5], []])
        with pytest.raises(ContextError):
            llm.embed([[5], [5] * (llm.context + 1)])
        assert_at_rest(llm)
        assert llm.embed([[5] * llm.context]).shape == (1, llm.graph.width)
    with pytest.raises(RequestError, match="closed"):
        llm.embed("x")


def test_rows_that_are_not_finite_fail_their_text_alone(llama):
    with LLM(llama, token_budget=64) as llm:
        right = llm.embed(TEXTS)
        forward = llm.engine.runner.forward

        def spoilt(step: Step) -> Output[Any]:
            output = forward(step)
            for chunk, rows in zip(step.chunks, output.rows, strict=True):
                if chunk.sequence.tokens == list(TEXTS[2]):
                    output.hidden[rows[-1]] = float("nan")
            return output

        llm.engine.runner.forward = spoilt
        with pytest.raises(EngineError, match=r"a text could not be embedded: .* not finite"):
            llm.embed(TEXTS)
        assert np.array_equal(llm.embed([TEXTS[0], TEXTS[3]]), right[[0, 3]])
        assert_at_rest(llm)


def test_a_preempted_text_reports_each_row_once():
    engine, _ = scripted_engine(lambda text: text[-1] + 1, pages=8, token_budget=5)
    tokens = tuple(range(13))
    sequence = engine.submit(Request(tokens, SamplingParams(max_tokens=0), share=False, hidden=True))
    events = engine.step()
    engine.scheduler.preempt(sequence.group)
    while engine.busy:
        events += engine.step()
        check_invariants(engine.scheduler)
    rows = [event for event in events if isinstance(event, HiddenStates)]
    assert [event.start for event in rows] == [0, 5, 10]
    assert [row for event in rows for row in event.rows] == [list(tokens[: n + 1]) for n in range(13)]
    assert sequence.counts.forwarded == 18
    assert isinstance(events[-1], Finished)
    assert not any(isinstance(event, Failed) for event in events)


def test_a_text_to_embed_uses_no_cached_pages():
    """Its rows are needed, so a prefix that another text has computed is computed again."""
    engine, _ = scripted_engine(lambda text: text[-1] + 1, pages=8)
    engine.submit(Request(tuple(range(13)), SamplingParams(max_tokens=1)))
    while engine.busy:
        engine.step()
    sequence = engine.submit(Request(tuple(range(13)), SamplingParams(max_tokens=0), hidden=True))
    while engine.busy:
        engine.step()
    assert (sequence.counts.forwarded, sequence.counts.reused) == (13, 0)


def test_a_chunk_to_embed_needs_no_logits(llama):
    with LLM(llama) as llm:
        steps: list[Step] = []
        forward = llm.engine.runner.forward
        llm.engine.runner.forward = lambda step: (steps.append(step), forward(step))[1]
        llm.embed([5, 6, 7])
        [step] = steps
    assert [chunk.logits_needed for chunk in step.chunks] == [LogitsNeeded.HIDDEN]
