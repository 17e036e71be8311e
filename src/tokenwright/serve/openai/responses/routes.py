"""OpenAI's Responses API. Later requests repeat items, or name a stored response or conversation."""

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from fastapi import Response
from fastapi.responses import JSONResponse

from tokenwright.engine import FinishReason
from tokenwright.errors import RequestError
from tokenwright.serve.http.api import LARGE, Route, missing_field, wrong_field
from tokenwright.serve.http.exchange import Exchange, Streamed, event, schema_grammar
from tokenwright.serve.http.fields import MOST_ITEMS, MOST_TOOLS
from tokenwright.serve.http.openapi import EVENTS
from tokenwright.serve.http.reply_text import dumps, dumps_in_parts
from tokenwright.serve.http.request_parts import thinking_fields
from tokenwright.serve.openai.logprobs import Tokens
from tokenwright.serve.openai.replies import InputTokensReply
from tokenwright.serve.openai.responses import bodies
from tokenwright.serve.openai.responses.input_items import COMPACT, Tools, messages_of, tools_of
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
from tokenwright.serve.service.types import Delta, Problem, ToolMode, distinct

WITH_LOGPROBS = "message.output_text.logprobs"
WITH_SEALED = "reasoning.encrypted_content"


@dataclass(slots=True)
class Asked:
    stored: list[StoredItem]  # the items of the whole conversation
    known: int  # how many of them, the first, are from earlier
    tools: Tools
    prompt: dict[str, Any]  # fields of a GenerationRequest


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


def _stored(exchange: Exchange) -> StoredResponses:
    found: StoredResponses = exchange.request.app.state.stored
    return found


async def create(exchange: Exchange, body: bodies.Create) -> Response:
    """Answer a conversation."""
    body.model = exchange.check_model(body.model)
    body.store = body.store and _stored(exchange).most > 0
    asked, options = await _asked(exchange, body), body.prompt_cache_options
    compared = (options and options.comparison_response_id) or body.previous_response_id or ""
    names = {"identity": new_identity("resp"), "compared": compared}
    wanted = exchange.wanted(**asked.prompt, **names, overrides=overrides_of(body), streamed=body.stream)
    if body.stream:
        generation = await exchange.started(wanted)
        output = _output(exchange, body, generation, asked)
        return Streamed(_stream(exchange, body, generation, output, asked), generation.cancel)
    generation, answer = await exchange.answered(wanted)
    output = _output(exchange, body, generation, asked)

    def reply() -> dict[str, Any]:
        for _ in output.take(answer):
            pass
        return output.response(generation.counts())

    response = await exchange.whole(reply, generation)
    await _store(exchange, body, output, asked, generation)
    return response


async def compact(exchange: Exchange, body: bodies.Create) -> Response:
    """Summarise a conversation in an item that replaces it in later requests."""
    body.model = exchange.check_model(body.model)
    body.input = [*_items(body), bodies.CompactionTrigger(type="compaction_trigger")]
    asked = await _asked(exchange, body)
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


async def input_tokens(exchange: Exchange, body: bodies.InputTokens) -> JSONResponse:
    """The tokens of a request's prompt."""
    body.model = exchange.check_model(body.model)
    asked = await _asked(exchange, body)
    counted = await exchange.unless_gone(exchange.service.count(exchange.wanted(**asked.prompt)))
    return JSONResponse(InputTokensReply(object="response.input_tokens", input_tokens=counted))


async def _asked(exchange: Exchange, body: bodies.ResponsePrompted) -> Asked:
    if body.compacts:
        body.tools, body.tool_choice, body.text = [], "auto", bodies.TextConfig()
    before, named, earlier = body.previous_response_id, body.conversation_id, list[StoredItem]()
    if before is not None and named is not None:
        raise wrong_field("conversation", "conversation: send either it or previous_response_id")
    stored: StoredResponse | None = None
    if before is not None:
        stored = _stored(exchange).found(exchange.key, before, "previous_response_id")
    elif named is not None:
        stored = _stored(exchange).found(exchange.key, named, "conversation", conversation=True)
    if stored is not None:
        exchange.about.hold(stored.size)
        exchange.about.large |= stored.size > LARGE
        earlier += (*stored.items, *stored.output)
    return await exchange.off_loop(lambda: _read(exchange, body, earlier))


def _read(exchange: Exchange, body: bodies.ResponsePrompted, earlier: list[StoredItem]) -> Asked:
    own, about = _items(body), exchange.about
    if not earlier and all(isinstance(item, bodies.CompactionTrigger) for item in own):
        raise missing_field("input")
    new = list(_stored(exchange).resolved(about.caller.key, own))
    items = [*read_items(earlier), *new]
    offered = () if body.compacts else items  # a summary calls no tools
    added = [tool for item in offered if isinstance(item, bodies.AdditionalTools) for tool in item.tools]
    if len(added) > MOST_TOOLS:
        raise wrong_field("input", f"input: it adds more than {MOST_TOOLS:,} tools; leave some out")
    tools = tools_of([*body.tools, *added], about)
    tools.tools = distinct(tools.tools)
    messages = messages_of(items, body.instructions, about)
    messages += [{"role": "user", "content": COMPACT}] if body.compacts else []
    stored = [*earlier, *(StoredItem.of(kept(item)) for item in new)]
    return Asked(stored, len(earlier), tools, prompt_of(body, messages, tools))


async def _store(
    exchange: Exchange, body: bodies.Create, output: ResponseOutput, asked: Asked, generation: Generation
) -> None:
    if body.store or body.conversation_id is not None:
        response = output.response(generation.counts())
        made = await exchange.off_loop(lambda: StoredResponse.of(response, asked.stored))
        talk = _stored(exchange).get(exchange.key, body.conversation_id or "", conversation=True)
        if body.store:
            _stored(exchange).add(exchange.key, made)
        if talk is not None:  # even if its own response has displaced it
            _stored(exchange).extend(exchange.key, talk, (*asked.stored[asked.known :], *made.output))


async def _stream(
    exchange: Exchange, body: bodies.Create, generation: Generation, output: ResponseOutput, asked: Asked
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

    _stored(exchange).running[place] = generation
    try:
        async for chunk in exchange.events(generation, _encoded, output.take, end, failed):
            if ended == "written":
                await _store(exchange, body, output, asked, generation)
            yield chunk
    finally:
        del _stored(exchange).running[place]
    if not ended:  # it was cancelled by its id
        yield _encoded(output.cancelled(generation.counts()))


async def retrieve(exchange: Exchange, response_id: str) -> Response:
    """A stored response."""
    stored = _stored(exchange).found(exchange.key, response_id, "response_id")
    if exchange.request.query_params.get("stream", "").lower() in ("true", "1"):
        raise wrong_field("stream", "stream: a stored response cannot be streamed; leave stream out")
    return Response(stored.text, media_type="application/json")


async def delete(exchange: Exchange, response_id: str) -> JSONResponse:
    """Delete a response."""
    _stored(exchange).found(exchange.key, response_id, "response_id")
    _stored(exchange).remove(exchange.key, response_id)
    return JSONResponse(Deleted(id=response_id, object="response", deleted=True))


async def cancel(exchange: Exchange, response_id: str) -> JSONResponse:
    """Cancel a response in progress."""
    running = _stored(exchange).running.get((exchange.key, response_id))
    if running is None:
        stored = _stored(exchange).found(exchange.key, response_id, "response_id")
        raise wrong_field("response_id", f"response_id: this response is {stored.status} already")
    running.cancel()
    return JSONResponse(CancelledResponse(id=response_id, object="response", status="cancelled"))


async def input_items(exchange: Exchange, response_id: str) -> Response:
    """The items of a response's input, the newest first unless `order` is asc."""
    stored = _stored(exchange).found(exchange.key, response_id, "response_id")
    return item_page(stored.items, exchange.request.query_params)


async def begin_conversation(exchange: Exchange, body: bodies.CreateConversation) -> Response:
    """Create a conversation."""
    if not _stored(exchange).most:
        raise RequestError("this server stores nothing; send the whole conversation in input")
    made = {"id": new_identity("conv"), "object": "conversation", "created_at": int(time.time())}
    stored = StoredResponse.of(made | {"metadata": body.metadata}, await _new_items(exchange, body))
    _stored(exchange).add(exchange.key, stored)
    return Response(_conversation(exchange, stored.id).text, media_type="application/json")


async def conversation(exchange: Exchange, conversation_id: str) -> Response:
    """A conversation without its items."""
    return Response(_conversation(exchange, conversation_id).text, media_type="application/json")


async def delete_conversation(exchange: Exchange, conversation_id: str) -> Response:
    """Delete a conversation and its items."""
    _stored(exchange).remove(exchange.key, _conversation(exchange, conversation_id).id)
    return JSONResponse(Deleted(id=conversation_id, object="conversation.deleted", deleted=True))


async def add_items(exchange: Exchange, body: bodies.ConversationItems, conversation_id: str) -> Response:
    """Add items at the end."""
    _conversation(exchange, conversation_id)
    items = await _new_items(exchange, body)
    found = _conversation(exchange, conversation_id)
    if len(found.items) + len(items) > MOST_ITEMS:
        raise wrong_field("items", f"items: a conversation has at most {MOST_ITEMS:,}; begin another one")
    _stored(exchange).extend(exchange.key, found, items)
    _conversation(exchange, conversation_id)
    return item_page(items, {"order": "asc", "limit": "100"})


async def items(exchange: Exchange, conversation_id: str) -> Response:
    """The items, the newest first unless `order` is asc."""
    return item_page(_conversation(exchange, conversation_id).items, exchange.request.query_params)


async def _new_items(exchange: Exchange, body: bodies.ConversationItems) -> list[StoredItem]:
    found = _stored(exchange).resolved(exchange.key, body.items)
    return await exchange.off_loop(lambda: [StoredItem.of(kept(item)) for item in found])


def _conversation(exchange: Exchange, identity: str) -> StoredResponse:
    return _stored(exchange).found(exchange.key, identity, "conversation_id", conversation=True)


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


_ONE, _TALK = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"
ROUTES = (
    Route("/v1/responses", create, (ResponseReply,), bodies.Create, EVENTS, prompt="input"),
    Route("/v1/responses/compact", compact, (CompactedReply,), bodies.Create, prompt="input"),
    Route("/v1/responses/input_tokens", input_tokens, (InputTokensReply,), bodies.InputTokens),
    Route(_ONE, retrieve, (ResponseReply,)),
    Route(_ONE, delete, (Deleted,), method="DELETE"),
    Route(f"{_ONE}/cancel", cancel, (CancelledResponse,), method="POST"),
    Route(f"{_ONE}/input_items", input_items, (ResponseItems,)),
    Route("/v1/conversations", begin_conversation, (ConversationReply,), bodies.CreateConversation),
    Route(_TALK, conversation, (ConversationReply,)),
    Route(_TALK, delete_conversation, (Deleted,), method="DELETE"),
    Route(f"{_TALK}/items", add_items, (ResponseItems,), bodies.ConversationItems),
    Route(f"{_TALK}/items", items, (ResponseItems,)),
)
