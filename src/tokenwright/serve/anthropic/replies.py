"""Anthropic's replies: messages, whole and as events, and errors."""

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any, Literal, NotRequired, TypedDict

from tokenwright.engine import FinishReason
from tokenwright.llm.chat.output_parser import new_hex
from tokenwright.llm.prompts.report import CacheReport, Cause
from tokenwright.serve.http.exchange import arguments_of
from tokenwright.serve.http.reply_text import Json, TimingsReply
from tokenwright.serve.service.types import Delta, Kind, Problem, TokenCounts, ToolCallDelta

ERROR_TYPES: dict[Kind, str] = {
    "invalid": "invalid_request_error", "key": "authentication_error", "forbidden": "permission_error",
    "missing": "not_found_error", "size": "request_too_large", "busy": "rate_limit_error",
    "unavailable": "overloaded_error", "engine": "api_error",
}  # fmt: skip

Event = dict[str, Any]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str
    details: NotRequired[Json]


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


def error_body(problem: Problem, request_id: str) -> AnthropicError:
    error = AnthropicErrorDetail(type=ERROR_TYPES[problem.kind], message=problem.message)
    if problem.param == "thread":  # the client's tool runner then asks again, with the whole conversation
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": request_id}


class ThinkingContent(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class TextContent(TypedDict):
    type: Literal["text"]
    text: str


class ToolUseContent(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


Content = ThinkingContent | TextContent | ToolUseContent


class CacheCreation(TypedDict):
    ephemeral_1h_input_tokens: int
    ephemeral_5m_input_tokens: int


class MessageUsage(TypedDict):
    """Prompt tokens: read from the cache, computed and pinned (creation), and computed (input_tokens)."""

    input_tokens: int
    output_tokens: int
    output_tokens_details: dict[Literal["thinking_tokens"], int]
    cache_creation_input_tokens: int
    cache_creation: NotRequired[CacheCreation]
    cache_read_input_tokens: int
    pinned_input_tokens: NotRequired[int]
    unpinned_breakpoints: NotRequired[int]
    service_tier: Literal["standard"]


class Stop(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


MissType = (
    Literal["model_changed", "system_changed", "tools_changed", "messages_changed"]
    | Literal["previous_message_not_found", "unavailable"]
)


class MissReason(TypedDict):
    """Why a prompt missed the cache, as in Anthropic's API."""

    type: MissType
    cache_missed_input_tokens: NotRequired[int]


class DiagnosticsReply(TypedDict):
    cache_miss_reason: MissReason


class AnthropicMessage(Stop):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    usage: MessageUsage
    diagnostics: NotRequired[DiagnosticsReply | None]
    timings: NotRequired[TimingsReply]


class CountedTokens(TypedDict):
    input_tokens: int


def stop_of(finished: Delta) -> Stop:
    match finished.finish, finished.reason:
        case "tool_calls", _:
            reason: StopReason = "tool_use"
        case "length", FinishReason.CONTEXT:
            reason = "model_context_window_exceeded"
        case "length", _:
            reason = "max_tokens"
        case _ if isinstance(finished.stopped, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stopped}
        case _:
            reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def usage_of(counts: TokenCounts) -> MessageUsage:
    written, hour = (max(0, tokens - counts.cached) for tokens in (counts.pinned, counts.pinned_hour))
    found: MessageUsage = {
        "input_tokens": counts.prompt - counts.cached - written,
        "output_tokens": counts.completion,
        "output_tokens_details": {"thinking_tokens": counts.reasoning},
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": counts.cached,
        "service_tier": "standard",
    }
    if counts.pinned or counts.unpinned:
        found["pinned_input_tokens"], found["unpinned_breakpoints"] = counts.pinned, counts.unpinned
        found["cache_creation"] = {"ephemeral_1h_input_tokens": hour, "ephemeral_5m_input_tokens": written - hour}
    return found


_MISSES: Mapping[Cause, MissType] = {
    Cause.MODEL: "model_changed",
    Cause.SYSTEM: "system_changed",
    Cause.TOOLS: "tools_changed",
    **dict.fromkeys((Cause.MESSAGE, Cause.COMPACTED, Cause.THOUGHTS, Cause.RETOKENISED), "messages_changed"),
}


def diagnostics_of(report: CacheReport | None) -> DiagnosticsReply | None:
    """The diagnostics of a prompt compared with an earlier one; None: no miss."""
    if report is not None and report.missing:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if report is None or not report.known or report.cause is Cause.PLACE:
        return None
    kind = _MISSES.get(report.cause, "unavailable") if report.cause is not None else "unavailable"
    if kind == "unavailable":
        return {"cache_miss_reason": {"type": kind}}
    return {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": report.again}}


def message_of(
    identity: str, model: str, answer: Delta, counts: TokenCounts, diagnostics: DiagnosticsReply | None = None
) -> AnthropicMessage:
    stop = stop_of(answer)
    return {
        "id": identity,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content_of(answer),
        "stop_reason": stop["stop_reason"],
        "stop_sequence": stop["stop_sequence"],
        "usage": usage_of(counts),
        "diagnostics": diagnostics,
    }


def content_of(answer: Delta) -> list[Content]:
    """The blocks of an answer. A call that is cut off has only its whole arguments."""
    blocks: list[Content] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature_of(answer.reasoning)})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    return blocks + [
        ToolUseContent(type="tool_use", id=call.id, name=call.name, input=arguments_of(call)) for call in answer.calls
    ]


def signature_of(thought: str) -> str:
    """A signature, without which clients drop reasoning; this server checks none."""
    return b64encode(sha256(thought.encode()).digest()).decode()


def new_identity() -> str:
    return f"msg_{new_hex(12)}"


class Events:
    """The events of a streamed reply. shown: reasoning has text. counts: tokens so far. diagnostics: of its prompt."""

    def __init__(
        self,
        identity: str,
        model: str,
        shown: bool,
        counts: Callable[[], TokenCounts],
        diagnostics: Callable[[], DiagnosticsReply | None] = lambda: None,
    ) -> None:
        self._diagnostics = diagnostics
        self.identity = identity
        self.model = model
        self.shown = shown
        self._counts = counts
        self._thought = ""
        self._begun = False
        self._open = ""
        self._index = -1

    def take(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta, except its end. From the first delta on, the cached tokens are known."""
        if not self._begun:
            self._begun = True
            found = message_of(self.identity, self.model, Delta(0), self._counts(), self._diagnostics())
            empty: Event = {**found, "stop_reason": None}
            yield {"type": "message_start", "message": empty}
        yield from self._calls(delta.continued)
        if delta.reasoning:
            yield from self._block({"type": "thinking", "thinking": "", "signature": ""})
            self._thought += delta.reasoning
            if self.shown:
                yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            yield from self._block({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.text})
        yield from self._calls(delta.begun)

    def end(self, delta: Delta, more: Event) -> Iterator[Event]:
        """more: extension fields."""
        yield from self._close()
        yield {"type": "message_delta", "delta": stop_of(delta), "usage": usage_of(self._counts()), **more}
        yield {"type": "message_stop"}

    def _calls(self, calls: Iterable[ToolCallDelta]) -> Iterator[Event]:
        for call in calls:
            if call.id is not None:
                yield from self._close()
                yield from self._block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _block(self, block: dict[str, Any]) -> Iterator[Event]:
        if self._open == block["type"]:
            return
        yield from self._close()
        self._open, self._index = block["type"], self._index + 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Event]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature_of(self._thought)})
            self._thought = ""
        if self._open:
            self._open = ""
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
