"""OpenAI's embeddings: a text's hidden states after the final norm, pooled and scaled to unit length.

They are pooled as the checkpoint's files say, and the reply says so by `pooling`. A model that was not trained to make
embeddings has no such files; then it is the mean. Clients expect unit length: their sums of products are then cosines.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from tokenwright.serve.http.api import About, RefusedRequest, about, answers, body_of, takes, unless_gone
from tokenwright.serve.http.reply_text import Json, server_timing, timings_of, written
from tokenwright.serve.http.replying import check_model
from tokenwright.serve.openai.bodies import MOST_INPUTS, EmbeddingBody
from tokenwright.serve.openai.prompt_forms import prompts_of, read_prompts
from tokenwright.serve.openai.replies import cut
from tokenwright.serve.openai.reply_schema import EmbeddingList
from tokenwright.serve.service.generation import Generation, timings_of_all
from tokenwright.serve.service.multi_prompt import gathered
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import GenerationRequest, Problem

Embedded = list[tuple[Generation, NDArray[np.float32]]]


async def embedded(
    request: Request,
    service: Service,
    model: str,
    inputs: Sequence[Any],
    truncate: int | None = None,
    *,
    cut: bool = False,
    dimensions: int | None = None,
) -> Embedded:
    """The embedding of each text or list of ids. truncate: how many of its last tokens are read; None: all.

    cut: as many as the context has. dimensions: how many are kept, scaled to unit length again; None: all.
    """
    model = check_model(request, service, model)
    if cut:
        truncate = (await service.opened(about(request).caller.key)).context
    each = [
        GenerationRequest(
            prompt=one,
            embed=True,
            model=model,
            caller=about(request).caller,
            request_id=about(request).request_id,
            truncate_prompt_tokens=truncate,
        )
        for one in inputs
    ]
    found = await unless_gone(request, gathered(lambda wanted: _embedded(about(request), service, wanted), each))
    return found if dimensions is None else [(one, _shortened(vector, dimensions)) for one, vector in found]


def _shortened(vector: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """The first dimensions, as models that nest shorter vectors in their own are trained for (arXiv 2205.13147)."""
    if dimensions > len(vector):
        why = f"dimensions: a vector of this model has {len(vector)}, fewer than {dimensions}"
        raise RefusedRequest(Problem(400, "invalid", why, "dimensions"))
    return _unit(vector[:dimensions])


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def tokens_of(found: Embedded) -> int:
    """The tokens of all texts."""
    return sum(len(generation.prompt_ids) for generation, _ in found)


async def vectors(request: Request, found: Embedded, reply: Callable[[], Json], timed: bool = False) -> Response:
    """The response with the vectors in `reply`. timed: the request asks where the time went."""
    timings = timings_of_all([generation for generation, _ in found]) if timed or about(request).timed else None
    more = {} if timings is None else {"timings": timings_of(timings)}
    text = await written(lambda: reply() | more, sum(len(vector) for _, vector in found))
    headers = {} if timings is None else {"server-timing": server_timing(timings)}
    return Response(text, media_type="application/json", headers=headers)


async def _embedded(
    about: About, service: Service, wanted: GenerationRequest
) -> tuple[Generation, NDArray[np.float32]]:
    generation = await about.started(service.start(wanted))
    try:
        await generation.answers()
    finally:
        generation.cancel()
    vector = generation.embedding(service.host.llm.prepared.facts.pooling.pooling)
    return generation, _unit(vector)


class Embeddings:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def embed(self, request: Request) -> Response:
        """The embedding of each text."""
        body = await body_of(request, EmbeddingBody)
        given, _ = prompts_of(body.input, MOST_INPUTS)
        inputs = await unless_gone(request, read_prompts(request, self.service, given))
        body.model = check_model(request, self.service, body.model)
        truncate, dimensions = body.truncate_prompt_tokens, body.dimensions
        found = await embedded(request, self.service, body.model, inputs, truncate, dimensions=dimensions)
        tokens, pooling = tokens_of(found), self.service.host.llm.prepared.facts.pooling.pooling

        def reply() -> Json:
            data = [
                {"object": "embedding", "index": at, "embedding": _written(vector, body.encoding_format)}
                for at, (_, vector) in enumerate(found)
            ]
            truncated = sum(generation.counts().truncated for generation, _ in found)
            usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
            usage |= {"prompt_tokens_details": cut(truncated)} if truncated else {}
            return {"object": "list", "data": data, "model": body.model, "pooling": pooling, "usage": usage}

        return await vectors(request, found, reply, body.return_timings)


def _written(vector: NDArray[np.float32], form: str) -> list[float] | str:
    """A vector as numbers, or as the base64 of its float32 bytes, the lowest first."""
    return vector.tolist() if form == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    api = Embeddings(service)
    app.add_api_route(
        "/v1/embeddings",
        api.embed,
        methods=["POST"],
        openapi_extra=takes(EmbeddingBody),
        responses=answers(EmbeddingList),
        response_model=None,
        tags=["OpenAI"],
    )
