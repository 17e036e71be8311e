"""Reads what a page sends into plain dataclasses: their annotations say what each field may be.

    pace: Annotated[float, Between(0.01, 1000)] | None
    prompts: Annotated[list[Prompt], Length(1, 6)]

Unknown fields and values of another type are errors, which name the field's path.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tokenwright.checks import json_word
from tokenwright.errors import RequestError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Between:
    least: float
    most: float

    def check(self, value: Any, path: str) -> None:
        if not self.least <= value <= self.most:
            bound = f"least {_number(self.least)}" if value < self.least else f"most {_number(self.most)}"
            raise RequestError(f"{path} must be at {bound}, not {json_word(value)}", path)


@dataclass(frozen=True, slots=True)
class Length:
    least: int  # entries of a list or an object, characters of a text
    most: int

    def check(self, value: Any, path: str) -> None:
        unit = "characters" if isinstance(value, str) else "entries"
        if len(value) > self.most:
            todo = "shorten it" if isinstance(value, str) else "leave some out"
            raise RequestError(f"{path}: it has more than {self.most:,} {unit}; {todo}", path)
        if len(value) < self.least:
            raise RequestError(f"{path}: it has fewer than {self.least:,} {unit}", path)
        if isinstance(value, str) and any("\ud800" <= one <= "\udfff" for one in value):
            raise RequestError(f"{path}: it has half of a surrogate pair, which is no character; remove it", path)


@cache
def hints_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def read(kind: type[T], data: object, path: str = "") -> T:
    """Raises RequestError, which names the field."""
    if not isinstance(data, dict):
        raise _wrong(path, "an object", data)
    found, hints = {}, hints_of(kind)  # type: ignore[arg-type]
    for one in fields(kind):  # type: ignore[arg-type]
        place = f"{path}.{one.name}" if path else one.name
        if one.name in data:
            found[one.name] = _value(hints[one.name], data[one.name], place)
        elif one.default is MISSING and one.default_factory is MISSING:
            raise RequestError(f"{place}: this field is required", place)
    if unknown := next((name for name in data if name not in hints), None):
        place = (f"{path}.{unknown}" if path else unknown)[:200]
        raise RequestError(f"{place}: this API has no such field; remove it", place)
    return kind(**found)


def read_parameter(hint: Any, text: str, name: str) -> Any:
    kind = next(one for one in _alternatives(hint) if one is not NoneType)
    try:
        return _FROM_TEXT[kind](text)
    except (ValueError, KeyError):
        raise _wrong(name, _WORDS[kind], text) from None


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_TRUTH = {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}
_FROM_TEXT: Mapping[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: lambda text: _TRUTH[text.lower()],
    str: str,
}


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _wrong(path: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"{path or 'the body'} must be {wanted}, not {json_word(value)}", *([path] if path else []))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _value(hint: Any, value: Any, path: str) -> Any:
    some = _alternatives(hint)
    if value is None and NoneType in some:
        return None
    kinds = [one for one in some if one is not NoneType]
    chosen = next((one for one in kinds if _fits(one, value)), None)
    if chosen is None:
        raise _wrong(path, ", or ".join(map(_word, kinds)), value)
    checks = get_args(chosen)[1:] if get_origin(chosen) is Annotated else ()
    kind = _plain(chosen)
    if kind is float:
        value = _finite(value, path)
    for check in checks:
        check.check(value, path)
    if is_dataclass(kind):
        return read(kind, value, path)  # type: ignore[arg-type]
    if get_origin(kind) is list:
        [entry] = get_args(kind)
        return [_value(entry, one, f"{path}.{at}") for at, one in enumerate(value)]
    if get_origin(kind) is dict:
        name, entry = get_args(kind)
        return {_value(name, key, path): _value(entry, one, f"{path}.{key}") for key, one in value.items()}
    return value


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _fits(hint: Any, value: object) -> bool:
    kind = _plain(hint)
    if get_origin(kind) is Literal:
        return value in get_args(kind) and isinstance(value, str)
    wanted = dict if is_dataclass(kind) else get_origin(kind) or kind
    return type(value) in ((int, float) if wanted is float else (wanted,))


def _word(hint: Any) -> str:
    kind = _plain(hint)
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return "a list" if get_origin(kind) is list else _WORDS.get(kind, "an object")


def _finite(value: float, path: str) -> float:
    try:
        if isfinite(found := float(value)):
            return found
    except OverflowError:
        pass
    raise _wrong(path, "a finite number", value)
