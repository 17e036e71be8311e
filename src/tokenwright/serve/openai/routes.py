"""OpenAI's completions and chat completions over the service: a translation of schemas."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

from fastapi.responses import JSONResponse, Response

from tokenwright.serve.http.api import Api, Route
from tokenwright.serve.http.exchange import DONE, Exchange, Streamed, whole
from tokenwright.serve.http.fields import MOST_NAME
from tokenwright.serve.http.openapi import EVENTS
from tokenwright.serve.http.reply_text import LONG, dumps
from tokenwright.serve.openai import embeddings, replies
from tokenwright.serve.openai.bodies import ChatBody, CompletionBody, Sampling
from tokenwright.serve.openai.embeddings import RERANK, SCORE
from tokenwright.serve.openai.generation_request import chat_wanted, completion_wanted, customs_of
from tokenwright.serve.openai.logprobs import Offsets, TextLogprobs, Tokens
from tokenwright.serve.openai.responses import routes as responses
from tokenwright.serve.service.generation import Generation, timings_of_all
from tokenwright.serve.service.multi_prompt import PromptGroup, gather
from tokenwright.serve.service.types import Delta, Problem, Timings
from tokenwright.text import Tokenizer


async def release(exchange: Exchange, session: str) -> Response:
    """DELETE /v1/cache/sessions/ID: end the pins of a session of this key."""
    llm = (await exchange.service.opened(exchange.key)).llm
    llm.llm_engine.release(exchange.about.caller.salt, session[:MOST_NAME])
    return JSONResponse(replies.ReleasedSession(id=session, object="cache.session.released"))


async def chat(exchange: Exchange, body: ChatBody) -> Response:
    """Answer a conversation."""
    wanted = await exchange.off_loop(lambda: chat_wanted(exchange, body))
    names, customs = _names(exchange, "chat.completion", body), customs_of(body)
    compared = body.prompt_cache_options and body.prompt_cache_options.comparison_response_id
    wanted = replace(wanted, identity=names.head["id"], compared=compared or "")
    if body.stream:
        generation = await exchange.started(wanted)
        return Streamed(_chat_lines(exchange, body, generation, names), generation.cancel)
    generation, answers = await exchange.unless_gone(exchange.finished(wanted))
    for answer in answers if body.hides_reasoning else ():
        answer.reasoning = ""
    tokens = Tokens(exchange.tokenizer) if body.logprobs else None

    def choices() -> list[replies.ChatChoice]:
        return [
            replies.chat_choice(one, tokens.chat(one.tokens) if tokens else None, customs, older=bool(body.functions))
            for one in answers
        ]

    return await _reply(exchange, body, names, choices, [generation])


async def input_tokens(exchange: Exchange, body: ChatBody) -> JSONResponse:
    """The tokens of a conversation's prompt."""
    wanted = await exchange.off_loop(lambda: chat_wanted(exchange, body))
    counted = await exchange.unless_gone(exchange.service.count(wanted))
    return JSONResponse(replies.InputTokensReply(object="response.input_tokens", input_tokens=counted))


async def complete(exchange: Exchange, body: CompletionBody) -> Response:
    """Continue one prompt or group."""
    each = completion_wanted(exchange, body)
    names = _names(exchange, "text_completion", body)
    if body.stream:
        group = PromptGroup(exchange.start, each)
        await exchange.unless_gone(group.start())
        return Streamed(_lines(exchange, body, group, names), group.cancel)
    finished = await exchange.unless_gone(gather(exchange.finished, each))

    def choices() -> list[replies.TextChoice]:
        texts = CompletionTexts(body, exchange.tokenizer)
        return [
            texts.choice(at * len(answers) + answer.choice, generation, answer)
            for at, (generation, answers) in enumerate(finished)
            for answer in answers
        ]

    return await _reply(exchange, body, names, choices, [generation for generation, _ in finished])


def _names(exchange: Exchange, kind: str, body: Sampling) -> replies.Names:
    return replies.Names(kind, body.model, replies.fingerprint_of(exchange.service.host.name))


def _chat_lines(
    exchange: Exchange, body: ChatBody, generation: Generation, names: replies.Names
) -> AsyncIterator[bytes]:
    chunks = replies.Chunks(names, body.counts, customs_of(body), older=bool(body.functions))
    tokens, begun = Tokens(exchange.tokenizer), set[int]()

    def take(delta: Delta) -> Iterator[str]:
        chunks.usage = replies.usage_of([generation.counts()]) if body.counts_chunks else None
        delta.reasoning = "" if body.hides_reasoning else delta.reasoning
        yield chunks.chat(delta, tokens, delta.choice not in begun)
        begun.add(delta.choice)

    def failed(problem: Problem) -> str:
        return _failed(exchange, problem)

    def last() -> bytes:
        return _last(exchange, body, chunks, [generation])

    return exchange.events(generation, str.encode, take, lambda _: (), failed, last)


async def _lines(
    exchange: Exchange, body: CompletionBody, group: PromptGroup, names: replies.Names
) -> AsyncIterator[bytes]:
    chunks, n, texts = replies.Chunks(names, body.counts), body.n or 1, CompletionTexts(body, exchange.tokenizer)

    def lines(at: int, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        chunks.usage = replies.usage_of(one.counts() for one in group.generations) if body.counts_chunks else None
        return "".join(texts.lines(chunks, at * n + delta.choice, generation, delta) for delta in deltas).encode()

    try:
        async for each in group:
            echoes = body.echo and len(texts.begun) < n * len(group.generations)  # with a prompt's logprobs
            yield await asyncio.to_thread(lines, *each) if echoes and each[1].logprobs > LONG else lines(*each)
    except Exception as error:
        yield _failed(exchange, exchange.failure(error)).encode()
        return
    yield _last(exchange, body, chunks, group.generations)


class CompletionTexts:
    """The texts of a completion's reply, behind their prompts if the request asks for these. begun: by index."""

    def __init__(self, body: CompletionBody, tokenizer: Tokenizer) -> None:
        self.begun: dict[int, Offsets] = {}
        self._body = body
        self._tokenizer = tokenizer
        self._tokens = Tokens(tokenizer)

    def lines(self, chunks: replies.Chunks, index: int, generation: Generation, delta: Delta) -> str:
        before = ""
        if index not in self.begun:
            prompt = self._begin(index, generation)
            if self._body.echo:
                shown = self._prompt_logprobs(generation) if self._body.logprobs is not None else None
                before = chunks.completion(index, prompt, shown, None)
        logprobs = self._logprobs(index, delta) if delta.tokens else None
        return before + chunks.completion(index, delta.text, logprobs, delta.finish)

    def choice(self, index: int, generation: Generation, answer: Delta) -> replies.TextChoice:
        before, logprobs = self._begin(index, generation), None
        if self._body.logprobs is not None:
            logprobs = self._logprobs(index, answer)
            if self._body.echo:
                prompt = self._prompt_logprobs(generation)
                for name, values in logprobs.items():
                    values[:0] = prompt[name]  # type: ignore[literal-required, index]
        text, finish = before + answer.text, replies.finish_of(answer)
        return replies.TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish)

    def _begin(self, index: int, generation: Generation) -> str:
        """Begin a text; returns the prompt that stands before it in the reply."""
        text, ids = "", generation.prompt_ids
        if self._body.echo:
            text = ("" if generation.counts().truncated else generation.prepared.text) or self._tokenizer.decode(ids)
        self.begun[index] = Offsets(self._tokenizer, ids, len(text))
        return text

    def _logprobs(self, index: int, delta: Delta) -> TextLogprobs:
        pieces = delta.tokens
        ids = [piece.token_id for piece in pieces if piece.token_id is not None]
        logprobs, tops = [piece.logprob for piece in pieces], [piece.top for piece in pieces]
        return self._tokens.completion(ids, logprobs, tops, self.begun[index])

    def _prompt_logprobs(self, generation: Generation) -> TextLogprobs:
        """Nothing is known of the first token."""
        known = generation.completion()
        tops = known.prompt_top_logprobs or ((),) * len(known.prompt_logprobs)
        ids, offsets = generation.prompt_ids, Offsets(self._tokenizer)
        return self._tokens.completion(ids, [None, *known.prompt_logprobs], [None, *tops], offsets)


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
    timings = _timings(exchange, body, each)
    if timings is None and not body.counts:
        return DONE
    return chunks.last(replies.usage_of(one.counts() for one in each) if body.counts else None, timings).encode() + DONE


def _timings(exchange: Exchange, body: Sampling, each: Sequence[Generation]) -> Timings | None:
    return timings_of_all(each) if exchange.about.timed or body.return_timings else None


def _failed(exchange: Exchange, problem: Problem) -> str:
    return f"data: {dumps(replies.error_body(problem, exchange.about.request_id))}\n\n"


ROUTES = (
    *responses.ROUTES,
    *embeddings.ROUTES,
    Route("/v1/chat/completions/input_tokens", input_tokens, (replies.InputTokensReply,), ChatBody),
    Route("/v1/chat/completions", chat, (replies.ChatCompletion,), ChatBody, EVENTS, prompt="messages"),
    Route("/v1/cache/sessions/{session:path}", release, (replies.ReleasedSession,), method="DELETE"),
    Route("/v1/completions", complete, (replies.TextCompletion,), CompletionBody, EVENTS, prompt="prompt"),
)
API = Api(("/v1", *RERANK, *SCORE), replies.error_body, ROUTES, errors=replies.Problems, name="openai", tag="OpenAI")
