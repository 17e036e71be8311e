"""Request bodies of the published APIs: every field is implemented, without effect, or refused by name.

A body is a strict pydantic model: it has the fields that are implemented, and lists the others of its API in `refused`
(with what to do instead, and the values that ask for nothing) and `without_effect`. A field that the API does not have
is refused as well. null means that a field is absent. The errors, the OpenAPI schema and the tables of the
documentation all come from these declarations.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from tokenwright.checks import MAX_TOKENS, shown

MOST_TEXT = 4 * 2**20  # characters of one string
MOST_ITEMS = 100_000  # messages of a conversation
MOST_PARTS = 10_000  # parts of one message
MOST_TOOLS = 256
MOST_STOPS = 64
MOST_STOP = 1_000  # characters of one stop string
MOST_NAME = 256  # characters of a name or an id
MOST_NAMES = 4096  # of an object whose names are the client's


def many(most: int, least: int = 0) -> Any:
    """For a list in a body: it has `least` to `most` entries. Of wrong entries the first alone is told.

    A body of a million wrong entries would make a million errors, in one call that lets no other thread run.
    """
    return Field(min_length=least or None, max_length=most, fail_fast=True)


def names(most: int) -> Any:
    """For an object whose names are the client's: it has at most `most`, which is checked before its values are."""

    def counted(value: object) -> object:
        if isinstance(value, dict) and len(value) > most:
            about = {"field_type": "Dictionary", "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", about)
        return value

    return BeforeValidator(counted)


Text = Annotated[str, Field(max_length=MOST_TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=MOST_NAME)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
StopText = Annotated[str, Field(min_length=1, max_length=MOST_STOP)]
Stops = Annotated[list[StopText], many(MOST_STOPS)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], names(16), Field(max_length=16)
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # how long a model of OpenAI's reasons
Object = Annotated[dict[str, Any], names(MOST_NAMES), Field(max_length=MOST_NAMES)]  # a schema, or arguments


@dataclass(frozen=True, slots=True)
class Refused:
    """A field of a published API that is not implemented. why: what to do instead, as the end of a sentence.

    neutral: the values that ask for nothing, which are accepted; null always is.
    """

    why: str
    neutral: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        return any(type(value) is type(one) and value == one for one in (None, *self.neutral))


class Body(BaseModel):
    """An object of a request: strict types, and no field that is accepted and ignored but those of `without_effect`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    refused: ClassVar[Mapping[str, Refused]] = {}
    without_effect: ClassVar[tuple[str, ...]] = ()  # fields that are checked, and change nothing

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: object) -> object:
        """The implemented fields that are not null. Raises PydanticCustomError for a refused one."""
        if not isinstance(data, dict):
            return data
        for name in data.keys() & cls.refused.keys():
            refusal = cls.refused[name]
            if not refusal.accepts(data[name]):
                context = {"field": name, "value": shown(data[name]), "why": refusal.why}
                raise PydanticCustomError("refused", "{field} is not supported: {why}", context)
        known = _fields(cls)
        for name, value in data.items():
            if name not in known and name not in cls.refused and value is not None:
                near = get_close_matches(name, known, 1, 0.75) if len(name) <= MOST_NAME else []
                context = {"field": name, "near": near[0] if near else ""}
                raise PydanticCustomError("unknown", "there is no field {field}", context)
        return {name: value for name, value in data.items() if value is not None and name not in cls.refused}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        """The schema as it is checked: null where a field may be absent, and the neutral values of refused fields.

        An unknown field that is null counts as absent too, because some clients send all fields that they know.
        """
        schema: dict[str, Any] = handler.resolve_ref_schema(handler(core))
        schema["additionalProperties"] = {"type": "null"}
        required = schema.get("required", ())
        for name, one in schema.get("properties", {}).items():
            if name not in required:
                schema["properties"][name] = {"anyOf": [one, {"type": "null"}]}
        for name, refusal in cls.refused.items():
            schema.setdefault("properties", {})[name] = {
                "enum": [None, *refusal.neutral],
                "description": f"Not supported: {refusal.why}.",
            }
        return schema


@cache
def _fields(body: type[Body]) -> frozenset[str]:
    """The names of a body's fields in JSON."""
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def refusals(body: type[Body], before: str = "") -> Iterator[tuple[str, Refused]]:
    """All refused fields of a body and of the objects in it, with their paths ("tools.strict")."""
    for name, refusal in body.refused.items():
        yield f"{before}{name}", refusal
    for name, field in body.model_fields.items():
        for part in _bodies(field.annotation):
            yield from refusals(part, f"{before}{field.alias or name}.")


def _bodies(annotation: object) -> Iterator[type[Body]]:
    """The bodies in an annotation such as list[A | B]."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield annotation
    for part in get_args(annotation):
        yield from _bodies(part)


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong with a body. param: the path of the field ("messages.0.content"), None for the whole body."""

    param: str | None
    message: str


def complaint(error: ValidationError, data: object) -> Complaint:
    """The most specific of an error's complaints about `data`, the body as it was parsed, in our own words."""
    return _worst(error.errors(include_url=False, include_input=False), data)


def complaint_of_parameters(details: Sequence[Any]) -> Complaint:
    """The same of pydantic's errors about the parameters of a path and of a query."""
    data = {one["loc"][-1]: one["input"] for one in details if one["type"] != "missing"}
    return _worst([{**one, "loc": one["loc"][1:]} for one in details], data)


def _worst(details: Sequence[Any], data: object) -> Complaint:
    worst = max(details, key=_weight)
    path = list(_path(worst["loc"], data, missing=worst["type"] == "missing"))
    kind, context = worst["type"], worst.get("ctx", {})
    if kind in _OWN:
        field = ".".join((*path, context["field"]))[:MOST_SHOWN]
        message = f"is not supported: {context['why']}" if kind == "refused" else _unknown(context["near"])
        return Complaint(field, f"{field}{' ' if kind == 'refused' else ': '}{message}")
    field, value = ".".join(path), _at(data, path)
    if kind == "union_tag_invalid":
        name = context["discriminator"].strip("'")
        said = f"{name} {shown(context['tag'])} is not supported; it is {context['expected_tags']}"
        return Complaint(field or None, f"{field}: {said}" if field else said)
    same = [one for one in details if list(_path(one["loc"], data, missing=False)) == path]
    wanted = [
        _filled(_WANTED[one["type"]], one) for one in (same if kind in _TYPES else [worst]) if one["type"] in _WANTED
    ]
    if kind in _WANTED:
        message = f"must be {', or '.join(dict.fromkeys(wanted))}, not {_told(value)}"
        return Complaint(field or None, f"{field or 'the body'} {message}")
    message = _filled(_MESSAGES.get(kind, "it is not what this field may be"), worst)
    return Complaint(field or None, f"{field}: {message}" if field else message)


MOST_SHOWN = 200  # characters of a field's path
_OWN = ("refused", "unknown")  # errors of `Body._known`
_NOTHING = object()
_MESSAGES = {  # of pydantic's kinds of errors
    "missing": "this field is required",
    "extra_forbidden": "this API has no such field; remove it",
    "string_unicode": "it has half of a surrogate pair, which is no character; remove it",
    "union_tag_not_found": "the field {discriminator} is required in it",
    "string_too_long": "it has more than {max_length} characters; shorten it",
    "string_too_short": "it has fewer than {min_length} characters",
    "too_long": "it has more than {max_length} entries; leave some out",
    "too_short": "it has fewer than {min_length} entries",
    "string_pattern_mismatch": "it does not match {pattern}",
}
_WANTED = {  # what a value must be, of pydantic's kinds of errors
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "greater_than": "more than {gt}",
    "less_than": "less than {lt}",
}


_BOUNDS = ("greater_than_equal", "less_than_equal", "greater_than", "less_than")
_TYPES = _WANTED.keys() - set(_BOUNDS)  # of a value that may be one of several, each alternative has one


def _weight(detail: Any) -> tuple[bool, int, bool, bool]:
    """How much one of pydantic's errors tells: our own first, then the deepest, then those about more than the type.

    An object of a type that is not known tells more than that it is none of the words that may stand in its place.
    """
    kind = detail["type"]
    telling = kind not in _TYPES or kind == "literal_error"  # which says what a value of the right type may be
    return kind == "refused", len(detail["loc"]) + (kind in _OWN), telling, kind == "union_tag_invalid"


def _filled(words: str, detail: Any) -> str:
    """A message with what one of pydantic's errors tells: bounds, and values that are allowed."""
    context = {name: f"{one:,}" if isinstance(one, int) else one for name, one in detail.get("ctx", {}).items()}
    return words.format_map({name: f"{one:g}" if isinstance(one, float) else one for name, one in context.items()})


def _told(value: object) -> str:
    """A value of a body for a message, in JSON's words."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else shown(value)


def _unknown(near: str) -> str:
    return f"this API has no such field; {f'did you mean {near}?' if near else 'remove it'}"


def _at(data: object, path: list[str]) -> object:
    """The value of a body at a path of keys and indices."""
    for part in path:
        data = _found(data, int(part) if isinstance(data, list) else part)
    return data


def _path(loc: tuple[int | str, ...], data: object, *, missing: bool) -> Iterator[str]:
    """The parts of a place that are keys and indices of the body, without pydantic's names of alternatives."""
    for at, part in enumerate(loc):
        found = _found(data, part)
        if found is not _NOTHING:
            data = found
        elif not (missing and at == len(loc) - 1):
            continue
        yield str(part)


def _found(data: object, part: int | str) -> object:
    """The value at a key or an index; _NOTHING without it."""
    if isinstance(data, dict):
        return data.get(part, _NOTHING)
    return data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else _NOTHING
