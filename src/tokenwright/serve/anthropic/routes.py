"""Anthropic's Messages API over the service: a translation of its bodies, answers, events and errors, no more.

An answer's content is a thinking block, a text block and tool_use blocks, in the order in which the model wrote them.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from hashlib import sha256
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from tokenwright.engine import FinishReason
from tokenwright.errors import RequestError
from tokenwright.llm.chat.ids import new_hex
from tokenwright.serve.anthropic.bodies import (
    AnthropicAssistantMessage,
    AnthropicPrompted,
    AnyChoice,
    CountTokens,
    Messages,
    NoChoice,
    ThinkingOn,
    ToolChoice,
)
from tokenwright.serve.anthropic.context_edits import edited
from tokenwright.serve.anthropic.reply_schema import AnthropicError, AnthropicMessage, CountedTokens
from tokenwright.serve.anthropic.turns import conversation, left_out
from tokenwright.serve.http.api import (
    EVENTS,
    Api,
    RefusedRequest,
    about,
    answers,
    body_of,
    off_loop,
    takes,
    unless_gone,
)
from tokenwright.serve.http.hosted import leave_out
from tokenwright.serve.http.reasoning_options import Thinking
from tokenwright.serve.http.replying import (
    answered,
    arguments_of,
    check_model,
    event,
    events_of,
    said,
    schema_grammar,
    started,
    whole,
)
from tokenwright.serve.http.sse import Streamed
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import (
    Answer,
    Delta,
    GenerationRequest,
    Kind,
    Problem,
    TokenCounts,
    Tool,
    ToolCallDelta,
    distinct,
)

ERROR_TYPES: dict[Kind, str] = {
    "invalid": "invalid_request_error",
    "key": "authentication_error",
    "forbidden": "permission_error",
    "missing": "not_found_error",
    "size": "request_too_large",
    "busy": "rate_limit_error",
    "unavailable": "overloaded_error",
    "engine": "api_error",
}

Event = dict[str, Any]


def error_body(problem: Problem, request_id: str) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    error: dict[str, Any] = {"type": ERROR_TYPES[problem.kind], "message": problem.message}
    if problem.param == "thread":  # so the client's tool runner asks again, with the whole conversation
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": request_id}


HEADER = "anthropic-version"  # which its clients send with every request
API = Api(
    ("/v1/messages",),
    error_body,
    queued=frozenset(("/v1/messages",)),
    errors=AnthropicError,
    header=HEADER,
    shared=("/v1/",),
)


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post(
        "/v1/messages",
        openapi_extra=takes(Messages),
        responses=answers(AnthropicMessage, stream=EVENTS),
        tags=["Anthropic"],
    )
    async def messages(request: Request) -> Response:
        body = await body_of(request, Messages)
        body.model = check_model(request, service, body.model)
        wanted = GenerationRequest(
            **await off_loop(request, lambda: prompt_of(request, body)),
            overrides=overrides_of(body),
            caller=about(request).caller,
            request_id=about(request).request_id,
            streamed=body.stream,
            model=body.model,
        )
        shown = not (isinstance(body.thinking, ThinkingOn) and body.thinking.display == "omitted")
        if not body.stream:
            generation, answer = await answered(request, service, wanted)
            answer.reasoning = answer.reasoning if shown else ""
            identity = new_identity()
            return await whole(
                request, lambda: message_of(identity, body.model, answer, generation.counts()), generation
            )
        generation = await started(request, service, wanted)
        events = Events(new_identity(), body.model, shown, generation.counts)
        return Streamed(_stream(request, generation, events), generation.cancel)

    counted = answers(CountedTokens)

    @app.post("/v1/messages/count_tokens", openapi_extra=takes(CountTokens), responses=counted, tags=["Anthropic"])
    async def count_tokens(request: Request) -> JSONResponse:
        body = await body_of(request, CountTokens)
        check_model(request, service, body.model)
        prompt = await off_loop(request, lambda: prompt_of(request, body))
        wanted = GenerationRequest(**prompt, caller=about(request).caller)
        return JSONResponse({"input_tokens": await unless_gone(request, service.count(wanted))})


async def _stream(request: Request, generation: Generation, events: Events) -> AsyncIterator[bytes]:
    def take(delta: Delta) -> Iterator[bytes]:
        return map(_encoded, events.take(delta))

    def end(delta: Delta) -> Iterator[bytes]:
        return map(_encoded, events.end(delta, said(request, generation)))

    def failed(problem: Problem) -> bytes:
        return _encoded(error_body(problem, about(request).request_id))

    async for chunk in events_of(request, generation, take, end, failed):
        yield chunk


def _encoded(one: Event) -> bytes:
    return event(one["type"], one)


def overrides_of(body: Messages) -> dict[str, Any]:
    """The sampling parameters of a request."""
    found: dict[str, Any] = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p")}
    found["top_k"] = 0 if body.top_k == -1 else body.top_k
    found["seed"] = None if body.seed is None else body.seed % 2**64
    if body.stop_sequences:
        found["stop"] = body.stop_sequences
    form = (body.output_config and body.output_config.format) or body.output_format
    if form is not None:
        found["grammar"] = schema_grammar(form.schema_, "output_config.format")
    return found


def prompt_of(request: Request, body: AnthropicPrompted) -> dict[str, Any]:
    """The fields of a GenerationRequest that make its prompt. Raises RequestError for messages that cannot be one."""
    choice, last = body.tool_choice, body.messages[-1]
    messages = edited(body, conversation(body), about(request))
    about(request).ignored += left_out(body)
    if isinstance(last, AnthropicAssistantMessage) and "tool_calls" in messages[-1]:
        raise RequestError(
            f"messages.{len(body.messages) - 1}: an answer goes on from text alone, and this last message has a "
            "tool_use block; send the user's next message behind it"
        )
    thinking = thinking_of(body)
    return {
        "messages": messages,
        "tools": tools_of(request, body),
        **choice_of(choice),
        "thinking": thinking.on,
        "thinking_budget": thinking.budget,
        "variables": thinking.variables,
        "continue_last": isinstance(last, AnthropicAssistantMessage),
        "parallel_tool_calls": not getattr(choice, "disable_parallel_tool_use", False),
    }


def thinking_of(body: AnthropicPrompted) -> Thinking:
    """Whether the model shall reason, and how."""
    effort = None if body.output_config is None else body.output_config.effort
    if isinstance(body.thinking, ThinkingOn):
        return Thinking.of(True, body.thinking.budget_tokens, effort)
    return Thinking.of(None if body.thinking is None else False, None, effort)


def tools_of(request: Request, body: AnthropicPrompted) -> list[Tool]:
    """The tools that the model may call. Raises RefusedRequest as `leave_out`, and for one without a schema."""
    leave_out(about(request), [tool.type for tool in body.tools], ("custom",))
    found = []
    for at, tool in enumerate(body.tools):
        if tool.type == "custom":
            if tool.name is None or tool.input_schema is None:
                place = f"tools.{at}.{'name' if tool.name is None else 'input_schema'}"
                raise RefusedRequest(Problem(400, "invalid", f"{place}: this field is required", place))
            found.append(Tool(tool.name, tool.description, tool.input_schema, tool.strict))
    return distinct(found)


def choice_of(choice: object) -> dict[str, Any]:
    """The fields of a Wanted that say whether a tool must be called, and which may be."""
    match choice:
        case ToolChoice():
            return {"tool_choice": "required", "allowed_tools": [choice.name]}
        case AnyChoice():
            return {"tool_choice": "required"}
        case NoChoice():
            return {"tool_choice": "none"}
        case _:
            return {"tool_choice": "auto"}


def stop_of(finished: Answer | Delta) -> dict[str, Any]:
    """stop_reason and stop_sequence of a text that has ended."""
    match finished.finish, finished.reason:
        case "tool_calls", _:
            reason = "tool_use"
        case "length", FinishReason.CONTEXT:
            reason = "model_context_window_exceeded"
        case "length", _:
            reason = "max_tokens"
        case _:
            reason = "stop_sequence" if isinstance(finished.stopped, str) else "end_turn"
    return {"stop_reason": reason, "stop_sequence": finished.stopped if reason == "stop_sequence" else None}


def usage_of(counts: TokenCounts) -> dict[str, Any]:
    """input_tokens are those that were computed; the others of the prompt were cached."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "output_tokens": counts.completion,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "service_tier": "standard",
    }


def message_of(identity: str, model: str, answer: Answer | None, counts: TokenCounts) -> dict[str, Any]:
    """A whole reply; without an answer the empty one with which a stream begins."""
    stop = {"stop_reason": None, "stop_sequence": None} if answer is None else stop_of(answer)
    return {
        "id": identity,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [] if answer is None else content_of(answer),
        **stop,
        "usage": usage_of(counts),
    }


def content_of(answer: Answer) -> list[dict[str, Any]]:
    """The blocks of an answer. A call that its end has cut off has the arguments that are whole."""
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature_of(answer.reasoning)})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_of(call)}
        for call in answer.tool_calls
    ]


def signature_of(thought: str) -> str:
    """A mark of reasoning: clients leave reasoning without one out of later requests. This server checks none."""
    return b64encode(sha256(thought.encode()).digest()).decode()


def new_identity() -> str:
    return f"msg_{new_hex(12)}"


class Events:
    """The events of one streamed reply. shown: its reasoning is part of it. counts: its tokens so far."""

    def __init__(self, identity: str, model: str, shown: bool, counts: Callable[[], TokenCounts]) -> None:
        self.identity = identity
        self.model = model
        self.shown = shown
        self._counts = counts
        self._thought = ""
        self._begun = False
        self._open = ""  # the type of the block that is being written
        self._index = -1

    def take(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta, but for its end. With the first it is known how much of the prompt was cached."""
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": message_of(self.identity, self.model, None, self._counts())}
        yield from self._calls(delta.continued)
        if delta.reasoning and self.shown:
            yield from self._block({"type": "thinking", "thinking": "", "signature": ""})
            self._thought += delta.reasoning
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            yield from self._block({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.text})
        yield from self._calls(delta.begun)

    def end(self, delta: Delta, more: Event) -> Iterator[Event]:
        """The events of the last delta's end. more: fields beyond the API's."""
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
        """Go on with a block of this type, or open this one."""
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
