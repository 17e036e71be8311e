"""Anthropic's Messages API over the service: a translation of its bodies, answers, events and errors, no more.

An answer's content is a thinking block, a text block and tool_use blocks, in the order in which the model wrote them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from tokenwright.engine import FinishReason
from tokenwright.errors import RequestError
from tokenwright.serve.anthropic.bodies import (
    AnthropicAssistantMessage,
    AnthropicPrompted,
    AnthropicSystemMessage,
    AnthropicTool,
    AnthropicUserMessage,
    AnyChoice,
    ClearThinking,
    CountTokens,
    HostedTool,
    Messages,
    NoChoice,
    OtherEdit,
    TextBlock,
    ThinkingBlock,
    ThinkingOff,
    ThinkingOn,
    ThinkingWithin,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from tokenwright.serve.anthropic.reply_schema import AnthropicError, AnthropicMessage, CountedTokens
from tokenwright.serve.http.api import EVENTS, Api, about, answers, body_of, off_loop, takes, unless_gone
from tokenwright.serve.http.replying import (
    answered,
    arguments_of,
    check_model,
    event,
    events_of,
    note_unenforced,
    said,
    schema_grammar,
    started,
    whole,
)
from tokenwright.serve.http.sse import Streamed
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.ids import new_hex
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
        model = check_model(request, service, body.model)
        note_left_out(request, body)
        prompt = await off_loop(request, lambda: prompt_of(body))
        note_unenforced(request, prompt["tools"])
        wanted = GenerationRequest(
            **prompt,
            overrides=overrides_of(request, body),
            caller=about(request).caller,
            request_id=about(request).request_id,
            streamed=body.stream,
            model=model,
        )
        shown = not (isinstance(body.thinking, ThinkingOn | ThinkingWithin) and body.thinking.display == "omitted")
        if not body.stream:
            generation, answer = await answered(request, service, wanted)
            answer.reasoning = answer.reasoning if shown else ""
            identity = new_identity()
            return await whole(request, lambda: message_of(identity, model, answer, generation.counts()), generation)
        generation = await started(request, service, wanted)
        events = Events(new_identity(), model, shown)
        return Streamed(_stream(request, generation, events), generation.cancel)

    counted = answers(CountedTokens)

    @app.post("/v1/messages/count_tokens", openapi_extra=takes(CountTokens), responses=counted, tags=["Anthropic"])
    async def count_tokens(request: Request) -> JSONResponse:
        body = await body_of(request, CountTokens)
        check_model(request, service, body.model)
        prompt = await off_loop(request, lambda: prompt_of(body))
        wanted = GenerationRequest(**prompt, caller=about(request).caller)
        return JSONResponse({"input_tokens": await unless_gone(request, service.count(wanted))})


async def _stream(request: Request, generation: Generation, events: Events) -> AsyncIterator[bytes]:
    yield _encoded(events.start(generation.counts()))

    def take(delta: Delta) -> Iterator[bytes]:
        return map(_encoded, events.take(delta))

    def end(delta: Delta) -> Iterator[bytes]:
        return map(_encoded, events.end(delta, generation.counts(), said(request, generation)))

    def failed(problem: Problem) -> bytes:
        return _encoded(error_body(problem, about(request).request_id))

    async for chunk in events_of(request, generation, take, end, failed):
        yield chunk


def _encoded(one: Event) -> bytes:
    return event(one["type"], one)


def overrides_of(request: Request, body: Messages) -> dict[str, Any]:
    """The sampling parameters of a request."""
    found: dict[str, Any] = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    if body.stop_sequences:
        found["stop"] = body.stop_sequences
    form = body.output_format
    if form is None and body.output_config is not None:
        form = body.output_config.format
    if form is not None:
        found["grammar"] = schema_grammar(request, form.schema_, False, "output_config.format.schema")
    return found


def prompt_of(body: AnthropicPrompted) -> dict[str, Any]:
    """The fields of a Wanted that make its prompt. Raises RequestError for messages that cannot be one."""
    choice, last, messages = body.tool_choice, body.messages[-1], conversation(body)
    if isinstance(last, AnthropicAssistantMessage) and (extra := messages[-1].keys() - {"role", "content"}):
        what = "tool_use" if "tool_calls" in extra else "thinking"
        raise RequestError(
            f"messages.{len(body.messages) - 1}: an answer goes on from text alone, and this last message has a "
            f"{what} block; send the user's next message behind it"
        )
    tools = [tool for tool in body.tools if isinstance(tool, AnthropicTool)]
    effort = body.output_config and body.output_config.effort
    return {
        "messages": messages,
        "tools": [Tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in tools],
        **choice_of(None if body.tools and not tools else choice),  # hosted tools are left out
        "thinking": None if body.thinking is None else not isinstance(body.thinking, ThinkingOff),
        "variables": {"reasoning_effort": effort} if effort else {},
        "continue_last": isinstance(last, AnthropicAssistantMessage),
        "parallel_tool_calls": not getattr(choice, "disable_parallel_tool_use", False),
    }


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


def conversation(body: AnthropicPrompted) -> list[dict[str, Any]]:
    """The messages of a request as the service reads them. Raises RequestError for a result without its call."""
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": text_of(body.system)})
    names: dict[str, str] = {}  # of the tools, by the id of their call
    for at, message in enumerate(body.messages):
        match message:
            case AnthropicUserMessage():
                found.extend(_from_user(message, names, at))
            case AnthropicAssistantMessage():
                found.append(_from_assistant(message, names))
            case AnthropicSystemMessage():
                found.append({"role": "system", "content": text_of(message.content)})
    for edit in body.context_management.edits if body.context_management else ():
        if isinstance(edit, ClearThinking) and edit.keep != "all":
            clear_thinking(found, edit.keep.value)
    return found


def clear_thinking(messages: Iterable[dict[str, Any]], keep: int) -> None:
    """Leave reasoning out of all answers but the newest `keep` that have some."""
    thinking = [message for message in messages if "reasoning_content" in message]
    for message in thinking[: len(thinking) - keep]:
        del message["reasoning_content"]


def note_left_out(request: Request, body: Messages) -> None:
    """Name what the answer is made without: tools and edits of Anthropic's servers, and the budget of reasoning."""
    reading = about(request).reading
    for tool in body.tools:
        if isinstance(tool, HostedTool):
            reading.ignore(f"tools.{tool.type}")
    for edit in body.context_management.edits if body.context_management else ():
        if isinstance(edit, OtherEdit):
            reading.ignore(f"context_management.{edit.type}")
    if isinstance(body.thinking, ThinkingWithin) and body.thinking.budget_tokens:
        reading.ignore("thinking.budget_tokens")


def text_of(content: str | Iterable[object]) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


def _from_user(message: AnthropicUserMessage, names: Mapping[str, str], at: int) -> Iterator[dict[str, Any]]:
    """A message for each tool result, then one with the text."""
    if isinstance(message.content, str):
        yield {"role": "user", "content": message.content}
        return
    for place, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock):
            if block.tool_use_id not in names:
                raise RequestError(
                    f"messages.{at}.content.{place}.tool_use_id: no tool_use block before it has the id "
                    f"{block.tool_use_id!r}"
                )
            text = text_of(block.content)
            content = f"Error: {text}" if block.is_error else text
            name = names[block.tool_use_id]
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    if texts or not message.content:
        yield {"role": "user", "content": text_of(texts)}


def _from_assistant(message: AnthropicAssistantMessage, names: dict[str, str]) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    found: dict[str, Any] = {"role": "assistant", "content": text_of(message.content)}
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    names.update({call.id: call.name for call in calls})
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    if calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return found


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
    """The blocks of an answer, without a call that its end has cut off."""
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
        for call in answer.tool_calls
        if (arguments := arguments_of(call)) is not None
    ]


def new_identity() -> str:
    return f"msg_{new_hex(12)}"


class Events:
    """The events of one streamed reply. shown: its reasoning is part of it."""

    def __init__(self, identity: str, model: str, shown: bool) -> None:
        self.identity = identity
        self.model = model
        self.shown = shown
        self._open = ""  # the type of the block that is being written
        self._index = -1

    def start(self, counts: TokenCounts) -> Event:
        return {"type": "message_start", "message": message_of(self.identity, self.model, None, counts)}

    def take(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta, but for its end."""
        yield from self._calls(delta.continued)
        if delta.reasoning and self.shown:
            yield from self._block({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            yield from self._block({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.text})
        yield from self._calls(delta.begun)

    def end(self, delta: Delta, counts: TokenCounts, more: Event) -> Iterator[Event]:
        """The events of the last delta's end. more: fields beyond the API's."""
        yield from self._close()
        yield {"type": "message_delta", "delta": stop_of(delta), "usage": usage_of(counts), **more}
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
        if self._open:
            self._open = ""
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
