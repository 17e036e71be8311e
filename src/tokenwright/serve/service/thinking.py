"""How a model is made to reason, or not, and for how long: variables of its template, and the end of its thoughts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tokenwright.decode.stopping import Constraint
from tokenwright.serve.service.output_parser import ThinkTags

if TYPE_CHECKING:
    from tokenwright.text import Tokenizer

SWITCHES = ("enable_thinking", "thinking")  # variables of templates that switch reasoning on and off
_BEFORE, _AFTER = "\n", "\n\n"  # the end tag, as it is written for a model


def switches_of(source: str) -> tuple[str, ...]:
    """The variables by which a template's reasoning is switched, from its source: those that it asks for by name."""
    statements = " ".join(re.findall(r"\{[%{](.*?)[%}]\}", source, re.DOTALL))
    code = re.sub(r"'[^']*'|\"[^\"]*\"", "''", statements)
    return tuple(name for name in SWITCHES if re.search(rf"(?<![\w.]){name}(?!\w)(?!\s*=(?!=))", code))


def variables_of(thinking: bool | None, given: Mapping[str, Any], switches: Sequence[str]) -> dict[str, Any]:
    """The template's variables: those that a request gives, and its switches."""
    switched = {} if thinking is None else dict.fromkeys(switches, thinking)
    return {**switched, **given}


def closing(text: str, tags: ThinkTags) -> str:
    """What follows a prompt so that the model does not reason: empty thoughts, or the end of those that it opens."""
    opening = "" if text.rstrip().endswith(tags.start) else f"{tags.start}{_BEFORE}"
    return f"{opening}{_BEFORE}{tags.end}{_AFTER}"


class ThinkingBudget:
    """Ends the thoughts of a text after so many tokens, by the tokens of the end tag.

    inner: constrains the whole text. If the prompt does not end inside the thoughts, they begin where the text begins
    with the start tag.
    """

    def __init__(self, inner: Constraint | None, budget: int, tags: ThinkTags, tokenizer: Tokenizer, size: int) -> None:
        self._inner = inner
        self._left = budget
        self._tags = tags
        self._tokenizer = tokenizer
        self._size = size  # of the vocabulary
        self._state = "thinks" if tags.opened else "begins"
        self._seen = ""  # of the text, as far as a tag may end in it
        self._forced: tuple[int, ...] = ()
        if tags.opened:
            self._close_if_over()

    def mask(self) -> Any:
        """The allowed ids: the next one of the end tag, where the budget is spent and `inner` allows it."""
        allowed = None if self._inner is None else self._inner.mask()
        if not self._forced:
            return allowed
        token = self._forced[0]
        if allowed is not None and not int(allowed[token // 32]) >> token % 32 & 1:
            self._forced = ()
            return allowed
        words = np.zeros(-(-self._size // 32), dtype=np.uint32)
        words[token // 32] = np.uint32(1 << token % 32)
        return words

    def advance(self, token: int) -> bool:
        """Advance by a token; True: nothing may follow it."""
        if self._forced:
            self._forced = self._forced[1:]
        elif self._state != "over":
            self._read(self._tokenizer.token_text(token))
        return self._inner is not None and self._inner.advance(token)

    def fork(self) -> Self:
        """An independent copy in the same state."""
        other = copy(self)
        other._inner = None if self._inner is None else self._inner.fork()
        return other

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return self._inner is None or self._inner.accepting

    def _read(self, piece: str) -> None:
        self._seen += piece
        if self._state == "begins":
            text = self._seen.lstrip()
            if text.startswith(self._tags.start):
                self._state, self._seen = "thinks", text[len(self._tags.start) :]
            elif not self._tags.start.startswith(text):
                self._state = "over"
        elif self._tags.end in self._seen:
            self._state = "over"
        else:
            self._left -= 1
            self._seen = self._seen[-len(self._tags.end) :]
        if self._state == "thinks":
            self._close_if_over()

    def _close_if_over(self) -> None:
        if self._left <= 0:
            end = f"{_BEFORE}{self._tags.end}{_AFTER}"
            self._forced, self._state = tuple(self._tokenizer.encode(end, add_special=False)), "over"
