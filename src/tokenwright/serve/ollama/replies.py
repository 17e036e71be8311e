"""Ollama's replies: lines of a text, vectors and errors, made from what the service says.

A tool call is sent when it is complete; one that the end of the text has cut off is left out, as Ollama does.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired, TypedDict

from tokenwright.llm.outputs import Piece
from tokenwright.serve.http.exchange import arguments_of
from tokenwright.serve.http.reply_text import Json, TimingsReply
from tokenwright.serve.openai.logprobs import TokenLogprob, Tokens
from tokenwright.serve.service.types import Delta, Problem, Timings, TokenCounts, ToolCall

Line = dict[str, Any]


class OllamaError(TypedDict):
    error: str


def error_body(problem: Problem, request_id: str) -> OllamaError:  # noqa: ARG001  (it is in the header alone)
    return {"error": problem.message}


class OllamaReplyFunction(TypedDict):
    name: str
    arguments: Json


class OllamaCall(TypedDict):
    id: str
    function: OllamaReplyFunction


class OllamaReplyMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class Durations(TypedDict):
    """Tokens, and nanoseconds. The prompt's tokens are all of them, cached or not."""

    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_cached_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    timings: NotRequired[TimingsReply]


class OllamaAnswer(Durations):
    """The fields that replies of /api/chat and /api/generate have in common.

    One that only loads the model has no durations and no counts.
    """

    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load", "unload"]
    logprobs: NotRequired[list[TokenLogprob]]


class OllamaChat(OllamaAnswer):
    message: OllamaReplyMessage


class OllamaGenerated(OllamaAnswer):
    response: str
    thinking: NotRequired[str]


class OllamaVectors(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    timings: NotRequired[TimingsReply]


class OllamaVector(TypedDict):
    embedding: list[float]
    timings: NotRequired[TimingsReply]


class OllamaVersion(TypedDict):
    version: str


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def durations(counts: TokenCounts, timings: Timings) -> Durations:
    return {
        "total_duration": total_duration(timings),
        "load_duration": 0,  # the model was loaded when the server started
        "prompt_eval_count": counts.prompt,
        "prompt_eval_cached_count": counts.cached,
        "prompt_eval_duration": _ns(timings.prefill_s),
        "eval_count": counts.completion,
        "eval_duration": _ns(timings.decode_s),
    }


def total_duration(timings: Timings) -> int:
    """Nanoseconds."""
    return _ns(timings.queue_s + timings.prefill_s + timings.decode_s)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def loaded_line(model: str, keep_s: float | None, *, chat: bool) -> Line:
    """The reply to a request without a prompt, which loads the model or, with a keep_alive of 0, unloads it."""
    empty: Line = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    done = {"done": True, "done_reason": "unload" if keep_s == 0 else "load"}
    return {"model": model, "created_at": now(), **empty, **done}


class Lines:
    """The lines of one reply. tokens: for the texts of tokens with their logprobs, once the model is loaded."""

    def __init__(self, model: str, *, chat: bool, tokens: Callable[[], Tokens]) -> None:
        self.model = model
        self.chat = chat
        self._tokens = tokens
        self._answer = Delta(0)
        self._sent = 0  # tool calls

    def take(self, delta: Delta) -> Iterator[Line]:
        self._answer.add(delta)
        if delta.reasoning and delta.text:  # no line has both: many clients read only one
            yield self._line("", delta.reasoning, (), ())
            yield self._line(delta.text, "", (), delta.tokens)
        elif delta.text or delta.reasoning or delta.tokens:
            yield self._line(delta.text, delta.reasoning, (), delta.tokens)
        calls = self._answer.calls[: None if delta.finish and not delta.unfinished else -1]
        if len(calls) > self._sent:
            ready, self._sent = calls[self._sent :], len(calls)
            yield self._line("", "", ready, ())

    def end(self, counts: TokenCounts, timings: Timings) -> Line:
        return self._line("", "", (), ()) | self._done(counts, timings)

    def whole(self, answer: Delta, counts: TokenCounts, timings: Timings) -> Line:
        self._answer = answer
        calls = answer.calls[: -1 if answer.unfinished else None]
        line = self._line(answer.text, answer.reasoning, calls, answer.tokens)
        return line | self._done(counts, timings)

    def _done(self, counts: TokenCounts, timings: Timings) -> Line:
        reason = "length" if self._answer.finish == "length" else "stop"
        return {"done": True, "done_reason": reason, **durations(counts, timings)}

    def _line(self, text: str, thinking: str, calls: Iterable[ToolCall], tokens: Sequence[Piece]) -> Line:
        content: dict[str, Any] = {"content" if self.chat else "response": text}
        if thinking:
            content["thinking"] = thinking
        if called := [
            OllamaCall(id=call.id, function=OllamaReplyFunction(name=call.name, arguments=arguments_of(call)))
            for call in calls
        ]:
            content["tool_calls"] = called
        body = {"message": {"role": "assistant", **content}} if self.chat else content
        extra = {"logprobs": self._tokens().chat(tokens)} if tokens else {}
        return {"model": self.model, "created_at": now(), **body, "done": False, **extra}
