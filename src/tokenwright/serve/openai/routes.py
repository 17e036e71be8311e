"""OpenAI's API over the service: completions and chat completions; a translation of schemas, no more."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tokenwright.llm.outputs import Piece
from tokenwright.serve.http.api import Api
from tokenwright.serve.http.exchange import Exchange, whole
from tokenwright.serve.http.fields import MOST_NAME
from tokenwright.serve.http.openapi import EVENTS, Route, add_routes
from tokenwright.serve.http.reply_text import LONG, dumps
from tokenwright.serve.http.sse import DONE, Streamed
from tokenwright.serve.openai import embeddings, replies, rerank
from tokenwright.serve.openai.bodies import ChatBody, CompletionBody, Sampling
from tokenwright.serve.openai.generation_request import chat_wanted, completion_wanted, customs_of
from tokenwright.serve.openai.logprobs import Offsets, TextLogprobs, Tokens
from tokenwright.serve.openai.rerank import RERANK, SCORE
from tokenwright.serve.openai.responses import routes as responses
from tokenwright.serve.service.generation import Generation, timings_of_all
from tokenwright.serve.service.multi_prompt import Several, gathered
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Delta, Problem, Timings


class OpenAI:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.fingerprint = replies.fingerprint_of(service.host.name)

    async def release(self, request: Request, session: str) -> Response:
        """DELETE /v1/cache/sessions/ID: end the pins of a session of this key."""
        exchange = Exchange(request, self.service)
        llm = await self.service.opened(exchange.key)
        llm.unpin(exchange.about.caller.salt, session[:MOST_NAME])
        return JSONResponse(replies.ReleasedSession(id=session, object="cache.session.released"))

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        exchange = Exchange(request, self.service)
        body = await exchange.body(ChatBody)
        wanted = await exchange.off_loop(lambda: chat_wanted(exchange, body))
        names, customs = replies.Names("chat.completion", body.model, self.fingerprint), customs_of(body)
        compared = body.prompt_cache_options and body.prompt_cache_options.comparison_response_id
        wanted = replace(wanted, identity=names.head["id"], compared=compared or "")
        if body.stream:
            generation = await exchange.started(wanted)
            return Streamed(self._chat_lines(exchange, body, generation, names), generation.cancel)
        generation, answers = await exchange.unless_gone(exchange.finished(wanted))
        for answer in answers if body.hides_reasoning else ():
            answer.reasoning = ""
        tokens, older = self._tokens(), body.by_function_call

        def choices() -> list[replies.ChatChoice]:
            return [
                replies.chat_choice(one, tokens.chat(one.tokens) if body.logprobs else None, customs, older=older)
                for one in answers
            ]

        return await _reply(exchange, body, names, choices, [generation])

    async def input_tokens(self, request: Request) -> JSONResponse:
        """The tokens of a conversation's prompt."""
        exchange = Exchange(request, self.service)
        body = await exchange.body(ChatBody)
        wanted = await exchange.off_loop(lambda: chat_wanted(exchange, body))
        counted = await exchange.unless_gone(self.service.count(wanted))
        return JSONResponse(replies.InputTokensReply(object="response.input_tokens", input_tokens=counted))

    async def complete(self, request: Request) -> Response:
        """Continue one prompt or several."""
        exchange = Exchange(request, self.service)
        body = await exchange.body(CompletionBody)
        each = completion_wanted(exchange, body)
        names = replies.Names("text_completion", body.model, self.fingerprint)
        if body.stream:
            several = Several(exchange.start, each)
            await exchange.unless_gone(several.start())
            return Streamed(self._lines(exchange, body, several, names), several.cancel)
        finished = await exchange.unless_gone(gathered(exchange.finished, each))

        def choices() -> list[replies.TextChoice]:
            return [
                self._choice(at * len(answers) + answer.choice, body, generation, answer)
                for at, (generation, answers) in enumerate(finished)
                for answer in answers
            ]

        return await _reply(exchange, body, names, choices, [generation for generation, _ in finished])

    def _tokens(self) -> Tokens:
        return Tokens(self.service.host.llm.tokenizer)

    def _chat_lines(
        self, exchange: Exchange, body: ChatBody, generation: Generation, names: replies.Names
    ) -> AsyncIterator[bytes]:
        chunks = replies.Chunks(names, body.counts, customs_of(body), older=body.by_function_call)
        tokens, begun = self._tokens(), set[int]()

        def take(delta: Delta) -> tuple[bytes]:
            chunks.usage = replies.usage_of([generation.counts()]) if body.counts_chunks else None
            delta.reasoning = "" if body.hides_reasoning else delta.reasoning
            line = chunks.chat(delta, tokens, delta.choice not in begun)
            begun.add(delta.choice)
            return (line.encode(),)

        def last() -> bytes:
            return _last(exchange, body, chunks, [generation])

        return exchange.events(generation, take, lambda _: (), lambda problem: _failed(exchange, problem), last)

    async def _lines(
        self, exchange: Exchange, body: CompletionBody, several: Several, names: replies.Names
    ) -> AsyncIterator[bytes]:
        chunks, texts = replies.Chunks(names, body.counts), body.n or 1
        offsets: dict[int, Offsets] = {}

        def lines(at: int, generation: Generation, deltas: Sequence[Delta]) -> bytes:
            chunks.usage = replies.usage_of(one.counts() for one in several.generations) if body.counts_chunks else None
            return "".join(
                self._completion_lines(chunks, body, generation, delta, at * texts + delta.choice, offsets)
                for delta in deltas
            ).encode()

        try:
            async for each in several:
                echoes = body.echo and len(offsets) < texts * len(several.generations)  # with a prompt's logprobs
                yield await asyncio.to_thread(lines, *each) if echoes and each[1].logprobs > LONG else lines(*each)
        except Exception as error:
            yield _failed(exchange, exchange.failure(error))
            return
        yield _last(exchange, body, chunks, several.generations)

    def _completion_lines(
        self,
        chunks: replies.Chunks,
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

    def _choice(self, index: int, body: CompletionBody, generation: Generation, answer: Delta) -> replies.TextChoice:
        before = self._prompt_text(generation) if body.echo else ""
        logprobs = None
        if body.logprobs is not None:
            logprobs = self._logprobs(answer.tokens, self._offsets(generation, before))
            if body.echo:
                prompt = self._prompt_logprobs(generation)
                for name, values in logprobs.items():
                    values[:0] = prompt[name]  # type: ignore[literal-required, index]
        text = before + answer.text
        return replies.TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=replies.finish_of(answer))

    def _prompt_text(self, generation: Generation) -> str:
        whole = "" if generation.counts().truncated else generation.prompt_text
        return whole or self.service.host.llm.tokenizer.decode(generation.prompt_ids)

    def _offsets(self, generation: Generation, before: str) -> Offsets:
        """The offsets of a text that stands behind `before` in its choice."""
        return Offsets(self.service.host.llm.tokenizer, generation.prompt_ids, len(before))

    def _logprobs(self, pieces: Sequence[Piece], offsets: Offsets) -> TextLogprobs:
        ids = [piece.token_id for piece in pieces if piece.token_id is not None]
        logprobs, tops = [piece.logprob for piece in pieces], [piece.top for piece in pieces]
        return self._tokens().completion(ids, logprobs, tops, offsets)

    def _prompt_logprobs(self, generation: Generation) -> TextLogprobs:
        """Of all prompt tokens; nothing is known of the first."""
        known = generation.completion()
        tops = known.prompt_top_logprobs or ((),) * len(known.prompt_logprobs)
        ids, offsets = generation.prompt_ids, Offsets(self.service.host.llm.tokenizer)
        return self._tokens().completion(ids, [None, *known.prompt_logprobs], [None, *tops], offsets)


async def _reply(
    exchange: Exchange,
    body: Sampling,
    names: replies.Names,
    choices: Callable[[], Sequence[replies.TextChoice | replies.ChatChoice]],
    each: Sequence[Generation],
) -> Response:
    timings, usage = _timings(exchange, body, each), replies.usage_of(one.counts() for one in each)
    return await whole(lambda: names.whole(choices(), usage, timings), sum(one.logprobs for one in each), timings)


def _last(exchange: Exchange, body: Sampling, chunks: replies.Chunks, each: Sequence[Generation]) -> bytes:
    """What follows the last text: usage and timings where they are asked for, and the end."""
    timings = _timings(exchange, body, each)
    if timings is None and not body.counts:
        return DONE
    return chunks.last(replies.usage_of(one.counts() for one in each) if body.counts else None, timings).encode() + DONE


def _timings(exchange: Exchange, body: Sampling, each: Sequence[Generation]) -> Timings | None:
    return timings_of_all(each) if exchange.about.timed or body.return_timings else None


def _failed(exchange: Exchange, problem: Problem) -> bytes:
    return f"data: {dumps(replies.error_body(problem, exchange.about.request_id))}\n\n".encode()


def add(app: FastAPI, service: Service) -> None:
    for more in (embeddings, rerank, responses):
        more.add(app, service)
    api = OpenAI(service)
    add_routes(
        app,
        "OpenAI",
        Route("/v1/chat/completions/input_tokens", api.input_tokens, (replies.InputTokensReply,), ChatBody),
        Route("/v1/chat/completions", api.chat, (replies.ChatCompletion,), ChatBody, EVENTS),
        Route("/v1/cache/sessions/{session:path}", api.release, (replies.ReleasedSession,), method="DELETE"),
        Route("/v1/completions", api.complete, (replies.TextCompletion,), CompletionBody, EVENTS),
    )


API = Api(
    ("/v1", *RERANK, *SCORE),
    replies.error_body,
    queued=frozenset(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", *RERANK, *SCORE)),
    prompts={"/v1/completions": "prompt", "/v1/embeddings": "input", "/v1/responses": "input"},
    errors=replies.Problems,
    name="openai",
    add=add,
)
