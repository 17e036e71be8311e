"""Ollama's API over the service: a translation of its bodies, answers, lines and errors, no more.

Streams are lines of JSON. A tool call is one object, so it is sent when its arguments are complete; a call that the end
of the text has cut off is left out, as Ollama does. Bodies are JSON whatever their Content-Type, because Ollama's
clients often send none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from tokenwright.errors import RequestError
from tokenwright.llm.outputs import Piece
from tokenwright.serve.http.api import Api, about, answers, body_of, off_loop, takes
from tokenwright.serve.http.reasoning_options import Thinking
from tokenwright.serve.http.reply_text import dumps
from tokenwright.serve.http.replying import (
    answered,
    arguments_of,
    check_model,
    events_of,
    said,
    schema_grammar,
    started,
    whole,
)
from tokenwright.serve.http.samplers import samplers_of
from tokenwright.serve.http.sse import Streamed
from tokenwright.serve.ollama import reply_schema as replies
from tokenwright.serve.ollama.bodies import (
    Chat,
    Embedded,
    Generate,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaPrompted,
    Options,
    Show,
)
from tokenwright.serve.ollama.card import card, entry, loaded
from tokenwright.serve.ollama.prompts import chat_prompt, generate_prompt
from tokenwright.serve.openai.embeddings import Embedded as Vectors
from tokenwright.serve.openai.embeddings import embedded, tokens_of, vectors
from tokenwright.serve.openai.replies import Tokens
from tokenwright.serve.service.generation import Generation, timings_of_all
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import (
    Answer,
    Delta,
    GenerationRequest,
    Problem,
    Timings,
    TokenCounts,
    ToolCall,
)

VERSION = "0.13.3"  # of Ollama's API as it is spoken here: its clients refuse a server that is older than they need
REPEAT_LAST_N = 64  # where repeat_penalty is given without it

Line = dict[str, Any]


def error_body(problem: Problem, request_id: str) -> dict[str, Any]:  # noqa: ARG001  (it is in the header alone)
    """An error as Ollama's clients read it."""
    return {"error": problem.message}


NDJSON = "application/x-ndjson"
API = Api(
    ("/api/",),
    error_body,
    queued=frozenset(("/api/generate", "/api/chat", "/api/embed", "/api/embeddings")),
    errors=replies.OllamaError,
)


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post(
        "/api/generate",
        openapi_extra=takes(Generate),
        responses=answers(replies.OllamaGenerated, stream=NDJSON),
        tags=["Ollama"],
    )
    async def generate(request: Request) -> Response:
        body = await body_of(request, Generate, any_type=True)
        return await _reply(request, service, body, generate_prompt(body))

    @app.post(
        "/api/chat", openapi_extra=takes(Chat), responses=answers(replies.OllamaChat, stream=NDJSON), tags=["Ollama"]
    )
    async def chat(request: Request) -> Response:
        body = await body_of(request, Chat, any_type=True)
        prompt = await off_loop(request, lambda: chat_prompt(request, body))
        return await _reply(request, service, body, prompt)

    @app.post("/api/embed", openapi_extra=takes(OllamaEmbed), responses=answers(replies.OllamaVectors), tags=["Ollama"])
    async def embed(request: Request) -> Response:
        body = await body_of(request, OllamaEmbed, any_type=True)
        inputs = [body.input] if isinstance(body.input, str) else body.input
        if not body.input:
            model = await _opened(request, service, body)
            return JSONResponse(
                {"model": model, "embeddings": [], "total_duration": 0, "load_duration": 0, "prompt_eval_count": 0}
            )
        found = await _vectors(request, service, body, inputs)
        taken = total_duration(timings_of_all([generation for generation, _ in found]))

        def reply() -> Line:
            times = {"total_duration": taken, "load_duration": 0, "prompt_eval_count": tokens_of(found)}
            return {"model": body.model, "embeddings": [vector.tolist() for _, vector in found], **times}

        return await vectors(request, found, reply)

    @app.post(
        "/api/embeddings",
        openapi_extra=takes(OllamaEmbeddings),
        responses=answers(replies.OllamaVector),
        tags=["Ollama"],
    )
    async def embeddings(request: Request) -> Response:
        body = await body_of(request, OllamaEmbeddings, any_type=True)
        if not body.prompt:
            await _opened(request, service, body)
            return JSONResponse({"embedding": []})
        found = await _vectors(request, service, body, [body.prompt])
        return await vectors(request, found, lambda: {"embedding": found[0][1].tolist()})

    @app.get("/api/ps", responses=answers(replies.OllamaRunning), tags=["Ollama"])
    async def running() -> JSONResponse:
        llm = await service.opened()
        return JSONResponse({"models": [loaded(name, llm, service.created) for name in service.names]})

    @app.get("/api/version", responses=answers(replies.OllamaVersion), tags=["Ollama"])
    async def version() -> JSONResponse:
        return JSONResponse({"version": VERSION})

    @app.get("/api/tags", responses=answers(replies.OllamaTags), tags=["Ollama"])
    async def tags() -> JSONResponse:
        llm = await service.opened()
        return JSONResponse({"models": [entry(name, llm, service.created) for name in service.names]})

    @app.post("/api/show", openapi_extra=takes(Show), responses=answers(replies.OllamaCard), tags=["Ollama"])
    async def show(request: Request) -> JSONResponse:
        body = await body_of(request, Show, any_type=True)
        if (body.model is None) == (body.name is None):
            raise RequestError("model: give the model's name, once")
        served_model(request, service, body.model or body.name or "")
        preparer = await service.preparer()
        found = card(await service.opened(), service.created, thinks=preparer.chat.thinks, calls=preparer.chat.calls)
        return JSONResponse(found)


def served_model(request: Request, service: Service, name: str) -> str:
    """The name under which the model is served, with or without the tag that means the same to Ollama's clients.

    Raises Missing for a model that this server does not have.
    """
    plain = name.removesuffix(_TAG)
    found = next((one for one in (name, plain, plain + _TAG) if one in service.names), plain)
    return check_model(request, service, found, exact=True)  # its clients pull a model that is missing


_TAG = ":latest"


async def _opened(request: Request, service: Service, body: Embedded) -> str:
    """Load the model; returns its name, as the request has it. Raises Missing."""
    name = body.model or service.names[0]
    served_model(request, service, name)
    await service.opened()
    return name


async def _vectors(request: Request, service: Service, body: Embedded, inputs: Sequence[str]) -> Vectors:
    body.model = body.model or service.names[0]
    cut, dimensions = (body.truncate, body.dimensions) if isinstance(body, OllamaEmbed) else (False, None)
    model = served_model(request, service, body.model)
    return await embedded(request, service, model, inputs, cut=cut, dimensions=dimensions)


async def _reply(request: Request, service: Service, body: Chat | Generate, prompt: dict[str, Any]) -> Response:
    body.model = body.model or service.names[0]
    model = served_model(request, service, body.model)
    if not (body.messages if isinstance(body, Chat) else body.prompt or body.suffix):
        await service.opened()
        return JSONResponse(loaded_line(body.model, body.keep_alive, chat=isinstance(body, Chat)))
    lines = Lines(body.model, chat=isinstance(body, Chat), tokens=lambda: Tokens(service.host.llm.tokenizer))
    effort = body.think if isinstance(body.think, str) else None
    thinking = Thinking.of(None if body.think is None else body.think is not False, None, effort)
    wanted = GenerationRequest(
        **prompt,
        overrides=overrides_of(body),
        json_object=body.format == "json",
        thinking=thinking.on,
        variables=thinking.variables,
        drop_oldest=body.truncate,
        context=body.options.num_ctx,
        caller=about(request).caller,
        request_id=about(request).request_id,
        streamed=body.stream,
        model=model,
    )
    if not body.stream:
        generation, answer = await answered(request, service, wanted)
        return await whole(request, lambda: lines.whole(answer, generation.counts(), generation.timings()), generation)
    generation = await started(request, service, wanted)
    chunks = _stream(request, generation, lines)
    return Streamed(chunks, generation.cancel, media_type=NDJSON, ping=None)


async def _stream(request: Request, generation: Generation, lines: Lines) -> AsyncIterator[bytes]:
    def take(delta: Delta) -> Iterator[bytes]:
        return map(_encoded, lines.take(delta))

    def end(_: Delta) -> Iterator[bytes]:
        yield _encoded(lines.end(generation.counts(), generation.timings()) | said(request, generation))

    def failed(problem: Problem) -> bytes:
        return _encoded(error_body(problem, ""))

    async for chunk in events_of(request, generation, take, end, failed):
        yield chunk


def _encoded(line: Line) -> bytes:
    return f"{dumps(line)}\n".encode()


def overrides_of(body: OllamaPrompted) -> dict[str, Any]:
    """The sampling parameters of a request. Raises RequestError for a schema that cannot be written."""
    options = body.options
    names = ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty")
    found: dict[str, Any] = {name: getattr(options, name) for name in names}
    found |= {
        "top_k": None if options.top_k is None else max(0, options.top_k),
        "seed": None if options.seed == -1 else options.seed,
        "max_tokens": None if options.num_predict is None or options.num_predict < 0 else options.num_predict,
        "stop": options.stop or None,
        **_repetition(options),
        **samplers_of(options),
    }
    if isinstance(body.format, Mapping):
        found["grammar"] = schema_grammar(body.format, "format")
    if body.logprobs:
        found["logprobs"] = body.top_logprobs
    elif body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true")
    return found


def _repetition(options: Options) -> dict[str, Any]:
    penalty, window = options.repeat_penalty, options.repeat_last_n
    if window == 0:
        return {"repetition_penalty": 1.0}
    if penalty is None:
        return {"repetition_window": None if window is None else max(0, window)}
    return {"repetition_penalty": penalty, "repetition_window": max(0, REPEAT_LAST_N if window is None else window)}


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def done_reason(finished: Answer | Delta) -> str:
    return "length" if finished.finish == "length" else "stop"


def durations(counts: TokenCounts, timings: Timings) -> dict[str, int]:
    """Tokens, and nanoseconds. The prompt's tokens are all of them, cached or not."""
    return {
        "total_duration": total_duration(timings),
        "load_duration": 0,  # the model was loaded when the server started
        "prompt_eval_count": counts.prompt,
        "prompt_eval_cached_count": counts.cached,
        "prompt_eval_duration": _ns(timings.prefill_s),
        "eval_count": counts.completion,
        "eval_duration": _ns(timings.decode_s),
    }


def total_duration(timings: Timings) -> int:
    """Nanoseconds."""
    return _ns(timings.queue_s + timings.prefill_s + timings.decode_s)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def loaded_line(model: str, keep_s: float | None, *, chat: bool) -> Line:
    """The reply to a request without a prompt, which loads the model or, with a keep_alive of 0, unloads it."""
    empty: Line = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    done = {"done": True, "done_reason": "unload" if keep_s == 0 else "load"}
    return {"model": model, "created_at": now(), **empty, **done}


class Lines:
    """The lines of one reply of /api/chat (`chat`) or /api/generate.

    tokens: for the texts of tokens with their logprobs, once the model is loaded.
    """

    def __init__(self, model: str, *, chat: bool, tokens: Callable[[], Tokens]) -> None:
        self.model = model
        self.chat = chat
        self._tokens = tokens
        self._answer = Answer(0)
        self._sent = 0  # tool calls

    def take(self, delta: Delta) -> Iterator[Line]:
        """The lines of a delta, but for its end."""
        self._answer.add(delta)
        if delta.reasoning and delta.text:  # no line has both: many clients read only one
            yield self._line("", delta.reasoning, (), ())
            yield self._line(delta.text, "", (), delta.tokens)
        elif delta.text or delta.reasoning or delta.tokens:
            yield self._line(delta.text, delta.reasoning, (), delta.tokens)
        calls = self._answer.tool_calls[: None if delta.finish and not delta.unfinished else -1]
        if len(calls) > self._sent:
            ready, self._sent = calls[self._sent :], len(calls)
            yield self._line("", "", ready, ())

    def end(self, counts: TokenCounts, timings: Timings) -> Line:
        """The last line of a stream."""
        return self._line("", "", (), ()) | self._done(counts, timings)

    def whole(self, answer: Answer, counts: TokenCounts, timings: Timings) -> Line:
        """A reply that is not streamed."""
        self._answer = answer
        calls = answer.tool_calls[: -1 if answer.unfinished else None]
        line = self._line(answer.text, answer.reasoning, calls, answer.tokens)
        return line | self._done(counts, timings)

    def _done(self, counts: TokenCounts, timings: Timings) -> dict[str, Any]:
        return {"done": True, "done_reason": done_reason(self._answer), **durations(counts, timings)}

    def _line(self, text: str, thinking: str, calls: Iterable[ToolCall], tokens: Sequence[Piece]) -> Line:
        content: dict[str, Any] = {"content" if self.chat else "response": text}
        if thinking:
            content["thinking"] = thinking
        called = [{"id": call.id, "function": {"name": call.name, "arguments": arguments_of(call)}} for call in calls]
        if called:
            content["tool_calls"] = called
        body = {"message": {"role": "assistant", **content}} if self.chat else content
        extra = {"logprobs": self._tokens().chat(tokens)["content"]} if tokens else {}
        return {"model": self.model, "created_at": now(), **body, "done": False, **extra}
