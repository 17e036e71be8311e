"""Reads replies as the OpenAPI document declares them."""

import json
from types import SimpleNamespace
from typing import Any

import jsonschema

from tokenwright.serve.http.openapi import schema_of


class Read(SimpleNamespace):
    """An object of a reply; a field that it has not is None."""

    def __getattr__(self, name: str) -> None:
        return None


def read(kind: Any, value: Any) -> Any:
    """A reply, or its text, as an object with attributes. Raises ValidationError for one that is not of this kind."""
    known: dict[str, Any] = {}
    schema = schema_of(kind, known) | {"components": {"schemas": known}}
    text = value if isinstance(value, str | bytes) else json.dumps(value)
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    return json.loads(text, object_hook=lambda found: Read(**found))
