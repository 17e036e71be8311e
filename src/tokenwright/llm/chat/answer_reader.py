"""Reads reasoning, calls and the value of an answer from the pieces of a text, for `LLM.chat` and the server."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenwright.engine import FinishReason
from tokenwright.llm.chat.output_parser import Delta, Finish, OutputParser
from tokenwright.llm.outputs import Piece

# These reasons may cut a mark: the length, or a stop string or token inside a call.
CUT = frozenset((FinishReason.LENGTH, FinishReason.CONTEXT, FinishReason.TIME, FinishReason.STOP, FinishReason.STOP_ID))
_FINISH: dict[FinishReason, Finish] = dict.fromkeys(
    (FinishReason.LENGTH, FinishReason.CONTEXT, FinishReason.TIME), "length"
)


class AnswerReader:
    """Reads the texts of one request. `new` makes the parser of a text; `parse` gives the value of its content."""

    def __init__(
        self, new: Callable[[], OutputParser], parse: Callable[[str], Any] | None = None, *, keeps_tokens: bool = False
    ) -> None:
        self.keeps_tokens = keeps_tokens
        self._new = new
        self._parse = parse
        self._growing = defaultdict[int, TextTokens](lambda: TextTokens(new()))

    @property
    def reasoning_tokens(self) -> int:
        return sum(one.parser.reasoning_tokens for one in self._growing.values())

    def push(self, piece: Piece, delta: Delta) -> None:
        tokens = self._growing[piece.choice]
        start = tokens.parser.pushed
        tokens.parser.push(piece.text, piece.token_id, delta)
        if self.keeps_tokens:
            delta.tokens += tokens.push(piece, start)

    def finish(self, delta: Delta, reason: FinishReason | None, stopped: str | int | None = None) -> None:
        """Put what was held back, and why the text has ended, into its last delta."""
        tokens = self._growing[delta.choice]
        tokens.parser.finish(delta, cut=reason in CUT)
        if self.keeps_tokens:
            delta.tokens += tokens.finish()
        if reason in (None, FinishReason.ABORTED):  # the text is unfinished: its reader gets an error, or is closed
            return
        delta.finish, delta.reason, delta.stopped = _FINISH.get(reason, "stop"), reason, stopped
        delta.unfinished = tokens.parser.unfinished
        if delta.finish == "stop" and tokens.parser.called and not delta.unfinished:
            delta.finish = "tool_calls"

    def fields(self, pieces: Iterable[Piece], reason: FinishReason | None) -> dict[str, Any]:
        reader, read, answer = AnswerReader(self._new), Delta(0), Delta(0)
        for piece in pieces:
            reader.push(piece._replace(choice=0), read)
        reader.finish(read, reason)
        answer.add(read)
        return {
            "content": answer.text,
            "reasoning": answer.reasoning,
            "tool_calls": tuple(answer.calls),
            "parsed": self._value(answer),
        }

    def _value(self, answer: Delta) -> Any:
        if self._parse is None or answer.tool_calls:
            return None
        try:
            return self._parse(answer.text)
        except (ValueError, RecursionError):  # pydantic's errors are ValueErrors
            return None

    def split(self, pieces: Sequence[Piece], reasons: Mapping[int, FinishReason | None]) -> list[Piece]:
        """The next pieces of a stream with content and reasoning; `reasons`, at the end, release held-back text."""
        found = []
        for piece in pieces:
            delta = Delta(piece.choice)
            self.push(piece, delta)
            found.append(piece._replace(content=delta.text, reasoning=delta.reasoning))
        for choice in self._growing if reasons else ():
            delta = Delta(choice)
            self.finish(delta, reasons[choice])
            if delta.text or delta.reasoning:
                found.append(Piece("", None, 0.0, 0.0, (), choice, delta.text, delta.reasoning))
        return found


class TextTokens:
    """The tokens that `parser` shows as text. A token without a whole character goes with the next one."""

    def __init__(self, parser: OutputParser) -> None:
        self.parser = parser
        self._known = self._said = 0  # characters that are sorted, and those of them that are text
        self._waiting: list[tuple[Piece, int, int]] = []  # where its characters begin and end
        self._in_text = True  # the last token was the text's

    def push(self, piece: Piece, start: int) -> list[Piece]:
        """The tokens that are known to be text once the parser has taken this piece, after `start` characters."""
        end = self.parser.pushed
        if piece.token_id is not None:
            self._waiting.append((piece, start, end))
        self._known = end - self.parser.held
        return self._settle(self._known - self._grown(), self._known)

    def finish(self) -> list[Piece]:
        found = self._settle(self._known, self._known + self._grown())
        if any(start < end for _, start, end in self._waiting):
            return found  # the text ends inside a mark
        return found + [piece for piece, _, _ in self._waiting if self._in_text]

    def _grown(self) -> int:
        grown, self._said = self.parser.said - self._said, self.parser.said
        return grown

    def _settle(self, first: int, last: int) -> list[Piece]:
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
