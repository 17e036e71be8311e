"""OpenAI's Responses API over the service: a translation of its body, response and events, no more.

A response's output is a reasoning item, a message and function_call items, in the order in which the model wrote them.
Nothing is stored: a later request sends these items again in its input.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from fastapi import FastAPI, Request, Response

from tokenwright.checks import shown
from tokenwright.errors import RequestError
from tokenwright.llm.outputs import Piece
from tokenwright.sampling_params import Grammar
from tokenwright.serve.http.api import EVENTS, about, answers, body_of, off_loop, takes
from tokenwright.serve.http.reply_text import dumps_in_parts
from tokenwright.serve.http.replying import answered, check_model, event, events_of, said, started, whole
from tokenwright.serve.http.sse import Streamed
from tokenwright.serve.openai import reply_schema
from tokenwright.serve.openai.replies import Tokens
from tokenwright.serve.openai.responses_bodies import (
    Create,
    FunctionCall,
    FunctionOutput,
    InputText,
    JsonObject,
    NamedChoice,
    OutputText,
    Reasoning,
    RefusalPart,
    ResponseAllowedChoice,
    ResponseJsonSchema,
    ResponseMessage,
)
from tokenwright.serve.openai.responses_output import Envelope, Event, ResponseOutput
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Answer, Delta, GenerationRequest, Problem, Tool, ToolCallDelta, ToolMode

WITH_LOGPROBS = "message.output_text.logprobs"


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post(
        "/v1/responses",
        openapi_extra=takes(Create),
        responses=answers(reply_schema.Response, stream=EVENTS),
        tags=["OpenAI"],
    )
    async def create(request: Request) -> Response:
        body = await body_of(request, Create)
        check_model(request, service, body.model)
        wanted = GenerationRequest(
            **await off_loop(request, lambda: prompt_of(body)),
            overrides=overrides_of(body),
            caller=about(request).caller,
            request_id=about(request).request_id,
            streamed=body.stream,
            model=body.model,
        )

        def render(tokens: Iterable[Piece]) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = Tokens(service.host.llm.tokenizer).chat(list(tokens))["content"]
            return found

        if not body.stream:
            generation, answer = await answered(request, service, wanted)
            output = ResponseOutput(Envelope(body, body.model, generation.params), render)

            def reply() -> dict[str, Any]:
                for _ in output.take(as_delta(answer)):
                    pass
                return output.response(generation.counts())

            return await whole(request, reply, generation)
        generation = await started(request, service, wanted)
        output = ResponseOutput(Envelope(body, body.model, generation.params), render)
        return Streamed(_stream(request, generation, output), generation.cancel)


async def _stream(request: Request, generation: Generation, output: ResponseOutput) -> AsyncIterator[bytes]:
    yield b"".join(map(_encoded, output.start()))

    def take(delta: Delta) -> Iterator[bytes]:
        return map(_encoded, output.take(delta))

    def end(_: Delta) -> Iterator[bytes]:
        last = output.end(generation.counts())
        last["response"] |= said(request, generation)
        yield event(last["type"], last, dumps_in_parts)

    def failed(problem: Problem) -> bytes:
        return _encoded(output.failed(problem.message))

    async for chunk in events_of(request, generation, take, end, failed):
        yield chunk


def _encoded(one: Event) -> bytes:
    return event(one["type"], one)


def as_delta(answer: Answer) -> Delta:
    """A whole text as one delta."""
    calls = [ToolCallDelta(at, call.id, call.name, call.arguments) for at, call in enumerate(answer.tool_calls)]
    return Delta(answer.choice, answer.text, answer.reasoning, calls, answer.tokens, answer.finish, answer.reason)


def overrides_of(body: Create) -> dict[str, Any]:
    """The sampling parameters of a request. Raises RequestError for a schema that cannot be written."""
    found: dict[str, Any] = {
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
    }
    if isinstance(body.text.format, ResponseJsonSchema):
        found["grammar"] = Grammar.json_schema(body.text.format.schema_)
    if wants_logprobs(body):
        found["logprobs"] = body.top_logprobs
    elif body.top_logprobs:
        raise RequestError(f'top_logprobs needs "{WITH_LOGPROBS}" in include')
    return found


def wants_logprobs(body: Create) -> bool:
    return WITH_LOGPROBS in body.include


def prompt_of(body: Create) -> dict[str, Any]:
    """The fields of a Wanted that make its prompt."""
    return {
        "messages": conversation(body),
        "tools": [Tool(tool.name, tool.description, tool.parameters) for tool in body.tools],
        **choice_of(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "thinking": thinking_of(body),
        "json_object": isinstance(body.text.format, JsonObject),
    }


def choice_of(choice: ToolMode | NamedChoice | ResponseAllowedChoice) -> dict[str, Any]:
    """The fields of a Wanted that say whether a function must be called, and which may be."""
    match choice:
        case NamedChoice():
            return {"tool_choice": "required", "allowed_tools": [choice.name]}
        case ResponseAllowedChoice():
            return {"tool_choice": choice.mode, "allowed_tools": [tool.name for tool in choice.tools]}
        case _:
            return {"tool_choice": choice}


def thinking_of(body: Create) -> bool | None:
    """Whether the model shall reason first; None: as its template says."""
    effort = None if body.reasoning is None else body.reasoning.effort
    return None if effort is None else effort != "none"


def conversation(body: Create) -> list[dict[str, Any]]:
    """The messages of a request as the service reads them. Raises RequestError for an output without its call."""
    found: list[dict[str, Any]] = []
    if body.instructions is not None:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    turn = _Turn(found)
    names: dict[str, str] = {}  # of the functions, by the id of their call
    for at, item in enumerate(body.input):
        match item:
            case ResponseMessage(role="assistant"):
                turn.says(text_of(item.content))
            case ResponseMessage():
                turn.add({"role": item.role, "content": text_of(item.content)})
            case Reasoning():
                texts = [part.text for part in item.content] or [part.text for part in item.summary]
                turn.thinks("\n".join(texts))
            case FunctionCall():
                names[item.call_id] = item.name
                turn.calls(item, at)
            case FunctionOutput():
                if item.call_id not in names:
                    raise RequestError(f"input.{at}.call_id: no function_call before it has the id {item.call_id!r}")
                about = {"tool_call_id": item.call_id, "name": names[item.call_id]}
                turn.add({"role": "tool", **about, "content": text_of(item.output)})
    return found


def arguments_of(item: FunctionCall, at: int) -> dict[str, Any]:
    """The arguments of an earlier call. Raises RequestError for anything but the JSON text of an object."""
    try:
        found = json.loads(item.arguments)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError(f"input.{at}.arguments: it must be a JSON object as text, not {shown(item.arguments)}")
    return found


class _Turn:
    """Collects the items that are one answer of the model: its reasoning, its text and its calls."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._own: dict[str, Any] | None = None  # the answer to which the next item may belong

    def add(self, message: dict[str, Any]) -> None:
        self._own = None
        self._messages.append(message)

    def thinks(self, text: str) -> None:
        self._own = None
        self._answer()["reasoning_content"] = text

    def says(self, text: str) -> None:
        if self._own is not None and (self._own["content"] or "tool_calls" in self._own):
            self._own = None  # a second message
        self._answer()["content"] = text

    def calls(self, item: FunctionCall, at: int) -> None:
        function = {"name": item.name, "arguments": arguments_of(item, at)}
        self._answer().setdefault("tool_calls", []).append(
            {"id": item.call_id, "type": "function", "function": function}
        )

    def _answer(self) -> dict[str, Any]:
        if self._own is None:
            self._own = {"role": "assistant", "content": ""}
            self._messages.append(self._own)
        return self._own


def text_of(content: str | Iterable[InputText | OutputText | RefusalPart]) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
