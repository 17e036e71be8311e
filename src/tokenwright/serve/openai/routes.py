"""OpenAI's API over the service: completions and chat completions; a translation of schemas, no more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tokenwright.llm.outputs import Piece
from tokenwright.serve.http.api import (
    EVENTS,
    About,
    Api,
    about,
    answers,
    body_of,
    off_loop,
    problem_from,
    takes,
    unless_gone,
)
from tokenwright.serve.http.reply_text import LONG, Json, dumps, server_timing, written
from tokenwright.serve.http.replying import started
from tokenwright.serve.http.sse import DONE, Streamed
from tokenwright.serve.openai.bodies import ChatBody, CompletionBody, Problems, Sampling
from tokenwright.serve.openai.generation_request import chat_wanted, completion_wanted, customs_of
from tokenwright.serve.openai.replies import (
    Chunks,
    Names,
    Offsets,
    Tokens,
    error_body,
    fingerprint_of,
    finish_of,
    message_of,
    usage_of,
)
from tokenwright.serve.openai.reply_schema import ChatCompletion, InputTokensReply, TextCompletion
from tokenwright.serve.openai.rerank import RERANK, SCORE
from tokenwright.serve.service.generation import Generation, timings_of_all
from tokenwright.serve.service.multi_prompt import Several, gathered
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Answer, Delta, GenerationRequest, NotReady

log = logging.getLogger(__name__)

API = Api(
    ("/v1", *RERANK, *SCORE),
    error_body,
    queued=frozenset(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", *RERANK, *SCORE)),
    prompts={"/v1/completions": "prompt", "/v1/embeddings": "input", "/v1/responses": "input"},
    errors=Problems,
)


class OpenAI:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.fingerprint = fingerprint_of(service.host.name)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await body_of(request, ChatBody)
        wanted = await off_loop(request, lambda: chat_wanted(self.service, request, body))
        names, customs = Names("chat.completion", body.model, self.fingerprint), customs_of(body)
        if body.stream:
            generation = await started(request, self.service, wanted)
            return Streamed(self._chat_lines(request, body, generation, names), generation.cancel)
        generation, answers = await unless_gone(request, self._finished(about(request), wanted))
        for answer in answers if body.hides_reasoning else ():
            answer.reasoning = ""
        tokens = self._tokens()

        def choices() -> list[Json]:
            return [
                {
                    "index": answer.choice,
                    "message": message_of(answer, customs, older=body.by_function_call),
                    "logprobs": tokens.chat(answer.tokens) if body.logprobs else None,
                    "finish_reason": finish_of(answer, older=body.by_function_call),
                }
                for answer in answers
            ]

        return await self._reply(request, body, names, choices, [generation])

    async def input_tokens(self, request: Request) -> JSONResponse:
        """The tokens of a conversation's prompt."""
        body = await body_of(request, ChatBody)
        wanted = await off_loop(request, lambda: chat_wanted(self.service, request, body))
        counted = await unless_gone(request, self.service.count(wanted))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": counted})

    async def complete(self, request: Request) -> Response:
        """Continue one prompt or several."""
        body = await body_of(request, CompletionBody)
        each = completion_wanted(self.service, request, body)
        names = Names("text_completion", body.model, self.fingerprint)
        if body.stream:
            several = Several(lambda wanted: about(request).started(self.service.start(wanted)), each)
            await unless_gone(request, several.start())
            return Streamed(self._lines(request, body, several, names), several.cancel)
        finished = await unless_gone(request, gathered(lambda wanted: self._finished(about(request), wanted), each))

        def choices() -> list[Json]:
            return [
                self._choice(at * len(answers) + answer.choice, body, generation, answer)
                for at, (generation, answers) in enumerate(finished)
                for answer in answers
            ]

        return await self._reply(request, body, names, choices, [generation for generation, _ in finished])

    async def _finished(self, about: About, wanted: GenerationRequest) -> tuple[Generation, list[Answer]]:
        generation = await about.started(self.service.start(wanted))
        try:
            return generation, await generation.answers()
        finally:
            generation.cancel()

    async def _reply(
        self,
        request: Request,
        body: Sampling,
        names: Names,
        choices: Callable[[], list[Json]],
        each: Sequence[Generation],
    ) -> Response:
        timings = timings_of_all(each)
        said = timings if about(request).timed or body.timed else None
        usage = usage_of(one.counts() for one in each)
        text = await written(lambda: names.whole(choices(), usage, said), sum(one.logprobs for one in each))
        headers = {} if said is None else {"server-timing": server_timing(said)}
        return Response(text, media_type="application/json", headers=headers)

    def _tokens(self) -> Tokens:
        return Tokens(self.service.host.llm.tokenizer)

    async def _chat_lines(
        self, request: Request, body: ChatBody, generation: Generation, names: Names
    ) -> AsyncIterator[bytes]:
        chunks = Chunks(names, body.counts, customs_of(body), older=body.by_function_call)
        tokens, begun = self._tokens(), set[int]()
        try:
            async for deltas in generation:
                lines = []
                chunks.usage = usage_of([generation.counts()]) if body.counts_chunks else None
                for delta in deltas:
                    delta.reasoning = "" if body.hides_reasoning else delta.reasoning
                    lines.append(chunks.chat(delta, tokens, delta.choice not in begun))
                    begun.add(delta.choice)
                if any(lines):
                    yield "".join(lines).encode()
        except Exception as error:
            yield _failed(error, about(request).request_id)
            return
        yield self._last(request, body, chunks, [generation])

    def _last(self, request: Request, body: Sampling, chunks: Chunks, each: Sequence[Generation]) -> bytes:
        """What follows the last text: usage and timings where they are asked for, and the end."""
        timings = timings_of_all(each)
        said = timings if about(request).timed or body.timed else None
        if said is None and not body.counts:
            return DONE
        usage = usage_of(one.counts() for one in each) if body.counts else None
        return chunks.last(usage, said).encode() + DONE

    async def _lines(
        self, request: Request, body: CompletionBody, several: Several, names: Names
    ) -> AsyncIterator[bytes]:
        chunks, texts = Chunks(names, body.counts), body.n or 1
        offsets: dict[int, Offsets] = {}

        def lines(at: int, generation: Generation, deltas: Sequence[Delta]) -> bytes:
            chunks.usage = usage_of(one.counts() for one in several.generations) if body.counts_chunks else None
            return "".join(
                self._completion_lines(chunks, body, generation, delta, at * texts + delta.choice, offsets)
                for delta in deltas
            ).encode()

        try:
            async for each in several:
                echoes = body.echo and len(offsets) < texts * len(several.generations)  # with a prompt's logprobs
                yield await asyncio.to_thread(lines, *each) if echoes and each[1].logprobs > LONG else lines(*each)
        except Exception as error:
            yield _failed(error, about(request).request_id)
            return
        yield self._last(request, body, chunks, several.generations)

    def _completion_lines(
        self,
        chunks: Chunks,
        body: CompletionBody,
        generation: Generation,
        delta: Delta,
        index: int,
        offsets: dict[int, Offsets],
    ) -> str:
        """The chunks of one delta; `offsets`: those of each choice that has begun."""
        before = ""
        if index not in offsets:
            prompt = self._prompt_text(generation) if body.echo else ""
            offsets[index] = self._offsets(generation, prompt)
            if body.echo:
                shown = self._prompt_logprobs(generation) if body.logprobs is not None else None
                before = chunks.completion(index, prompt, shown, None)
        logprobs = self._logprobs(delta.tokens, offsets[index]) if delta.tokens else None
        return before + chunks.completion(index, delta.text, logprobs, delta.finish)

    def _choice(self, index: int, body: CompletionBody, generation: Generation, answer: Answer) -> Json:
        """A choice of a completion in one piece."""
        before = self._prompt_text(generation) if body.echo else ""
        logprobs = None
        if body.logprobs is not None:
            logprobs = self._logprobs(answer.tokens, self._offsets(generation, before))
            if body.echo:
                prompt = self._prompt_logprobs(generation)
                logprobs = {name: prompt[name] + values for name, values in logprobs.items()}
        text = before + answer.text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_of(answer)}

    def _prompt_text(self, generation: Generation) -> str:
        """The prompt as the model reads it."""
        whole = "" if generation.counts().truncated else generation.prompt_text
        return whole or self.service.host.llm.tokenizer.decode(generation.prompt_ids)

    def _offsets(self, generation: Generation, before: str) -> Offsets:
        """The offsets of a text that stands behind `before` in its choice."""
        return Offsets(self.service.host.llm.tokenizer, generation.prompt_ids, len(before))

    def _logprobs(self, pieces: Sequence[Piece], offsets: Offsets) -> Json:
        ids = [piece.token_id for piece in pieces if piece.token_id is not None]
        logprobs, tops = [piece.logprob for piece in pieces], [piece.top for piece in pieces]
        return self._tokens().completion(ids, logprobs, tops, offsets)

    def _prompt_logprobs(self, generation: Generation) -> Json:
        """Of all prompt tokens; nothing is known of the first."""
        known = generation.completion()
        tops = known.prompt_top_logprobs or ((),) * len(known.prompt_logprobs)
        ids, offsets = generation.prompt_ids, Offsets(self.service.host.llm.tokenizer)
        return self._tokens().completion(ids, [None, *known.prompt_logprobs], [None, *tops], offsets)


def _failed(error: Exception, request_id: str) -> bytes:
    """The event that ends a stream whose request has failed."""
    if not isinstance(error, NotReady):  # the server ends, and has said so
        log.error("request %s failed while it was streamed", request_id, exc_info=error)
    return f"data: {dumps(error_body(problem_from(error), request_id))}\n\n".encode()


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    api = OpenAI(service)
    app.add_api_route(
        "/v1/chat/completions/input_tokens",
        api.input_tokens,
        methods=["POST"],
        openapi_extra=takes(ChatBody),
        responses=answers(InputTokensReply),
        response_model=None,
        tags=["OpenAI"],
    )
    for path, handler, body, reply in (
        ("/v1/chat/completions", api.chat, ChatBody, ChatCompletion),
        ("/v1/completions", api.complete, CompletionBody, TextCompletion),
    ):
        app.add_api_route(
            path,
            handler,
            methods=["POST"],
            openapi_extra=takes(body),
            responses=answers(reply, stream=EVENTS),
            response_model=None,
            tags=["OpenAI"],
        )
