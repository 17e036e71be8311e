"""Routes and their OpenAPI document. Schemas of replies are closed, so that tests find undeclared fields."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import Parameter, Signature
from types import UnionType
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tokenwright.serve.http.api import STATUSES, Api, Route, apis_of
from tokenwright.serve.http.exchange import Exchange
from tokenwright.serve.service.service import Service

EVENTS = "text/event-stream"
Schema = dict[str, Any]

_REFS = "#/components/schemas/{model}"
_NAMED: dict[str, Any] = {}
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def add_routes(app: FastAPI, service: Service, api: Api) -> None:
    for one in api.routes:
        app.add_api_route(
            one.path,
            _endpoint(one, service, api.any_type),
            methods=[one.method or ("POST" if one.body else "GET")],
            openapi_extra=takes(one.body) if one.body else None,
            responses=answers(*one.replies, stream=one.stream),
            response_model=None,
            tags=[one.tag or api.tag],
        )


def _endpoint(route: Route, service: Service, any_type: bool) -> Callable[..., Awaitable[Response]]:
    async def endpoint(request: Request, **places: str) -> Response:
        exchange = Exchange(request, service)
        body = () if route.body is None else (await exchange.body(route.body, any_type=any_type),)
        return await route.handler(exchange, *body, **places)

    named = [Parameter("request", Parameter.POSITIONAL_OR_KEYWORD, annotation=Request)]
    named += [Parameter(name, Parameter.KEYWORD_ONLY, annotation=str) for name in re.findall(r"{(\w+)", route.path)]
    endpoint.__signature__ = Signature(named)  # type: ignore[attr-defined]  # which FastAPI reads
    endpoint.__name__, endpoint.__doc__ = route.handler.__name__, route.handler.__doc__
    return endpoint


def takes(model: type[BaseModel]) -> Schema:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _mark(model)}}}}


def answers(*replies: Any, stream: str | None = None) -> dict[int | str, Schema]:
    marks = [_mark(one) for one in replies]
    content: Schema = {"application/json": {"schema": marks[0] if len(marks) == 1 else {"anyOf": marks}}}
    return {200: {"content": content | ({} if stream is None else {stream: {}})}}


def _mark(kind: Any) -> Schema:
    if get_origin(kind) is list:
        return {"type": "array", "items": _mark(get_args(kind)[0])}
    name = f"{kind.__module__}.{kind.__name__}"
    _NAMED[name] = kind
    return {"x-schema": name}


def schema_of(kind: Any, known: dict[str, Schema]) -> Schema:
    """The JSON schema of a reply's type; TypedDicts' schemas are added to `known` by name."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        if kind.__name__ not in known:
            hints = get_type_hints(kind, include_extras=True)
            optional = {name for name, one in hints.items() if get_origin(one) is NotRequired or not kind.__total__}
            known[kind.__name__] = {
                "title": kind.__name__,
                "type": "object",
                "properties": {name: schema_of(one, known) for name, one in hints.items()},
                "required": [name for name in hints if name not in optional],
                "additionalProperties": False,
            }
            if kind.__doc__:
                known[kind.__name__]["description"] = kind.__doc__
        return {"$ref": _REFS.format(model=kind.__name__)}
    if origin is NotRequired:
        return schema_of(parts[0], known)
    if origin is Literal:
        return {"enum": [*parts]}
    if origin in (Union, UnionType):
        return {"anyOf": [schema_of(one, known) for one in parts]}
    if origin is list:
        return {"type": "array", "items": schema_of(parts[0], known)}
    if origin is dict:
        return {"type": "object"} | ({} if parts[1] is Any else {"additionalProperties": schema_of(parts[1], known)})
    return {"type": _PLAIN[kind]}


def add_schemas(app: FastAPI, apis: Sequence[Api]) -> None:
    """Add the schemas that `takes` and `answers` name, and each API's errors, to the OpenAPI document."""
    original = app.openapi

    def openapi() -> Schema:
        if app.openapi_schema is None:
            document = original()
            for path, operations in document["paths"].items():
                errors = [one.errors for one in apis_of(apis, path) if one.errors is not None]
                content = {"content": answers(*errors)[200]["content"]} if errors else {}
                for operation in operations.values():
                    for status, text in STATUSES.items():
                        operation["responses"].setdefault(str(status), {"description": text, **content})
                    operation["responses"].pop("422", None)
            bodies = [one for one in _NAMED.values() if not is_typeddict(one)]
            refs, definitions = models_json_schema([(one, "validation") for one in bodies], ref_template=_REFS)
            known: dict[str, Schema] = {}
            schemas = {
                name: schema_of(kind, known) if is_typeddict(kind) else refs[kind, "validation"]
                for name, kind in _NAMED.items()
            }
            document.setdefault("components", {}).setdefault("schemas", {}).update(definitions.get("$defs", {}) | known)
            document["paths"] = _resolved(document["paths"], schemas)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _resolved(value: Any, schemas: Mapping[str, Schema]) -> Any:
    if isinstance(value, dict):
        name = value.get("x-schema")
        return {key: _resolved(one, schemas) for key, one in value.items()} if name is None else schemas[name]
    return [_resolved(one, schemas) for one in value] if isinstance(value, list) else value
