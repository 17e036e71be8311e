"""A challenge and its answer. No form passes as it begins: a field that could be right by chance begins empty."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partialmethod

from tokenwright.errors import RequestError
from tokenwright.explorer.learn.work import CheckWork
from tokenwright.explorer.panels.learn import ChallengeCard, Checked, Fact, Field
from tokenwright.llm.llm import LLM
from tokenwright.trace.wire import Source

Value = int | float | str


@dataclass(frozen=True, slots=True)
class ChallengeAnswer:
    values: Mapping[str, Value]

    def whole(self, name: str) -> int:
        return int(self.values[name])

    def number(self, name: str) -> float:
        return float(self.values[name])

    def text(self, name: str) -> str:
        return str(self.values[name])

    def head(self, name: str) -> tuple[int, int]:
        layer, _, head = str(self.values[name]).partition(".")
        return int(layer), int(head)


Check = Callable[[CheckWork, ChallengeAnswer], Checked]


@dataclass(frozen=True, slots=True)
class Challenge:
    id: str
    card: str
    title: str
    task: str
    target: Callable[[LLM], str]
    fields: tuple[Field, ...]
    check: Check

    def describe(self, number: int, llm: LLM) -> ChallengeCard:
        return ChallengeCard(self.id, number, self.card, self.title, self.task, self.target(llm), self.fields)

    def read(self, given: Mapping[str, Value]) -> ChallengeAnswer:
        """Raises RequestError, naming the field, for a missing or senseless answer."""
        if unknown := sorted(given.keys() - {field.name for field in self.fields}):
            raise RequestError(f"{unknown[0]} is no field of the challenge {self.id}; leave it out")
        found: dict[str, Value] = {}
        for field in self.fields:
            if field.name not in given:
                raise RequestError(f"{field.name} is missing; the challenge {self.id} needs it")
            found[field.name] = _read(field, given[field.name])
        return ChallengeAnswer(found)


def challenge(
    card: str, title: str, task: str, target: Callable[[LLM], str], *fields: Field
) -> Callable[[Check], Challenge]:
    """Make a challenge of the function that checks its answer, whose name is the id."""
    return lambda check: Challenge(check.__name__, card, title, task, target, fields, check)


def whole(name: str, label: str, start: int | str, least: int, most: int) -> Field:
    return Field(name, label, "whole", start, (), least, most)


def number(name: str, label: str, start: float, least: float, most: float) -> Field:
    return Field(name, label, "number", start, (), least, most)


def text(name: str, label: str, start: str, most: int) -> Field:
    return Field(name, label, "text", start, (), None, most)


def choice(name: str, label: str, *options: str, start: str | None = None) -> Field:
    return Field(name, label, "choice", options[0] if start is None else start, options, None, None)


def head(name: str, label: str) -> Field:
    return Field(name, label, "head", "", (), None, None)


def streak(most: int) -> Field:
    return Field("streak", "right in a row", "streak", 0, (), 0, most)


def _read(field: Field, value: Value) -> Value:
    match field.kind:
        case "whole" | "streak" | "number":
            return _number(field, value)
        case "choice":
            if value not in field.options:
                raise RequestError(f"“{field.label}” must be one of {', '.join(field.options)}, not {value!r}")
            return value
        case "head":
            layer, dot, index = str(value).partition(".")
            if not (dot and layer.isascii() and layer.isdigit() and index.isascii() and index.isdigit()):
                raise RequestError(f"“{field.label}” must be a layer and a head, such as 4.1, not {value!r}")
            return str(value)
        case "text":
            if not isinstance(value, str) or not value or len(value) > (field.most or 0):
                raise RequestError(f"“{field.label}” must be text of 1 to {field.most:g} characters")
            return value


def _number(field: Field, value: Value) -> Value:
    least, most = field.least or 0, field.most or 0
    plain = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not plain or not least <= float(value) <= most:
        raise RequestError(f"“{field.label}” must be a number from {least:g} to {most:g}, not {value!r}")
    if field.kind != "number" and float(value) != int(value):
        raise RequestError(f"“{field.label}” must be a whole number, not {value!r}")
    return int(value) if field.kind != "number" else float(value)


class Figures:
    def __init__(self) -> None:
        self.facts: list[Fact] = []

    def _add(self, source: Source, name: str, label: str, value: float | str | None, unit: str, meaning: str) -> None:
        self.facts.append(Fact(name, label, value, unit, source, meaning))

    measured = partialmethod(_add, Source.MEASURED)  # by the clock
    counted = partialmethod(_add, Source.COUNTED)  # by the engine
    read = partialmethod(_add, Source.READ)  # out of the model: a log-probability, a weight, an entropy
    derived = partialmethod(_add, Source.DERIVED)  # by a formula
    given = partialmethod(_add, Source.GIVEN)  # by the learner, or a name

    def verdict(self, challenge: str, why_not: str, done: str, *, streak: int = 0) -> Checked:
        """Passed, with the sentence `done`, unless `why_not` has a text."""
        return Checked(challenge, not why_not, why_not or done, tuple(self.facts), streak)


def within(value: float, right: float, share: float) -> bool:
    return abs(value - right) <= share * abs(right)


QUESTION = "Is Python an interpreted language?"
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play in the park with her dog. One day, Lily "
    "and her dog went to the park. They saw a big tree with red apples. Lily wanted to eat an apple, but the tree was "
    "too tall. She asked her mom for help. Her mom smiled and"
)
OPENING = "One day, a boy named Ben"
QUESTIONS = ("What did Lily see?", "Who was with Lily?", "What did Lily want?", "Whom did Lily ask?")


def asked(llm: LLM, question: str) -> list[int]:
    if llm.loaded.template is None:
        return llm.tokenizer.encode(question)
    return list(llm.render([{"role": "user", "content": question}]).ids)


def repeated(ids: Sequence[int], tokens: int) -> list[int]:
    return (list(ids) * (-(-tokens // len(ids))))[:tokens]


def quoted(llm: LLM, ids: Sequence[int]) -> str:
    return llm.tokenizer.decode(list(ids)).replace("\n", " ").strip()[:80]
