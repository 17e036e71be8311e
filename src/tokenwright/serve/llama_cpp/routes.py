"""The API of llama.cpp's server: texts continued and filled, embeddings, prompts, and what the server is."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

import tokenwright
from tokenwright.errors import RequestError
from tokenwright.serve.http.api import Api
from tokenwright.serve.http.exchange import Exchange, schema_grammar, whole
from tokenwright.serve.http.openapi import EVENTS, Route, add_routes
from tokenwright.serve.http.sse import Streamed
from tokenwright.serve.llama_cpp.bodies import (
    DetokenizeBody,
    InfillBody,
    LlamaBody,
    LlamaCompletionBody,
    LlamaEmbeddingBody,
    TokenizeBody,
    overrides_of,
)
from tokenwright.serve.llama_cpp.replies import (
    AppliedTemplate,
    GenerationSettings,
    Infilled,
    LlamaEmbedding,
    LlamaText,
    LoraAdapter,
    Props,
    Slot,
)
from tokenwright.serve.llama_cpp.tokenize import (
    Detokenized,
    DetokenizedText,
    Texts,
    TokenCards,
    Tokenized,
    TokenPieces,
)
from tokenwright.serve.openai.bodies import MOST_INPUTS, ChatBody
from tokenwright.serve.openai.embeddings import embedded
from tokenwright.serve.openai.generation_request import chat_wanted, grammar
from tokenwright.serve.openai.prompt_forms import prompts_of, read_prompts
from tokenwright.serve.openai.replies import Problems, error_body
from tokenwright.serve.service.multi_prompt import gathered
from tokenwright.serve.service.preprocess import check
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Gap, GenerationRequest

SHOWN = ("seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "max_tokens")


class LlamaCpp:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def complete(self, request: Request) -> Response:
        """Continue one text, or several."""
        exchange = Exchange(request, self.service)
        body = await exchange.body(LlamaCompletionBody)
        model = exchange.check_model(body.model)
        each, several = await exchange.unless_gone(self._completions(exchange, body))
        if body.stream:
            return await self._streamed(exchange, body, each[0])
        found = await exchange.unless_gone(gathered(exchange.finished, each))
        replies = [
            LlamaText(body, generation, self.service.host.llm, model, at).whole(answer)
            for at, (generation, [answer]) in enumerate(found)
        ]
        return await whole(lambda: replies if several else replies[0], sum(one.logprobs for one, _ in found))

    async def infill(self, request: Request) -> Response:
        """Fill the gap between two texts."""
        exchange = Exchange(request, self.service)
        body = await exchange.body(InfillBody)
        model = exchange.check_model(body.model)
        overrides = await exchange.unless_gone(self._overrides(exchange, body))
        files = tuple((one.filename, one.text) for one in body.input_extra or ())
        gap = Gap(body.input_suffix, files, body.prompt)
        wanted = exchange.wanted(prompt=body.input_prefix, gap=gap, overrides=overrides, streamed=body.stream)
        if body.stream:
            return await self._streamed(exchange, body, wanted)
        generation, answer = await exchange.answered(wanted)
        text = LlamaText(body, generation, self.service.host.llm, model)
        return await whole(lambda: text.whole(answer), generation.logprobs)

    async def embed(self, request: Request) -> Response:
        """The embedding of each text."""
        exchange = Exchange(request, self.service)
        body = await exchange.body(LlamaEmbeddingBody)
        content = body.input if body.content is None else body.content
        if content is None or (body.input is not None and body.content is not None):
            raise RequestError("content: give one of content and input")
        given, _ = prompts_of(content, MOST_INPUTS)
        inputs = await exchange.unless_gone(read_prompts(exchange, given))
        exchange.check_model(body.model)
        found = await embedded(exchange, inputs)
        each = [LlamaEmbedding(index=at, embedding=[one.tolist()]) for at, (_, one) in enumerate(found)]
        return await whole(lambda: each, sum(len(vector) for _, vector in found))

    async def apply_template(self, request: Request) -> JSONResponse:
        """The prompt of a chat, as text."""
        exchange = Exchange(request, self.service)
        body = await exchange.body(ChatBody)
        wanted = await exchange.off_loop(lambda: chat_wanted(exchange, body))
        check(wanted)
        preparer = await self.service.preparer()
        _, text = await exchange.unless_gone(exchange.read(lambda: preparer.prompt(wanted)))
        return JSONResponse(AppliedTemplate(prompt=text))

    async def props(self) -> JSONResponse:
        """The properties of the server."""
        llm = await self.service.opened()
        params, tokenizer = llm.sampling(), llm.tokenizer
        ends = [tokenizer.bos_id, next(iter(tokenizer.eos_ids), None)]
        bos, eos = ("" if token is None else tokenizer.token_text(token) for token in ends)
        return JSONResponse(
            Props(
                default_generation_settings=GenerationSettings(
                    n_ctx=llm.context, params={name: getattr(params, name) for name in SHOWN}
                ),
                total_slots=llm.options.max_sequences,
                model_alias=self.service.names[0],
                model_path=self.service.host.name,
                chat_template=tokenizer.chat_template or "",
                bos_token=bos,
                eos_token=eos,
                modalities={"vision": False, "audio": False},
                build_info=f"tokenwright {tokenwright.__version__}",
                is_sleeping=False,
            )
        )

    async def slots(self) -> JSONResponse:
        """The places in the engine, and how far their requests are."""
        llm = await self.service.opened()
        places = llm.options.max_sequences
        busy = [(True, one.prompt, one.completion) for one in self.service.counts()[:places]]
        return JSONResponse(
            [
                Slot(id=at, n_ctx=llm.context, is_processing=runs, n_prompt_tokens=prompt, n_decoded=written)
                for at, (runs, prompt, written) in enumerate([*busy, *[(False, 0, 0)] * (places - len(busy))])
            ]
        )

    async def lora_adapters(self) -> JSONResponse:
        """The adapters that are served, each as a model of its name."""
        llm = await self.service.opened()
        return JSONResponse([LoraAdapter(id=at, path=name, scale=0.0) for at, name in enumerate(llm.prepared.adapters)])

    async def _completions(self, exchange: Exchange, body: LlamaCompletionBody) -> tuple[list[GenerationRequest], bool]:
        """One request for each prompt, and whether the reply is a list. Raises as `read_prompts`."""
        if body.grammar and body.json_schema:
            raise RequestError("grammar and json_schema each say the form of the text; leave one of them out")
        given, several = prompts_of(body.prompt)
        if several and body.stream:
            raise RequestError("several prompts are answered whole; leave stream out")
        overrides = await self._overrides(exchange, body)
        if body.grammar:
            overrides["grammar"] = grammar(body.grammar)
        elif body.json_schema:
            overrides["grammar"] = schema_grammar(body.json_schema, "json_schema")
        prompts = await read_prompts(exchange, given)
        fields = {"overrides": overrides, "together": len(prompts), "streamed": body.stream}
        return [exchange.wanted(prompt=one, **fields) for one in prompts], several

    async def _overrides(self, exchange: Exchange, body: LlamaBody) -> dict[str, Any]:
        if not body.names_texts:
            return overrides_of(body, None)
        tokenizer = (await self.service.opened(exchange.key)).tokenizer
        return await exchange.read(lambda: overrides_of(body, tokenizer))

    async def _streamed(self, exchange: Exchange, body: LlamaBody, wanted: GenerationRequest) -> Streamed:
        generation = await exchange.started(wanted)
        text = LlamaText(body, generation, self.service.host.llm, exchange.about.model)
        return Streamed(text.events(exchange), generation.cancel)


def add(app: FastAPI, service: Service) -> None:
    api, texts = LlamaCpp(service), Texts(service)
    add_routes(
        app,
        "llama.cpp",
        Route("/completion", api.complete, (Infilled, list[Infilled]), LlamaCompletionBody, EVENTS),
        Route("/infill", api.infill, (Infilled,), InfillBody, EVENTS),
        Route("/embedding", api.embed, (list[LlamaEmbedding],), LlamaEmbeddingBody),
        Route("/tokenize", texts.tokenize, (Tokenized, TokenCards, TokenPieces), TokenizeBody),
        Route("/detokenize", texts.detokenize, (Detokenized, DetokenizedText), DetokenizeBody),
        Route("/apply-template", api.apply_template, (AppliedTemplate,), ChatBody),
        Route("/props", api.props, (Props,)),
        Route("/slots", api.slots, (list[Slot],)),
        Route("/lora-adapters", api.lora_adapters, (list[LoraAdapter],)),
    )


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
    name="llama_cpp",
    add=add,
)
