"""Speculation: the chunk of a decoding sequence gets rows of draft tokens, and commit keeps those that were chosen.

    text      [ ........... t ]             t is pending: a plain chunk computes its row alone
    chunk                 [ t a b c ]       with drafts a, b, c
    chosen                  a b x           by the sampler at these rows, one by one; the first that differs is the last
    computed  [ ........... t a b ]         x is pending; what c left in the cache lies behind, where no row reads

A row depends on its own text alone, and a draw on the row, the seed, the position and the choice. So each row's choice
is the one that decoding token by token makes: drafts change how many tokens a step writes, and nothing else.

A recurrent layer's state does not go back to the last draft that was kept. The chunk rewrites a copy of it, and where a
draft is rejected the text goes on from the state that the chunk began with: the next chunk computes the tokens that it
has written once more, with x, and has no drafts.

    computed  [ ........... ]               or up to the end of a page behind t, which has a state of its own
    chunk                   [ t a b x ]
"""

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from typing import Protocol

from tokenwright.engine.kv_manager import KVManager
from tokenwright.engine.request import Sequence
from tokenwright.engine.step import ALL, LAST, Chunk, Step


class Proposer(Protocol):
    """Guesses how texts go on. Called in the engine's thread."""

    def propose(self, sequences: ListLike[Sequence], most: ListLike[int], step: Step) -> ListLike[ListLike[int]]:
        """The drafts of each sequence, at most as many as `most` says; none where the rows would not pay.

        step: what is computed anyway, the rows of `sequences` among it. Equal calls have equal answers.
        """

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended, well or not; it may be one that was never asked about."""


def with_drafts(step: Step, proposer: Proposer, kv: KVManager, budget: int) -> Step:
    """The step with drafts in its chunks, at most `budget` rows more.

    Their pages come from those available: no sequence is preempted for a draft.
    """
    open_to_drafts = [(place, most) for place, chunk in enumerate(step.chunks) if (most := most_drafts(chunk)) > 0]
    if not open_to_drafts or budget <= 0:
        return step
    asked = [step.chunks[place].sequence for place, _ in open_to_drafts]
    proposed = proposer.propose(asked, [min(most, budget) for _, most in open_to_drafts], step)
    chunks = list(step.chunks)
    for place, drafts in _granted(step, open_to_drafts, proposed, kv, budget):
        plain = chunks[place]
        chunks[place] = Chunk(plain.sequence, plain.start, plain.stop + len(drafts), ALL, drafts)
    return Step(tuple(chunks))


def _granted(
    step: Step,
    open_to_drafts: ListLike[tuple[int, int]],
    proposed: ListLike[ListLike[int]],
    kv: KVManager,
    budget: int,
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The places of chunks, with the drafts for which there are rows and pages."""
    for (place, most), drafts in zip(open_to_drafts, proposed, strict=True):
        granted = tuple(drafts[: min(most, budget)])
        chunk = step.chunks[place]
        stop = chunk.stop + len(granted)
        if granted and kv.reserve_drafts(chunk.sequence, chunk.start, stop):
            budget -= len(granted)
            yield place, granted


def most_drafts(chunk: Chunk) -> int:
    """The most drafts that a chunk may have: 0 unless it decodes one text with the cache, token by token.

    The token after the last draft must still be wanted: below the limit of the text, and where it will be paused.
    """
    sequence = chunk.sequence
    group, length = sequence.group, len(sequence.tokens)
    decodes = chunk.logits_needed is LAST and chunk.stop == length == chunk.start + 1
    if not (decodes and group.cache and sequence.request.speculate and group.width == len(sequence.choices) == 1):
        return 0
    stop = group.limit if group.pause_at is None else min(group.limit, group.pause_at)
    return stop - length - 1
