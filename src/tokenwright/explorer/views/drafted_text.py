"""A known text as speculation writes it: the scheduler and a proposer run over it, without the model.

Drafts change no text. So what the sampler chooses behind them are the text's own tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenwright.engine import Group, PagePool, Pick, Proposer, Request, Scheduler

PAGE_SIZE = 256  # of a pool without memory, which has room for every draft


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A step from `position` on that computes `rows` tokens, the drafts among them, and keeps `kept` of these.

    open: the text ends before it is known which of the drafts hold.
    """

    position: int
    rows: int
    drafts: tuple[int, ...]
    written: tuple[int, ...]
    kept: int
    open: bool = False

    @property
    def decodes(self) -> bool:
        return self.rows == 1 + len(self.drafts)


def drafted_steps(
    request: Request, text: Sequence[int], limit: int, budget: int, proposer: Proposer
) -> Iterator[DraftedStep]:
    """The steps that write `text` behind the request's prompt, which it begins with. budget: of a step."""
    pool = PagePool([Group(limit // PAGE_SIZE + 2)], PAGE_SIZE)
    scheduler = Scheduler(pool, budget, 1, proposer=proposer)
    sequence = scheduler.new(request, limit)
    scheduler.add(sequence)
    while sequence.id in scheduler.sequences:
        [chunk] = (step := scheduler.schedule()).chunks
        if not chunk.picks:  # a part of the prompt
            scheduler.commit(step, [])
            continue
        known, accepted = len(sequence.tokens), sequence.counts.accepted
        written, decided = _chosen(chunk.drafts, text[known:])
        if written:
            zeros = (0.0,) * len(written)
            scheduler.commit(step, [Pick(sequence.id, written, zeros, zeros, ((),) * len(written))])
        rows = chunk.stop - chunk.start
        if decided or sequence.id not in scheduler.sequences:
            yield DraftedStep(known, rows, chunk.drafts, written, sequence.counts.accepted - accepted)
            continue
        if chunk.drafts:
            yield DraftedStep(known, rows, chunk.drafts, written, len(written), open=True)
        return


def _chosen(drafts: tuple[int, ...], following: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """The choice of a step, up to the first token that is not the draft. False: more of the text would decide it."""
    for count, (token, draft) in enumerate(zip(following, (*drafts, None), strict=False), 1):
        if token != draft:
            return tuple(following[:count]), True
    return tuple(following), False
