"""A draft model: a smaller model with the same vocabulary, which drafts tokens where no earlier text matches.

Its K and V lie in the pages of the same sequences. It may have computed fewer tokens than the model, except in full
pages, so a text whose guesses fail costs one pass a page. If a layer has a window, it computes every step.

    text       [ page | page | . . . . t ]     t is pending
    computed   [ ...................]          by the model
    filled     [ ............ ..]              by the draft model, which catches up where a step fills the page
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any

from tokenwright.decode.drafts import speculate
from tokenwright.decode.drafts.step_costs import StepCosts
from tokenwright.decode.sampler import Guessing
from tokenwright.engine import Chunk, LogitsNeeded, Output, PagePool, Runner, Sequence, Step

log = logging.getLogger(__name__)

RETRY = 48  # tokens of a text after which a draft model that did not pay is tried again
TRIAL = 2  # tokens of such a trial


@dataclass(slots=True)
class _Filled:
    """The draft model has computed the first `known` tokens of a text, and the guesses after them."""

    known: int
    guessed: ListLike[int]
    preemptions: int  # of the sequence at that time: a preempted one has lost these pages


class DraftModel:
    """Runs a draft model on one engine's sequences. It is the engine's Runner, and wraps the model's own."""

    def __init__(self, runner: Runner[Any], drafter: Runner[Any], pool: PagePool, context: int) -> None:
        self.context = context
        self.failed = False
        self._runner, self._drafter, self._pool = runner, drafter, pool
        self._lags = all(group_pool.reads_all for group_pool in pool.group_pools)
        self._filled: dict[int, _Filled] = {}

    def forward(self, step: Step) -> Output[Any]:
        output = self._runner.forward(step)
        self._catch_up(step)
        return output

    def _catch_up(self, step: Step) -> None:
        chunks, size = [], self._pool.page_size
        for chunk in step.chunks:
            sequence, stop = chunk.sequence, min(chunk.stop, self.context)
            fills = not self._lags or chunk.start // size != stop // size
            if fills and sequence.cache:
                filled = self._filled_of(sequence, chunk.start, chunk.drafts)
                if filled < stop:
                    chunks.append(_rows(sequence, filled, stop, LogitsNeeded.NONE, chunk.drafts))
        self._compute(chunks)

    def reserve(self, sequence: Sequence, most: int) -> int:
        """How many tokens, at most `most`, can be drafted; their pages are reserved."""
        known = len(sequence.tokens)
        most = 0 if self.failed else min(most, self.context - known)
        stop = known + most
        return most if most > 0 and self._pool.reserve(sequence.tables, sequence.computed, stop, stop) else 0

    def release(self, sequence: Sequence, drafts: int) -> None:
        self._pool.cut(sequence.tables, len(sequence.tokens) + drafts)
        filled = self._filled.get(sequence.id)
        if filled is not None and filled.known == len(sequence.tokens):
            filled.guessed = filled.guessed[:drafts]

    def extend(self, texts: ListLike[Guessing]) -> list[float | None]:
        """Guess one more token of each text, as in `Guessing.guess`."""
        chunks = []
        for text in texts:
            sequence, stop = text.sequence, len(text.sequence.tokens) + len(text.tokens)
            start = self._filled_of(sequence, sequence.computed, text.tokens)
            chunks.append(_rows(sequence, min(start, stop - 1), stop, LogitsNeeded.LAST, text.tokens))
        if (output := self._compute(chunks)) is None:
            return [None] * len(texts)
        each = zip(texts, chunks, output.rows, strict=True)
        return [text.guess(chunk, output, rows.stop - 1) for text, chunk, rows in each]

    def end(self, sequence: Sequence) -> None:
        self._filled.pop(sequence.id, None)

    def _filled_of(self, sequence: Sequence, computed: int, drafts: ListLike[int]) -> int:
        """How many tokens of a text and its drafts the draft model has computed; the model has the first `computed`."""
        found, text = self._filled.get(sequence.id), sequence.tokens
        least = computed - computed % self._pool.page_size if self._lags else computed  # full pages may be shared
        if found is None or found.preemptions != sequence.counts.preemptions or computed < found.known - 1:
            return least
        filled, beyond = found.known, found.known < len(text)
        for token in found.guessed:
            place = filled - len(text)
            now = text[filled] if place < 0 else drafts[place] if place < len(drafts) else None
            if token != now:
                break
            filled += 1
        return max(least, min(filled, computed) if beyond else filled)  # later pages were released meanwhile

    def _compute(self, chunks: list[Chunk]) -> Output[Any] | None:
        if not chunks or self.failed:
            return None
        try:
            output = self._run(chunks)
        except Exception:
            log.exception("the draft model has failed; texts go on without it")
            self.failed = True
            return None
        for chunk in chunks:
            sequence = chunk.sequence
            known = min(chunk.stop, len(sequence.tokens))
            guessed = self._guessed(chunk, known)
            self._filled[sequence.id] = _Filled(known, guessed, sequence.counts.preemptions)
        return output

    def _run(self, chunks: list[Chunk]) -> Output[Any]:
        return self._drafter.forward(Step(tuple(chunks)))

    def _guessed(self, chunk: Chunk, known: int) -> ListLike[int]:
        before = chunk.start - known
        if before <= 0:
            return chunk.drafts
        return (*self._filled[chunk.sequence.id].guessed[:before], *chunk.drafts)


def _rows(sequence: Sequence, start: int, stop: int, needed: LogitsNeeded, drafts: ListLike[int]) -> Chunk:
    known = len(sequence.tokens)
    return Chunk(sequence, start, stop, needed, tuple(drafts[max(0, start - known) : max(0, stop - known)]))


@dataclass(slots=True, eq=False)
class _Drafting:
    """Drafting for one text. `chance`: that all guesses so far are accepted. trial: to test whether drafting pays."""

    place: int
    followed: speculate.Followed
    text: Guessing
    most: int
    trial: bool
    chance: float
    kinds: list[int] = field(default_factory=list)

    @property
    def next(self) -> float:
        return self.chance * self.followed.of_model

    @property
    def fails(self) -> float:
        """The expected number of tokens computed again because the next guess is the first one rejected."""
        return (len(self.kinds) + 1) * (self.chance - self.next)

    def add(self, confidence: float | None) -> bool:
        """Count a guess with this confidence; return whether to draft another."""
        if confidence is None:
            return False
        kind = speculate.FROM_MODEL + bisect_left(speculate.CONFIDENCES, confidence)
        self.kinds.append(kind)
        self.chance *= self.followed.held[kind] / self.followed.made[kind]
        return len(self.kinds) < self.most and not self.text.ended


class DraftProposer(speculate.SuffixProposer):
    """Drafts from the suffix index and grammars, and from a draft model where these promise less."""

    def __init__(
        self, costs: StepCosts, model: DraftModel, own: StepCosts, earlier: int = speculate.EARLIER_BYTES
    ) -> None:
        super().__init__(costs, earlier)
        self.model = model
        self.own = own

    def propose(self, sequences: ListLike[Sequence], most: ListLike[int], step: Step) -> ListLike[ListLike[int]]:
        drafts = super().propose(sequences, most, step)
        for sequence, granted in zip(sequences, drafts, strict=True):
            self.model.release(sequence, len(granted))
        return drafts

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self.model.end(sequence)

    def _improve(
        self, sequences: ListLike[Sequence], most: ListLike[int], guesses: list[speculate.Guess | None], step: Step
    ) -> None:
        rows = step.size
        worth = self.costs.of(rows) / max(1, sum(chunk.picks for chunk in step.chunks))
        drafted: list[_Drafting] = []
        for place, (sequence, limit, guess) in enumerate(zip(sequences, most, guesses, strict=True)):
            followed, length = self._followed[sequence.id], len(sequence.tokens)
            expected = followed.of_model * followed.trust(True)
            if guess is not None and followed.chances(guess)[0] >= expected:
                continue
            trial = expected * worth <= self._price(rows, 1, 1 - expected)
            if trial and length - followed.tried < RETRY:
                continue
            if room := self.model.reserve(sequence, min(limit, TRIAL if trial else speculate.MOST_DRAFTS)):
                followed.tried = length
                drafted.append(_Drafting(place, followed, Guessing(sequence), room, trial, chance=followed.trust(True)))
        going = drafted
        while going:
            found = self.model.extend([one.text for one in going])
            rows += len(going)
            texts = len(going)
            going = [
                one
                for one, confidence in zip(going, found, strict=True)
                if one.add(confidence) and (one.trial or one.next * worth > self._price(rows, texts, one.fails))
            ]
        for one in drafted:
            if one.kinds:
                sequence = one.text.sequence
                guesses[one.place] = speculate.Guess(len(sequence.tokens), one.text.tokens, one.kinds)

    def _price(self, rows: int, texts: int, fails: float) -> float:
        """The cost of one more draft of each of `texts` texts, in a step of `rows` rows.

        fails: the expected number of tokens computed again because it is the first one rejected.
        """
        row = self.costs.of(rows + 1) - self.costs.of(rows)
        return row + (fails * row if self.costs.states else 0.0) + self.own.of(texts) / texts
