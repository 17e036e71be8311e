"""The form that an answer must have, from the many fields in which clients write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tokenwright.decode.grammars.gbnf import is_gbnf, lark_of
from tokenwright.errors import RequestError
from tokenwright.sampling_params import MOST_GRAMMAR, Grammar
from tokenwright.serve.http.api import RefusedRequest
from tokenwright.serve.http.exchange import schema_grammar
from tokenwright.serve.openai.bodies import Sampling
from tokenwright.serve.openai.message_bodies import GrammarFormat, ObjectFormat, RegexFormat, SchemaFormat
from tokenwright.serve.service.preprocess import ANY_OBJECT
from tokenwright.serve.service.types import Problem

Form = Grammar | None  # None: any JSON object


def form_of(body: Sampling) -> dict[str, Any]:
    """The fields of a GenerationRequest and its overrides that say the form: {"json_object"} or {"grammar"}, or {}.

    Raises RefusedRequest for two forms, and RequestError for one that cannot be read.
    """
    found = list(_forms(body))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        why = f"{names} each say the form of the answer; leave all but one of them out"
        raise RefusedRequest(Problem(400, "invalid", why, found[0][0]))
    if not found:
        return {}
    [(_, form)] = found
    if body.whitespace is None:
        return {"json_object": True} if form is None else {"grammar": form}
    return {"grammar": replace(form or ANY_OBJECT, whitespace=body.whitespace)}


def _forms(body: Sampling) -> Iterator[tuple[str, Form]]:
    """The forms that a body has, with the names of their fields."""
    yield from _of_format(body.response_format)
    for name, made in _MADE.items():
        for before, holder in (("", body), ("structured_outputs.", body.structured_outputs)):
            if (given := getattr(holder, name, None)) not in (None, False, ""):
                yield f"{before}{name}", made(given)


def _of_format(given: object) -> Iterator[tuple[str, Form]]:
    name = "response_format"
    match given:
        case ObjectFormat():
            yield name, None if given.schema_ is None else schema_grammar(given.schema_, name)
        case SchemaFormat():
            inner = None if given.json_schema is None else given.json_schema.schema_
            found = given.schema_ if inner is None else inner
            if found is None:
                place = f"{name}.json_schema.schema"
                raise RefusedRequest(Problem(400, "invalid", f"{place}: this field is required", place))
            strict = given.json_schema is not None and given.json_schema.strict in (True, "true")
            yield name, schema_grammar(found, f"{name}.json_schema", strict=strict)
        case RegexFormat():
            yield name, Grammar.regex(given.pattern or "")
        case GrammarFormat():
            yield name, grammar(given.grammar or "")


def grammar(text: str) -> Grammar:
    """The grammar of a text in llguidance's variant of Lark, or in llama.cpp's GBNF. Raises RequestError."""
    if not is_gbnf(text):
        return Grammar.lark(text)
    if len(text) > MOST_GRAMMAR:
        raise RequestError(f"grammar has {len(text):,} characters; {MOST_GRAMMAR:,} are allowed")
    return Grammar.lark(lark_of(text))


def _enforced(schema: Any) -> Grammar:
    return schema_grammar(schema, "schema") if isinstance(schema, dict) else Grammar.json_schema(schema)


# What makes the form of each field that has one, but for response_format.
_MADE: dict[str, Callable[[Any], Form]] = {
    "json_schema": _enforced,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": grammar,
    "json_object": lambda _: None,
}
