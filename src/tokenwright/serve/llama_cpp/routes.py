"""The API of llama.cpp's server: texts continued and filled, embeddings, prompts, and what the server is."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

import tokenwright
from tokenwright.errors import RequestError
from tokenwright.serve.http.api import EVENTS, Api, about, answers, body_of, off_loop, takes, unless_gone
from tokenwright.serve.http.reply_text import written
from tokenwright.serve.http.replying import answered, check_model, finished, schema_grammar, started
from tokenwright.serve.http.sse import Streamed
from tokenwright.serve.llama_cpp import reply_schema as replies
from tokenwright.serve.llama_cpp.bodies import (
    DetokenizeBody,
    InfillBody,
    LlamaBody,
    LlamaCompletionBody,
    LlamaEmbeddingBody,
    TokenizeBody,
    overrides_of,
)
from tokenwright.serve.llama_cpp.llama_replies import LlamaText
from tokenwright.serve.llama_cpp.tokenize import Texts
from tokenwright.serve.openai.answer_form import grammar
from tokenwright.serve.openai.bodies import MOST_INPUTS, ChatBody, Problems
from tokenwright.serve.openai.embeddings import embedded
from tokenwright.serve.openai.generation_request import chat_wanted
from tokenwright.serve.openai.prompt_forms import prompts_of, read_prompts
from tokenwright.serve.openai.replies import error_body
from tokenwright.serve.service.multi_prompt import gathered
from tokenwright.serve.service.preprocess import check
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Gap, GenerationRequest

API = Api(
    (
        "/completion",
        "/infill",
        "/embedding",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/props",
        "/slots",
        "/lora-adapters",
    ),
    error_body,
    queued=frozenset(("/completion", "/infill", "/embedding")),
    prompts={"/completion": "prompt", "/infill": "input_prefix", "/embedding": "content"},
    errors=Problems,
)
SHOWN = ("seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "max_tokens")


class LlamaCpp:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def complete(self, request: Request) -> Response:
        """Continue one text, or several."""
        body = await body_of(request, LlamaCompletionBody)
        model = check_model(request, self.service, body.model)
        each, several = await unless_gone(request, self._completions(request, body, model))
        if body.stream:
            return await self._streamed(request, body, each[0], model)
        found = await unless_gone(request, gathered(lambda wanted: finished(request, self.service, wanted), each))
        replies = [
            LlamaText(body, generation, self.service.host.llm, model, at).whole(answer)
            for at, (generation, answer) in enumerate(found)
        ]
        numbers = sum(generation.logprobs for generation, _ in found)
        given = replies if several else replies[0]
        return Response(await written(lambda: given, numbers), media_type="application/json")

    async def infill(self, request: Request) -> Response:
        """Fill the gap between two texts."""
        body = await body_of(request, InfillBody)
        model = check_model(request, self.service, body.model)
        overrides = await unless_gone(request, self._overrides(request, body))
        files = tuple((one.filename, one.text) for one in body.input_extra or ())
        gap = Gap(body.input_suffix, files, body.prompt)
        wanted = _wanted(request, body, model, prompt=body.input_prefix, gap=gap, overrides=overrides)
        if body.stream:
            return await self._streamed(request, body, wanted, model)
        generation, answer = await answered(request, self.service, wanted)
        text = LlamaText(body, generation, self.service.host.llm, model)
        return Response(await written(lambda: text.whole(answer), generation.logprobs), media_type="application/json")

    async def embed(self, request: Request) -> Response:
        """The embedding of each text: a list of one vector."""
        body = await body_of(request, LlamaEmbeddingBody)
        content = body.input if body.content is None else body.content
        if content is None or (body.input is not None and body.content is not None):
            raise RequestError("content: give one of content and input")
        given, _ = prompts_of(content, MOST_INPUTS)
        inputs = await unless_gone(request, read_prompts(request, self.service, given))
        found = await embedded(request, self.service, body.model, inputs)
        reply = [{"index": at, "embedding": [vector.tolist()]} for at, (_, vector) in enumerate(found)]
        text = await written(lambda: reply, sum(len(vector) for _, vector in found))
        return Response(text, media_type="application/json")

    async def apply_template(self, request: Request) -> JSONResponse:
        """The prompt of a chat, as text."""
        body = await body_of(request, ChatBody)
        wanted = await off_loop(request, lambda: chat_wanted(self.service, request, body))
        check(wanted)
        preparer = await self.service.preparer()
        rendered = self.service.read(about(request).caller.key, lambda: preparer.prompt(wanted))
        return JSONResponse({"prompt": (await unless_gone(request, rendered))[1]})

    async def props(self) -> JSONResponse:
        """What the server is."""
        llm = await self.service.opened()
        params, tokenizer = llm.sampling(), llm.tokenizer
        ends = [tokenizer.bos_id, next(iter(tokenizer.eos_ids), None)]
        bos, eos = ("" if token is None else tokenizer.token_text(token) for token in ends)
        found: dict[str, Any] = {
            "default_generation_settings": {
                "n_ctx": llm.context,
                "params": {name: getattr(params, name) for name in SHOWN},
            },
            "total_slots": llm.options.max_sequences,
            "model_alias": self.service.names[0],
            "model_path": self.service.host.name,
            "chat_template": tokenizer.chat_template or "",
            "bos_token": bos,
            "eos_token": eos,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"tokenwright {tokenwright.__version__}",
            "is_sleeping": False,
        }
        return JSONResponse(found)

    async def slots(self) -> JSONResponse:
        """The places in the engine, and how far their requests are."""
        llm = await self.service.opened()
        counts = self.service.counts()[: llm.options.max_sequences]
        busy = [(True, one.prompt, one.completion) for one in counts]
        idle = [(False, 0, 0)] * (llm.options.max_sequences - len(busy))
        return JSONResponse(
            [
                {
                    "id": at,
                    "n_ctx": llm.context,
                    "is_processing": processing,
                    "n_prompt_tokens": prompt,
                    "n_decoded": written,
                }
                for at, (processing, prompt, written) in enumerate(busy + idle)
            ]
        )

    async def lora_adapters(self) -> JSONResponse:
        """The adapters that are served, each as a model of its name."""
        llm = await self.service.opened()
        return JSONResponse([{"id": at, "path": name, "scale": 0.0} for at, name in enumerate(llm.prepared.adapters)])

    async def _completions(
        self, request: Request, body: LlamaCompletionBody, model: str
    ) -> tuple[list[GenerationRequest], bool]:
        """One request for each prompt, and whether the reply is a list. Raises as `read_prompts`."""
        if body.grammar and body.json_schema:
            raise RequestError("grammar and json_schema each say the form of the text; leave one of them out")
        given, several = prompts_of(body.prompt)
        if several and body.stream:
            raise RequestError("several prompts are answered whole; leave stream out")
        overrides = await self._overrides(request, body)
        if body.grammar:
            overrides["grammar"] = grammar(body.grammar)
        elif body.json_schema:
            overrides["grammar"] = schema_grammar(body.json_schema, "json_schema")
        prompts = await read_prompts(request, self.service, given)
        together = len(prompts)
        each = [_wanted(request, body, model, prompt=one, overrides=overrides, together=together) for one in prompts]
        return each, several

    async def _overrides(self, request: Request, body: LlamaBody) -> dict[str, Any]:
        """The sampling parameters of a body. Raises RequestError, and as `Service.read`."""
        if not body.names_texts:
            return overrides_of(body, None)
        key = about(request).caller.key
        tokenizer = (await self.service.opened(key)).tokenizer
        return await self.service.read(key, lambda: overrides_of(body, tokenizer))

    async def _streamed(self, request: Request, body: LlamaBody, wanted: GenerationRequest, model: str) -> Streamed:
        generation = await started(request, self.service, wanted)
        text = LlamaText(body, generation, self.service.host.llm, model)
        return Streamed(text.events(request), generation.cancel)


def _wanted(request: Request, body: LlamaBody, model: str, **fields: Any) -> GenerationRequest:
    known = about(request)
    return GenerationRequest(
        caller=known.caller, request_id=known.request_id, streamed=body.stream, model=model, **fields
    )


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    api, texts = LlamaCpp(service), Texts(service)
    routes: tuple[tuple[str, Any, Any, dict[int | str, dict[str, Any]]], ...] = (
        (
            "/completion",
            api.complete,
            LlamaCompletionBody,
            answers(replies.Infilled, replies.InfilledList, stream=EVENTS),
        ),
        ("/infill", api.infill, InfillBody, answers(replies.Infilled, stream=EVENTS)),
        ("/embedding", api.embed, LlamaEmbeddingBody, answers(replies.LlamaEmbeddings)),
        (
            "/tokenize",
            texts.tokenize,
            TokenizeBody,
            answers(replies.Tokenized, replies.TokenCards, replies.TokenPieces),
        ),
        ("/detokenize", texts.detokenize, DetokenizeBody, answers(replies.Detokenized, replies.DetokenizedText)),
        ("/apply-template", api.apply_template, ChatBody, answers(replies.AppliedTemplate)),
        ("/props", api.props, None, answers(replies.Props)),
        ("/slots", api.slots, None, answers(replies.Slots)),
        ("/lora-adapters", api.lora_adapters, None, answers(replies.LoraAdapters)),
    )
    for path, handler, body, replied in routes:
        app.add_api_route(
            path,
            handler,
            methods=["GET" if body is None else "POST"],
            openapi_extra=None if body is None else takes(body),
            responses=replied,
            response_model=None,
            tags=["llama.cpp"],
        )
