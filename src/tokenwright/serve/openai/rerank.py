"""How relevant documents are to a query: /v1/rerank in the forms of Cohere, Jina and TEI, /v1/score in vLLM's."""

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, ClassVar, Literal, NotRequired, TypedDict

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import Field

from tokenwright.checks import MAX_TOKENS
from tokenwright.errors import RequestError
from tokenwright.llm.chat.answer import new_hex
from tokenwright.sampling_params import SamplingParams
from tokenwright.serve.http.api import RefusedRequest
from tokenwright.serve.http.exchange import Exchange, whole
from tokenwright.serve.http.fields import Body, ModelName, Refused, Text, many
from tokenwright.serve.http.openapi import Route, add_routes
from tokenwright.serve.openai.bodies import MOST_INPUTS
from tokenwright.serve.openai.embeddings import PromptUsage, embedded, tokens_of
from tokenwright.serve.service.multi_prompt import gathered
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Problem

RERANK = ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking", "/reranking")
SCORE = ("/v1/score", "/score")
Pair = tuple[str, str]  # a query and a document


class DocumentObject(Body):
    text: Text


class RerankBody(Body):
    """POST /v1/rerank. top_n: how many of the most relevant are returned. instruction: what the query asks for.

    texts: the documents in the form of TEI (text-embeddings-inference), which is answered by a list; return_text
    belongs to it.
    """

    refused: ClassVar = {"rank_fields": Refused("a document has one field, its text", (["text"],))}

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


class RerankedDocument(TypedDict):
    text: str


class RerankedEntry(TypedDict):
    """index: of the document in the request."""

    index: int
    relevance_score: float
    document: NotRequired[RerankedDocument]


class Reranked(TypedDict):
    """The reply of /v1/rerank, the most relevant document first."""

    id: str
    model: str
    results: list[RerankedEntry]
    usage: PromptUsage


class TeiEntry(TypedDict):
    """A document in the reply of /rerank to `texts`."""

    index: int
    score: float
    text: NotRequired[str]


class ScoredEntry(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class ScoredUsage(PromptUsage):
    completion_tokens: Literal[0]


class ScoreReply(TypedDict):
    """The reply of /v1/score, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoredEntry]
    usage: ScoredUsage


class RelevanceApi:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def rerank(self, request: Request) -> Response:
        """The documents in the order of their relevance."""
        exchange = Exchange(request, self.service)
        body = await exchange.body(RerankBody)
        if (given := body.documents or body.texts) is None or (body.documents and body.texts):
            why = "documents: this field is required" if given is None else "documents and texts: give one of them"
            raise RefusedRequest(Problem(400, "invalid", why, "documents"))
        texts = [one if isinstance(one, str) else one.text for one in given]
        model = exchange.check_model(body.model)
        scores, tokens = await _scores(exchange, [(body.query, one) for one in texts], body.instruction)
        order = sorted(range(len(texts)), key=lambda at: (-scores[at], at))[: body.top_n]

        def of_tei(at: int) -> TeiEntry:
            found = TeiEntry(index=at, score=float(scores[at]))
            return {**found, "text": texts[at]} if body.return_text else found

        def result(at: int) -> RerankedEntry:
            found = RerankedEntry(index=at, relevance_score=float(scores[at]))
            return {**found, "document": {"text": texts[at]}} if body.return_documents else found

        def reply() -> Reranked:
            return {
                "id": f"rerank-{new_hex(12)}",
                "model": model,
                "results": [result(at) for at in order],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }

        return await whole((lambda: [of_tei(at) for at in order]) if body.texts else reply, sum(map(len, texts)))

    async def score(self, request: Request) -> Response:
        """The relevance of each pair."""
        exchange = Exchange(request, self.service)
        body = await exchange.body(ScoreBody)
        pairs = _pairs(body)
        model = exchange.check_model(body.model)
        scores, tokens = await _scores(exchange, pairs, body.instruction)

        def reply() -> ScoreReply:
            return {
                "id": f"score-{new_hex(12)}",
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": [{"index": at, "object": "score", "score": float(one)} for at, one in enumerate(scores)],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
            }

        return await whole(reply, len(pairs))


async def _scores(exchange: Exchange, pairs: Sequence[Pair], instruction: str) -> tuple[NDArray[np.float64], int]:
    relevance = (await exchange.service.opened(exchange.key)).relevance
    if relevance.answers is None:
        return await _compared(exchange, pairs, instruction)
    asked = await exchange.read(lambda: [relevance.asked(*pair, instruction) for pair in pairs])
    each = [
        exchange.wanted(
            prompt=one.ids,
            overrides={field.name: getattr(one.params, field.name) for field in fields(SamplingParams)}
            | {"logprobs": 0},
            together=len(pairs),
        )
        for one in asked
    ]
    found = await exchange.unless_gone(gathered(exchange.finished, each))
    drawn = [answer.tokens[0] for _, [answer] in found]
    scores = [relevance.score(piece.token_id or 0, piece.sampler_logprob) for piece in drawn]
    return np.array(scores), sum(len(generation.prompt_ids) for generation, _ in found)


async def _compared(exchange: Exchange, pairs: Sequence[Pair], instruction: str) -> tuple[NDArray[np.float64], int]:
    """The cosines of the embeddings; each text is embedded once."""
    relevance = exchange.service.host.llm.relevance
    each = [(relevance.query(query, instruction), relevance.document(document)) for query, document in pairs]
    texts = list(dict.fromkeys(text for pair in each for text in pair))
    found = await embedded(exchange, texts)
    vectors = {text: vector for text, (_, vector) in zip(texts, found, strict=True)}  # of unit length
    scores = [float(vectors[query].astype(np.float64) @ vectors[document]) for query, document in each]
    return np.array(scores), tokens_of(found)


def _pairs(body: ScoreBody) -> list[Pair]:
    first, second = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
    if len(first) == 1:
        return [(first[0], one) for one in second]
    if len(first) != len(second):
        raise RequestError(f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many", "text_1")
    return list(zip(first, second, strict=True))


def add(app: FastAPI, service: Service) -> None:
    api = RelevanceApi(service)
    ranked = [Route(path, api.rerank, (Reranked, list[TeiEntry]), RerankBody) for path in RERANK]
    add_routes(app, "Rerankers", *ranked, *(Route(path, api.score, (ScoreReply,), ScoreBody) for path in SCORE))
