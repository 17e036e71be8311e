"""Panel Drafts: the steps that would write a run's text with drafts; an engine that records runs has none itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from tokenwright.decode import SuffixProposer
from tokenwright.decode.drafts.step_costs import StepCosts
from tokenwright.engine import Group, PagePool, Pick, Proposer, Request, Scheduler
from tokenwright.errors import RequestError
from tokenwright.explorer.explorer import Explorer
from tokenwright.llm.input_processor import RequestOptions
from tokenwright.llm.run import Run
from tokenwright.llm.run_trace import token_cards
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
    return drafts_of(explorer.run(identity), explorer.costs, free=free)


PAGE_SIZE = 256  # of a pool without memory, with room for every draft


@dataclass(frozen=True, slots=True)
class DraftedStep:
    position: int  # of its first token
    rows: int  # drafts among them
    drafts: tuple[int, ...]
    written: tuple[int, ...]
    kept: int
    open: bool = False  # the text ends before it is known which of the drafts hold

    @property
    def decodes(self) -> bool:
        return self.rows == 1 + len(self.drafts)


def drafted_steps(
    request: Request, text: Sequence[int], limit: int, budget: int, proposer: Proposer
) -> Iterator[DraftedStep]:
    """The steps that write `text` after the prompt, with which it begins. budget: of a step."""
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
    """A step's choice, up to the first token that is not the draft. False: more of the text would decide it."""
    for count, (token, draft) in enumerate(zip(following, (*drafts, None), strict=False), 1):
        if token != draft:
            return tuple(following[:count]), True
    return tuple(following), False


FREE = StepCosts({1: 1.0, 2: 1.0})  # every guess is drafted


def drafts_of(run: Run, costs: StepCosts, *, free: bool = False) -> DraftsCard:
    """The steps that write the run's text with drafts. Raises RequestError for a model with states or no text."""
    engine, start, text = run.engine, run.start, run.tokens
    if engine.facts.graph.recurrent:
        raise RequestError(
            "layers of this model keep a state, which cannot go back to where a draft was rejected; so it has no drafts"
        )
    prompt = run.sequence.request.prompt
    if len(text) == len(prompt):
        raise RequestError("the run has written no token yet; make a step first")
    options = RequestOptions(salt=start.salt, pictures=run.pictures)
    request = engine.inputs.build(start.prompt, start.params, options, written=prompt[len(start.prompt) :])
    budget = engine.loop.engine.scheduler.token_budget
    proposer = SuffixProposer(FREE if free else costs, earlier=0)
    steps = list(drafted_steps(request, text, run.sequence.limit, budget, proposer))
    return _card(run, steps, costs, free)


def _card(run: Run, steps: Sequence[DraftedStep], costs: StepCosts, free: bool) -> DraftsCard:
    done = [step for step in steps if not step.open]
    tokenizer = run.engine.facts.tokenizer
    tokens = sum(len(step.written) for step in done)
    decoding = [step for step in done if step.decodes]
    plain = (step.position + place for step in decoding for place in range(len(step.written)))
    return DraftsCard(
        free=free,
        steps=len(done),
        tokens=tokens,
        drafting=sum(bool(step.drafts) for step in done),
        drafted=sum(len(step.drafts) for step in done),
        kept=sum(step.kept for step in done),
        per_step=tokens / max(1, len(done)),
        cost=sum(_cost(costs, step.position, step.rows) for step in decoding),
        plain_cost=sum(_cost(costs, position, 1) for position in plain),
        second_row=costs.of(2),
        each=tuple(
            DraftStep(
                position=step.position,
                drafts=token_cards(tokenizer, step.drafts),
                kept=step.kept,
                written=token_cards(tokenizer, step.written),
                open=step.open,
            )
            for step in steps
        ),
    )


def _cost(costs: StepCosts, length: int, rows: int) -> float:
    """The cost of a step after a text of `length` tokens, as the proposer weighs it."""
    return costs.of(rows) + costs.context * length * rows
