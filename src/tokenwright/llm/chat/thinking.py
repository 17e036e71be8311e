"""Decides whether and how long a model reasons, by template variables and a gate on its tokens."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from tokenwright.decode.stopping import Constraint
from tokenwright.engine import Thoughts
from tokenwright.llm.chat.chat_options import SWITCHES
from tokenwright.llm.chat.output_parser import ThinkTags

if TYPE_CHECKING:
    from tokenwright.text import Tokenizer

_BITS = 32  # bits of a mask's word
_MOST_SPACE = 4  # characters of white space between reasoning and answer
_BEFORE, _AFTER = "\n", "\n\n"  # around an end tag that the gate forces


def switches_of(source: str) -> tuple[str, ...]:
    statements = " ".join(re.split(r"[%}]\}", part)[0] for part in re.split(r"\{[%{]", source)[1:])
    code = re.sub(r"'[^']*'|\"[^\"]*\"", "''", statements)
    return tuple(name for name in SWITCHES if re.search(rf"(?<![\w.]){name}(?!\w)(?!\s*=(?!=))", code))


def variables_of(thinking: bool | None, given: Mapping[str, Any], switches: Sequence[str]) -> dict[str, Any]:
    switched = {} if thinking is None else dict.fromkeys(switches, thinking)
    return {**switched, **given}


def closing(text: str, tags: ThinkTags) -> str:
    """The text that ends reasoning after a prompt: both tags, or only the end tag if the prompt opened it."""
    opening = "" if text.rstrip().endswith(tags.start) else f"{tags.start}{_BEFORE}"
    return f"{opening}{_BEFORE}{tags.end}{_AFTER}"


class TokenMasks:
    """Sets of a model's tokens as masks of 32-bit words, the lowest bit first. ends: the ids that end a text."""

    def __init__(self, tokenizer: "Tokenizer", size: int, ends: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self._ends = frozenset(ends)

    def of(self, ids: Iterable[int]) -> NDArray[np.uint32]:
        words = np.zeros(-(-self._size // _BITS), dtype=np.uint32)
        for token in ids:
            words[token // _BITS] |= np.uint32(1 << token % _BITS)
        return words

    @cached_property
    def going_on(self) -> NDArray[np.uint32]:
        return self.of(token for token in range(self._size) if token not in self._ends)

    @cached_property
    def spaces(self) -> NDArray[np.uint32]:
        texts = (self._tokenizer.token_bytes(token) for token in range(self._size))
        return self.of(at for at, text in enumerate(texts) if text and not text.strip() and len(text) <= _MOST_SPACE)


class ThoughtGate:
    """Lets a text begin with reasoning, after which its grammar applies; a budget of tokens may end the reasoning.

    inner: constrains the answer, or None. A tag that is a special token counts only as that token, others as text.
    """

    def __init__(self, inner: Constraint | None, thoughts: Thoughts, tokenizer: "Tokenizer", masks: TokenMasks) -> None:
        self._inner = inner
        self._answer = None if inner is None else inner.fork()  # advanced as if the text had no reasoning
        self._tags = thoughts
        self._tokenizer = tokenizer
        self._masks = masks
        self._left = thoughts.budget
        self._state = "thinks" if thoughts.opened else "begins"
        self._seen = ""  # the end of the text, in which a tag may end
        self._start = tuple(tokenizer.encode(thoughts.start, add_special=False))
        self._marked = len(self._start) == 1 or not tokenizer.special_ids.isdisjoint(self._start[:1])
        self._at = 0  # how many tokens of it were written
        self._forced: tuple[int, ...] = ()
        if thoughts.opened:
            self._close_if_over()

    def mask(self) -> Any:
        """The allowed ids: once the budget is spent, the rest of the end tag; while reasoning, all but end tokens."""
        if self._forced:
            return self._masks.of(self._forced[:1])
        if self._inner is None:
            return None
        if self._state == "thinks":
            return self._masks.going_on
        if self._state == "after" and len(self._seen) < _MOST_SPACE:
            return self._inner.mask() | self._masks.spaces
        if self._state == "begins":
            allowed = self._masks.of(()) if self._answer is None else self._answer.mask()
            # Allow a start tag that begins with a special token; one that is plain text could begin the answer.
            may = self._marked and (self._at > 0 or not self._seen.strip())
            return allowed | self._masks.of(self._start[self._at : self._at + 1] if may else ())
        return self._inner.mask()

    def forced(self) -> Sequence[int]:
        """The rest of the end tag once the budget is spent; after reasoning, the tokens that the grammar forces."""
        if self._forced or self._inner is None:
            return self._forced
        return self._inner.forced() if self._state == "over" else ()

    def advance(self, token: int) -> bool:
        if self._state == "over":
            return self._inner is not None and self._inner.advance(token)
        piece = self._tokenizer.token_text(token)
        if self._state == "begins":
            return self._begin(token, piece)
        if self._state == "after":
            if not piece.strip() and len(self._seen) < _MOST_SPACE:
                self._seen += piece
                return False
            self._state = "over"
            return self._inner is not None and self._inner.advance(token)
        if self._forced:
            self._forced = self._forced[1:]
            if not self._forced:
                self._end()
            return False
        self._think(token, piece)
        return False

    def fork(self) -> Self:
        other = copy(self)
        other._inner = None if self._inner is None else self._inner.fork()
        other._answer = None if self._answer is None else self._answer.fork()
        return other

    @property
    def accepting(self) -> bool:
        state = self._answer if self._state == "begins" else self._inner
        return self._inner is None or (self._state != "thinks" and state is not None and state.accepting)

    @property
    def answering(self) -> bool:
        return self._state != "thinks"

    def _begin(self, token: int, piece: str) -> bool:
        done = False
        if self._answer is not None:
            if int(self._answer.mask()[token // 32]) >> token % 32 & 1:
                done = self._answer.advance(token)
            else:
                self._answer = None
        self._at += self._start[self._at : self._at + 1] == (token,)
        self._seen += piece
        text, start = self._seen.lstrip(), self._tags.start
        if text.startswith(start):
            self._state, self._seen = "thinks", text[len(start) :]
            self._close_if_over()
            return False
        if not start.startswith(text):
            self._state, self._inner = "over", self._answer
        return done

    def _think(self, token: int, piece: str) -> None:
        self._seen += piece
        end = self._tokenizer.control.ids.get(self._tags.end)
        special = end is not None and end in self._tokenizer.special_ids
        if token == end or (not special and self._tags.end in self._seen):
            self._end()
            return
        self._left = None if self._left is None else self._left - 1
        self._seen = self._seen[-len(self._tags.end) :]
        self._close_if_over()

    def _end(self) -> None:
        self._state, self._seen = "after" if self._inner is not None else "over", ""

    def _close_if_over(self) -> None:
        if self._left is not None and self._left <= 0:
            end = f"{_BEFORE}{self._tags.end}{_AFTER}"
            self._forced = tuple(self._tokenizer.encode(end, add_special=False))
