"""Continuous batching and chunked prefill: one budget of tokens a step."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..cell import expect
from ..one_file import original
from ..steps import small, steps

TITLE = "Chunks and batches"
TEXT = """
A step that computes one row reads all weights for it. With rows of several texts it reads them once for all. So the
engine computes many texts in a step, and a text may begin or end at any step: continuous batching.

A long prompt would make all others wait. So a step has a budget of tokens. The oldest text gets as many of its
pending tokens as the budget allows, a chunk, then the next one. There is no prefill and no decode here: a prompt is a
long chunk, or several, and a text that goes on is a chunk of one token.

A chunk that ends before its text does makes K and V only: then pick chooses nothing.
"""
PARTS = ("Scheduler.schedule", "pick")
START = '''\
def schedule(self):
    """The chunks of the next step, the oldest text first.

    All together have at most self.token_budget tokens.
    """
    chunks, budget = [], self.token_budget
    # The text at the next place; behind the last one another is admitted.
    while budget and (sequence := self._at(len(chunks))):
        stop = len(sequence.tokens)  # can the budget be smaller?
        if not self._reserve(sequence, stop):  # no pages: see lesson 7
            break
        chunks.append(Chunk(sequence, sequence.computed, stop))
        # What is left of the budget?
    return chunks

def pick(chunks, logits):
    """The next token of each chunk's text, from logits [chunks, V].

    None where the text goes on after its chunk.
    """
    return [
        sample(row, s.sampling, uniform(s.sampling.seed, stop))
        for (s, _, stop), row in zip(chunks, logits)
    ]
'''
BUDGET = 8
PROMPTS = [[3, 9, 1, 12, 30, 2, 8, 8, 17, 5, 21], [4, 11, 25], [6, 7, 13, 19, 28, 1]]


def check(file: Any) -> Iterator[None]:
    check_pick(file)
    yield
    mine, right = (engine(one) for one in (file, original()))
    for n, _ in enumerate(zip(steps(mine), steps(right), strict=False), 1):
        found, wanted = mine.made[-1], right.made[-1]
        shown = f"Step {n} must be {told(wanted)}; yours is {told(found)}."
        total = sum(stop - start for _, start, stop in found)
        over = f"It has {total} tokens, and the budget is {BUDGET}: look at stop, and at what is left of the budget."
        expect(total <= BUDGET, f"{shown} {over}")
        begun = [start for _, start, _ in found] == [start for _, start, _ in wanted]
        expect(begun or len(found) != len(wanted), f"{shown} A chunk begins where its text is computed up to.")
        expect(found == wanted, shown)
        mine.scheduler.check()
    texts = [[one.tokens for one in each.texts] for each in (mine, right)]
    expect(texts[0] == texts[1], "The chunks are right, and the texts are not: look at pick.")
    print(*(f"step {n}: {told(chunks)}" for n, chunks in enumerate(mine.made[:6], 1)), sep="\n")


def told(chunks: list[tuple[str, int, int]]) -> str:
    return ", ".join(f"{name}[{start}:{stop}]" for name, start, stop in chunks) or "nothing"


def engine(file: Any) -> Any:
    """Three texts; each step's chunks are noted."""
    made = file.Engine(small(file), pages=24, page_size=4, token_budget=BUDGET)
    made.texts = [made.add(prompt, file.Sampling(max_tokens=4)) for prompt in PROMPTS]
    made.made, schedule = [], made.scheduler.schedule

    def noted() -> Any:
        chunks = schedule()
        expect(isinstance(chunks, list), "schedule must return the list of chunks.")
        made.made.append([("ABC"[made.texts.index(s)], start, stop) for s, start, stop in chunks])
        expect(chunks, f"Step {len(made.made)} has no chunk, and texts are waiting.")
        return chunks

    made.scheduler.schedule = noted
    return made


def check_pick(file: Any) -> None:
    texts = [file.Sequence([5] * 6, file.Sampling(), 20), file.Sequence([5] * 4, file.Sampling(), 20)]
    logits = np.zeros((2, 10))
    logits[0, 3] = logits[1, 7] = 1.0
    found = file.pick([file.Chunk(texts[0], 0, 4), file.Chunk(texts[1], 0, 4)], logits)
    expect(isinstance(found, list) and len(found) == 2, "pick must return a list with an entry for each chunk.")
    half = (
        "A chunk up to token 4 of 6 ends in the middle of its prompt: whatever the logits are, the next token is known."
    )
    expect(found[0] is None, f"{half} Return None there, and look at stop.")
    expect(found[1] == 7, f"A chunk up to the last token of its text must get a token, here 7; yours: {found[1]}.")
