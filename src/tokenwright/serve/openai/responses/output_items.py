"""The response object of OpenAI's Responses API, and its numbered events."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NotRequired, TypedDict

from tokenwright.llm.chat.output_parser import new_hex
from tokenwright.llm.outputs import Piece
from tokenwright.llm.prompts.report import CacheReport
from tokenwright.sampling_params import SamplingParams
from tokenwright.serve.http.reply_text import CacheDiagnostics, Json, TimingsReply, diagnostics_of
from tokenwright.serve.openai.custom_tools import CustomCalls
from tokenwright.serve.openai.logprobs import TokenLogprob
from tokenwright.serve.openai.replies import OutputDetails
from tokenwright.serve.openai.responses.bodies import Create, ReasoningConfig
from tokenwright.serve.openai.responses.input_items import Tools, sealed
from tokenwright.serve.service.types import Delta, TokenCounts, ToolCallDelta

Kind = Literal["reasoning", "message", "function_call", "custom_tool_call"]
Event = dict[str, Any]
Render = Callable[[Iterable[Piece]], list[TokenLogprob]]  # tokens -> their logprobs in this API

PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "compaction": "cmp"}
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
_CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}


ItemStatus = Literal["completed", "incomplete"]


class ResponseText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: list[TokenLogprob]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[ResponseText]


class ResponseReasoning(TypedDict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class OutputReasoning(TypedDict):
    """Reasoning, as content or summary. encrypted_content: all of it, if requested."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[ResponseReasoning]
    content: list[ResponseReasoning]
    encrypted_content: NotRequired[str]


class OutputCalled(TypedDict):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]


class OutputCall(OutputCalled):
    type: Literal["function_call"]
    arguments: str


class OutputCustomCall(OutputCalled):
    type: Literal["custom_tool_call"]
    input: str


class OutputCompaction(TypedDict):
    """A summary that replaces the conversation in later requests."""

    id: str
    type: Literal["compaction"]
    encrypted_content: str


class Incomplete(TypedDict):
    reason: Literal["max_output_tokens"]


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int
    pinned_tokens: NotRequired[int]
    unpinned_breakpoints: NotRequired[int]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ReasoningAsked(TypedDict):
    effort: str | None
    summary: str | None


class ResponseReply(TypedDict):
    """The reply of /v1/responses. In events it may also be in progress or failed."""

    id: str
    created_at: int
    completed_at: int | None
    status: ItemStatus
    error: None
    incomplete_details: Incomplete | None
    output: list[OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | OutputCompaction]
    usage: ResponseUsage
    timings: NotRequired[TimingsReply]
    object: Literal["response"]
    background: Literal[False]
    conversation: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_diagnostics: NotRequired[CacheDiagnostics | None]
    prompt_cache_key: str | None
    reasoning: ReasoningAsked
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class CompactedReply(TypedDict):
    id: str
    created_at: int
    object: Literal["response.compaction"]
    output: list[OutputCompaction]
    usage: ResponseUsage


_AS_SENT = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "user"),
    *("max_tool_calls", "prompt_cache_key", "safety_identifier", "store", "top_logprobs", "truncation"),
)


def new_identity(prefix: str) -> str:
    return f"{prefix}_{new_hex(16)}"


class Envelope:
    """A response without its output: its id and the request's fields. cache: the report on the prompt."""

    def __init__(
        self,
        identity: str,
        body: Create,
        model: str,
        params: SamplingParams,
        cache: Callable[[], CacheReport | None] = lambda: None,
    ) -> None:
        options = body.prompt_cache_options
        self._cache = cache if options is not None and options.comparison_response_id is not None else None
        choice, reasoning = body.tool_choice, body.reasoning or ReasoningConfig()
        self.summarised = bool(reasoning.summary)
        self.identity = identity
        self._created = int(time.time())
        self._about: dict[str, Any] = {name: getattr(body, name) for name in _AS_SENT} | {
            "object": "response",
            "background": False,
            "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
            "model": model,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "service_tier": "default",
            "temperature": params.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True), "verbosity": "medium"},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools],
            "top_p": params.top_p,
        }

    def at(
        self, status: str, output: list[dict[str, Any]], counts: TokenCounts | None = None, error: str | None = None
    ) -> dict[str, Any]:
        """The response with a status. counts: given once its text has ended. error: why it failed."""
        return {
            "id": self.identity,
            "created_at": self._created,
            "completed_at": max(int(time.time()), self._created) if status == "completed" else None,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": None if counts is None else usage_of(counts),
            **self._about,
            **({} if self._cache is None else {"prompt_cache_diagnostics": counts and diagnostics_of(self._cache())}),
        }


def usage_of(counts: TokenCounts) -> ResponseUsage:
    details = InputDetails(cached_tokens=counts.cached, cache_write_tokens=counts.kept)
    if counts.pinned or counts.unpinned:
        details |= {"pinned_tokens": counts.pinned, "unpinned_breakpoints": counts.unpinned}
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": details,
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.completion,
    }


class ResponseOutput:
    """Writes a response's items as events, each valid until the next. sealed: add opaque reasoning."""

    def __init__(self, envelope: Envelope, render: Render, tools: Tools | None = None, *, sealed: bool = False) -> None:
        self._tools = tools or Tools()
        self._customs = CustomCalls(self._tools.customs)
        self._sealed = sealed
        self._summarised = envelope.summarised
        self._items: list[dict[str, Any]] = []
        self._envelope = envelope
        self._render = render
        self._number = 0
        self._open = False  # the last item is being written
        self._part = ""  # the name of its part's index
        self._cut = False
        self._tokens: list[Piece] = []  # of text that is held back

    @property
    def identity(self) -> str:
        return self._envelope.identity

    def start(self) -> Iterator[Event]:
        for state in ("created", "in_progress"):
            yield self._event(f"response.{state}", response=self._envelope.at("in_progress", []))

    def take(self, delta: Delta) -> Iterator[Event]:
        yield from self._add_calls(delta.continued)
        if delta.reasoning:
            yield from self._add_text("reasoning", delta.reasoning)
        self._tokens += delta.tokens
        if delta.text:
            yield from self._add_text("message", delta.text)
        yield from self._add_calls(delta.begun)
        if delta.finish is not None:
            for call, _ in self._customs.rest():
                yield from self._add_call(call, "custom_tool_call")
            self._cut = delta.finish == "length"
            if not self._items:
                yield from self._begin("message")
            if self._tokens and self._items[-1]["type"] == "message":  # the last tokens have added no text
                yield from self._add_text("message", "")
            yield from self._end_item()

    def response(self, counts: TokenCounts) -> dict[str, Any]:
        return self._envelope.at("incomplete" if self._cut else "completed", self._items, counts)

    def end(self, counts: TokenCounts) -> Event:
        response = self.response(counts)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, message: str) -> Event:
        return self._event("response.failed", response=self._envelope.at("failed", self._items, error=message))

    def cancelled(self, counts: TokenCounts) -> Event:
        return self._event("response.incomplete", response=self._envelope.at("cancelled", self._items, counts))

    def _event(self, kind: str, **content: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **content}
        self._number += 1
        return event

    def _add_text(self, kind: Kind, text: str) -> Iterator[Event]:
        if not (self._open and self._items[-1]["type"] == kind):
            yield from self._begin(kind)
        summary = kind == "reasoning" and self._summarised
        part = self._items[-1]["summary" if summary else "content"][0]
        part["text"] += text
        more = {}
        if kind == "message":
            more["logprobs"] = self._render(self._tokens)
            part["logprobs"] += more["logprobs"]
            self._tokens = []
        name = "reasoning_summary_text" if summary else _PARTS[kind]
        yield self._event(f"response.{name}.delta", **self._place(part=self._part), delta=text, **more)

    def _add_calls(self, calls: list[ToolCallDelta]) -> Iterator[Event]:
        for call, custom in self._customs.take(calls):
            yield from self._add_call(call, "custom_tool_call" if custom else "function_call")

    def _add_call(self, call: ToolCallDelta, kind: Kind) -> Iterator[Event]:
        name, told = _CALLS[kind]
        if call.id is not None:
            about = {"namespace": self._tools.namespaces[call.name]} if call.name in self._tools.namespaces else {}
            yield from self._begin(kind, call_id=call.id, name=call.name, **{name: ""}, **about)
        if call.arguments:
            self._items[-1][name] += call.arguments
            yield self._event(f"response.{told}.delta", **self._place(), delta=call.arguments)

    def _begin(self, kind: Kind, **about: Any) -> Iterator[Event]:
        yield from self._end_item()
        item = {"id": new_identity(PREFIXES[kind]), "type": kind, "status": "in_progress", **about}
        item |= {"role": "assistant", "content": []} if kind == "message" else {}
        item |= {"summary": [], "content": []} if kind == "reasoning" else {}
        self._items.append(item)
        self._open = True
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if kind == "reasoning" and self._summarised:
            self._part = "summary_index"
            item["summary"].append({"type": "summary_text", "text": ""})
            part = item["summary"][0]
            yield self._event("response.reasoning_summary_part.added", **self._place(part=self._part), part=part)
        elif kind in _PARTS:
            self._part = "content_index"
            item["content"].append(
                {"type": _PARTS[kind], "text": ""} | ({"annotations": [], "logprobs": []} if kind == "message" else {})
            )
            part = item["content"][0]
            yield self._event("response.content_part.added", **self._place(part=self._part), part=part)

    def _end_item(self) -> Iterator[Event]:
        if not self._open:
            return
        self._open, item = False, self._items[-1]
        if item["type"] in _CALLS:
            name, told = _CALLS[item["type"]]
            yield self._event(f"response.{told}.done", **self._place(), **{"name": item["name"], name: item[name]})
        elif self._part == "summary_index":
            part, place = item["summary"][0], self._place(part=self._part)
            yield self._event("response.reasoning_summary_text.done", **place, text=part["text"])
            yield self._event("response.reasoning_summary_part.done", **place, part=part)
        else:
            part, place = item["content"][0], self._place(part=self._part)
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._event(f"response.{part['type']}.done", **place, **done)
            yield self._event("response.content_part.done", **place, part=part)
        if item["type"] == "reasoning" and self._sealed:
            item["encrypted_content"] = sealed((item["summary"] or item["content"])[0]["text"])
        item["status"] = "incomplete" if self._cut else "completed"
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self, *, part: str = "") -> dict[str, Any]:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place | ({part: 0} if part else {})


class CompactedOutput(ResponseOutput):
    """Writes a response with a summary of the conversation, in one item that only this server reads."""

    def take(self, delta: Delta) -> Iterator[Event]:
        if not self._items:
            self._items.append({"id": new_identity("cmp"), "type": "compaction", "encrypted_content": ""})
        [item] = self._items
        item["encrypted_content"] += delta.text
        if delta.finish is not None:
            self._cut = delta.finish == "length"
            item["encrypted_content"] = sealed(item["encrypted_content"].strip())
            for state in ("added", "done"):
                yield self._event(f"response.output_item.{state}", output_index=0, item=item)
