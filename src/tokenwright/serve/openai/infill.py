"""/infill, as llama.cpp's server has it: a model fills a gap between two texts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import Response

from tokenwright.serve.http.api import EVENTS, about, answers, body_of, takes, unless_gone
from tokenwright.serve.http.fields import Body, Refused, Text, many
from tokenwright.serve.http.reply_text import written
from tokenwright.serve.http.replying import answered, check_model, started
from tokenwright.serve.http.sse import Streamed
from tokenwright.serve.openai.completion import llama_overrides
from tokenwright.serve.openai.llama_bodies import LlamaBody
from tokenwright.serve.openai.llama_text import LlamaText
from tokenwright.serve.openai.reply_schema import Infilled
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Gap, GenerationRequest

MOST_FILES = 1_024


class ExtraFile(Body):
    """Another file, or a part of one, that the model reads before."""

    filename: Text = ""
    text: Text


class InfillBody(LlamaBody):
    """POST /infill. prompt: how the text of the gap begins."""

    refused: ClassVar = {"grammar": Refused("use /v1/completions", ("",))}

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[ExtraFile], many(MOST_FILES)] | None = None
    prompt: Text = ""


def wanted_of(request: Request, body: InfillBody, overrides: dict[str, Any], model: str) -> GenerationRequest:
    """The internal request."""
    files = tuple((one.filename, one.text) for one in body.input_extra or ())
    return GenerationRequest(
        prompt=body.input_prefix,
        gap=Gap(body.input_suffix, files, body.prompt),
        overrides=overrides,
        caller=about(request).caller,
        request_id=about(request).request_id,
        streamed=body.stream,
        model=model,
    )


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    async def infill(request: Request) -> Response:
        """Fill the gap between two texts."""
        body = await body_of(request, InfillBody)
        model = check_model(request, service, body.model)
        overrides = await unless_gone(request, llama_overrides(request, service, body))
        wanted = wanted_of(request, body, overrides, model)
        if body.stream:
            generation = await started(request, service, wanted)
            return Streamed(LlamaText(body, generation, service.host.llm, model).events(request), generation.cancel)
        generation, answer = await answered(request, service, wanted)
        text = LlamaText(body, generation, service.host.llm, model)
        body_text = await written(lambda: text.whole(answer), generation.logprobs)
        return Response(body_text, media_type="application/json")

    app.add_api_route(
        "/infill",
        infill,
        methods=["POST"],
        openapi_extra=takes(InfillBody),
        responses=answers(Infilled, stream=EVENTS),
        response_model=None,
        tags=["llama.cpp"],
    )
