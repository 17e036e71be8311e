"""OpenAI's Responses API over the service: a translation of its body, response and events, no more.

A response's output is a reasoning item, a message and function_call items, in the order in which the model wrote them.
Responses are kept for a while (stored_responses.py), so that a later request can go on from one.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from tokenwright.checks import shown
from tokenwright.errors import RequestError
from tokenwright.llm.outputs import Piece
from tokenwright.serve.http.api import EVENTS, RefusedRequest, about, answers, body_of, off_loop, takes, unless_gone
from tokenwright.serve.http.reply_text import dumps_in_parts
from tokenwright.serve.http.replying import (
    answered,
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
from tokenwright.serve.openai import reply_schema
from tokenwright.serve.openai.replies import Tokens
from tokenwright.serve.openai.responses_bodies import (
    Create,
    CustomCall,
    CustomOutput,
    CustomTool,
    FunctionCall,
    FunctionOutput,
    HostedItem,
    HostedResponseTool,
    InputText,
    JsonObject,
    NamedChoice,
    OutputText,
    Reasoning,
    ResponseAllowedChoice,
    ResponseFunctionTool,
    ResponseJsonSchema,
    ResponseMessage,
    ResponsesRefusalPart,
)
from tokenwright.serve.openai.responses_output import Envelope, Event, ResponseOutput, functions_of
from tokenwright.serve.openai.stored_responses import StoredResponse, StoredResponses, answer_of, read_arguments
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Answer, Delta, GenerationRequest, Problem, Tool, ToolCallDelta, ToolMode

WITH_LOGPROBS = "message.output_text.logprobs"


class Responses:
    """The handlers. stored: the responses that are kept for later requests."""

    def __init__(self, service: Service, stored: StoredResponses) -> None:
        self.service = service
        self.stored = stored

    async def create(self, request: Request) -> Response:
        """Answer an input, which may go on from an earlier response."""
        body = await body_of(request, Create)
        model = check_model(request, self.service, body.model)
        note_left_out(request, body)
        prompt = await self._prompt(request, body)
        note_unenforced(request, prompt["tools"])
        wanted = GenerationRequest(
            **prompt,
            overrides=overrides_of(request, body),
            caller=about(request).caller,
            request_id=about(request).request_id,
            streamed=body.stream,
            model=model,
        )

        def render(tokens: Iterable[Piece]) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = Tokens(self.service.host.llm.tokenizer).chat(list(tokens))["content"]
            return found

        def keep(response: dict[str, Any]) -> None:
            if body.store:
                messages = [*prompt["messages"], answer_of(response["output"])]
                self.stored.add(about(request).caller.key, response, items_of(body), messages)

        if not body.stream:
            generation, answer = await answered(request, self.service, wanted)
            output = ResponseOutput(Envelope(body, model, generation.params), render)

            def reply() -> dict[str, Any]:
                for _ in output.take(as_delta(answer)):
                    pass
                return output.response(generation.counts())

            found = await off_loop(request, reply)
            keep(found)
            return await whole(request, lambda: found, generation)
        generation = await started(request, self.service, wanted)
        output = ResponseOutput(Envelope(body, model, generation.params), render)
        return Streamed(_stream(request, generation, output, keep), generation.cancel)

    async def _prompt(self, request: Request, body: Create) -> dict[str, Any]:
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            before = self._stored(request, body.previous_response_id, "previous_response_id").messages
            if body.instructions is not None:  # those of earlier requests are not carried over
                before = [message for message in before if message["role"] not in ("system", "developer")]
        return await off_loop(request, lambda: prompt_of(body, before))

    def _stored(self, request: Request, identity: str, param: str | None = None) -> StoredResponse:
        found = self.stored.get(about(request).caller.key, identity)
        if found is None:
            why = f"there is no response {shown(identity)} here: it was not stored, or is forgotten; send its input"
            raise RefusedRequest(Problem(404, "missing", why, param))
        return found

    async def count(self, request: Request) -> JSONResponse:
        """The tokens of an input."""
        body = await body_of(request, Create)
        check_model(request, self.service, body.model)
        wanted = GenerationRequest(**await self._prompt(request, body), caller=about(request).caller)
        tokens = await unless_gone(request, self.service.count(wanted))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    async def retrieve(self, request: Request, identity: str) -> JSONResponse:
        """A stored response."""
        return JSONResponse(self._stored(request, identity).response)

    async def delete(self, request: Request, identity: str) -> JSONResponse:
        """Forget a stored response."""
        self._stored(request, identity)
        self.stored.remove(about(request).caller.key, identity)
        return JSONResponse({"id": identity, "object": "response", "deleted": True})

    async def input_items(self, request: Request, identity: str) -> JSONResponse:
        """The items of a stored response's input."""
        items = self._stored(request, identity).items
        ends = {"first_id": items[0].get("id"), "last_id": items[-1].get("id")} if items else dict.fromkeys(_ENDS)
        return JSONResponse({"object": "list", "data": items, **ends, "has_more": False})


_ENDS = ("first_id", "last_id")


def add(app: FastAPI, service: Service, stored: StoredResponses) -> None:
    """Add the routes."""
    handlers = Responses(service, stored)
    found, path = reply_schema, "/v1/responses"
    for method, place, handler, reply in (
        ("POST", path, handlers.create, answers(found.Response, stream=EVENTS)),
        ("POST", f"{path}/input_tokens", handlers.count, answers(found.InputTokens)),
        ("GET", f"{path}/{{identity}}", handlers.retrieve, answers(found.Response)),
        ("POST", f"{path}/{{identity}}/cancel", handlers.retrieve, answers(found.Response)),  # nothing runs unread
        ("DELETE", f"{path}/{{identity}}", handlers.delete, answers(found.DeletedResponse)),
        ("GET", f"{path}/{{identity}}/input_items", handlers.input_items, answers(found.InputItems)),
    ):
        takes_body = takes(Create) if method == "POST" and "{" not in place else None
        app.add_api_route(
            place,
            handler,
            methods=[method],
            openapi_extra=takes_body,
            responses=reply,
            response_model=None,
            tags=["OpenAI"],
        )


def note_left_out(request: Request, body: Create) -> None:
    """Name the tools and the items of OpenAI's servers, which the answer is made without.

    Raises RefusedRequest where they are the only tools: the answer would need them.
    """
    reading = about(request).reading
    hosted = [tool.type for tool in body.tools if isinstance(tool, HostedResponseTool)]
    if hosted and len(hosted) == len(body.tools):
        why = f"tools: this server runs no tools itself, and there is only {', '.join(hosted)[:200]}; leave it out"
        raise RefusedRequest(Problem(400, "invalid", why, "tools"))
    for kind in hosted:
        reading.ignore(f"tools.{kind}")
    for item in body.input if not isinstance(body.input, str) else ():
        if isinstance(item, HostedItem):
            reading.ignore(f"input.{item.type}")


def items_of(body: Create) -> list[dict[str, Any]]:
    """The items of a request's input, as they came."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    return [item.model_dump(exclude_none=True) for item in body.input]


async def _stream(
    request: Request, generation: Generation, output: ResponseOutput, keep: Callable[[dict[str, Any]], None]
) -> AsyncIterator[bytes]:
    yield b"".join(map(_encoded, output.start()))

    def take(delta: Delta) -> Iterator[bytes]:
        return map(_encoded, output.take(delta))

    def end(_: Delta) -> Iterator[bytes]:
        last = output.end(generation.counts())
        keep(last["response"])
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


def overrides_of(request: Request, body: Create) -> dict[str, Any]:
    """The sampling parameters of a request. Raises RequestError for a schema that cannot be written."""
    found: dict[str, Any] = {
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
    }
    if isinstance(body.text.format, ResponseJsonSchema):
        strict = "strict" in body.text.format.model_fields_set and body.text.format.strict
        found["grammar"] = schema_grammar(request, body.text.format.schema_, strict, "text.format.schema")
    if wants_logprobs(body):
        found["logprobs"] = body.top_logprobs
    elif body.top_logprobs:
        raise RequestError(f'top_logprobs needs "{WITH_LOGPROBS}" in include')
    return found


def wants_logprobs(body: Create) -> bool:
    return WITH_LOGPROBS in body.include


def prompt_of(body: Create, before: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a GenerationRequest that make its prompt. before: the messages of earlier requests."""
    effort = None if body.reasoning is None else body.reasoning.effort
    return {
        "messages": conversation(body, before),
        "tools": [declared(tool) for tool in functions_of(body.tools)],
        "variables": {"reasoning_effort": effort} if effort not in (None, "none") else {},
        **choice_of(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "thinking": thinking_of(body),
        "json_object": isinstance(body.text.format, JsonObject),
    }


def declared(tool: ResponseFunctionTool | CustomTool) -> Tool:
    """A tool as the service knows it. A custom tool is a function of one text, whose format the model is told."""
    if isinstance(tool, ResponseFunctionTool):
        strict = "strict" in tool.model_fields_set and tool.strict
        return Tool(tool.name, tool.description, tool.parameters, strict)
    form = tool.format.get("definition")
    about = tool.description if not form else f"{tool.description}\n\nThe input follows this grammar:\n{form}"
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return Tool(tool.name, about.strip(), text | {"additionalProperties": False})


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


def conversation(body: Create, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a request as the service reads them. Raises RequestError for an output without its call."""
    found: list[dict[str, Any]] = []
    if body.instructions is not None:
        found.append({"role": "system", "content": body.instructions})
    found += before
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    turn = _Turn(found)
    calls = [call for message in before for call in message.get("tool_calls", ())]
    names: dict[str, str] = {call["id"]: call["function"]["name"] for call in calls}  # by the id of their call
    for at, item in enumerate(body.input):
        match item:
            case ResponseMessage(role="assistant"):
                turn.says(text_of(item.content))
            case ResponseMessage():
                turn.add({"role": item.role, "content": text_of(item.content)})
            case Reasoning():
                turn.thinks(thoughts_of(item))
            case FunctionCall() | CustomCall():
                names[item.call_id] = item.name
                turn.calls(item)
            case FunctionOutput() | CustomOutput():
                if item.call_id not in names:
                    raise RequestError(f"input.{at}.call_id: no function_call before it has the id {item.call_id!r}")
                about = {"tool_call_id": item.call_id, "name": names[item.call_id]}
                turn.add({"role": "tool", **about, "content": text_of(item.output)})
    return found


def thoughts_of(item: Reasoning) -> str:
    """The text of earlier reasoning; that of another server's encrypted_content cannot be read, and is left out."""
    texts = [part.text for part in item.content] or [part.text for part in item.summary]
    if not texts and item.encrypted_content:
        try:
            return base64.b64decode(item.encrypted_content, validate=True).decode()
        except ValueError:
            return ""
    return "\n".join(texts)


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

    def calls(self, item: FunctionCall | CustomCall) -> None:
        arguments = {"input": item.input} if isinstance(item, CustomCall) else read_arguments(item.arguments)
        function = {"name": item.name, "arguments": arguments}
        self._answer().setdefault("tool_calls", []).append(
            {"id": item.call_id, "type": "function", "function": function}
        )

    def _answer(self) -> dict[str, Any]:
        if self._own is None:
            self._own = {"role": "assistant", "content": ""}
            self._messages.append(self._own)
        return self._own


def text_of(content: str | Iterable[InputText | OutputText | ResponsesRefusalPart]) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, ResponsesRefusalPart) else part.text for part in content)
