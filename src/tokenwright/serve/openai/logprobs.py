"""Log-probabilities of tokens in the APIs' formats, and the tokens' offsets in a text."""

from collections.abc import Iterable, Sequence
from typing import TypedDict

from tokenwright.engine import TopLogprob
from tokenwright.llm.outputs import Piece
from tokenwright.text import TextStream, Tokenizer

LEAST = -9999.0  # a probability of 0, whose logarithm JSON cannot write


class TopLogprobReply(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprobReply):
    top_logprobs: list[TopLogprobReply]


class LlamaLogprob(TopLogprobReply):
    id: int


class LlamaToken(LlamaLogprob):
    top_logprobs: list[LlamaLogprob]


class TextLogprobs(TypedDict):
    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]


class Tokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        return self._tokenizer.token_text(token)

    def chat(self, pieces: Iterable[Piece]) -> list[TokenLogprob]:
        return [
            TokenLogprob(
                **self._named(_id_of(piece), piece.logprob),
                top_logprobs=[self._named(top.token, top.logprob) for top in piece.top],
            )
            for piece in pieces
        ]

    def llama(self, pieces: Iterable[Piece]) -> list[LlamaToken]:
        return [
            LlamaToken(
                **self._numbered(_id_of(piece), piece.logprob),
                top_logprobs=[self._numbered(top.token, top.logprob) for top in piece.top],
            )
            for piece in pieces
        ]

    def _named(self, token: int, logprob: float) -> TopLogprobReply:
        data = self._tokenizer.token_bytes(token, skip_special=False) or b""
        return {"token": self.text(token), "logprob": max(logprob, LEAST), "bytes": list(data)}

    def _numbered(self, token: int, logprob: float) -> LlamaLogprob:
        return LlamaLogprob(id=token, **self._named(token, logprob))

    def completion(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Sequence[TopLogprob] | None],
        offsets: "Offsets",
    ) -> TextLogprobs:

        def named(top: Sequence[TopLogprob], token: int, logprob: float | None) -> dict[str, float | None]:
            found = {self.text(one.token): _finite(one.logprob) for one in top}
            found.setdefault(self.text(token), _finite(logprob))
            return found

        each = zip(tops, ids, logprobs, strict=True)
        return TextLogprobs(
            text_offset=offsets.of(ids),
            tokens=[self.text(token) for token in ids],
            token_logprobs=[_finite(one) for one in logprobs],
            top_logprobs=[None if top is None else named(top, token, logprob) for top, token, logprob in each],
        )


class Offsets:
    """Offsets of tokens in the decoded text, in characters. prompt: the ids before it. start: the first offset."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), start: int = 0) -> None:
        self._stream = TextStream(tokenizer, prompt=prompt)
        self._at = start

    def of(self, ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens; a token that begins inside a character has that character's."""
        found = []
        for token in ids:
            found.append(self._at)
            self._at += len(self._stream.push(token))
        return found


def _id_of(piece: Piece) -> int:
    assert piece.token_id is not None, "only tokens have log-probabilities"
    return piece.token_id


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)
