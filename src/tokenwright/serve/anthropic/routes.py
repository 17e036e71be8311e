"""Anthropic's Messages API over the service: a translation of its bodies to requests, no more."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from tokenwright.errors import RequestError
from tokenwright.serve.anthropic import bodies, replies
from tokenwright.serve.anthropic.turns import conversation, edited, left_out
from tokenwright.serve.http.api import About, Api, RefusedRequest
from tokenwright.serve.http.exchange import Exchange, event, schema_grammar
from tokenwright.serve.http.openapi import EVENTS, Route, add_routes
from tokenwright.serve.http.request_parts import Thinking, leave_out
from tokenwright.serve.http.sse import Streamed
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Delta, Problem, Tool, distinct

HEADER = "anthropic-version"  # which its clients send with every request


class Anthropic:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def messages(self, request: Request) -> Response:
        exchange = Exchange(request, self.service)
        body = await exchange.body(bodies.Messages)
        model = exchange.check_model(body.model)
        prompt = await exchange.off_loop(lambda: prompt_of(exchange.about, body))
        identity, asked = replies.new_identity(), body.diagnostics
        prompt |= {"identity": identity, "compared": (asked and asked.previous_message_id) or ""}
        wanted = exchange.wanted(**prompt, overrides=overrides_of(body), streamed=body.stream)
        shown = not (isinstance(body.thinking, bodies.ThinkingOn) and body.thinking.display == "omitted")
        if body.stream:
            generation = await exchange.started(wanted)
            events = replies.Events(identity, model, shown, generation.counts, lambda: _diagnostics(body, generation))
            return Streamed(_stream(exchange, generation, events), generation.cancel)
        generation, answer = await exchange.answered(wanted)
        answer.reasoning = answer.reasoning if shown else ""

        def reply() -> replies.AnthropicMessage:
            return replies.message_of(identity, model, answer, generation.counts(), _diagnostics(body, generation))

        return await exchange.whole(reply, generation)

    async def count_tokens(self, request: Request) -> Response:
        exchange = Exchange(request, self.service)
        body = await exchange.body(bodies.CountTokens)
        exchange.check_model(body.model)
        prompt = await exchange.off_loop(lambda: prompt_of(exchange.about, body))
        tokens = await exchange.unless_gone(self.service.count(exchange.wanted(**prompt)))
        return JSONResponse(replies.CountedTokens(input_tokens=tokens))


def add(app: FastAPI, service: Service) -> None:
    api = Anthropic(service)
    add_routes(
        app,
        "Anthropic",
        Route("/v1/messages", api.messages, (replies.AnthropicMessage,), bodies.Messages, EVENTS),
        Route("/v1/messages/count_tokens", api.count_tokens, (replies.CountedTokens,), bodies.CountTokens),
    )


def _stream(exchange: Exchange, generation: Generation, events: replies.Events) -> AsyncIterator[bytes]:
    def take(delta: Delta) -> Iterator[bytes]:
        return map(_encoded, events.take(delta))

    def end(delta: Delta) -> Iterator[bytes]:
        return map(_encoded, events.end(delta, exchange.said(generation)))

    def failed(problem: Problem) -> bytes:
        return event("error", replies.error_body(problem, exchange.about.request_id))

    return exchange.events(generation, take, end, failed)


def _diagnostics(body: bodies.Messages, generation: Generation) -> replies.DiagnosticsReply | None:
    """As the client asks for them: by naming an earlier message."""
    named = body.diagnostics is not None and body.diagnostics.previous_message_id is not None
    return replies.diagnostics_of(generation.cache) if named else None


def _encoded(one: replies.Event) -> bytes:
    return event(one["type"], one)


def overrides_of(body: bodies.Messages) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p")}
    found["top_k"] = 0 if body.top_k == -1 else body.top_k
    found["seed"] = None if body.seed is None else body.seed % 2**64
    if body.stop_sequences:
        found["stop"] = body.stop_sequences
    form = (body.output_config and body.output_config.format) or body.output_format
    if form is not None:
        found["grammar"] = schema_grammar(form.schema_, "output_config.format")
    return found


def prompt_of(about: About, body: bodies.AnthropicPrompted) -> dict[str, Any]:
    """The fields of a GenerationRequest that make its prompt. Raises RequestError for messages that cannot be one."""
    choice, last = body.tool_choice, body.messages[-1]
    messages = edited(body, whole := conversation(body), about)
    about.ignored += left_out(body)
    if isinstance(last, bodies.AnthropicAssistantMessage) and "tool_calls" in messages[-1]:
        raise RequestError(
            f"messages.{len(body.messages) - 1}: an answer goes on from text alone, and this last message has a "
            "tool_use block; send the user's next message behind it"
        )
    thinking = thinking_of(body)
    return {
        "messages": messages,
        "edited": messages is not whole,
        "tools": tools_of(about, body),
        "tools_kept_s": next((kept for tool in reversed(body.tools) if (kept := tool.kept_s()) is not None), None),
        **choice_of(choice),
        "thinking": thinking.on,
        "thinking_budget": thinking.budget,
        "variables": thinking.variables,
        "continue_last": isinstance(last, bodies.AnthropicAssistantMessage),
        "parallel_tool_calls": not getattr(choice, "disable_parallel_tool_use", False),
    }


def thinking_of(body: bodies.AnthropicPrompted) -> Thinking:
    effort = None if body.output_config is None else body.output_config.effort
    if isinstance(body.thinking, bodies.ThinkingOn):
        return Thinking.of(True, body.thinking.budget_tokens, effort)
    return Thinking.of(None if body.thinking is None else False, None, effort)


def tools_of(about: About, body: bodies.AnthropicPrompted) -> list[Tool]:
    """The tools that the model may call. Raises RefusedRequest as `leave_out`, and for one without a schema."""
    leave_out(about, [tool.type for tool in body.tools], ("custom",))
    found = []
    for at, tool in enumerate(body.tools):
        if tool.type == "custom":
            if tool.name is None or tool.input_schema is None:
                place = f"tools.{at}.{'name' if tool.name is None else 'input_schema'}"
                raise RefusedRequest(Problem(400, "invalid", f"{place}: this field is required", place))
            found.append(Tool(tool.name, tool.description, tool.input_schema, tool.strict))
    return distinct(found)


def choice_of(choice: object) -> dict[str, Any]:
    match choice:
        case bodies.ToolChoice():
            return {"tool_choice": "required", "allowed_tools": [choice.name]}
        case bodies.AnyChoice():
            return {"tool_choice": "required"}
        case bodies.NoChoice():
            return {"tool_choice": "none"}
        case _:
            return {"tool_choice": "auto"}


API = Api(
    ("/v1/messages",),
    replies.error_body,
    queued=frozenset(("/v1/messages",)),
    errors=replies.AnthropicError,
    header=HEADER,
    shared=("/v1/",),
    name="anthropic",
    add=add,
)
