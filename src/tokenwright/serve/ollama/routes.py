"""Ollama's API. Its clients often send no Content-Type, so bodies of any are read as JSON."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_options import read_arguments
from tokenwright.serve.http.api import About, Api, Route
from tokenwright.serve.http.exchange import Exchange, Streamed, schema_grammar
from tokenwright.serve.http.reply_text import dumps
from tokenwright.serve.http.request_parts import OpenCalls, leave_out, pictures_field, sampling_of, thinking_fields
from tokenwright.serve.ollama import bodies, replies
from tokenwright.serve.ollama.replies import OllamaCard, OllamaRunning, OllamaTags, card, entry, loaded
from tokenwright.serve.openai.embeddings import Embedded as Vectors
from tokenwright.serve.openai.embeddings import embedded, tokens_of, vectors
from tokenwright.serve.openai.logprobs import Tokens
from tokenwright.serve.service.generation import Generation, timings_of_all
from tokenwright.serve.service.types import Delta, Gap, Tool, distinct
from tokenwright.text.messages import PICTURE, called

VERSION = "0.13.3"  # of Ollama's API; clients refuse older servers
REPEAT_LAST_N = 64  # by default, if repeat_penalty is given
NDJSON = "application/x-ndjson"


async def generate(exchange: Exchange, body: bodies.Generate) -> Response:
    return await _reply(exchange, body, generate_prompt(body))


async def chat(exchange: Exchange, body: bodies.Chat) -> Response:
    return await _reply(exchange, body, await exchange.off_loop(lambda: chat_prompt(exchange.about, body)))


async def embed(exchange: Exchange, body: bodies.OllamaEmbed) -> Response:
    inputs = [body.input] if isinstance(body.input, str) else body.input
    name = body.model or exchange.service.names[0]
    found = await _vectors(exchange, body, inputs) if body.input else []
    taken = replies.total_duration(timings_of_all([one for one, _ in found])) if found else 0

    def reply() -> replies.OllamaVectors:
        return {
            "model": name,
            "embeddings": [vector.tolist() for _, vector in found],
            "total_duration": taken,
            "load_duration": 0,
            "prompt_eval_count": tokens_of(found),
        }

    if not found:
        await _opened(exchange, name)
        return JSONResponse(reply())
    return await vectors(exchange, found, reply)


async def embeddings(exchange: Exchange, body: bodies.OllamaEmbeddings) -> Response:
    if not body.prompt:
        await _opened(exchange, body.model or exchange.service.names[0])
        return JSONResponse(replies.OllamaVector(embedding=[]))
    found = await _vectors(exchange, body, [body.prompt])
    return await vectors(exchange, found, lambda: replies.OllamaVector(embedding=found[0][1].tolist()))


async def running(exchange: Exchange) -> JSONResponse:
    llm = (await exchange.service.opened()).llm
    return JSONResponse(OllamaRunning(models=[loaded(name, llm) for name in exchange.service.names]))


async def version(_: Exchange) -> JSONResponse:
    return JSONResponse(replies.OllamaVersion(version=VERSION))


async def tags(exchange: Exchange) -> JSONResponse:
    service = exchange.service
    llm, created = (await service.opened()).llm, service.created
    return JSONResponse(OllamaTags(models=[entry(name, llm, created) for name in service.names]))


async def show(exchange: Exchange, body: bodies.Show) -> JSONResponse:
    if (body.model is None) == (body.name is None):
        raise RequestError("model: give the model's name, once")
    served_model(exchange, body.model or body.name or "")
    service = exchange.service
    llm, created = (await service.opened()).llm, service.created
    of_model = llm.conversations
    return JSONResponse(card(llm, created, thinks=of_model.thinks, calls=of_model.calls))


ROUTES = (
    Route("/api/generate", generate, (replies.OllamaGenerated,), bodies.Generate, NDJSON, prompt="messages"),
    Route("/api/chat", chat, (replies.OllamaChat,), bodies.Chat, NDJSON, prompt="messages"),
    Route("/api/embed", embed, (replies.OllamaVectors,), bodies.OllamaEmbed, prompt="messages"),
    Route("/api/embeddings", embeddings, (replies.OllamaVector,), bodies.OllamaEmbeddings, prompt="messages"),
    Route("/api/ps", running, (OllamaRunning,)),
    Route("/api/version", version, (replies.OllamaVersion,)),
    Route("/api/tags", tags, (OllamaTags,)),
    Route("/api/show", show, (OllamaCard,), bodies.Show),
)
API = Api(
    ("/api/",), replies.error_body, ROUTES, errors=replies.OllamaError, name="ollama", tag="Ollama", any_type=True
)


def served_model(exchange: Exchange, name: str) -> str:
    """The name of a served model, with or without Ollama's tag. Raises Missing."""
    plain, names = name.removesuffix(_TAG), exchange.service.names
    found = next((one for one in (name, plain, plain + _TAG) if one in names), plain)
    return exchange.check_model(found, exact=True)  # clients pull a missing model


_TAG = ":latest"


async def _opened(exchange: Exchange, name: str) -> None:
    served_model(exchange, name)
    await exchange.service.opened()


async def _vectors(exchange: Exchange, body: bodies.Embedded, inputs: Sequence[str]) -> Vectors:
    cut, dimensions = (body.truncate, body.dimensions) if isinstance(body, bodies.OllamaEmbed) else (False, None)
    served_model(exchange, body.model or exchange.service.names[0])
    return await embedded(exchange, inputs, cut=cut, dimensions=dimensions)


async def _reply(exchange: Exchange, body: bodies.Chat | bodies.Generate, prompt: dict[str, Any]) -> Response:
    service, chat = exchange.service, isinstance(body, bodies.Chat)
    name = body.model or service.names[0]
    served_model(exchange, name)
    if not (body.messages if isinstance(body, bodies.Chat) else body.prompt or body.suffix):
        await service.opened()
        return JSONResponse(replies.loaded_line(name, body.keep_alive, chat=chat))
    lines = replies.Lines(name, chat=chat, tokens=lambda: Tokens(service.host.llm.tokenizer))
    effort = body.think if isinstance(body.think, str) else None
    wanted = exchange.wanted(
        **prompt,
        overrides=overrides_of(body),
        json_object=body.format == "json",
        **thinking_fields(None if body.think is None else body.think is not False, None, effort),
        drop_oldest=body.truncate,
        context=body.options.num_ctx,
        streamed=body.stream,
    )
    if not body.stream:
        generation, answer = await exchange.answered(wanted)
        return await exchange.whole(lambda: lines.whole(answer, generation.counts(), generation.timings()), generation)
    generation = await exchange.started(wanted)
    return Streamed(_stream(exchange, generation, lines), generation.cancel, media_type=NDJSON, ping=None)


def _stream(exchange: Exchange, generation: Generation, lines: replies.Lines) -> AsyncIterator[bytes]:
    def end(_: Delta) -> Iterator[replies.Line]:
        yield lines.end(generation.counts(), generation.timings()) | exchange.said(generation)

    return exchange.events(generation, _encoded, lines.take, end, lambda problem: replies.error_body(problem, ""))


def _encoded(line: Mapping[str, Any]) -> bytes:
    return f"{dumps(line)}\n".encode()


def overrides_of(body: bodies.OllamaPrompted) -> dict[str, Any]:
    options = body.options
    found = sampling_of(options) | _repetition(options)
    found["max_tokens"] = None if options.num_predict is None or options.num_predict < 0 else options.num_predict
    if isinstance(body.format, Mapping):
        found["grammar"] = schema_grammar(body.format, "format")
    if body.logprobs:
        found["logprobs"] = body.top_logprobs
    elif body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true")
    return found


def _repetition(options: bodies.Options) -> dict[str, Any]:
    penalty, window = options.repeat_penalty, options.repeat_last_n
    if window == 0:
        return {"repetition_penalty": 1.0}
    if penalty is None:
        return {"repetition_window": None if window is None else max(0, window)}
    return {"repetition_penalty": penalty, "repetition_window": max(0, REPEAT_LAST_N if window is None else window)}


def generate_prompt(body: bodies.Generate) -> dict[str, Any]:
    """The prompt of /api/generate: one message, or the text itself if raw or with a suffix."""
    if body.suffix and (body.system or body.think is not None):
        raise RequestError("system and think belong to the chat template, which suffix leaves out; leave them out")
    if body.images and (body.suffix or body.raw):
        raise RequestError("images belong to the chat template, which suffix and raw leave out; leave them out")
    if body.suffix:
        return {"prompt": body.prompt, "gap": Gap(body.suffix)}
    if body.raw:
        if body.think is not None:
            raise RequestError("think belongs to the chat template, which raw leaves out; leave it out as well")
        if body.system:
            raise RequestError("system belongs to the chat template, which raw leaves out; put it into the prompt")
        return {"prompt": body.prompt}
    system = [{"role": "system", "content": body.system}] if body.system else []
    return {"messages": [*system, {"role": "user", **_seen(body.prompt, body.images)}]}


def _seen(text: str, images: list[str]) -> dict[str, Any]:
    return {"content": "\n".join((*len(images) * [PICTURE], text)), **pictures_field(images)}


def chat_messages(body: bodies.Chat) -> list[dict[str, Any]]:
    """The messages of /api/chat. Calls without ids get some; a result without one answers the next call."""
    found: list[dict[str, Any]] = []
    calls = OpenCalls()
    for at, message in enumerate(body.messages):
        one: dict[str, Any] = {"role": message.role, **_seen(message.content, message.images)}
        one |= {"name": message.name} if message.name and message.role != "tool" else {}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            own = [(call.id or f"call_{at}_{place}", call.function) for place, call in enumerate(message.tool_calls)]
            for identity, function in own:
                calls.add(identity, function.name)
            one["tool_calls"] = [called(identity, each.name, read_arguments(each.arguments)) for identity, each in own]
        if message.role == "tool":
            one |= _answered(message, calls, at)
        found.append(one)
    return found


def _answered(message: bodies.OllamaMessage, calls: OpenCalls, at: int) -> dict[str, str]:
    """Close the call that a result answers. Returns its id and name, or the result's."""
    call = calls.answer(message.tool_call_id, message.tool_name)
    if call is None:
        return {"tool_call_id": message.tool_call_id or f"call_{at}", "name": message.tool_name or message.name}
    return {"tool_call_id": call[0], "name": call[1]}


def chat_prompt(about: About, body: bodies.Chat) -> dict[str, Any]:
    last = body.messages[-1] if len(body.messages) > 1 else None
    goes_on = last is not None and last.role == "assistant" and not last.tool_calls
    return {"messages": chat_messages(body), "tools": tools_of(about, body), "continue_last": goes_on}


def tools_of(about: About, body: bodies.Chat) -> list[Tool]:
    """The tools that the model may call. Raises RefusedRequest for one without its function."""
    leave_out(about, [tool.type for tool in body.tools], ("function",))
    found = []
    for at, tool in enumerate(body.tools):
        if tool.type == "function":
            if tool.function is None:
                raise RequestError(f"tools.{at}.function: this field is required")
            found.append(Tool(tool.function.name, tool.function.description, tool.function.parameters))
    return distinct(found)
