"""/infill and /completion, as llama.cpp's server has them: a model fills a gap, or continues a text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from tokenwright.checks import MAX_TOKENS
from tokenwright.engine import FinishReason
from tokenwright.errors import RequestError
from tokenwright.serve.http.api import EVENTS, about, answers, body_of, takes, unless_gone
from tokenwright.serve.http.fields import Body, ModelName, Object, Refused, Share, Stops, StopText, Text, many
from tokenwright.serve.http.reply_text import Json, dumps, written
from tokenwright.serve.http.replying import answered, check_model, events_of, finished, schema_grammar, started
from tokenwright.serve.http.samplers import Samplers, samplers_of
from tokenwright.serve.http.sse import Streamed
from tokenwright.serve.openai.answer_form import grammar
from tokenwright.serve.openai.bodies import MOST_BATCH, Ids
from tokenwright.serve.openai.replies import error_body
from tokenwright.serve.openai.reply_schema import Infilled, InfilledList
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.multi_prompt import gathered
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Answer, Delta, Gap, GenerationRequest

MOST_FILES = 1_024


class ExtraFile(Body):
    """Another file, or a part of one, that the model reads before."""

    filename: Text = ""
    text: Text


class LlamaBody(Samplers):
    """The fields that both routes have in common. n_predict: -1 goes on to the end of the context.

    top_k 0 and -1: all ids. repeat_last_n -1: the whole text; 0: no repetition penalty. seed -1: a random one.
    """

    refused: ClassVar = {
        "n_probs": Refused("use logprobs of /v1/completions", (0,)),
        "lora": Refused("use model", ([],)),
    }
    harmless: ClassVar = dict.fromkeys(
        ("samplers", "cache_prompt", "id_slot", "n_indent", "t_max_prompt_ms", "t_max_predict_ms", "n_cache_reuse"),
        "it changes no text that a model here writes",
    )

    model: ModelName = ""
    stream: bool = False
    n_predict: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] = -1
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**64)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    stop: StopText | Stops | None = None
    ignore_eos: bool | None = None


class InfillBody(LlamaBody):
    """POST /infill. prompt: how the text of the gap begins."""

    refused: ClassVar = {"grammar": Refused("use /v1/completions", ("",))}

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[ExtraFile], many(MOST_FILES)] | None = None
    prompt: Text = ""


class LlamaCompletionBody(LlamaBody):
    """POST /completion: continue one text, or several at once. json_schema, grammar: the form of what follows."""

    prompt: Text | Ids | Annotated[list[Text], many(MOST_BATCH, 1)] | Annotated[list[Ids], many(MOST_BATCH, 1)]
    grammar: Text = ""
    json_schema: Object | None = None


def completion_wanted(request: Request, body: LlamaCompletionBody, model: str) -> list[GenerationRequest]:
    """The internal requests, one for each prompt. Raises RequestError."""
    overrides, prompt = _overrides(body), body.prompt
    if body.grammar and body.json_schema:
        raise RequestError("grammar and json_schema each say the form of the text; leave one of them out")
    if body.grammar:
        overrides["grammar"] = grammar(body.grammar)
    elif body.json_schema:
        overrides["grammar"] = schema_grammar(request, body.json_schema, False, "json_schema")
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    if several and body.stream:
        raise RequestError("several prompts are answered whole; leave stream out")
    prompts: list[Any] = prompt if several else [prompt]  # type: ignore[assignment]
    return [
        GenerationRequest(
            prompt=one,
            overrides=overrides,
            together=len(prompts),
            caller=about(request).caller,
            request_id=about(request).request_id,
            streamed=body.stream,
            model=model,
        )
        for one in prompts
    ]


def wanted_of(request: Request, body: InfillBody, model: str) -> GenerationRequest:
    """The internal request. Raises RequestError."""
    files = tuple((one.filename, one.text) for one in body.input_extra or ())
    return GenerationRequest(
        prompt=body.input_prefix,
        gap=Gap(body.input_suffix, files, body.prompt),
        overrides=_overrides(body),
        caller=about(request).caller,
        request_id=about(request).request_id,
        streamed=body.stream,
        model=model,
    )


def _overrides(body: LlamaBody) -> dict[str, Any]:
    names = ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "ignore_eos")
    found: dict[str, Any] = {name: getattr(body, name) for name in names} | samplers_of(body)
    found["top_k"] = None if body.top_k is None else max(0, body.top_k)
    found["seed"] = None if body.seed == -1 else body.seed
    found["max_tokens"] = None if body.n_predict < 0 else body.n_predict
    found["stop"] = (body.stop,) if isinstance(body.stop, str) else body.stop or None
    found["repetition_penalty"] = 1.0 if body.repeat_last_n == 0 else body.repeat_penalty
    found["repetition_window"] = None if body.repeat_last_n is None else max(0, body.repeat_last_n)
    return found


def _end(model: str, generation: Generation, last: Delta | Answer) -> Json:
    """What a reply says at its end."""
    counts, times = generation.counts(), generation.timings()
    word = last.stopped if isinstance(last.stopped, str) else ""
    ends = (FinishReason.EOS, FinishReason.STOP_ID, FinishReason.GRAMMAR)
    kind = "word" if word else "eos" if last.reason in ends else "limit"
    return {
        "stop": True,
        "model": model,
        "tokens_evaluated": counts.prompt,
        "tokens_cached": counts.cached,
        "tokens_predicted": counts.completion,
        "truncated": False,
        "stop_type": kind,
        "stopping_word": word,
        "timings": {
            "cache_n": counts.cached,
            "prompt_n": counts.prompt - counts.cached,
            "prompt_ms": 1e3 * times.prefill_s,
            "predicted_n": counts.completion,
            "predicted_ms": 1e3 * times.decode_s,
        },
    }


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    async def complete(request: Request) -> Response:
        """Continue one text, or several."""
        body = await body_of(request, LlamaCompletionBody)
        model = check_model(request, service, body.model)
        each = completion_wanted(request, body, model)
        if body.stream:
            generation = await started(request, service, each[0])
            return Streamed(_events(request, generation, model), generation.cancel)

        found = await unless_gone(request, gathered(lambda wanted: finished(request, service, wanted), each))
        replies = [
            {"index": at, "content": answer.text} | _end(model, generation, answer)
            for at, (generation, answer) in enumerate(found)
        ]
        given = replies if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else replies[0]
        return Response(await written(lambda: given, 0), media_type="application/json")

    async def infill(request: Request) -> Response:
        """Fill the gap between two texts."""
        body = await body_of(request, InfillBody)
        model = check_model(request, service, body.model)
        wanted = wanted_of(request, body, model)
        if body.stream:
            generation = await started(request, service, wanted)
            return Streamed(_events(request, generation, model), generation.cancel)
        generation, answer = await answered(request, service, wanted)
        reply = {"index": 0, "content": answer.text} | _end(model, generation, answer)
        return Response(await written(lambda: reply, 0), media_type="application/json")

    for path, handler, body_type, replies in (
        ("/infill", infill, InfillBody, (Infilled,)),
        ("/completion", complete, LlamaCompletionBody, (Infilled, InfilledList)),
    ):
        app.add_api_route(
            path,
            handler,
            methods=["POST"],
            openapi_extra=takes(body_type),
            responses=answers(*replies, stream=EVENTS),
            response_model=None,
            tags=["llama.cpp"],
        )


def _events(request: Request, generation: Generation, model: str) -> AsyncIterator[bytes]:
    """One event for each step, and a last one with the counts."""

    def line(event: Json) -> bytes:
        return f"data: {dumps(event)}\n\n".encode()

    def take(delta: Delta) -> Iterator[bytes]:
        if delta.text:
            yield line({"index": 0, "content": delta.text, "stop": False})

    def end(delta: Delta) -> Iterator[bytes]:
        yield line({"index": 0, "content": ""} | _end(model, generation, delta))

    def failed(problem: Any) -> bytes:
        return line(error_body(problem, about(request).request_id))

    return events_of(request, generation, take, end, failed)
