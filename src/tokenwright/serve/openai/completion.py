"""/completion, as llama.cpp's server has it: a text is continued, or several are."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from tokenwright.errors import RequestError
from tokenwright.serve.http.api import EVENTS, about, answers, body_of, takes, unless_gone
from tokenwright.serve.http.fields import Object, Text
from tokenwright.serve.http.reply_text import written
from tokenwright.serve.http.replying import check_model, finished, schema_grammar, started
from tokenwright.serve.http.sse import Streamed
from tokenwright.serve.openai.answer_form import grammar
from tokenwright.serve.openai.llama_bodies import LlamaBody, overrides_of
from tokenwright.serve.openai.llama_text import LlamaText
from tokenwright.serve.openai.prompt_forms import Prompts, prompts_of, read_prompts
from tokenwright.serve.openai.reply_schema import Infilled, InfilledList
from tokenwright.serve.service.multi_prompt import gathered
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import GenerationRequest


class LlamaCompletionBody(LlamaBody):
    """POST /completion: continue one text, or several at once. json_schema, grammar: the form of what follows.

    prompt: a text, ids, both in one list, an object with a prompt_string, or a list of these.
    """

    prompt: Prompts
    grammar: Text = ""
    json_schema: Object | None = None


async def llama_overrides(request: Request, service: Service, body: LlamaBody) -> dict[str, Any]:
    """The sampling parameters of a body. Raises RequestError, and as `Service.read`."""
    if not body.names_texts:
        return overrides_of(body, None)
    key = about(request).caller.key
    tokenizer = (await service.opened(key)).tokenizer
    return await service.read(key, lambda: overrides_of(body, tokenizer))


async def wanted_of(
    request: Request, service: Service, body: LlamaCompletionBody, model: str
) -> tuple[list[GenerationRequest], bool]:
    """The internal requests, one for each prompt, and whether the reply is a list. Raises as `read_prompts`."""
    if body.grammar and body.json_schema:
        raise RequestError("grammar and json_schema each say the form of the text; leave one of them out")
    given, several = prompts_of(body.prompt)
    if several and body.stream:
        raise RequestError("several prompts are answered whole; leave stream out")
    overrides = await llama_overrides(request, service, body)
    if body.grammar:
        overrides["grammar"] = grammar(body.grammar)
    elif body.json_schema:
        overrides["grammar"] = schema_grammar(body.json_schema, "json_schema")
    prompts = await read_prompts(request, service, given)
    each = [
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
    return each, several


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    async def complete(request: Request) -> Response:
        """Continue one text, or several."""
        body = await body_of(request, LlamaCompletionBody)
        model = check_model(request, service, body.model)
        each, several = await unless_gone(request, wanted_of(request, service, body, model))
        if body.stream:
            generation = await started(request, service, each[0])
            text = LlamaText(body, generation, service.host.llm, model)
            return Streamed(text.events(request), generation.cancel)
        found = await unless_gone(request, gathered(lambda wanted: finished(request, service, wanted), each))
        replies = [
            LlamaText(body, generation, service.host.llm, model, at).whole(answer)
            for at, (generation, answer) in enumerate(found)
        ]
        numbers = sum(generation.logprobs for generation, _ in found)
        given = replies if several else replies[0]
        return Response(await written(lambda: given, numbers), media_type="application/json")

    app.add_api_route(
        "/completion",
        complete,
        methods=["POST"],
        openapi_extra=takes(LlamaCompletionBody),
        responses=answers(Infilled, InfilledList, stream=EVENTS),
        response_model=None,
        tags=["llama.cpp"],
    )
