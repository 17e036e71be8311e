"""OpenAI's embeddings, reranking and scores. Embeddings are pooled hidden states, scaled to unit length."""

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict

import numpy as np
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import Field

from tokenwright.checkpoints.files.pooling import Pooling
from tokenwright.checks import MAX_TOKENS
from tokenwright.errors import RequestError
from tokenwright.llm.chat.output_parser import new_hex
from tokenwright.sampling_params import SamplingParams
from tokenwright.serve.http.api import Route, wrong_field
from tokenwright.serve.http.exchange import Exchange, said, whole
from tokenwright.serve.http.fields import Body, ModelName, Refused, Text, many
from tokenwright.serve.http.reply_text import TimingsReply
from tokenwright.serve.openai.bodies import MOST_INPUTS, EmbeddingBody, prompts_of, read_prompts
from tokenwright.serve.openai.replies import Truncated
from tokenwright.serve.service.generation import Generation, timings_of_all
from tokenwright.serve.service.multi_prompt import gather
from tokenwright.serve.service.types import GenerationRequest

Embedded = list[tuple[Generation, NDArray[np.float32]]]


class EmbeddingEntry(TypedDict):
    """embedding: numbers, or the base64 of float32 bytes, the lowest first."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PromptUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingUsage(PromptUsage):
    prompt_tokens_details: NotRequired[Truncated]


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    pooling: Pooling
    usage: EmbeddingUsage
    timings: NotRequired[TimingsReply]


async def embedded(
    exchange: Exchange,
    inputs: Sequence[Any],
    truncate: int | None = None,
    *,
    cut: bool = False,
    dimensions: int | None = None,
    normalize: bool = True,
    add_special: bool = True,
) -> Embedded:
    """Embed texts or lists of ids. truncate: read only this many last tokens. cut: read what fits the context.

    dimensions: keep only this many, scaled to unit length again. normalize: scale to unit length.
    """
    service = exchange.service
    if cut:
        truncate = (await service.opened(exchange.key)).llm.context
    fields = {"embed": True, "truncate_prompt_tokens": truncate, "add_special": add_special}
    each = [exchange.wanted(prompt=one, **fields) for one in inputs]

    async def one_embedded(wanted: GenerationRequest) -> tuple[Generation, NDArray[np.float32]]:
        generation, _ = await exchange.finished(wanted)
        vector = generation.embedding(service.host.llm.prepared.facts.pooling.pooling)
        if dimensions is not None:
            vector = _shortened(vector, dimensions)
        return generation, vector / max(float(np.linalg.norm(vector)), 1e-12) if normalize else vector

    return await exchange.unless_gone(gather(one_embedded, each))


def _shortened(vector: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """The first dimensions, as in models trained with nested representations (arXiv 2205.13147)."""
    if dimensions > len(vector):
        why = f"dimensions: a vector of this model has {len(vector)}, fewer than {dimensions}"
        raise wrong_field("dimensions", why)
    return vector[:dimensions]


def tokens_of(found: Embedded) -> int:
    return sum(len(generation.prompt_ids) for generation, _ in found)


async def vectors(
    exchange: Exchange, found: Embedded, reply: Callable[[], Mapping[str, Any]], timed: bool = False
) -> Response:
    """The response. timed: the request asks for timings."""
    each = [generation for generation, _ in found]
    timings = timings_of_all(each) if timed or exchange.about.timed else None
    return await whole(lambda: {**reply(), **said(timings)}, sum(len(vector) for _, vector in found), timings)


def _written(vector: NDArray[np.float32], form: str) -> list[float] | str:
    return vector.tolist() if form == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()


async def embed(exchange: Exchange, body: EmbeddingBody) -> Response:
    """The embedding of each text."""
    given, _ = prompts_of(body.input, MOST_INPUTS)
    inputs = await exchange.unless_gone(read_prompts(exchange, given))
    model = exchange.check_model(body.model)
    found = await embedded(
        exchange,
        inputs,
        None if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens,
        cut=body.truncate_prompt_tokens == -1,
        dimensions=body.dimensions,
        normalize=body.normalize,
        add_special=body.add_special_tokens,
    )

    def reply() -> EmbeddingList:
        tokens, truncated = tokens_of(found), sum(one.counts().truncated for one, _ in found)
        usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
        if truncated:
            usage["prompt_tokens_details"] = {"truncated_tokens": truncated}
        return EmbeddingList(
            object="list",
            data=[
                EmbeddingEntry(object="embedding", index=at, embedding=_written(vector, body.encoding_format))
                for at, (_, vector) in enumerate(found)
            ],
            model=model,
            pooling=exchange.service.host.llm.prepared.facts.pooling.pooling,
            usage=usage,
        )

    return await vectors(exchange, found, reply, body.return_timings)


RERANK = ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking", "/reranking")
SCORE = ("/v1/score", "/score")
MOST_COMPARED = 1 << 25  # characters
Pair = tuple[str, str]


class DocumentObject(Body):
    text: Text


class RerankBody(Body):
    """POST /v1/rerank. top_n: return only the most relevant. instruction: the task that the query belongs to.

    texts, return_text: fields of TEI (text-embeddings-inference), whose reply is a list.
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
    """POST /v1/score: compare each of text_1 with the same entry of text_2, or one with all."""

    model: ModelName = ""
    text_1: Text | Annotated[list[Text], many(MOST_INPUTS, 1)]
    text_2: Text | Annotated[list[Text], many(MOST_INPUTS, 1)]
    instruction: Text = ""


class RerankedDocument(TypedDict):
    text: str


class RerankedEntry(TypedDict):
    index: int  # of the document in the request
    relevance_score: float
    document: NotRequired[RerankedDocument]


class Reranked(TypedDict):
    """The reply of /v1/rerank, the most relevant document first."""

    id: str
    model: str
    results: list[RerankedEntry]
    usage: PromptUsage


class TeiEntry(TypedDict):
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


async def rerank(exchange: Exchange, body: RerankBody) -> Response:
    """The documents in the order of their relevance."""
    if (given := body.documents or body.texts) is None or (body.documents and body.texts):
        why = "documents: this field is required" if given is None else "documents and texts: give one of them"
        raise wrong_field("documents", why)
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


async def score(exchange: Exchange, body: ScoreBody) -> Response:
    """The relevance of each pair."""
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
    relevance = (await exchange.service.opened(exchange.key)).llm.relevance
    if relevance.answers is None:
        return await _compared(exchange, pairs, instruction)
    _check_size(sum(len(query) + len(document) + len(instruction) for query, document in pairs))
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
    found = await exchange.unless_gone(gather(exchange.finished, each))
    drawn = [answer.tokens[0] for _, [answer] in found]
    scores = [relevance.score(piece.token_id or 0, piece.sampler_logprob) for piece in drawn]
    return np.array(scores), sum(len(generation.prompt_ids) for generation, _ in found)


async def _compared(exchange: Exchange, pairs: Sequence[Pair], instruction: str) -> tuple[NDArray[np.float64], int]:
    relevance = exchange.service.host.llm.relevance
    given = {query for query, _ in pairs}
    _check_size(sum(len(query) + len(instruction) for query in given))
    queries = {query: relevance.query(query, instruction) for query in given}
    each = [(queries[query], relevance.document(document)) for query, document in pairs]
    texts = list(dict.fromkeys(text for pair in each for text in pair))
    found = await embedded(exchange, texts)
    vectors = {text: vector for text, (_, vector) in zip(texts, found, strict=True)}  # of unit length
    scores = [float(vectors[query].astype(np.float64) @ vectors[document]) for query, document in each]
    return np.array(scores), tokens_of(found)


def _check_size(characters: int) -> None:
    """Raises RequestError if the texts, each with query and instruction, are too long."""
    if characters > MOST_COMPARED:
        why = f"the texts to compare have {characters:,} characters, with the query or the instruction in each"
        raise RequestError(f"{why}, and {MOST_COMPARED:,} are allowed; send fewer documents at once")


def _pairs(body: ScoreBody) -> list[Pair]:
    first, second = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
    if len(first) == 1:
        return [(first[0], one) for one in second]
    if len(first) != len(second):
        raise RequestError(f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many", "text_1")
    return list(zip(first, second, strict=True))


ROUTES = (
    Route("/v1/embeddings", embed, (EmbeddingList,), EmbeddingBody, prompt="input"),
    *(
        Route(path, rerank, (Reranked, list[TeiEntry]), RerankBody, prompt="messages", tag="Rerankers")
        for path in RERANK
    ),
    *(Route(path, score, (ScoreReply,), ScoreBody, prompt="messages", tag="Rerankers") for path in SCORE),
)
