"""Every family against transformers, through the engine: logits at prefill and at each of 64 cached steps.

With the reference kernels, for `FEW` steps, and with native ones, whose weights are kept in float32.

The oracle is teacher-forced: it computes our own text, prompt and greedy continuation, in one causal pass, and
each row of logits that our sampler was given is compared with its row. Once for each kind the oracle also writes
by itself, step by step over its own cache.

That the fixtures' logits are wide and their attention peaked is held in tests/models/test_fixtures.py.
"""

from itertools import product

import pytest
import torch

from tests.models.fixtures import KINDS, VARIANTS
from tests.oracle.harness import (
    MARGIN,
    TOLERANCE,
    Recorder,
    Subject,
    greedy,
    make_subject,
    prompt_of,
    write,
)
from tests.profiles import some
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.torch.kernels import Kernels
from tokenwright.backends.torch.reference_kernels import ReferenceKernels

STEPS = 64
FEW = 20  # of the reference kernels, and of the oracle's own: their steps take thirty times as long
PROMPTS = (1, 17, 300)
PAGES = (1, 16, 64)
WHOLE = 512
BUDGETS = (1, 7, WHOLE)
MANY_PROMPTS = (1, 2, 7, 16, 17, 63, 64, 65, 128, 199, 300)


def one_of_each() -> list[tuple[str, int, int, int]]:
    """Each kind with each prompt, page size and chunk once: three cases of a Latin square.

    The square is shifted from kind to kind, so that over nine kinds every prompt meets every page and chunk.
    """
    return [
        (kind, length, PAGES[(j + i) % 3], BUDGETS[(j + i // 3) % 3])
        for i, kind in enumerate(KINDS)
        for j, length in enumerate(PROMPTS)
    ] + [(kind, 17, 16, 7) for kind in VARIANTS]


def all_kernels() -> dict[str, Kernels]:
    """The reference, and the processor's best native ones where they were compiled."""
    native = find_kernels()
    return {"reference": ReferenceKernels(), **({} if native is None else {"native": native})}


def compare(subject: Subject, length: int, page_size: int, budget: int, *, native_only: bool = False) -> None:
    """The same with all kernels, so that the oracle mostly computes once."""
    every = all_kernels()
    for name in ["native"] if native_only and "native" in every else every:
        compare_one(subject, name, every[name], length, page_size, budget)


def compare_one(subject: Subject, name: str, kernels: Kernels, length: int, page_size: int, budget: int) -> None:
    """Write greedy tokens: one from the prefill's last row, and one from each cached step."""
    steps = FEW if name == "reference" else STEPS
    limit = length + steps + 1
    sampler = Recorder()
    engine = subject.engine(sampler, page_size=page_size, token_budget=budget, kernels=kernels)
    every_row = (length + page_size + budget) % 2 == 0  # of the prompt, or the last alone
    [text] = write(engine, [greedy(prompt_of(length), steps + 1, prompt_logprobs=every_row)])
    rows = sampler.rows[text.id]
    assert sorted(rows) == list(range(0 if every_row else length - 1, limit - 1))
    assert text.counts.forwarded == limit - 1

    theirs = subject.logits(text.tokens[:-1], limit)
    assert max(float((row - theirs[place]).abs().max()) for place, row in rows.items()) <= TOLERANCE

    highest, runner_up = theirs[length - 1 :].topk(2).values.unbind(-1)
    obliges = highest - runner_up > MARGIN
    agrees = torch.tensor(text.written) == theirs[length - 1 :].argmax(-1)
    assert agrees[obliges].all()
    assert obliges.double().mean() >= 0.9, "the comparison of greedy tokens would say too little"


@pytest.mark.parametrize(("kind", "length", "page_size", "budget"), one_of_each())
def test_logits_and_greedy_tokens_are_the_oracles(kind: str, length: int, page_size: int, budget: int) -> None:
    """The reference only after a prompt of 17."""
    compare(make_subject(kind), length, page_size, budget, native_only=length != 17)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_every_prompt_page_size_and_chunk(kind: str) -> None:
    for length, page_size, budget in product(MANY_PROMPTS, PAGES, BUDGETS):
        compare(make_subject(kind), length, page_size, budget)


@pytest.mark.parametrize("kind", some(list(KINDS)))
def test_the_oracle_writes_the_same_by_itself(kind: str) -> None:
    """transformers' own generate, one token a step over its own cache: the same logits, and so the same text."""
    subject = make_subject(kind)
    prompt = prompt_of(40, seed=1)
    limit = len(prompt) + FEW + 1
    sampler = Recorder()
    [text] = write(subject.engine(sampler, kernels=find_kernels()), [greedy(prompt, FEW + 1)])
    with subject.pinned(limit) as oracle:
        oracle.generation_config.eos_token_id = None
        written = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=FEW + 1,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    theirs = torch.cat(written.logits)  # [FEW + 1, V]
    their_text = written.sequences[0, len(prompt) :].tolist()
    parted = [i for i, (a, b) in enumerate(zip(text.written, their_text, strict=True)) if a != b]
    shared = min(parted, default=FEW)  # the last row that both computed after the same tokens
    highest, runner_up = theirs[shared].topk(2).values
    assert not parted or highest - runner_up <= MARGIN, "the texts part only where the oracle is undecided"
    ours = torch.stack([sampler.rows[text.id][place] for place in range(len(prompt) - 1, limit - 1)])
    assert (ours - theirs)[: shared + 1].abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", all_kernels())
@pytest.mark.parametrize("length", [30, 128, 129, 300])
@pytest.mark.parametrize("kind", ["dynamic", "phi3-long"])
def test_angles_are_fixed_by_the_longest_the_text_can_become(kind: str, length: int, name: str) -> None:
    """Within the original context of 128, across it, and beyond; batched, so that every text has its own angles."""
    subject, kernels = make_subject(kind), all_kernels()[name]
    longest = 120 if name == "native" or length == 30 else FEW
    requests = [greedy(prompt_of(length, seed=2), most) for most in (1, 5, longest)]
    sampler = Recorder()
    for text in write(subject.engine(sampler, pages=128, kernels=kernels), requests):
        theirs = subject.logits(text.tokens[:-1], text.limit)
        assert text.limit == length + text.request.params.max_tokens
        for place, row in sampler.rows[text.id].items():
            assert (row - theirs[place]).abs().max() <= TOLERANCE
