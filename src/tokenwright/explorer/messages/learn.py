"""Messages between the lesson and the server: facts for the cards, the challenges, and their checked answers."""

from dataclasses import dataclass
from typing import Literal

from tokenwright.trace.schema import TokenCard
from tokenwright.trace.wire import Source


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure that a card shows, or that a check used."""

    name: str
    label: str
    value: int | float | str | None  # text for what is no number
    unit: str
    source: Source
    meaning: str  # the formula, the clock, or what was counted


@dataclass(frozen=True, slots=True)
class Field:
    """A part of the answer to a challenge. `start`: what the form begins with."""

    name: str
    label: str
    kind: Literal["whole", "number", "text", "choice", "head", "streak"]
    start: int | float | str
    options: tuple[str, ...]  # of a choice
    least: int | float | None
    most: int | float | None  # of a text: characters


@dataclass(frozen=True, slots=True)
class ChallengeCard:
    """A challenge, with its target for the loaded model."""

    id: str
    number: int
    card: str
    title: str
    task: str
    target: str
    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Figures of one card that follow from the model's shapes."""

    card: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Lesson:
    """GET /learn: what the lesson needs to know of the loaded model."""

    challenges: tuple[ChallengeCard, ...]
    facts: tuple[CardFacts, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """POST /check/CHALLENGE: whether the answer is right, why or why not, and the figures that say so.

    streak: right answers in a row, where a challenge asks for several; send it with the next one.
    """

    challenge: str
    passed: bool
    message: str
    facts: tuple[Fact, ...]
    streak: int


@dataclass(frozen=True, slots=True)
class Losses:
    """POST /learn/score: one teacher-forced pass over a whole text."""

    tokens: tuple[TokenCard, ...]
    losses: tuple[float | None, ...]  # nats, of each token after those before it; the first has none
    facts: tuple[Fact, ...]


MESSAGES = (Fact, Field, ChallengeCard, CardFacts, Lesson, Checked, Losses)
