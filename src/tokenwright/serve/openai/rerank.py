"""How relevant documents are to a query: /v1/rerank in the forms of Cohere, Jina and TEI, /v1/score in vLLM's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import Field

from tokenwright.checks import MAX_TOKENS
from tokenwright.errors import RequestError
from tokenwright.llm.chat.ids import new_hex
from tokenwright.sampling_params import SamplingParams
from tokenwright.serve.http.api import RefusedRequest, about, answers, body_of, takes, unless_gone
from tokenwright.serve.http.fields import Body, ModelName, Refused, Text, many
from tokenwright.serve.http.reply_text import Json, written
from tokenwright.serve.http.replying import check_model
from tokenwright.serve.openai.bodies import MOST_INPUTS
from tokenwright.serve.openai.embeddings import embedded, tokens_of
from tokenwright.serve.openai.reply_schema import Reranked, ScoreReply, TeiReranked
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.multi_prompt import gathered
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Answer, GenerationRequest, Problem

RERANK = ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking", "/reranking")
SCORE = ("/v1/score", "/score")
Pair = tuple[str, str]  # a query and a document


class DocumentObject(Body):
    """A document as an object."""

    text: Text


class RerankBody(Body):
    """POST /v1/rerank. top_n: how many of the most relevant are returned. instruction: what the query asks for.

    texts: the documents in the form of TEI (text-embeddings-inference), which is answered by a list; return_text
    belongs to it.
    """

    refused: ClassVar = {
        "rank_fields": Refused("a document has one field, its text", (["text"],)),
    }

    model: ModelName = ""
    query: Text
    documents: Annotated[list[Text | DocumentObject], many(MOST_INPUTS, 1)] | None = None
    texts: Annotated[list[Text], many(MOST_INPUTS, 1)] | None = None
    return_text: bool = False
    top_n: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    return_documents: bool = True
    instruction: Text = ""


class ScoreBody(Body):
    """POST /v1/score: each of text_1 is compared with its neighbour in text_2, or one with all of them."""

    model: ModelName = ""
    text_1: Text | Annotated[list[Text], many(MOST_INPUTS, 1)]
    text_2: Text | Annotated[list[Text], many(MOST_INPUTS, 1)]
    instruction: Text = ""


class RelevanceApi:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def rerank(self, request: Request) -> Response:
        """The documents in the order of their relevance."""
        body = await body_of(request, RerankBody)
        if (given := body.documents or body.texts) is None or (body.documents and body.texts):
            why = "documents: this field is required" if given is None else "documents and texts: give one of them"
            raise RefusedRequest(Problem(400, "invalid", why, "documents"))
        texts = [one if isinstance(one, str) else one.text for one in given]
        scores, tokens = await self._scores(request, body.model, [(body.query, one) for one in texts], body.instruction)
        order = sorted(range(len(texts)), key=lambda at: (-scores[at], at))[: body.top_n]

        def of_tei(at: int) -> Json:
            return {"index": at, "score": float(scores[at])} | ({"text": texts[at]} if body.return_text else {})

        def result(at: int) -> Json:
            document = {"document": {"text": texts[at]}} if body.return_documents else {}
            return {"index": at, "relevance_score": float(scores[at])} | document

        if body.texts:
            return await _reply(lambda: [of_tei(at) for at in order], sum(map(len, texts)))
        return await _reply(
            lambda: {
                "id": f"rerank-{new_hex(12)}",
                "model": about(request).model,
                "results": [result(at) for at in order],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            },
            sum(map(len, texts)),
        )

    async def score(self, request: Request) -> Response:
        """The relevance of each pair."""
        body = await body_of(request, ScoreBody)
        pairs = _pairs(body)
        scores, tokens = await self._scores(request, body.model, pairs, body.instruction)
        return await _reply(
            lambda: {
                "id": f"score-{new_hex(12)}",
                "object": "list",
                "created": int(time.time()),
                "model": about(request).model,
                "data": [{"index": at, "object": "score", "score": float(one)} for at, one in enumerate(scores)],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
            },
            len(pairs),
        )

    async def _scores(
        self, request: Request, model: str, pairs: Sequence[Pair], instruction: str
    ) -> tuple[NDArray[np.float64], int]:
        """The relevance of each pair, and the tokens of all prompts."""
        name, key = check_model(request, self.service, model), about(request).caller.key
        await self.service.opened(key)
        relevance = self.service.host.llm.relevance
        if relevance.answers is None:
            return await self._compared(request, name, pairs, instruction)
        asked = await self.service.read(key, lambda: [relevance.asked(*pair, instruction) for pair in pairs])
        each = [
            GenerationRequest(
                prompt=one.ids,
                overrides={field.name: getattr(one.params, field.name) for field in fields(SamplingParams)}
                | {"logprobs": 0},
                model=name,
                caller=about(request).caller,
                request_id=about(request).request_id,
                together=len(pairs),
            )
            for one in asked
        ]
        found = await unless_gone(request, gathered(lambda wanted: self._answered(request, wanted), each))
        drawn = [answer.tokens[0] for _, answer in found]
        scores = [relevance.score(piece.token_id or 0, piece.sampler_logprob) for piece in drawn]
        return np.array(scores), sum(len(generation.prompt_ids) for generation, _ in found)

    async def _answered(self, request: Request, wanted: GenerationRequest) -> tuple[Generation, Answer]:
        generation = await about(request).started(self.service.start(wanted))
        try:
            [answer] = await generation.answers()
        finally:
            generation.cancel()
        return generation, answer

    async def _compared(
        self, request: Request, model: str, pairs: Sequence[Pair], instruction: str
    ) -> tuple[NDArray[np.float64], int]:
        """The cosines of the embeddings; each text is embedded once."""
        relevance = self.service.host.llm.relevance
        each = [(relevance.query(query, instruction), relevance.document(document)) for query, document in pairs]
        texts = list(dict.fromkeys(text for pair in each for text in pair))
        found = await embedded(request, self.service, model, texts)
        vectors = {text: vector for text, (_, vector) in zip(texts, found, strict=True)}  # of unit length
        scores = [float(vectors[query].astype(np.float64) @ vectors[document]) for query, document in each]
        return np.array(scores), tokens_of(found)


def _pairs(body: ScoreBody) -> list[Pair]:
    """The pairs to compare. Raises RequestError for lists that do not fit together."""
    first, second = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
    if len(first) == 1:
        return [(first[0], one) for one in second]
    if len(first) != len(second):
        raise RequestError(f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many", "text_1")
    return list(zip(first, second, strict=True))


async def _reply(reply: Any, size: int) -> Response:
    return Response(await written(reply, size), media_type="application/json")


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    api = RelevanceApi(service)
    for paths, handler, body, replies in (
        (RERANK, api.rerank, RerankBody, (Reranked, TeiReranked)),
        (SCORE, api.score, ScoreBody, (ScoreReply,)),
    ):
        for path in paths:
            app.add_api_route(
                path,
                handler,
                methods=["POST"],
                openapi_extra=takes(body),
                responses=answers(*replies),
                response_model=None,
                tags=["Rerankers"],
            )
