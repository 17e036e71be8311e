"""OpenAI's embeddings: a text's hidden states after the final norm, pooled and scaled to unit length.

They are pooled as the checkpoint's files say, and the reply says so by `pooling`. A model that was not trained to make
embeddings has no such files; then it is the mean. Clients expect unit length: their sums of products are then cosines.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from tokenwright.checkpoints.files.pooling import Pooling
from tokenwright.serve.http.api import RefusedRequest
from tokenwright.serve.http.exchange import Exchange, said, whole
from tokenwright.serve.http.openapi import Route, add_routes
from tokenwright.serve.http.reply_text import TimingsReply
from tokenwright.serve.openai.bodies import MOST_INPUTS, EmbeddingBody
from tokenwright.serve.openai.prompt_forms import prompts_of, read_prompts
from tokenwright.serve.openai.replies import Truncated
from tokenwright.serve.service.generation import Generation, timings_of_all
from tokenwright.serve.service.multi_prompt import gathered
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import GenerationRequest, Problem

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
    """The embedding of each text or list of ids. truncate: how many of its last tokens are read; None: all.

    cut: as many as the context has. dimensions: how many are kept, scaled to unit length again; None: all.
    normalize: scale vectors to unit length. add_special: texts have the tokens that the tokenizer adds.
    """
    service = exchange.service
    if cut:
        truncate = (await service.opened(exchange.key)).context
    fields = {"embed": True, "truncate_prompt_tokens": truncate, "add_special": add_special}
    each = [exchange.wanted(prompt=one, **fields) for one in inputs]

    async def one_embedded(wanted: GenerationRequest) -> tuple[Generation, NDArray[np.float32]]:
        generation, _ = await exchange.finished(wanted)
        vector = generation.embedding(service.host.llm.prepared.facts.pooling.pooling)
        if dimensions is not None:
            vector = _shortened(vector, dimensions)
        return generation, vector / max(float(np.linalg.norm(vector)), 1e-12) if normalize else vector

    return await exchange.unless_gone(gathered(one_embedded, each))


def _shortened(vector: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """The first dimensions, as models that nest shorter vectors in their own are trained for (arXiv 2205.13147)."""
    if dimensions > len(vector):
        why = f"dimensions: a vector of this model has {len(vector)}, fewer than {dimensions}"
        raise RefusedRequest(Problem(400, "invalid", why, "dimensions"))
    return vector[:dimensions]


def tokens_of(found: Embedded) -> int:
    return sum(len(generation.prompt_ids) for generation, _ in found)


async def vectors(
    exchange: Exchange, found: Embedded, reply: Callable[[], Mapping[str, Any]], timed: bool = False
) -> Response:
    """The response with the vectors in `reply`. timed: the request asks where the time went."""
    each = [generation for generation, _ in found]
    timings = timings_of_all(each) if timed or exchange.about.timed else None
    return await whole(lambda: {**reply(), **said(timings)}, sum(len(vector) for _, vector in found), timings)


def _written(vector: NDArray[np.float32], form: str) -> list[float] | str:
    return vector.tolist() if form == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()


def add(app: FastAPI, service: Service) -> None:
    async def embed(request: Request) -> Response:
        """The embedding of each text."""
        exchange = Exchange(request, service)
        body = await exchange.body(EmbeddingBody)
        given, _ = prompts_of(body.input, MOST_INPUTS)
        inputs = await exchange.unless_gone(read_prompts(exchange, given))
        model = exchange.check_model(body.model)
        found = await embedded(
            exchange,
            inputs,
            body.truncate_prompt_tokens,
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
                pooling=service.host.llm.prepared.facts.pooling.pooling,
                usage=usage,
            )

        return await vectors(exchange, found, reply, body.return_timings)

    add_routes(app, "OpenAI", Route("/v1/embeddings", embed, (EmbeddingList,), EmbeddingBody))
