"""Sequence groups: sequences that are admitted, paused, preempted and ended together.

Nearly every group is one sequence. The beams of a search are a group of up to `width` sequences. They take their last
token in the same step, so that the sampler has the rows of all of them at once. Admitted one by one, the beams of two
searches could wait for each other's pages for ever.
"""

from collections.abc import Callable, Iterable, Iterator

from tokenwright.engine.page_pool import PagePool
from tokenwright.engine.request import Request, Sequence


class SequenceGroup:
    """One sequence that advances on its own, or (BeamSequences) several that advance together.

    limit: the most tokens of each. cache: whether their K and V are kept between steps. pause_at: tokens at which the
    group is paused; None: never. width: the most sequences that it comes to.
    """

    __slots__ = ("cache", "limit", "pause_at", "sequences", "width")

    def __init__(self, limit: int, *, cache: bool = True, pause_at: int | None = None, width: int = 1) -> None:
        self.sequences: list[Sequence] = []
        self.limit = limit
        self.cache = cache
        self.pause_at = pause_at
        self.width = width

    def add(self, sequence: Sequence, after: Sequence | None = None) -> None:
        """Take in a sequence that was made for this group: at its end, or right behind another one."""
        at = len(self.sequences) if after is None else self.sequences.index(after) + 1
        self.sequences.insert(at, sequence)

    @property
    def first(self) -> Sequence:
        return self.sequences[0]

    @property
    def paused(self) -> bool:
        return self.pause_at is not None and len(self.sequences[0].tokens) >= self.pause_at

    def plan(self, budget: int, attach: Callable[[Sequence], None]) -> Iterable[tuple[Sequence, int]]:
        """The sequences of a group to compute in a step, each with its number of tokens, `budget` in all.

        All take their last token together, once what is pending fits the budget > 0; before, they catch up to it.
        `attach` puts a sequence that has no pages on those that are cached of its text.
        """
        recomputed = [beam for beam in self.sequences if beam.shares and not beam.computed]
        if not recomputed and sum(beam.pending for beam in self.sequences) <= budget:
            return [(beam, beam.pending) for beam in self.sequences]
        return self._catch_up(budget, attach, recomputed)

    def _catch_up(
        self, budget: int, attach: Callable[[Sequence], None], recomputed: list[Sequence]
    ) -> Iterator[tuple[Sequence, int]]:
        for place, beam in enumerate(self.sequences):
            if not budget:
                return
            if beam in recomputed:  # it finds what it has in common with those before it, once they have it
                if any(other.pending > 1 for other in self.sequences[:place]):
                    continue
                if not beam.pages:  # else a step that was never committed has attached some
                    attach(beam)
            if length := min(beam.pending - 1, budget):
                yield beam, length
                budget -= length

    def branch(self) -> "SequenceGroup":
        """The group of a sequence that goes on from one of this group: one of its own, still empty."""
        return SequenceGroup(self.limit, cache=self.cache, pause_at=self.pause_at, width=self.width)


class BeamSequences(SequenceGroup):
    """The beams of a search, in the order of their choices."""

    __slots__ = ()

    def branch(self) -> SequenceGroup:
        """This group: the beams of a search stay together."""
        return self


def group_for(request: Request, limit: int) -> SequenceGroup:
    """An empty group for the first sequence of a request. limit: the most tokens that one of it can have."""
    made = BeamSequences if request.width > 1 else SequenceGroup
    return made(limit, cache=request.cache, width=request.width)


def pages_of(pool: PagePool, sequence: Sequence, count: int, tokens: int, chunk: int) -> list[int]:
    """The most pages of each group of layers that `count` sequences like this one use, with `tokens` tokens each.

    They have the full pages of their prompt in common. chunk: the most tokens that are computed at once.
    """
    own = pool.max_pages(tokens, chunk)
    if count == 1:
        return own
    common = pool.shareable_pages(len(sequence.request.prompt) if sequence.shares else 0)
    return [count * pages - (count - 1) * shared for pages, shared in zip(own, common, strict=True)]
