"""The counted work, and the promise behind it: cached, naive, batched and preempted write the same text.

For a prompt of N tokens and T new ones the cached loop sends N + T - 1 tokens through the layers (the last one is
never computed), the naive loop the sum from N to N + T - 1. Both are counted where it happens, at the call of a
layer, and for each request.

Equal texts: by the native kernels, whose rows do not depend on their neighbours. Without a compiler it is the
reference, where they do, by the rounding of torch's products (1e-6 or so): a draw or a tie could fall the other way
once in a very long while.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.fixtures import KINDS, make_checkpoint
from tests.oracle.harness import Subject, make_subject, prompt_of, write
from tests.profiles import examples
from tokenwright import LLM
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.decode import RowSampler
from tokenwright.engine import Request, SamplingParams
from tokenwright.engine import Sequence as Text

N, T = 8, 20


def cached_work(n: int, t: int) -> int:
    return n + t - 1


def naive_work(n: int, t: int) -> int:
    return t * (2 * n + t - 1) // 2


@pytest.fixture(scope="module")
def six_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("six"), "qwen2.5", changes={"num_hidden_layers": 6}).path


@pytest.mark.parametrize("budget", [1, 3, 7, 512])
@pytest.mark.parametrize(("cache", "tokens", "layer_tokens"), [(True, 27, 162), (False, 350, 2100)])
def test_the_work_of_8_and_20_tokens_in_6_layers(
    six_layers: Path, cache: bool, tokens: int, layer_tokens: int, budget: int
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=T, ignore_eos=True)
    with LLM(six_layers, device="cpu", pages=8, token_budget=budget) as llm:
        [completion] = llm.generate(prompt_of(N), params, cache=cache)
        counted = llm.model.decoder.layer_tokens  # at the call site
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (N, T)
    assert usage.forward_tokens == tokens == (cached_work(N, T) if cache else naive_work(N, T))
    assert usage.layer_tokens == counted == layer_tokens == 6 * tokens


def test_each_request_of_a_batch_is_told_its_own_work(six_layers: Path) -> None:
    prompts = [prompt_of(length) for length in (1, 8, 30)]
    params = [SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True) for most in (5, 20, 1)]
    with LLM(six_layers, device="cpu", pages=16, token_budget=9) as llm:
        completions = llm.generate(prompts, params)
        counted = llm.model.decoder.layer_tokens
    work = [cached_work(1, 5), cached_work(8, 20), cached_work(30, 1)]
    assert [completion.usage.forward_tokens for completion in completions] == work
    assert counted == 6 * sum(work) == sum(completion.usage.layer_tokens for completion in completions)


def test_recomputation_is_counted_too(six_layers: Path) -> None:
    """Two texts of which the pool holds one and a half: the younger is preempted, and its work is told."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(six_layers, device="cpu", page_size=4, pages=18) as llm:
        completions = llm.generate([prompt_of(10), prompt_of(11)], params)
        counted = llm.model.decoder.layer_tokens
    older, younger = (completion.usage for completion in completions)
    assert older.preemptions == 0
    assert older.forward_tokens == cached_work(10, 40)
    assert younger.preemptions > 0
    assert younger.forward_tokens > cached_work(11, 40)
    assert counted == older.layer_tokens + younger.layer_tokens


def alone(subject: Subject, request: Request) -> list[int]:
    """The text of one request in an engine of its own, whole chunks, pages of 16."""
    [text] = write(subject.engine(RowSampler(), kernels=find_kernels()), [request])
    return list(text.written)


def together(subject: Subject, requests: Sequence[Request], **sizes: int) -> list[Text]:
    return write(subject.engine(RowSampler(), kernels=find_kernels(), **sizes), requests)


def uncached(request: Request) -> Request:
    return Request(request.prompt, request.params, cache=False)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 5, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 24),
)
REQUESTS = st.builds(
    Request,
    prompt=st.lists(st.integers(0, 319), min_size=1, max_size=90).map(tuple),
    params=PARAMS,
    cache=st.sampled_from([True, True, False]),
)


@examples(60, derandomize=True)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    requests=st.lists(REQUESTS, min_size=1, max_size=5),
    page_size=st.sampled_from([1, 3, 16, 64]),
    budget=st.sampled_from([1, 2, 7, 50, 512]),
    running=st.integers(1, 5),
    spare=st.integers(0, 20),
)
def test_cached_naive_batched_and_preempted_write_the_same(
    kind: str, requests: list[Request], page_size: int, budget: int, running: int, spare: int
) -> None:
    """Requests of both loops side by side, over a pool that holds the longest and at best a little more."""
    subject = make_subject(kind)
    if kind in (
        "dynamic",
        "phi3-long",
        "phi4-mini",
    ):  # whose angles depend on how long a text may become: other lengths share nothing
        requests = [replace(request, salt=str(request.limit(512)).encode()) for request in requests]
    pages = max(-(-request.limit(512) // page_size) for request in requests) + spare
    texts = together(subject, requests, page_size=page_size, pages=pages, token_budget=budget, max_sequences=running)
    for request, text in zip(requests, texts, strict=True):
        cached = Request(request.prompt, request.params)
        expected = alone(subject, cached)
        assert alone(subject, uncached(request)) == expected
        assert list(text.written) == expected
        work = (cached_work if request.cache else naive_work)(len(request.prompt), request.params.max_tokens)
        assert text.counts.forwarded + text.counts.reused >= work
        assert text.counts.preemptions or text.counts.forwarded + text.counts.reused == work
