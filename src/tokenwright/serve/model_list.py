"""The list of models, in OpenAI's format or, for requests with Anthropic's header, in Anthropic's."""

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired, Protocol, TypedDict

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from tokenwright.errors import RequestError
from tokenwright.serve.anthropic.routes import HEADER
from tokenwright.serve.http.api import about
from tokenwright.serve.http.openapi import answers
from tokenwright.serve.http.reply_text import when
from tokenwright.serve.service.types import Caller, ListedModel, no_model

MOST = 1000
USUAL = 20


class ModelMeta(TypedDict):
    n_ctx: int


class ModelEntry(TypedDict):
    """max_model_len, context_length, meta.n_ctx: its context, once it is loaded, as different clients expect it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: NotRequired[int]
    context_length: NotRequired[int]
    meta: NotRequired[ModelMeta]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelEntry]


class AnthropicModel(TypedDict):
    """max_input_tokens, max_tokens: its context, once it is loaded."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModels(TypedDict):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Catalogue(Protocol):
    """A server's list of models. created: the server's start, in seconds since 1970."""

    @property
    def created(self) -> int: ...

    def listed(self, caller: Caller) -> list[ListedModel]: ...


def add(app: FastAPI, models_of: Catalogue) -> None:
    created = models_of.created

    @app.get(
        "/v1/models", response_model=None, responses=answers(ModelList, AnthropicModels), tags=["OpenAI", "Anthropic"]
    )
    async def models(request: Request) -> JSONResponse:
        """The names of the models."""
        listed = {one.name: one for one in models_of.listed(about(request).caller)}
        if not _anthropic(request):
            entries = [_openai_card(one, created) for one in listed.values()]
            return JSONResponse(ModelList(object="list", data=entries))
        names, more = page_of(list(listed), request.query_params)
        cards = [_anthropic_card(listed[name], created) for name in names]
        first, last = (names[0], names[-1]) if names else (None, None)
        return JSONResponse(AnthropicModels(data=cards, has_more=more, first_id=first, last_id=last))

    @app.get(
        "/v1/models/{name:path}",
        response_model=None,
        responses=answers(ModelEntry, AnthropicModel),
        tags=["OpenAI", "Anthropic"],
    )
    async def model(request: Request, name: str) -> JSONResponse:
        """One name of a model."""
        listed = {one.name: one for one in models_of.listed(about(request).caller)}
        if name not in listed:
            raise no_model(name, list(listed))
        return JSONResponse((_anthropic_card if _anthropic(request) else _openai_card)(listed[name], created))


def _anthropic(request: Request) -> bool:
    return HEADER in request.headers


def _openai_card(one: ListedModel, created: int) -> ModelEntry:
    found = ModelEntry(id=one.name, object="model", created=created, owned_by="tokenwright", root=one.root)
    if one.context is not None:
        found["max_model_len"] = found["context_length"] = one.context
        found["meta"] = {"n_ctx": one.context}
    return found


def _anthropic_card(one: ListedModel, created: int) -> AnthropicModel:
    return {
        "type": "model",
        "id": one.name,
        "display_name": one.name,
        "created_at": when(created),
        "lifecycle": "active",
        "max_input_tokens": one.context,
        "max_tokens": one.context,
    }


def page_of(names: Sequence[str], query: Mapping[str, str]) -> tuple[Sequence[str], bool]:
    """The names that `limit`, `after_id` and `before_id` select, and whether there are more. Raises RequestError."""
    written = query.get("limit", str(USUAL))
    if not written.isdecimal() or len(written) > 4 or not 1 <= int(written) <= MOST:
        raise RequestError(f"limit must be a number from 1 to {MOST}")
    if "after_id" in query and "before_id" in query:
        raise RequestError("after_id and before_id: give only one")
    limit, start, end = int(written), 0, len(names)
    if "after_id" in query:
        start = _index_of(names, query, "after_id") + 1
    if "before_id" in query:
        end = _index_of(names, query, "before_id")
        return names[max(0, end - limit) : end], end > limit
    return names[start : start + limit], end - start > limit


def _index_of(names: Sequence[str], query: Mapping[str, str], option: str) -> int:
    if query[option] not in names:
        raise RequestError(f"{option} must be the id of a model: {', '.join(names)}")
    return names.index(query[option])
