"""OpenAI's replies: objects, chunks, usage and errors."""

import hashlib
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NotRequired, TypedDict

import tokenwright
from tokenwright.llm.chat.output_parser import new_hex
from tokenwright.serve.http.reply_text import Json, ReplyTimings, dumps, llama_timings, timings_of
from tokenwright.serve.openai.custom_tools import CustomCalls, input_of
from tokenwright.serve.openai.logprobs import TextLogprobs, TokenLogprob, Tokens
from tokenwright.serve.service.types import Delta, Problem, Timings, TokenCounts, ToolCall, ToolCallDelta

_TYPES = {
    "invalid": "invalid_request_error", "key": "authentication_error", "forbidden": "permission_error",
    "missing": "not_found_error", "size": "invalid_request_error", "busy": "rate_limit_error",
    "unavailable": "service_unavailable_error", "engine": "server_error",
}  # fmt: skip
_CODES = {"key": "invalid_api_key", "missing": "not_found", "busy": "rate_limit_exceeded"}


class ErrorDetail(TypedDict):
    """param: the field at fault. n_prompt_tokens, n_ctx: given if the prompt exceeds the context."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: NotRequired[int]
    n_ctx: NotRequired[int]


class Problems(TypedDict):
    error: ErrorDetail


def error_body(problem: Problem, request_id: str) -> Problems:  # noqa: ARG001  (other APIs repeat the id)
    """OpenAI's error, with llama.cpp's fields for lengths."""
    code = "model_not_found" if problem.param == "model" else problem.code or _CODES.get(problem.kind)
    found = ErrorDetail(message=problem.message, type=_TYPES[problem.kind], param=problem.param, code=code)
    if problem.lengths is not None:
        found["n_prompt_tokens"], found["n_ctx"] = problem.lengths
    return {"error": found}


FinishWord = Literal["stop", "length", "tool_calls", "function_call"]


class Truncated(TypedDict):
    truncated_tokens: NotRequired[int]


class PromptDetails(Truncated):
    """disk_tokens: cached tokens read from disk. truncated_tokens: cut off by truncate_prompt_tokens."""

    cached_tokens: int
    cache_write_tokens: int
    disk_tokens: NotRequired[int]
    pinned_tokens: NotRequired[int]
    unpinned_breakpoints: NotRequired[int]


class OutputDetails(TypedDict):
    reasoning_tokens: int


class CompletionDetails(OutputDetails):
    """Prediction tokens are drafts of any origin."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageReply(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage_of(counts: Iterable[TokenCounts]) -> UsageReply:
    each = list(counts)
    prompt, written = sum(one.prompt for one in each), sum(one.completion for one in each)
    accepted, disk = sum(one.accepted for one in each), sum(one.disk for one in each)
    cached, kept = sum(one.cached for one in each), sum(one.kept for one in each)
    details = PromptDetails(cached_tokens=cached, cache_write_tokens=kept)
    if disk:
        details["disk_tokens"] = disk
    if any(one.pinned or one.unpinned for one in each):
        details["pinned_tokens"] = max(one.pinned for one in each)
        details["unpinned_breakpoints"] = sum(one.unpinned for one in each)
    if truncated := sum(one.truncated for one in each):
        details["truncated_tokens"] = truncated
    return UsageReply(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=details,
        completion_tokens_details=CompletionDetails(
            reasoning_tokens=sum(one.reasoning for one in each),
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=sum(one.drafted for one in each) - accepted,
        ),
    )


class ReplyHead(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: UsageReply
    timings: NotRequired[ReplyTimings]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishWord


class TextCompletion(ReplyHead):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class AnswerFunction(TypedDict):
    name: str
    arguments: str


class AnswerInput(TypedDict):
    name: str
    input: str


class AnswerCall(TypedDict):
    id: str
    type: Literal["function", "custom"]
    function: NotRequired[AnswerFunction]
    custom: NotRequired[AnswerInput]


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[AnswerCall]]
    function_call: NotRequired[AnswerFunction]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord


class ChatCompletion(ReplyHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ReleasedSession(TypedDict):
    """The reply of DELETE /v1/cache/sessions/ID, which ends the session's pins."""

    id: str
    object: Literal["cache.session.released"]


class InputTokensReply(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Names:
    """Fields that all objects of one reply share. fingerprint: of the server and its model."""

    def __init__(self, kind: str, model: str, fingerprint: str) -> None:
        self.kind = kind
        prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
        self.head: Json = {"id": f"{prefix}-{new_hex(12)}", "object": kind, "created": int(time.time()), "model": model}
        self.head["system_fingerprint"] = fingerprint

    def whole(self, choices: Sequence[TextChoice | ChatChoice], usage: UsageReply, timings: Timings | None) -> Json:
        """A TextCompletion or a ChatCompletion."""
        return self.head | {"choices": choices, "usage": usage} | _timed(timings)


def fingerprint_of(model: str) -> str:
    """A hash of version and model, which begins as llama.cpp's do."""
    return "b" + hashlib.sha256(f"{tokenwright.__version__} {model}".encode()).hexdigest()[:10]


def _timed(timings: Timings | None) -> Json:
    return {} if timings is None else {"timings": ReplyTimings(**timings_of(timings), **llama_timings(timings))}


def chat_choice(
    answer: Delta, tokens: list[TokenLogprob] | None, customs: Collection[str], *, older: bool
) -> ChatChoice:
    """A whole choice of a chat. customs: the names of custom tools. older: its call is a function_call."""
    message = ChatMessage(role="assistant", content=answer.text, refusal=None)
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = answer.text or None
    if answer.tool_calls and older:
        call = answer.calls[0]
        message["function_call"] = {"name": call.name, "arguments": call.arguments}
    elif answer.tool_calls:
        message["tool_calls"] = [_called(call, call.name in customs) for call in answer.calls]
    return ChatChoice(
        index=answer.choice,
        message=message,
        logprobs=None if tokens is None else ChatLogprobs(content=tokens, refusal=None),
        finish_reason=finish_of(answer, older=older),
    )


def _called(call: ToolCall, custom: bool) -> AnswerCall:
    if custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": input_of(call.arguments)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class Chunks:
    """Writes a stream's chunks, by joining strings for speed. older: calls are function_call."""

    def __init__(self, names: Names, usage: bool, customs: Collection[str] = (), *, older: bool = False) -> None:
        kind = names.kind if names.kind == "text_completion" else f"{names.kind}.chunk"
        self._head = "data: " + dumps(names.head | {"object": kind})[:-1] + ',"choices":['
        self.usage: UsageReply | None = None  # if set, every chunk has it
        self._tail = ',"usage":null}\n\n' if usage else "}\n\n"
        self._customs = customs
        self._older = older
        self._calls: dict[int, CustomCalls] = {}  # by choice, where there are custom tools

    def line(self, choice: str) -> str:
        tail = self._tail if self.usage is None else f',"usage":{dumps(self.usage)}}}\n\n'
        return f"{self._head}{choice}]{tail}"

    def last(self, usage: UsageReply | None, timings: Timings | None) -> str:
        more: Json = {} if usage is None else {"usage": usage}
        more |= _timed(timings)
        return f"{self._head}],{dumps(more)[1:]}\n\n"

    def chat(self, delta: Delta, tokens: Tokens, first: bool) -> str:
        """The chunks of one delta, each with one field, since some clients read only one. first: of its choice."""
        lines = []
        if first:
            lines.append(self._choice(delta.choice, '{"role":"assistant","content":""}'))
        parts = []
        if delta.reasoning:
            parts.append(f'"reasoning_content":{dumps(delta.reasoning)}')
        if delta.text:
            parts.append(f'"content":{dumps(delta.text)}')
        if self._older:
            parts += [f'"function_call":{dumps(_older(call))}' for call in delta.tool_calls if call.index == 0]
        elif calls := self._fragments(delta):
            parts.append(f'"tool_calls":{dumps(calls)}')
        lines += [self._choice(delta.choice, f"{{{part}}}") for part in parts[:-1]]
        if parts or delta.tokens:
            logprobs = "null"
            if delta.tokens:
                logprobs = dumps({"content": tokens.chat(delta.tokens), "refusal": None})
            lines.append(self._choice(delta.choice, f"{{{''.join(parts[-1:])}}}", logprobs))
        if delta.finish is not None:
            lines.append(self._choice(delta.choice, "{}", finish=f'"{finish_of(delta, older=self._older)}"'))
        return "".join(lines)

    def _fragments(self, delta: Delta) -> list[Json]:
        """The calls of a delta; calls to custom tools are sent whole."""
        if not self._customs:
            return [_fragment(call, custom=False) for call in delta.tool_calls]
        calls = self._calls.setdefault(delta.choice, CustomCalls(self._customs))
        found = [_fragment(call, custom=custom) for call, custom in calls.take(delta.tool_calls)]
        rest = calls.rest() if delta.finish is not None else ()
        return found + [_fragment(call, custom=custom) for call, custom in rest]

    def _choice(self, choice: int, delta: str, logprobs: str = "null", finish: str = "null") -> str:
        return self.line(f'{{"index":{choice},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}}}')

    def completion(self, index: int, text: str, logprobs: TextLogprobs | None, finish: str | None) -> str:
        reason = "null" if finish is None else f'"{finish}"'
        found = "null" if logprobs is None else dumps(logprobs)
        return self.line(f'{{"index":{index},"text":{dumps(text)},"logprobs":{found},"finish_reason":{reason}}}')


def _fragment(call: ToolCallDelta, *, custom: bool) -> Json:
    if custom:
        about = {"name": call.name, "input": call.arguments}
        return {"index": call.index, "id": call.id, "type": "custom", "custom": about}
    function: Json = {} if call.name is None else {"name": call.name}
    found: Json = {"index": call.index, "function": function | {"arguments": call.arguments}}
    return found if call.id is None else found | {"id": call.id, "type": "function"}


def _older(call: ToolCallDelta) -> Json:
    name: Json = {} if call.name is None else {"name": call.name}
    return name | {"arguments": call.arguments}


def finish_of(answer: Delta, *, older: bool = False) -> FinishWord:
    """The finish reason of a text. older: a call is a function_call."""
    return "function_call" if older and answer.finish == "tool_calls" else answer.finish or "stop"
