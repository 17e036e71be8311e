"""OpenAI's Responses API. Later requests repeat items, or name a stored response or conversation."""

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from tokenwright.engine import FinishReason
from tokenwright.errors import RequestError
from tokenwright.serve.http.api import LARGE, About, missing_field, wrong_field
from tokenwright.serve.http.exchange import Exchange, Streamed, event, schema_grammar
from tokenwright.serve.http.fields import MOST_ITEMS, MOST_TOOLS
from tokenwright.serve.http.openapi import EVENTS, Route, add_routes
from tokenwright.serve.http.reply_text import dumps, dumps_in_parts
from tokenwright.serve.http.request_parts import thinking_fields
from tokenwright.serve.openai.logprobs import Tokens
from tokenwright.serve.openai.replies import InputTokensReply
from tokenwright.serve.openai.responses import bodies
from tokenwright.serve.openai.responses.input_items import COMPACT, Tools, conversation, tools_of
from tokenwright.serve.openai.responses.output_items import (
    PREFIXES,
    CompactedOutput,
    CompactedReply,
    Envelope,
    Event,
    ResponseOutput,
    ResponseReply,
    new_identity,
)
from tokenwright.serve.openai.responses.stored import StoredItem, StoredResponse, StoredResponses, read_items
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Delta, Problem, ToolMode, distinct

WITH_LOGPROBS = "message.output_text.logprobs"
WITH_SEALED = "reasoning.encrypted_content"


@dataclass(slots=True)
class Asked:
    """stored: the items of the whole conversation, the first `known` from earlier. prompt: of a GenerationRequest."""

    stored: list[StoredItem]
    known: int
    tools: Tools
    prompt: dict[str, Any]


class Deleted(TypedDict):
    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True]


class CancelledResponse(TypedDict):
    id: str
    object: Literal["response"]
    status: Literal["cancelled"]


class ResponseItems(TypedDict):
    """The items of a response's input, or of a conversation."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ConversationReply(TypedDict):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class Responses:
    def __init__(self, stored: StoredResponses) -> None:
        self.stored = stored

    async def create(self, exchange: Exchange, body: bodies.Create) -> Response:
        """Answer a conversation."""
        body.model = exchange.check_model(body.model)
        body.store = body.store and self.stored.most > 0
        asked, options = await self._asked(exchange, body), body.prompt_cache_options
        compared = (options and options.comparison_response_id) or body.previous_response_id or ""
        names = {"identity": new_identity("resp"), "compared": compared}
        wanted = exchange.wanted(**asked.prompt, **names, overrides=overrides_of(body), streamed=body.stream)
        if body.stream:
            generation = await exchange.started(wanted)
            output = _output(exchange, body, generation, asked)
            return Streamed(self._stream(exchange, body, generation, output, asked), generation.cancel)
        generation, answer = await exchange.answered(wanted)
        output = _output(exchange, body, generation, asked)

        def reply() -> dict[str, Any]:
            for _ in output.take(answer):
                pass
            return output.response(generation.counts())

        response = await exchange.whole(reply, generation)
        await self._store(exchange, body, output, asked, generation)
        return response

    async def compact(self, exchange: Exchange, body: bodies.Create) -> Response:
        """Summarise a conversation in an item that replaces it in later requests."""
        body.model = exchange.check_model(body.model)
        body.input = [*_items(body), bodies.CompactionTrigger(type="compaction_trigger")]
        asked = await self._asked(exchange, body)
        wanted = exchange.wanted(**asked.prompt, identity=new_identity("resp"), overrides=overrides_of(body))
        generation, answer = await exchange.answered(wanted)
        if answer.finish == "length":
            full = answer.reason is FinishReason.CONTEXT
            todo = "does not fit behind the conversation; leave out a part of it"
            raise RequestError(f"the summary {todo if full else 'is longer than max_output_tokens allows; raise it'}")
        output = _output(exchange, body, generation, asked)
        list(output.take(answer))
        found = output.response(generation.counts()) | {"object": "response.compaction"}
        return await exchange.whole(lambda: {name: found[name] for name in CompactedReply.__annotations__}, generation)

    async def input_tokens(self, exchange: Exchange, body: bodies.InputTokens) -> JSONResponse:
        """The tokens of a request's prompt."""
        body.model = exchange.check_model(body.model)
        asked = await self._asked(exchange, body)
        counted = await exchange.unless_gone(exchange.service.count(exchange.wanted(**asked.prompt)))
        return JSONResponse(InputTokensReply(object="response.input_tokens", input_tokens=counted))

    async def _asked(self, exchange: Exchange, body: bodies.ResponsePrompted) -> Asked:
        if body.compacts:
            body.tools, body.tool_choice, body.text = [], "auto", bodies.TextConfig()
        before, named, earlier = body.previous_response_id, body.conversation_id, list[StoredItem]()
        if before is not None and named is not None:
            raise wrong_field("conversation", "conversation: send either it or previous_response_id")
        stored: StoredResponse | None = None
        if before is not None:
            stored = self.stored.found(exchange.key, before, "previous_response_id")
        elif named is not None:
            stored = self.stored.found(exchange.key, named, "conversation", conversation=True)
        if stored is not None:
            exchange.about.hold(stored.size)
            exchange.about.large |= stored.size > LARGE
            earlier += (*stored.items, *stored.output)
        return await exchange.off_loop(lambda: self._read(exchange.about, body, earlier))

    def _read(self, about: About, body: bodies.ResponsePrompted, earlier: list[StoredItem]) -> Asked:
        own = _items(body)
        if not earlier and all(isinstance(item, bodies.CompactionTrigger) for item in own):
            raise missing_field("input")
        new = list(self.stored.resolved(about.caller.key, own))
        items = [*read_items(earlier), *new]
        offered = () if body.compacts else items  # a summary calls no tools
        added = [tool for item in offered if isinstance(item, bodies.AdditionalTools) for tool in item.tools]
        if len(added) > MOST_TOOLS:
            raise wrong_field("input", f"input: it adds more than {MOST_TOOLS:,} tools; leave some out")
        tools = tools_of([*body.tools, *added], about)
        tools.tools = distinct(tools.tools)
        messages = conversation(items, body.instructions, about)
        messages += [{"role": "user", "content": COMPACT}] if body.compacts else []
        stored = [*earlier, *(StoredItem.of(kept(item)) for item in new)]
        return Asked(stored, len(earlier), tools, prompt_of(body, messages, tools))

    async def _store(
        self, exchange: Exchange, body: bodies.Create, output: ResponseOutput, asked: Asked, generation: Generation
    ) -> None:
        if body.store or body.conversation_id is not None:
            response = output.response(generation.counts())
            made = await exchange.off_loop(lambda: StoredResponse.of(response, asked.stored))
            talk = self.stored.get(exchange.key, body.conversation_id or "", conversation=True)
            if body.store:
                self.stored.add(exchange.key, made)
            if talk is not None:  # even if its own response has displaced it
                self.stored.extend(exchange.key, talk, (*asked.stored[asked.known :], *made.output))

    async def _stream(
        self, exchange: Exchange, body: bodies.Create, generation: Generation, output: ResponseOutput, asked: Asked
    ) -> AsyncIterator[bytes]:
        place = (exchange.key, output.identity)
        ended: Literal["", "written", "failed"] = ""
        yield b"".join(map(_encoded, output.start()))

        def end(_: Delta) -> Iterator[Event]:
            nonlocal ended
            ended = "written"
            last = output.end(generation.counts())
            last["response"] |= exchange.said(generation)
            yield last

        def failed(problem: Problem) -> Event:
            nonlocal ended
            ended = "failed"
            return output.failed(problem.message)

        self.stored.running[place] = generation
        try:
            async for chunk in exchange.events(generation, _encoded, output.take, end, failed):
                if ended == "written":
                    await self._store(exchange, body, output, asked, generation)
                yield chunk
        finally:
            del self.stored.running[place]
        if not ended:  # it was cancelled by its id
            yield _encoded(output.cancelled(generation.counts()))

    async def retrieve(self, exchange: Exchange, response_id: str) -> Response:
        """A stored response."""
        stored = self.stored.found(exchange.key, response_id, "response_id")
        if exchange.request.query_params.get("stream", "").lower() in ("true", "1"):
            raise wrong_field("stream", "stream: a stored response cannot be streamed; leave stream out")
        return Response(stored.text, media_type="application/json")

    async def delete(self, exchange: Exchange, response_id: str) -> JSONResponse:
        """Delete a response."""
        self.stored.found(exchange.key, response_id, "response_id")
        self.stored.remove(exchange.key, response_id)
        return JSONResponse(Deleted(id=response_id, object="response", deleted=True))

    async def cancel(self, exchange: Exchange, response_id: str) -> JSONResponse:
        """Cancel a response in progress."""
        running = self.stored.running.get((exchange.key, response_id))
        if running is None:
            stored = self.stored.found(exchange.key, response_id, "response_id")
            raise wrong_field("response_id", f"response_id: this response is {stored.status} already")
        running.cancel()
        return JSONResponse(CancelledResponse(id=response_id, object="response", status="cancelled"))

    async def input_items(self, exchange: Exchange, response_id: str) -> Response:
        """The items of a response's input, the newest first unless `order` is asc."""
        stored = self.stored.found(exchange.key, response_id, "response_id")
        return item_page(stored.items, exchange.request.query_params)

    async def begin_conversation(self, exchange: Exchange, body: bodies.CreateConversation) -> Response:
        """Create a conversation."""
        if not self.stored.most:
            raise RequestError("this server stores nothing; send the whole conversation in input")
        made = {"id": new_identity("conv"), "object": "conversation", "created_at": int(time.time())}
        stored = StoredResponse.of(made | {"metadata": body.metadata}, await self._new_items(exchange, body))
        self.stored.add(exchange.key, stored)
        return Response(self._conversation(exchange, stored.id).text, media_type="application/json")

    async def conversation(self, exchange: Exchange, conversation_id: str) -> Response:
        """A conversation without its items."""
        return Response(self._conversation(exchange, conversation_id).text, media_type="application/json")

    async def delete_conversation(self, exchange: Exchange, conversation_id: str) -> Response:
        """Delete a conversation and its items."""
        self.stored.remove(exchange.key, self._conversation(exchange, conversation_id).id)
        return JSONResponse(Deleted(id=conversation_id, object="conversation.deleted", deleted=True))

    async def add_items(self, exchange: Exchange, body: bodies.ConversationItems, conversation_id: str) -> Response:
        """Add items at the end."""
        self._conversation(exchange, conversation_id)
        items = await self._new_items(exchange, body)
        found = self._conversation(exchange, conversation_id)
        if len(found.items) + len(items) > MOST_ITEMS:
            raise wrong_field("items", f"items: a conversation has at most {MOST_ITEMS:,}; begin another one")
        self.stored.extend(exchange.key, found, items)
        self._conversation(exchange, conversation_id)
        return item_page(items, {"order": "asc", "limit": "100"})

    async def items(self, exchange: Exchange, conversation_id: str) -> Response:
        """The items, the newest first unless `order` is asc."""
        return item_page(self._conversation(exchange, conversation_id).items, exchange.request.query_params)

    async def _new_items(self, exchange: Exchange, body: bodies.ConversationItems) -> list[StoredItem]:
        found = self.stored.resolved(exchange.key, body.items)
        return await exchange.off_loop(lambda: [StoredItem.of(kept(item)) for item in found])

    def _conversation(self, exchange: Exchange, identity: str) -> StoredResponse:
        return self.stored.found(exchange.key, identity, "conversation_id", conversation=True)


def _items(body: bodies.ResponsePrompted) -> list[bodies.Item]:
    given = body.input
    return [bodies.ResponseMessage(type="message", role="user", content=given)] if isinstance(given, str) else given


def _output(exchange: Exchange, body: bodies.Create, generation: Generation, asked: Asked) -> ResponseOutput:
    made = CompactedOutput if body.compacts else ResponseOutput
    envelope = Envelope(generation.identity, body, body.model, generation.params, lambda: generation.cache)
    return made(envelope, Tokens(exchange.tokenizer).chat, asked.tools, sealed=WITH_SEALED in body.include)


def item_page(items: Sequence[StoredItem], query: Mapping[str, str]) -> Response:
    """A page of a list of items. Raises RequestError."""
    if query.get("order", "desc") != "asc":
        items = items[::-1]
    if (after := query.get("after")) is not None:
        place = next((at for at, item in enumerate(items, 1) if item.id == after), None)
        if place is None:
            raise RequestError("after must be the id of an item of this list")
        items = items[place:]
    limit = query.get("limit", "20")
    if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= 100:
        raise RequestError("limit must be a number from 1 to 100")
    page = items[: int(limit)]
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    rest = dumps({"object": "list", "has_more": len(items) > len(page), **ends}).encode()
    data = b",".join(item.text for item in page)
    return Response(b'%s,"data":[%s]}' % (rest.removesuffix(b"}"), data), media_type="application/json")


def kept(item: bodies.Item) -> dict[str, Any]:
    found = item.model_dump(by_alias=True, exclude_none=True)
    if found["type"] == "message" and isinstance(found["content"], str):
        kind = "output_text" if found["role"] == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": found["content"]}]
    return found | {"id": found.get("id") or new_identity(PREFIXES.get(found["type"], "item"))}


def add(app: FastAPI, service: Service) -> None:
    api = Responses(app.state.stored)
    one, talk = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"
    add_routes(
        app,
        service,
        "OpenAI",
        Route("/v1/responses", api.create, (ResponseReply,), bodies.Create, EVENTS),
        Route("/v1/responses/compact", api.compact, (CompactedReply,), bodies.Create),
        Route("/v1/responses/input_tokens", api.input_tokens, (InputTokensReply,), bodies.InputTokens),
        Route(one, api.retrieve, (ResponseReply,)),
        Route(one, api.delete, (Deleted,), method="DELETE"),
        Route(f"{one}/cancel", api.cancel, (CancelledResponse,), method="POST"),
        Route(f"{one}/input_items", api.input_items, (ResponseItems,)),
        Route("/v1/conversations", api.begin_conversation, (ConversationReply,), bodies.CreateConversation),
        Route(talk, api.conversation, (ConversationReply,)),
        Route(talk, api.delete_conversation, (Deleted,), method="DELETE"),
        Route(f"{talk}/items", api.add_items, (ResponseItems,), bodies.ConversationItems),
        Route(f"{talk}/items", api.items, (ResponseItems,)),
    )


def _encoded(one: Event) -> bytes:
    return event(one["type"], one, dumps_in_parts if "response" in one else dumps)


def overrides_of(body: bodies.Create) -> dict[str, Any]:
    found: dict[str, Any] = {"max_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p}
    if isinstance(body.text.format, bodies.ResponseJsonSchema):
        form = body.text.format
        strict = "strict" in form.model_fields_set and form.strict
        found["grammar"] = schema_grammar(form.schema_, "text.format", strict=strict)
    if WITH_LOGPROBS in body.include:
        found["logprobs"] = body.top_logprobs
    elif body.top_logprobs:
        raise RequestError(f'top_logprobs needs "{WITH_LOGPROBS}" in include')
    return found


def prompt_of(body: bodies.ResponsePrompted, messages: list[dict[str, Any]], tools: Tools) -> dict[str, Any]:
    reasoning = body.reasoning or bodies.ReasoningConfig()
    on = None if reasoning.effort is None else reasoning.effort != "none"
    return {
        "messages": messages,
        "tools": tools.tools,
        **choice_of(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        **thinking_fields(on, reasoning.max_tokens, reasoning.effort, body.chat_template_kwargs),
        "json_object": body.text.format.type == "json_object",
        "drop_oldest": body.truncation == "auto",
    }


def choice_of(choice: ToolMode | bodies.NamedChoice | bodies.ResponseAllowedChoice) -> dict[str, Any]:
    match choice:
        case bodies.NamedChoice():
            return {"tool_choice": "required", "allowed_tools": [choice.name]}
        case bodies.ResponseAllowedChoice():
            return {"tool_choice": choice.mode, "allowed_tools": [tool.name for tool in choice.tools]}
        case _:
            return {"tool_choice": choice}
