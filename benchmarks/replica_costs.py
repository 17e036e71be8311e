"""The costs of replicas that share a machine, fitted on requests that came to them at random times.

A step costs something always, for each token of a prompt, for each sequence that writes and for each cached token that
either of them reads (rows of a prompt read it together, in a fraction of the time); a text's first step after its
prompt costs more, as its data is not in the caches yet. While another replica computes a prompt, or writes, which gives
the router and the client work, too, each step costs more: something always, and for each token of a prompt. Some time
passes while a request and its first token are on the way.

So the time from the first token of a text to its last is a sum of counts and costs, and so is the time to the first
token of a text whose replica had no other. Least squares find the costs whose sums are right on average.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np
from cluster_costs import least_squares

TOGETHER_S = 1e-5  # tokens of one step are delivered at the same time
AGAIN = 12  # rounds of the least squares: each takes the errors relative to what the one before said
LEAST_WRITTEN = 4  # tokens of a text whose pace counts


class SharedCosts(NamedTuple):
    """Seconds: of a step, of a prompt's token, of a sequence that writes, of each cached token that it or a prompt's
    token reads, of a text's first step after its prompt, and of the way.

    prompt_base, prompt_token: more of a step, and of a prompt's token, while another replica computes a prompt.
    writing_base, writing_token: while another one writes.
    """

    base: float
    token: float
    sequence: float
    key: float
    prompt_key: float
    start: float
    way: float
    prompt_base: float
    prompt_token: float
    writing_base: float
    writing_token: float


@dataclass(frozen=True)
class Work:
    """What steps compute. sequences, keys: of those that write, and the cached tokens that they read.

    prompt_keys: cached tokens that tokens of prompts read. starts: sequences that write for the first time.
    """

    steps: int = 1
    tokens: int = 0
    sequences: int = 0
    keys: float = 0.0
    prompt_keys: float = 0.0
    starts: int = 0

    def counts(self, prompts: float, writing: float, way: int = 0) -> tuple[float, ...]:
        """How often each cost is in it, if other replicas compute prompts, and write, for these shares of its time."""
        own = self.steps, self.tokens, self.sequences, self.keys, self.prompt_keys, self.starts, way
        beside = prompts * self.steps, prompts * self.tokens, writing * self.steps, writing * self.tokens
        return *own, *beside

    def seconds(self, costs: SharedCosts, prompts: float, writing: float) -> float:
        return sum(count * cost for count, cost in zip(self.counts(prompts, writing), costs, strict=True))


def keys_of(start: int, stop: int) -> float:
    """Cached tokens that the rows [start, stop) of a text read."""
    return (stop - start) * (start + stop + 1) / 2


class SeenText(Protocol):
    """A text that has ended. place: its replica. times: when its tokens came, by the clock of `submitted`."""

    @property
    def submitted(self) -> float: ...
    @property
    def place(self) -> int: ...
    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def times(self) -> Sequence[float]: ...


def equations(texts: Iterable[SeenText]) -> Iterator[tuple[tuple[float, ...], float]]:
    """Of all texts of a load: how often each cost is in a time, and the time, in seconds."""
    ordered = sorted(texts, key=lambda text: text.submitted)
    for text in ordered:
        beside = [one for one in ordered if one is not text and _meet(one, text.submitted, text.times[-1])]
        same = [one for one in beside if one.place == text.place]
        others = [one for one in beside if one.place != text.place]
        first, last = text.times[0], text.times[-1]
        if not any(_meet(one, text.submitted, first) for one in same):
            tokens = len(text.prompt)
            work = Work(tokens=tokens, prompt_keys=keys_of(0, tokens))
            yield work.counts(*_shares(others, text.submitted, first), 1), first - text.submitted
        if len(text.times) >= LEAST_WRITTEN:
            yield _written(text, same).counts(*_shares(others, first, last)), last - first


def _meet(text: SeenText, start: float, stop: float) -> bool:
    return text.submitted < stop and text.times[-1] > start


def _written(text: SeenText, same: Sequence[SeenText]) -> Work:
    """All steps from the first token to the last one, with those of other texts in them."""
    tokens, prompt_keys, starts = 0, 0.0, 1
    sequences = len(text.times) - 1
    keys = sum(len(text.prompt) + at for at in range(1, len(text.times)))
    for one in same:
        prompt, first = len(one.prompt), bisect_left(one.times, text.times[0] + TOGETHER_S)
        if first == 0 and one.times[0] <= text.times[-1] + TOGETHER_S:
            tokens, prompt_keys, first = tokens + prompt, prompt_keys + keys_of(0, prompt), 1
        starts += first == 1 < len(one.times) and one.times[1] <= text.times[-1] + TOGETHER_S
        end = bisect_left(one.times, text.times[-1] + TOGETHER_S)
        sequences += max(0, end - first)
        keys += sum(prompt + at for at in range(first, end))
    return Work(len(text.times) - 1, tokens, sequences, keys, prompt_keys, starts)


def _shares(others: Sequence[SeenText], start: float, stop: float) -> tuple[float, float]:
    """The shares of this time in which any of the others computes a prompt, and in which they only write."""
    edges = {edge for one in others for edge in (one.submitted, one.times[0], one.times[-1])}
    cuts = sorted({start, stop, *(edge for edge in edges if start < edge < stop)})
    prompts = writing = 0.0
    for left, right in pairwise(cuts):
        if any(one.submitted <= left < one.times[0] for one in others):
            prompts += right - left
        elif any(one.times[0] <= left < one.times[-1] for one in others):
            writing += right - left
    return prompts / (stop - start), writing / (stop - start)


@dataclass(frozen=True)
class Fit:
    """error: of the middle equation, relative."""

    costs: SharedCosts
    error: float


def fitted(found: Sequence[tuple[tuple[float, ...], float]]) -> Fit:
    """The costs by which these equations are right on average, none of them negative."""
    counts, seconds = np.array([one for one, _ in found], float), np.array([one for _, one in found])
    said = seconds
    for _ in range(AGAIN):
        costs = least_squares(counts, seconds, said)
        said = counts @ costs
    return Fit(SharedCosts(*map(float, costs)), median(abs(seconds / said - 1)))
