"""Request bodies of the published APIs: every field is implemented, harmless, ignored and named, or refused.

A body is a strict pydantic model: it has the fields that are implemented. Of the other fields that clients are known to
send, `harmless` are accepted with any value, because the answer would be the same, and `refused` would change it, so
they come with the reason and with the values that ask for nothing. Any other field is ignored, and named in the reply's
header X-Tokenwright-Ignored; but a typing error of an implemented one is refused with a suggestion, and
`--strict-fields` refuses all. null means that a field is absent. The errors, the OpenAPI schema and the tables of the
documentation all come from these declarations.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
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
CallId = Annotated[str, Field(min_length=1, max_length=MOST_TEXT)]  # of a tool call, as the client kept it
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,256}$")]
StopText = Annotated[str, Field(min_length=1, max_length=MOST_STOP)]
Stops = Annotated[list[StopText], many(MOST_STOPS)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], names(16), Field(max_length=16)
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # how long a model of OpenAI's reasons
Object = Annotated[dict[str, Any], names(MOST_NAMES), Field(max_length=MOST_NAMES)]  # a schema, or arguments


OFF: tuple[object, ...] = (None, False, 0, 0.0, -1, "", [], {})  # values of a field that ask for nothing, in any API


@dataclass(frozen=True, slots=True)
class Refused:
    """A field of a published API that is not implemented. why: what to do instead, as the end of a sentence.

    neutral: the values that ask for nothing besides `OFF`. switch: false asks for something too.
    """

    why: str
    neutral: tuple[object, ...] = ()
    switch: bool = False

    @property
    def values(self) -> tuple[object, ...]:
        """The values that are accepted."""
        off = (None,) if self.switch else OFF
        return (*off, *(one for one in self.neutral if not any(one is other for other in off)))

    def accepts(self, value: object) -> bool:
        return any(type(value) is type(one) and value == one for one in self.values)


@dataclass(slots=True)
class Reading:
    """How a body is read, as pydantic's context. strict: refuse unknown fields; `ignored`: those that were met."""

    strict: bool = False
    ignored: dict[str, None] = field(default_factory=dict)  # in their order

    def ignore(self, name: str) -> None:
        """Note a field that is left out. Its name is the client's: what no header can hold is left out of it."""
        if len(self.ignored) < MOST_IGNORED:
            self.ignored.setdefault(_NO_NAME.sub("?", name[:MOST_IGNORED_NAME]))


class Body(BaseModel):
    """An object of a request, with strict types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    refused: ClassVar[Mapping[str, Refused]] = {}
    harmless: ClassVar[tuple[str, ...]] = ()  # fields that are accepted with any value, and change nothing
    without_effect: ClassVar[tuple[str, ...]] = ()  # fields that are checked, and change nothing
    off: ClassVar[Mapping[str, tuple[object, ...]]] = {}  # values of implemented fields that count as absent

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: object, info: ValidationInfo) -> object:
        """The implemented fields that ask for something. Raises PydanticCustomError for a refused one."""
        if not isinstance(data, dict):
            return data
        reading = info.context if isinstance(info.context, Reading) else Reading(strict=True)
        known, found = _fields(cls), {}
        for name in sorted(data.keys() & cls.refused.keys()):
            refusal = cls.refused[name]
            if not refusal.accepts(data[name]):
                context = {"field": name, "value": shown(data[name]), "why": refusal.why}
                raise PydanticCustomError("refused", "{field} is not supported: {why}", context)
        for name, value in data.items():
            if name in known:
                if value is not None and value not in cls.off.get(name, ()):
                    found[name] = value
            elif name not in cls.refused and name not in cls.harmless and value is not None:
                if (near := mistyped(name, known)) or reading.strict:
                    raise PydanticCustomError("unknown", "there is no field {field}", {"field": name, "near": near})
                reading.ignore(name)
        return found

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        """The schema as it is checked: null where a field may be absent, and the neutral values of refused fields."""
        schema: dict[str, Any] = handler.resolve_ref_schema(handler(core))
        schema.pop("additionalProperties", None)  # unknown fields are ignored
        required = schema.get("required", ())
        for name, one in schema.get("properties", {}).items():
            if name not in required:
                off = [{"enum": list(cls.off[name])}] if name in cls.off else []
                schema["properties"][name] = {"anyOf": [one, {"type": "null"}, *off]}
        for name in cls.harmless:
            schema.setdefault("properties", {})[name] = {"description": "Accepted, without effect."}
        for name, refusal in cls.refused.items():
            schema.setdefault("properties", {})[name] = {
                "enum": list(refusal.values),
                "description": f"Not supported: {refusal.why}.",
            }
        return schema


MOST_IGNORED, MOST_IGNORED_NAME = 32, 64  # names of a header, and characters of one
_NO_NAME = re.compile(r"[^\w.-]", re.ASCII)
LEAST_MISTYPED = 6  # letters of a name of which one that is nearly the same is a typing error


def mistyped(name: str, known: Iterable[str]) -> str:
    """The known name of which `name` is a typing error: one letter too many, too few, wrong, or two exchanged.

    Short names differ by a letter and mean something else, such as top_a and top_p. '' if there is none.
    """
    return next((one for one in sorted(known) if len(one) >= LEAST_MISTYPED and _one_letter(name, one)), "")


def _one_letter(a: str, b: str) -> bool:
    start = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    x, y = a[start:], b[start:]
    exchanged = x[:2] == y[1::-1] and x[2:] == y[2:]
    return a != b and (x[1:] == y[1:] or x[1:] == y or x == y[1:] or exchanged)


@cache
def _fields(body: type[Body]) -> frozenset[str]:
    """The names of a body's fields in JSON."""
    return frozenset(one.alias or name for name, one in body.model_fields.items())


def refusals(body: type[Body], before: str = "") -> Iterator[tuple[str, Refused]]:
    """All refused fields of a body and of the objects in it, with their paths ("tools.strict")."""
    for name, refusal in body.refused.items():
        yield f"{before}{name}", refusal
    for name, one in body.model_fields.items():
        for part in _bodies(one.annotation):
            yield from refusals(part, f"{before}{one.alias or name}.")


def accepted(body: type[Body], before: str = "") -> Iterator[str]:
    """All harmless fields of a body and of the objects in it, with their paths."""
    yield from (f"{before}{name}" for name in body.harmless)
    for name, one in body.model_fields.items():
        for part in _bodies(one.annotation):
            yield from accepted(part, f"{before}{one.alias or name}.")


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
