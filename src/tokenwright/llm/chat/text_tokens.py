"""The tokens that wrote the text of an answer, as against its reasoning, its calls and their marks."""

from __future__ import annotations

from tokenwright.llm.chat.output_parser import OutputParser
from tokenwright.llm.outputs import Piece


class TextTokens:
    """Follows one text on its way through `parser`, by counts of characters.

    A token is the text's if a character of it is shown as text. A token without a character, such as half of one or an
    end token, goes with the next that has one, or at the end with the last.
    """

    def __init__(self, parser: OutputParser) -> None:
        self.parser = parser
        self._known = self._said = 0  # characters that are sorted; of these, those of the text
        self._waiting: list[tuple[Piece, int, int]] = []  # where its characters begin and end
        self._in_text = True  # the last token was the text's

    def push(self, piece: Piece, start: int) -> list[Piece]:
        """The parser has taken this piece after `start` characters: the text's tokens that are known since."""
        end = self.parser.pushed
        if piece.token_id is not None:
            self._waiting.append((piece, start, end))
        self._known = end - self.parser.held
        return self._settle(self._known - self._grown(), self._known)

    def finish(self) -> list[Piece]:
        """The parser has finished: the last of the text's tokens. It shows the start of the characters that it held."""
        found = self._settle(self._known, self._known + self._grown())
        if any(start < end for _, start, end in self._waiting):
            return found  # the text has ended inside a mark
        return found + [piece for piece, _, _ in self._waiting if self._in_text]

    def _grown(self) -> int:
        grown, self._said = self.parser.said - self._said, self.parser.said
        return grown

    def _settle(self, first: int, last: int) -> list[Piece]:
        """Let the tokens go that end before the character `last`; those from `first` on are the text's."""
        found: list[Piece] = []
        done, group = 0, list[Piece]()
        for at, (piece, start, end) in enumerate(self._waiting, 1):
            group.append(piece)
            if start == end:
                continue
            shown = max(start, first) < min(end, last)
            if start >= last or (end > last and not shown):
                break
            found += group if shown else []
            done, group, self._in_text = at, [], shown
        del self._waiting[:done]
        return found
