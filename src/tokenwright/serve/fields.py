"""Request bodies of the published APIs: every field is implemented, without effect, or refused by name.

A body is a strict pydantic model: it has the fields that are implemented, and lists the others of its API in `refused`
(with what to do instead, and the values that ask for nothing) and `without_effect`. A field that the API does not have
is refused as well. null means that a field is absent. The errors, the OpenAPI schema and the tables of the
documentation all come from these declarations.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from tokenwright.checks import MAX_TOKENS, shown

MOST_TEXT = 4 * 2**20  # characters of one string
MOST_ITEMS = 100_000  # messages of a conversation
MOST_PARTS = 10_000  # parts of one message
MOST_TOOLS = 256
MOST_STOPS = 64
MOST_STOP = 1_000  # characters of one stop string
MOST_NAME = 256  # characters of a name or an id

Text = Annotated[str, Field(max_length=MOST_TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=MOST_NAME)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
StopText = Annotated[str, Field(min_length=1, max_length=MOST_STOP)]
Stops = Annotated[list[StopText], Field(max_length=MOST_STOPS)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


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
        return {name: value for name, value in data.items() if value is not None and name not in cls.refused}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        """The schema as it is checked: null where a field may be absent, and the neutral values of refused fields."""
        schema: dict[str, Any] = handler.resolve_ref_schema(handler(core))
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
    """The most specific of an error's complaints about `data`, the body as it was parsed."""
    details = error.errors(include_url=False, include_input=False)
    worst = max(details, key=lambda detail: (detail["type"] == "refused", len(detail["loc"])))
    path = list(_path(worst["loc"], data, missing=worst["type"] == "missing"))
    kind, context = worst["type"], worst.get("ctx", {})
    if kind == "refused":
        field = ".".join((*path, context["field"]))
        return Complaint(field, f"{field} is not supported: {context['why']}")
    message = _MESSAGES.get(kind) or worst["msg"][:1].lower() + worst["msg"][1:]
    if kind == "union_tag_invalid":
        name = context["discriminator"].strip("'")
        message = f"{name} {shown(context['tag'])} is not supported; it is {context['expected_tags']}"
    return Complaint(".".join(path) or None, f"{'.'.join(path)}: {message}" if path else message)


_NOTHING = object()
_MESSAGES = {
    "missing": "this field is required",
    "extra_forbidden": "this API has no such field; remove it",
    "string_unicode": "it has half of a surrogate pair, which is no character; remove it",
}


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
