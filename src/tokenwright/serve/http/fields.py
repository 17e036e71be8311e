"""Request bodies of the published APIs: a field is implemented, harmless, refused or unknown.

A body is a strict pydantic model of the implemented fields. `harmless` fields change no answer and are dropped.
`refused` ones would change it; their errors say what to do instead. Unknown ones are dropped and reported, but a
mistyped name is refused. null means absent, and so do the values of _OFF in fields that are not implemented. `aliases`
are resolved here. The tables of the documentation come from these declarations.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    GetPydanticSchema,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError
from pydantic_core.core_schema import no_info_before_validator_function

from tokenwright.checks import MAX_TOKENS, shown

# MOST_TEXT, MOST_STOP and MOST_NAME count characters, the others entries.
MOST_TEXT = 4 * 2**20
MOST_ITEMS = 100_000
MOST_PARTS = 10_000
MOST_TOOLS = 4096
MOST_STOPS = 64
MOST_STOP = 1_000
MOST_NAME = 256
MOST_NAMES = 4096
LEAST_NUCLEUS = 1e-9  # keeps only the most probable token
MOST_UNKNOWN = 256  # fields


def many(most: int, least: int = 0) -> Any:
    """A list of `least` to `most` entries, checked only up to its first fault: a million would block all threads."""
    return Field(min_length=least or None, max_length=most, fail_fast=True)


def names(most: int) -> Any:
    """An object with at most `most` keys, counted before its values are checked."""

    def counted(value: object) -> object:
        if isinstance(value, dict) and len(value) > most:
            about = {"field_type": "Dictionary", "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", about)
        return value

    return BeforeValidator(counted)


def absent(*values: object) -> Any:
    """A field in which these values mean "not set"."""

    def dropped(value: object) -> object:
        return None if any(type(value) is type(one) and value == one for one in values) else value

    return BeforeValidator(dropped)


def others(*own: str) -> Any:
    """An entry of a list; of types other than `own`, only the type is read, as the published schema says."""

    def alone(value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else None
        return {"type": kind} if isinstance(kind, str) and kind not in own else value

    def published(schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        kind = {"type": "string", "not": {"enum": own}}
        other = {"type": "object", "properties": {"type": kind}, "required": ["type"]}
        return {"anyOf": [handler(schema), other]} if own else handler(schema)

    return GetPydanticSchema(lambda kind, of: no_info_before_validator_function(alone, of(kind)), published)


def finite(value: dict[str, Any]) -> dict[str, Any]:
    """Check that an object's numbers are finite, as replies repeat them; 1e400 reads as infinite."""
    left: list[object] = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict | list):
            left += one.values() if isinstance(one, dict) else one
        elif isinstance(one, float) and not isfinite(one):
            raise ValueError("it contains a number that is too large")
    return value


Text = Annotated[str, Field(max_length=MOST_TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=MOST_NAME)]
ModelName = Annotated[str, Field(max_length=MOST_NAME)]  # "": the served model
CallId = Annotated[str, Field(max_length=MOST_TEXT)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
StopText = Annotated[str, Field(min_length=1, max_length=MOST_STOP)]
GivenId = Annotated[CallId | None, absent("")]
GivenName = Annotated[Name | None, absent("")]  # Go clients send every field: "" is none
Stops = Annotated[list[StopText], many(MOST_STOPS)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Dimensions = Annotated[Tokens | None, absent(0, -1)]
MostTokens = Annotated[Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None, absent(-1)]  # -1: as many as fit
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
# 0 keeps only the most probable token, as in other servers.
Nucleus = Annotated[float, Field(ge=0.0, le=1.0), AfterValidator(lambda share: share or LEAST_NUCLEUS)]
# 0 is off in other servers.
Positive = Annotated[Annotated[float, Field(gt=0.0, le=1.0)] | None, absent(0, 0.0)]
Repetition = Annotated[Annotated[float, Field(gt=0.0, le=100.0)] | None, absent(0, 0.0)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], names(16), Field(max_length=16)
]
Variables = Annotated[dict[str, Any], names(256), Field(max_length=256), AfterValidator(finite)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "default", "auto"]
Object = Annotated[dict[str, Any], names(MOST_NAMES), Field(max_length=MOST_NAMES), AfterValidator(finite)]
_OFF: tuple[object, ...] = (None, False, 0, -1, 0.0, -1.0, 1.0, "", [], {})


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is not implemented."""

    why: str  # what to do instead
    neutral: tuple[object, ...] = ()  # values that mean off


def off(value: object, more: tuple[object, ...] = ()) -> bool:
    return any(type(value) is type(one) and value == one for one in (*_OFF, *more))


@dataclass(slots=True)
class Reading:
    """pydantic's context for a body."""

    body: "type[Body]"
    strict: bool = False
    unknown: "dict[tuple[type[Body], str], None]" = field(default_factory=dict)  # dropped fields, by body
    renamed: dict[str, str] = field(default_factory=dict)  # the client's names of fields

    def drop(self, body: "type[Body]", name: str) -> None:
        """Record an unknown field. Raises PydanticCustomError if there are too many."""
        self.unknown[body, name] = None
        if len(self.unknown) > MOST_UNKNOWN:
            raise PydanticCustomError("unknown", "there is no field {field}", {"field": name, "near": ""})

    @property
    def ignored(self) -> list[str]:
        places = _places(self.body)
        return [f"{places.get(body, '')}{name}" for body, name in self.unknown]


class Body(BaseModel):
    """A strict object of a request. Subclasses add to the refused and harmless fields of their bases."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    refused: ClassVar[Mapping[str, Refused]] = {}
    harmless: ClassVar[Mapping[str, str]] = {}  # dropped fields, and why they change no answer
    aliases: ClassVar[Mapping[str, str]] = {}  # other names of fields; the first that is set counts
    once: ClassVar[frozenset[str]] = frozenset()  # fields that may be given by one of their names only

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: object, info: ValidationInfo) -> object:
        """Keep implemented fields that are not null. Raises PydanticCustomError for refused and mistyped ones."""
        if not isinstance(data, dict):
            return data
        known, harmless, refused, aliases = rule(cls)
        for name, value in data.items():
            if name in known or name in harmless or name in aliases or value is None:
                continue
            if name in refused:
                if not off(value, refused[name].neutral):
                    context = {"field": name, "value": shown(value), "why": refused[name].why}
                    raise PydanticCustomError("refused", "{field} is not supported: {why}", context)
                continue
            reading = info.context if isinstance(info.context, Reading) else Reading(cls)
            near = typed(cls, name) if len(name) <= MOST_NAME else ""
            if not near and off(value):
                continue
            if near or reading.strict:
                context = {"field": name, "near": near}
                raise PydanticCustomError("unknown", "there is no field {field}", context)
            reading.drop(cls, name)
        found = {name: _whole(value) for name, value in data.items() if value is not None and name in known}
        for name, meant in aliases.items():
            if (value := data.get(name)) is None or (meant in found and off(value)):
                continue
            if off(found.get(meant)):
                found[meant] = _whole(value)
                if isinstance(info.context, Reading):
                    info.context.renamed[meant] = name
            elif meant in cls.once:
                raise ValueError(f"{meant} and {name} say the same thing; leave one of them out")
        return found

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        """The schema, with null for absence, and notes on harmless and refused fields."""
        schema: dict[str, Any] = handler.resolve_ref_schema(handler(core))
        schema["additionalProperties"] = True
        required = schema.get("required", ())
        for name, one in schema.get("properties", {}).items():
            if name not in required:
                schema["properties"][name] = {"anyOf": [one, {"type": "null"}]}
        _, harmless, refused, aliases = rule(cls)
        for name, meant in aliases.items():
            schema["properties"][name] = schema["properties"][meant]
        for name, why in harmless.items():
            schema.setdefault("properties", {})[name] = {"description": f"Without effect: {why}."}
        for name, refusal in refused.items():
            values = {repr(one): one for one in (*_OFF, *refusal.neutral)}
            schema.setdefault("properties", {})[name] = {
                "enum": [*values.values()],
                "description": f"Not supported: {refusal.why}.",
            }
        return schema


class Handed(Body):
    """An object that the chat template reads, with its unknown fields."""

    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(data)
        if isinstance(data, dict):
            made._sent = {name: one for name, one in data.items() if one is not None}
        return made

    @property
    def sent(self) -> dict[str, Any]:
        """The object as it was sent, without its harmless and refused fields."""
        _, harmless, refused, _ = rule(type(self))
        return {name: one for name, one in self._sent.items() if name not in harmless and name not in refused}

    @property
    def others(self) -> dict[str, Any]:
        known, _, _, aliases = rule(type(self))
        return {name: one for name, one in self.sent.items() if name not in known and name not in aliases}


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Rule(NamedTuple):
    known: frozenset[str]
    harmless: Mapping[str, str]
    refused: Mapping[str, Refused]
    aliases: Mapping[str, str]


@cache
def rule(body: type[Body]) -> Rule:
    known = frozenset(one.alias or name for name, one in body.model_fields.items())
    harmless: dict[str, str] = {}
    refused: dict[str, Refused] = {}
    aliases: dict[str, str] = {}
    for one in reversed(body.__mro__):
        harmless |= one.__dict__.get("harmless", {})
        refused |= one.__dict__.get("refused", {})
        aliases |= one.__dict__.get("aliases", {})
    taken = known | aliases.keys()
    harmless = {name: why for name, why in harmless.items() if name not in taken}
    refused = {name: why for name, why in refused.items() if name not in taken and name not in harmless}
    return Rule(known, harmless, refused, aliases)


@lru_cache(4096)
def typed(body: type[Body], name: str) -> str:
    """The field that a mistyped name probably means, or ""."""
    names = [name for part in rule(body) for name in part]
    plain = _plain(name)
    return next((one for one in names if _plain(one) == plain or one_edit(name, one)), "")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def one_edit(one: str, other: str) -> bool:
    """Whether one character is missing, doubled, swapped with the next or, in a long name, wrong."""
    short, long = sorted((one, other), key=len)
    if len(short) < 4 or len(long) - len(short) > 1:
        return False
    start = next((at for at, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    rest = short[start:], long[start:]
    if len(short) < len(long):
        return rest[0] == rest[1][1:]
    exchanged = rest[0][:2] == rest[1][1::-1] and rest[0][2:] == rest[1][2:]
    return exchanged or (len(short) >= 7 and rest[0][1:] == rest[1][1:])


def parts(body: type[Body], before: str = "") -> Iterator[tuple[str, type[Body]]]:
    """The paths of a body ("") and of objects in it (such as "tools."), each with its type."""
    yield before, body
    for name, one in body.model_fields.items():
        for part in _bodies(one.annotation):
            yield from parts(part, f"{before}{one.alias or name}.")


@cache
def _places(body: type[Body]) -> Mapping[type[Body], str]:
    found: dict[type[Body], str] = {}
    for path, part in parts(body):
        found.setdefault(part, path)
    return found


def _bodies(annotation: object) -> Iterator[type[Body]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield annotation
    for part in get_args(annotation):
        yield from _bodies(part)
