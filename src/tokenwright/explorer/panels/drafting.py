"""Panel Drafts: a run's text with speculation."""

from dataclasses import dataclass
from typing import Annotated

from tokenwright.explorer.explorer import Explorer
from tokenwright.trace.schema import TokenCard
from tokenwright.trace.wire import COUNTED, DERIVED, GIVEN


@dataclass(frozen=True, slots=True)
class DraftStep:
    """It computes the last token of the text and the drafts, and writes kept + 1 tokens."""

    position: int  # of its first written token
    drafts: tuple[TokenCard, ...]
    kept: int  # the first of the drafts
    written: tuple[TokenCard, ...]
    open: bool  # the last step, whose end the text does not have yet; not counted


@dataclass(frozen=True, slots=True)
class DraftsCard:
    free: bool  # drafted as if a row cost nothing
    steps: Annotated[int, COUNTED("", "steps with drafts on", "of the scheduler, that write this text")]
    tokens: Annotated[int, COUNTED("", "steps without", "one for each token of this text")]
    drafting: Annotated[int, COUNTED("", "of these with a draft", "steps with more rows than one")]
    drafted: Annotated[int, COUNTED("tokens", "drafted", "draft tokens that the steps compute")]
    kept: Annotated[int, COUNTED("tokens", "kept", "drafts that the sampler's own draw was equal to")]
    per_step: Annotated[float, DERIVED("", "tokens a step", "tokens of this text, divided by the steps")]
    cost: Annotated[float, DERIVED("", "cost with drafts", "of the steps behind the prompt's, by the table of costs")]
    plain_cost: Annotated[float, DERIVED("", "cost without", "of the same tokens one by one, by the table of costs")]
    second_row: Annotated[float, GIVEN("", "a step of two rows", "by the table, in steps of one; a draft must pay it")]
    each: tuple[DraftStep, ...]


MESSAGES = (DraftStep, DraftsCard)


def drafts(explorer: Explorer, identity: str, free: bool = False) -> DraftsCard:
    from tokenwright.explorer.views.run_drafts import drafts_of

    return drafts_of(explorer.run(identity), explorer.costs, free=free)
