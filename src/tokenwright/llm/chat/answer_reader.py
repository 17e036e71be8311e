"""Reads the texts of a chat's answer from their pieces: its content, reasoning, tool calls and value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenwright.engine import FinishReason
from tokenwright.llm.chat.answer import Answer, Delta
from tokenwright.llm.chat.output_parser import OutputParser
from tokenwright.llm.outputs import Piece

# A mark may have been cut: by the length, or by a stop string or token inside a call.
CUT = frozenset((FinishReason.LENGTH, FinishReason.CONTEXT, FinishReason.TIME, FinishReason.STOP, FinishReason.STOP_ID))


class AnswerReader:
    """Reads the texts of one request. new: makes the parser of one text. parse: makes a value of its content.

    It reads a growing stream by `split`, and whole texts by `fields`.
    """

    def __init__(self, new: Callable[[], OutputParser], parse: Callable[[str], Any] | None = None) -> None:
        self._new = new
        self._parse = parse
        self._growing: dict[int, OutputParser] = {}

    def fields(self, pieces: Iterable[Piece], reason: FinishReason | None) -> dict[str, Any]:
        """The fields of a Completion that a text's pieces make."""
        parser, answer = self._new(), Answer(0)
        for piece in pieces:
            delta = Delta(0)
            parser.push(piece.text, piece.token_id, delta)
            answer.add(delta)
        delta = Delta(0)
        parser.finish(delta, cut=reason in CUT)
        answer.add(delta)
        return {
            "content": answer.text,
            "reasoning": answer.reasoning,
            "tool_calls": tuple(answer.tool_calls),
            "parsed": self._value(answer),
        }

    def _value(self, answer: Answer) -> Any:
        """The value of an answer's content; None where it has none, as that of a text that was cut."""
        if self._parse is None or answer.tool_calls:
            return None
        try:
            return self._parse(answer.text)
        except (ValueError, RecursionError):  # pydantic's errors are ValueErrors
            return None

    def split(self, pieces: Sequence[Piece], reasons: Mapping[int, FinishReason | None]) -> list[Piece]:
        """The next pieces of a stream with their content and reasoning.

        reasons: why each text has ended, once all have; then there are pieces of what was held back, too.
        """
        found = []
        for piece in pieces:
            delta = Delta(piece.choice)
            self._parser(piece.choice).push(piece.text, piece.token_id, delta)
            found.append(piece._replace(content=delta.text, reasoning=delta.reasoning))
        for choice, parser in self._growing.items() if reasons else ():
            delta = Delta(choice)
            parser.finish(delta, cut=reasons[choice] in CUT)
            if delta.text or delta.reasoning:
                found.append(Piece("", None, 0.0, 0.0, (), choice, delta.text, delta.reasoning))
        return found

    def _parser(self, choice: int) -> OutputParser:
        if choice not in self._growing:
            self._growing[choice] = self._new()
        return self._growing[choice]
