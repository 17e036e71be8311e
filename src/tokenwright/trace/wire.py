"""Declares the source of each number of a message, for the codec and the page's types (`scripts/typescript.py`).

tokens: Annotated[int, COUNTED("tokens", "tokens computed", "tokens sent through the layers")]
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, get_args, get_origin, get_type_hints


class Source(StrEnum):
    """Where a number comes from. The page shows it as a badge."""

    MEASURED = "measured"  # by the engine's monotonic clock
    COUNTED = "counted"  # by the engine, where the work is done
    DERIVED = "derived"  # by a formula, from shapes alone
    READ = "read"  # from the model: a probability, a weight, a norm
    GIVEN = "given"  # a name or a choice

    def __call__(self, unit: str, label: str, meaning: str) -> "Wire":
        """The declaration of a number of a JSON message, from this source."""
        return Wire("", self, unit, label, meaning)


@dataclass(frozen=True, slots=True)
class Wire:
    code: Literal["B", "I", "Q", "f", "d", ""]  # as in `struct`, in a binary message
    source: Source
    unit: str
    label: str
    meaning: str


MEASURED, COUNTED, DERIVED, READ, GIVEN = Source


def wires(kind: type) -> dict[str, Wire]:
    hints = get_type_hints(kind, include_extras=True)
    notes = {name: get_args(hint)[1] for name, hint in hints.items() if get_origin(hint) is Annotated}
    return {name: note for name, note in notes.items() if isinstance(note, Wire)}
