"""The front door: texts, threads, ends and errors, on small random models."""

import asyncio
import gc
import re
import resource
import signal
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engines import assert_at_rest, held
from tests.models.fixtures import make_checkpoint
from tokenwright import (
    LLM,
    CapacityError,
    ContextError,
    EngineError,
    Grammar,
    RequestError,
    SamplingParams,
)
from tokenwright.backends.torch.border import tensor
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.llm.model import LoadedModel
from tokenwright.units import read_bytes

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, _ = make_checkpoint(tmp_path_factory.mktemp("llm") / "model", "llama3")
    return path


@pytest.fixture(scope="module")
def loaded(folder):
    """The weights, which the engines of all tests share."""
    return LoadedModel(str(folder))


@pytest.fixture
def llm(loaded):
    with LLM(loaded, pages=64, page_size=4, token_budget=32) as model:
        yield model
        assert_at_rest(model)


def test_the_pieces_are_the_completion(llm):
    stream = llm.stream("the and of", GREEDY)
    pieces = list(stream)
    done = stream.completion
    assert "".join(piece.text for piece in pieces) == done.text
    assert tuple(piece.token_id for piece in pieces) == done.token_ids
    assert tuple(piece.logprob for piece in pieces) == done.logprobs
    assert done.finish_reason == "length"
    ids = llm.tokenizer.encode("the and of")
    assert done.text == llm.tokenizer.decode([*ids, *done.token_ids]).removeprefix(llm.tokenizer.decode(ids))


def test_usage_is_counted(llm):
    done = llm.generate([5, 6, 7], GREEDY)[0]
    usage = done.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 12)
    assert (usage.forward_tokens, usage.layer_tokens) == (14, 14 * llm.config.layers)
    assert usage.kv_bytes == 14 * llm.config.layers * 2 * llm.config.kv_heads * llm.config.head_size * 4
    assert usage.preemptions == 0
    assert usage.seed is None
    assert 0 <= usage.queue_s <= usage.ttft_s <= usage.total_s == pytest.approx(sum(usage.step_s))
    assert usage.tokens_per_second == pytest.approx(11 / (usage.total_s - usage.ttft_s))
    naive = llm.generate([5, 6, 7], GREEDY, cache=False)[0]
    assert naive.token_ids == done.token_ids
    assert naive.usage.forward_tokens == sum(range(3, 15))
    assert naive.usage.kv_bytes == 0


def test_usage_of_nothing(llm):
    done = llm.generate("the", SamplingParams(max_tokens=0))[0]
    assert (done.text, done.token_ids, done.finish_reason) == ("", (), "length")
    assert (done.usage.ttft_s, done.usage.total_s, done.usage.tokens_per_second) == (None, 0.0, None)


def test_a_batch_gives_each_its_own_text_in_order(llm):
    prompts = [[5 + i, 6, 7 + i] for i in range(9)]
    params = [SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=3 + i) for i in range(9)]
    together = llm.generate(prompts, params)
    for prompt, its, done in zip(prompts, params, together, strict=True):
        alone = llm.generate([prompt], its)[0]
        assert (alone.text, alone.token_ids, alone.finish_reason) == (done.text, done.token_ids, done.finish_reason)


def test_seeds(llm):
    def ids(seed):
        done = llm.generate("the and", SamplingParams(seed=seed, max_tokens=20, ignore_eos=True))[0]
        return done.usage.seed, done.token_ids

    assert ids(3) == ids(3)
    assert ids(3)[1] != ids(4)[1]
    fresh, text = ids(None)
    assert ids(fresh) == (fresh, text), "the seed that is told gives the text again"


def test_end_tokens_end_unless_ignored(llm):
    free = llm.generate("the", GREEDY)[0]
    llm.llm_engine.inputs.eos_ids = frozenset({free.token_ids[2]})
    first = free.token_ids.index(free.token_ids[2])
    ended = llm.generate("the", SamplingParams(temperature=0.0))[0]
    assert ended.finish_reason == "eos"
    assert ended.token_ids == free.token_ids[: first + 1]
    assert llm.generate("the", GREEDY)[0].token_ids == free.token_ids


def test_score_is_the_log_softmax(llm):
    ids = [5, 9, 200, 31, 7, 7, 80]
    logits, _ = llm.model(ids)
    right = tensor(logits).log_softmax(-1)[range(6), ids[1:]]
    assert llm.score(ids) == pytest.approx(right.tolist(), abs=1e-4)
    assert llm.score([5]).shape == (0,)
    assert llm.score(ids).dtype == np.float64


def test_a_stream_that_is_closed_or_dropped_frees_its_pages(llm):
    stream = llm.stream("the", GREEDY)
    first = next(stream)
    stream.close()
    assert (stream.completion.finish_reason, stream.completion.token_ids) == ("aborted", (first.token_id,))
    assert len(list(stream)) == 0
    llm.generate("the", GREEDY)
    endless = llm.stream("the", replace(GREEDY, max_tokens=200))
    next(endless)
    del endless
    gc.collect()
    assert_at_rest(llm)


def test_a_stream_closed_in_the_middle_of_a_step_disturbs_nobody(llm):
    right = llm.generate("and", GREEDY)[0]
    victim = llm.stream("the", SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    next(victim)
    forward = llm.engine.runner.forward

    def forward_and_drop(step):
        victim.close()  # as a finalizer would, in the engine's own thread: must neither wait nor disturb
        return forward(step)

    llm.engine.runner.forward = forward_and_drop
    assert llm.generate("and", GREEDY)[0].token_ids == right.token_ids
    assert victim.completion.finish_reason == "aborted"


def test_an_interrupted_client_leaves_its_own_text_and_all_others_whole(llm):
    right = [done.token_ids for done in llm.generate(["the", "and"], GREEDY)]
    first, second = llm.stream("the", GREEDY), llm.stream("and", GREEDY)
    next(first)
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with held(llm), pytest.raises(KeyboardInterrupt):
        list(iter(first._inbox.get, None))  # what was delivered, and then it waits
    first.close()
    assert tuple(piece.token_id for piece in second) == right[1]
    assert llm.generate("the", GREEDY)[0].token_ids == right[0]


def _interrupt(*_):
    raise KeyboardInterrupt


def test_threads_share_the_engine(llm):
    alone = [llm.generate([9 + i, 3], GREEDY)[0].token_ids for i in range(8)]
    found = {}

    def work(i):
        if i % 2:
            found[i] = tuple(piece.token_id for piece in llm.stream([9 + i, 3], GREEDY))
        else:
            found[i] = llm.generate([9 + i, 3], GREEDY)[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(8)] == alone


def test_texts_of_several_threads_are_one_batch(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.scheduler, "proposer", None)  # one token a step
    forward, sizes = llm.engine.runner.forward, []

    def counted(step):
        sizes.append(len(step.chunks))
        return forward(step)

    llm.engine.runner.forward = counted
    with held(llm):
        streams = [llm.stream([9 + i, 3], GREEDY) for i in range(8)]
    threads = [threading.Thread(target=list, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [8] * 12, "every step is shared by all eight"


def test_a_token_reaches_its_reader_before_the_next_step_ends(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.scheduler, "proposer", None)  # one token a step
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    fetched, steps, seen = [0, 0, 0], [], []
    forward = llm.engine.runner.forward

    def patient(step):
        """Each step waits until every reader has the tokens of the steps before."""
        seen.append(any(min(fetched) >= len(steps) or time.sleep(0.01) for _ in range(300)))
        steps.append(step)
        return forward(step)

    def read(i):
        for _ in streams[i]:
            fetched[i] += 1

    llm.engine.runner.forward = patient
    with held(llm):
        streams = [llm.stream(prompt, params) for prompt in ("the", "and", "of")]
    threads = [threading.Thread(target=read, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 5


def test_astream_writes_what_stream_writes_and_ends_when_closed_or_cancelled(llm):
    async def run():
        right = llm.generate("the", GREEDY)[0].token_ids

        async def collect():
            return tuple([piece.token_id async for piece in llm.astream("the", GREEDY)])

        assert await asyncio.gather(collect(), collect()) == [right, right]
        agen = llm.astream("the", GREEDY)
        await anext(agen)
        await agen.aclose()
        begun = asyncio.Event()

        async def endless():
            async for _ in llm.astream("the", replace(GREEDY, max_tokens=200)):
                begun.set()

        task = asyncio.create_task(endless())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_event_loops_that_have_ended_are_not_kept(llm):
    async def read():
        [completion] = await llm.agenerate("the", GREEDY)
        return completion.token_ids, weakref.ref(asyncio.get_running_loop())

    found = [asyncio.run(read()) for _ in range(3)]
    gc.collect()
    assert len({ids for ids, _ in found}) == 1
    assert [event_loop() for _, event_loop in found] == [None] * 3


def test_astream_prepares_what_takes_time_in_another_thread(llm, monkeypatch):
    """Short prompts are tokenised in the event loop: that is faster than to wake a thread."""
    grammar = replace(GREEDY, grammar=Grammar.regex("[a-z ]+"), ignore_eos=False, max_tokens=4)
    requests = [("the", GREEDY), ("the " * 150, GREEDY), ("the", grammar)]
    right = [llm.generate(*request)[0].token_ids for request in requests]
    build, threads = llm.llm_engine.inputs.build, []

    def watched(*args, **options):
        threads.append(threading.current_thread() is threading.main_thread())
        return build(*args, **options)

    async def read(prompt, params):
        return tuple([piece.token_id async for piece in llm.astream(prompt, params)])

    async def run():
        return [await read(*request) for request in requests]

    monkeypatch.setattr(llm.llm_engine.inputs, "build", watched)
    assert asyncio.run(run()) == right
    assert threads == [True, False, False]


def test_astream_does_not_wait_in_the_event_loop_for_another_text_s_step(llm):
    turning, go_on, waits = threading.Event(), threading.Event(), []
    forward = llm.engine.runner.forward

    def slow(step):
        turning.set()
        waits.append(go_on.wait(10))  # set from the event loop, if that is free
        return forward(step)

    async def collect(prompt):
        return [piece.token_id async for piece in llm.astream(prompt, GREEDY)]

    async def run():
        first = asyncio.create_task(collect("the"))
        await asyncio.to_thread(turning.wait)
        second = asyncio.create_task(collect("and"))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(first, second)

    llm.engine.runner.forward = slow
    asyncio.run(run())
    assert all(waits), "the loop was blocked by a step"


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ("", RequestError, "no tokens"),
        ([], RequestError, "no tokens"),
        ([1, 320], RequestError, "from 0 to 319, not 320"),
        ([1, -1], RequestError, "not -1"),
        ([1, True], RequestError, "not True"),
        ("a\ud800b", RequestError, "surrogate"),
        (b"the", RequestError, "not bytes"),
        ([10**5000], RequestError, "not one of thousands of digits"),
        (["x" * 10**6], RequestError, "this is a list of texts$"),
        (5, RequestError, "not int"),
        ([1] * 513, ContextError, "1 more than the model's context of 512"),
        ([1] * 250, CapacityError, "lower max_tokens"),
    ],
)
def test_prompts_that_cannot_be_served(llm, prompt, error, match):
    with pytest.raises(error, match=match):
        llm.stream(prompt, GREEDY)
    assert not llm.engine.busy


@pytest.mark.parametrize("params", [5, 0, {}, {"temperature": 0}, "ab", [GREEDY, 5], SamplingParams])
def test_params_that_are_none(llm, params):
    with pytest.raises(RequestError, match=r"params must be SamplingParams, not|came with 0 sampling params"):
        llm.generate(["the", "and"], params)
    with pytest.raises(RequestError, match="params must be SamplingParams, not"):
        llm.stream("the", params)
    assert not llm.engine.busy


@pytest.mark.parametrize("salt", [5, None, b"a", "\ud800"])
def test_a_salt_is_text(llm, salt):
    with pytest.raises(RequestError, match="salt"):
        llm.generate("the", GREEDY, salt=salt)
    assert not llm.engine.busy


def test_a_bad_prompt_in_a_batch_leaves_nothing_behind(llm):
    with pytest.raises(ContextError):
        llm.generate(["the", [1] * 600], GREEDY)
    with pytest.raises(RequestError, match="2 prompts came with 3"):
        llm.generate(["the", "and"], [GREEDY] * 3)
    with pytest.raises(RequestError, match="beside other prompts"):
        llm.generate(["the", 5], GREEDY)
    with pytest.raises(RequestError, match="not bytes"):
        llm.generate(b"the", GREEDY)
    with pytest.raises(RequestError, match="must be SamplingParams, not str"):
        llm.generate("the", ["greedy"])


def test_nan_weights_of_one_row_fail_that_prompt_and_keep_the_others(llm):
    pick = llm.engine.sampler.pick

    @torch.inference_mode()
    def poisoned(output, step):
        output.logits[output.rows[1].start, 3] = torch.nan
        return pick(replace(output, best=(), log_totals=()), step)  # what the kernels told is of other logits

    llm.engine.sampler.pick = poisoned
    with pytest.raises(EngineError, match="not finite") as caught:
        llm.generate(["the", "and", "of"], SamplingParams(temperature=0.0, max_tokens=1))
    assert [done is None for done in caught.value.completions] == [False, True, False]
    llm.engine.sampler.pick = pick
    assert llm.generate("the", GREEDY)[0].finish_reason == "length"


def test_a_failing_model_is_told_to_who_waits(llm):
    def broken(step):
        raise RuntimeError("planted")

    forward, llm.engine.runner.forward = llm.engine.runner.forward, broken
    with pytest.raises(EngineError, match="planted"):
        next(llm.stream("the", GREEDY))
    with pytest.raises(EngineError, match="planted"):
        llm.score("the and")
    llm.engine.runner.forward = lambda step: iter(()).__next__()
    with pytest.raises(EngineError, match="StopIteration"):  # which has no message of its own
        next(llm.stream("the", GREEDY))
    llm.engine.runner.forward = forward
    assert llm.generate("the", GREEDY)[0].finish_reason == "length"


def test_sampling_takes_the_checkpoints_suggestions(llm):
    assert llm.sampling(max_tokens=3, top_p=None).max_tokens == 3
    with pytest.raises(RequestError, match="temprature is no sampling parameter"):
        llm.sampling(temprature=1)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"device": "abacus"}, RequestError, "abacus"),
        ({"device": "cuda:99"}, RequestError, "not usable"),
        ({"dtype": "int3"}, RequestError, "int3"),
        ({"page_size": 0}, RequestError, "page_size"),
        ({"pages": -1}, RequestError, "pages"),
        ({"token_budget": True}, RequestError, "token_budget"),
        ({"kv_memory": 10}, CapacityError, "no page"),
        ({"pages": 8, "kv_memory": 2**20}, RequestError, "give one of them"),
        ({"pages": 2**40}, CapacityError, "GiB, and cpu has .* GiB free; grant it less"),
    ],
)
def test_options_that_cannot_be_had(folder, options, error, match):
    with pytest.raises(error, match=match):
        LLM(folder, **options)


def test_a_wide_window_with_sinks_takes_no_memory_of_its_own(folder):
    """Its angles are computed for the positions of a step, not for all of the window."""
    with LLM(folder, pages=64) as llm:
        [right] = llm.generate([5, 6, 7], GREEDY)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with LLM(folder, pages=64, window=10_000_000, sinks=4) as llm:
        [wide] = llm.generate([5, 6, 7], GREEDY)
    assert wide.token_ids == right.token_ids
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB; the whole table has 640 MB


def test_weights_larger_than_the_memory_are_refused_before_they_are_read(folder, monkeypatch):
    monkeypatch.setattr("tokenwright.backends.kv_sizing.free_memory", lambda device: 1000)
    with pytest.raises(CapacityError, match="dtype bfloat16 halves that; weights int8 takes a quarter of it"):
        LLM(folder)
    with pytest.raises(CapacityError, match=r"in bfloat16, .* free; weights int8 takes half of it"):
        LLM(folder, dtype="bfloat16")
    with pytest.raises(CapacityError, match=r"in int4, .* free$"):
        LLM(folder, weights="int4")


def test_the_least_memory_that_an_error_names_suffices(folder):
    with pytest.raises(CapacityError, match="hold no page") as caught:
        LLM(folder, kv_memory=10)
    [least] = re.findall(r", at least (\S+), or smaller pages", str(caught.value))
    with pytest.raises(CapacityError, match=f"at least {least}, "):
        LLM(folder, kv_memory=read_bytes(least, "kv_memory") * 9 // 10)
    with LLM(folder, kv_memory=least) as llm:
        assert llm.generate([5], GREEDY, max_tokens=2)[0].token_ids


def test_a_cache_larger_than_the_memory_is_refused_before_it_is_written_to(folder, monkeypatch):
    monkeypatch.setattr("tokenwright.backends.kv_sizing.free_memory", lambda device: 2**20)
    with pytest.raises(CapacityError, match=r"needs .* MiB, and cpu has 1\.0 MiB free"):
        LLM(folder, pages=2**14)


def test_the_cache_is_sized_when_the_weights_that_were_joined_are_gone(folder, monkeypatch):
    """Of the reference kernels; for the native ones nothing is held twice."""

    class Weights(dict):  # a plain dict cannot be referred to weakly
        pass

    held, tensors = [], Checkpoint.tensors

    def watched(*args):
        weights = Weights(tensors(*args))
        held.append(weakref.ref(weights))
        return weights

    def free(device):
        assert all(reference() is None for reference in held)
        return 2**30

    monkeypatch.setattr("tokenwright.llm.model.find_kernels", lambda: None)
    monkeypatch.setattr(Checkpoint, "tensors", watched)
    monkeypatch.setattr("tokenwright.backends.kv_sizing.free_memory", free)
    with LLM(folder):
        assert len(held) == 1


def test_a_closed_model_says_so(folder):
    with LLM(folder, pages=8) as llm:
        with held(llm):
            stream = llm.stream("the", replace(GREEDY, max_tokens=100))
            stream._handle.let_write(3)
        next(stream)
        llm.close()
        with pytest.raises(EngineError, match="this LLM is closed"):
            list(stream)
        for use in (lambda: llm.generate("the"), lambda: llm.model([1]), lambda: llm.engine):
            with pytest.raises(RequestError, match="closed"):
                use()


def test_closing_frees_weights_and_cache(folder):
    with LLM(folder, pages=8, trace=True) as llm:
        llm.generate("the", GREEDY)
        kept = [weakref.ref(each) for each in (llm.loaded, llm.loaded.decoder, llm.llm_engine.store)]
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3
    for use in (lambda: llm.eos_ids, lambda: llm.sampling(), lambda: llm.run("the")):
        with pytest.raises(RequestError, match="this LLM is closed"):
            use()


def test_sixteen_bits(folder):
    for dtype in ("bfloat16", "float16"):
        with LLM(folder, dtype=dtype, pages=64) as llm:
            done = llm.generate("the and of", GREEDY)[0]
            assert len(done.token_ids) == 12
            assert done.usage.kv_bytes == done.usage.forward_tokens * llm.config.layers * 2 * llm.config.kv_heads * (
                llm.config.head_size * 2
            )


def test_a_second_engine_over_a_loaded_model_outlives_the_first(folder):
    first = LLM(folder, pages=64)
    right = first.generate("the", GREEDY)[0].token_ids
    with LLM(first.loaded, kv="int8", window=20, pages=64) as second:
        assert second.kv_format == "int8, window 20"
        assert len(second.generate("the", GREEDY)[0].token_ids) == 12
        first.close()
        assert second.loaded.vocabulary.grammars(second.eos_ids).compile(Grammar.choice(["yes"]))
        with LLM(second.loaded, pages=64) as third:
            assert third.generate("the", GREEDY)[0].token_ids == right
    with pytest.raises(RequestError, match="this LLM is closed"):
        second.generate("the", GREEDY)


@pytest.mark.parametrize("option", [{"device": "cpu"}, {"dtype": "float32"}, {"weights": "int8"}, {"trace": True}])
def test_how_a_model_is_loaded_is_refused_for_one_that_is(llm, option):
    with pytest.raises(RequestError, match="say how a model is loaded"):
        LLM(llm.loaded, **option)


def test_streams_outlive_the_name_of_their_model(folder):
    """`LLM(...).stream(...)`: the model is dropped while its stream is read."""
    stream = LLM(folder, pages=64).stream("the", GREEDY)
    gc.collect()
    assert len([piece.token_id for piece in stream]) == 12


def test_an_llm_that_is_dropped_ends_its_thread(folder):
    llm = LLM(folder, pages=64)
    thread = llm.llm_engine.loop.driver.thread
    del llm
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_slow_reader_misses_nothing(llm):
    """The engine does not wait for its readers: what they have not read waits for them."""
    stream = llm.stream("the", replace(GREEDY, max_tokens=60))
    first = next(stream)
    other = llm.generate("and", replace(GREEDY, max_tokens=80))[0]  # the stream has ended long before
    assert len(other.token_ids) == 80
    assert (first.token_id, *(piece.token_id for piece in stream)) == stream.completion.token_ids
    assert len(stream.completion.token_ids) == 60
