"""The names of the model that is served, for OpenAI's clients and, on the same paths, for Anthropic's.

Anthropic's clients are known by their header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from tokenwright.errors import RequestError
from tokenwright.serve.anthropic.reply_schema import AnthropicModel, AnthropicModels
from tokenwright.serve.anthropic.routes import HEADER
from tokenwright.serve.http.api import answers
from tokenwright.serve.http.reply_text import Json
from tokenwright.serve.openai.reply_schema import ModelEntry, ModelList
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import no_model

MOST = 1000  # names on one page, and
USUAL = 20  # as many where nothing is said


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.get(
        "/v1/models", response_model=None, responses=answers(ModelList, AnthropicModels), tags=["OpenAI", "Anthropic"]
    )
    async def models(request: Request) -> JSONResponse:
        """The names of the model."""
        if not _anthropic(request):
            return JSONResponse({"object": "list", "data": [_openai_card(service, name) for name in service.names]})
        names, more = page_of(service.names, request.query_params)
        cards = [_anthropic_card(service, name) for name in names]
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return JSONResponse({"data": cards, "has_more": more, **ends})

    @app.get(
        "/v1/models/{name:path}",
        response_model=None,
        responses=answers(ModelEntry, AnthropicModel),
        tags=["OpenAI", "Anthropic"],
    )
    async def model(request: Request, name: str) -> JSONResponse:
        """One name of the model."""
        if name not in service.names:
            raise no_model(name, service.names)
        return JSONResponse((_anthropic_card if _anthropic(request) else _openai_card)(service, name))


def _anthropic(request: Request) -> bool:
    return HEADER in request.headers


def _openai_card(service: Service, name: str) -> Json:
    found: Json = {"id": name, "object": "model", "created": service.created, "owned_by": "tokenwright"}
    found["root"] = service.host.name
    return found | ({"max_model_len": service.host.llm.context} if service.ready else {})


def _anthropic_card(service: Service, name: str) -> Json:
    created = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    found: Json = {"type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active"}
    context = service.host.llm.context if service.ready else None
    return found | {"max_input_tokens": context, "max_tokens": context}


def page_of(names: Sequence[str], query: Mapping[str, str]) -> tuple[Sequence[str], bool]:
    """The names that `limit`, `after_id` and `before_id` ask for, and whether there are more in that direction.

    Raises RequestError where one of them cannot be met.
    """
    written = query.get("limit", str(USUAL))
    if not written.isdecimal() or len(written) > 4 or not 1 <= int(written) <= MOST:
        raise RequestError(f"limit is a number from 1 to {MOST}")
    if "after_id" in query and "before_id" in query:
        raise RequestError("give one of after_id and before_id")
    limit, start, end = int(written), 0, len(names)
    if "after_id" in query:
        start = _place(names, query, "after_id") + 1
    if "before_id" in query:
        end = _place(names, query, "before_id")
        return names[max(0, end - limit) : end], end > limit
    return names[start : start + limit], end - start > limit


def _place(names: Sequence[str], query: Mapping[str, str], option: str) -> int:
    if query[option] not in names:
        raise RequestError(f"{option} is the id of a model of this server: {', '.join(names)}")
    return names.index(query[option])
