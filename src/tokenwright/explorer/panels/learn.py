"""The lesson: figures for its cards, the check of an answer, and one teacher-forced pass over a text."""

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from tokenwright.errors import RequestError
from tokenwright.explorer.dataclass_reader import Between, Length
from tokenwright.explorer.explorer import Explorer, PanelError
from tokenwright.trace.schema import TokenCard
from tokenwright.trace.wire import Source

if TYPE_CHECKING:
    from tokenwright.explorer.learn import CheckWork
    from tokenwright.llm.llm import LLM

MOST_TEXT = 2048  # ids to score
Answer = Annotated[dict[Annotated[str, Length(0, 40)], int | float | Annotated[str, Length(0, 1000)]], Length(0, 16)]


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    label: str
    value: int | float | str | None  # text for what is no number
    unit: str
    source: Source
    meaning: str  # the formula, the clock, or what was counted


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    label: str
    kind: Literal["whole", "number", "text", "choice", "head", "streak"]
    start: int | float | str  # of an empty form
    options: tuple[str, ...]  # of a choice
    least: int | float | None
    most: int | float | None  # of a text: characters


@dataclass(frozen=True, slots=True)
class ChallengeCard:
    id: str
    number: int
    card: str
    title: str
    task: str
    target: str
    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class CardFacts:
    card: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Lesson:
    challenges: tuple[ChallengeCard, ...]
    facts: tuple[CardFacts, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """POST /check/CHALLENGE. streak: right answers in a row, if several are needed; send it with the next one."""

    challenge: str
    passed: bool
    message: str
    facts: tuple[Fact, ...]
    streak: int


@dataclass(frozen=True, slots=True)
class Losses:
    tokens: tuple[TokenCard, ...]
    losses: tuple[float | None, ...]  # nats of each token after those before it; the first has none
    facts: tuple[Fact, ...]


MESSAGES = (Fact, Field, ChallengeCard, CardFacts, Lesson, Checked, Losses)


@dataclass(frozen=True, slots=True)
class AnswerBody:
    answer: Answer


@dataclass(frozen=True, slots=True)
class LossesBody:
    ids: Annotated[list[Annotated[int, Between(0, 2**31 - 1)]], Length(2, MOST_TEXT)]


def learn(explorer: Explorer) -> Lesson:
    from tokenwright.explorer.learn import lesson

    return lesson(explorer.llm)


def check(explorer: Explorer, challenge: str, body: AnswerBody, work: "CheckWork") -> Checked:  # noqa: ARG001
    from tokenwright.explorer.learn import CHALLENGES

    asked = CHALLENGES.get(challenge)
    if asked is None:
        raise PanelError("missing", f"there is no challenge of this name; there are {', '.join(CHALLENGES)}")
    return asked.check(work, asked.read(body.answer))


def score(explorer: Explorer, body: LossesBody, work: "CheckWork") -> Losses:
    size = explorer.llm.config.vocab_size
    if max(body.ids) >= size:
        raise RequestError(f"ids must be below {size}, the size of the vocabulary")
    with work.engine(len(body.ids)) as llm:
        llm.score(body.ids[:2])  # a fresh engine's first call takes longer
        return losses(llm, body.ids, explorer)


def losses(llm: "LLM", ids: list[int], explorer: Explorer) -> Losses:
    began = time.perf_counter()
    scored = llm.score(ids)
    spent = time.perf_counter() - began
    loss = [None, *(-value for value in scored.tolist())]
    mean = float(-scored.mean())
    facts = (
        Fact("loss", "mean loss", mean, "nat", Source.READ, "mean of -log p, at temperature 1"),
        Fact("perplexity", "perplexity", math.exp(mean), "", Source.DERIVED, "e to the mean loss"),
        Fact("pass_us", "the pass", spent * 1e6, "us", Source.MEASURED, "from the request to the last loss"),
        Fact("rows", "tokens in one pass", float(len(ids)), "tokens", Source.COUNTED, "rows of one pass"),
    )
    return Losses(explorer.looks(ids), tuple(loss), facts)
