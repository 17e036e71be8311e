"""Chooses the most specific of pydantic's errors about a body, and words it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from tokenwright.checks import json_word, read_table, shown

NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Complaint:
    param: str | None  # the path of the field at fault ("messages.0.content"); None: the whole body
    message: str


def complaint(error: ValidationError, data: object, renamed: Mapping[str, str] = NONE) -> Complaint:
    """The most specific complaint about `data`. renamed: the client's names of fields."""
    details: list[Any] = [*error.errors(include_url=False, include_input=False)]
    if renamed:
        for one in details:
            one["loc"] = tuple(_written(one["loc"], data, renamed))
    return _worst(details, data)


def _written(loc: Sequence[int | str], data: object, renamed: Mapping[str, str]) -> Iterator[int | str]:
    for part in loc:
        if isinstance(data, dict) and part not in data and renamed.get(str(part)) in data:
            part = renamed[str(part)]
        found = _found(data, part)
        data = data if found is _NOTHING else found
        yield part


def complaint_of_parameters(details: Sequence[Any]) -> Complaint:
    data = {one["loc"][-1]: one["input"] for one in details if one["type"] != "missing"}
    return _worst([{**one, "loc": one["loc"][1:]} for one in details], data)


def _worst(details: Sequence[Any], data: object) -> Complaint:
    worst = max(details, key=_weight)
    path = list(_path(worst["loc"], data, missing=worst["type"] == "missing"))
    kind, context = worst["type"], worst.get("ctx", {})
    if kind in _OWN:
        field = ".".join((*path, context["field"]))[:MOST_SHOWN]
        if kind == "refused":
            return Complaint(field, f"{field} is not supported: {context['why']}")
        hint = f"did you mean {context['near']}?" if context["near"] else "remove it"
        return Complaint(field, f"{field}: this API has no such field; {hint}")
    field, value = ".".join(path), _at(data, path)
    if kind == "value_error":
        said = str(context["error"])
        return Complaint(field or None, said if said.startswith(field) else f"{field}: {said}")
    if kind == "union_tag_invalid":
        name = "type" if context["discriminator"].endswith("()") else context["discriminator"].strip("'")
        expected = context["expected_tags"].replace(", 'hosted'", "")  # an internal tag
        media = "text'" in expected and any(one in context["tag"] for one in _MEDIA)
        why = "models here read text and pictures" if media else f"it is {expected}"
        said = f"{name} {shown(context['tag'])} is not supported; {why}"
        return Complaint(field or None, f"{field}: {said}" if field else said)
    same = [one for one in details if list(_path(one["loc"], data, missing=False)) == path]
    wanted = [
        _filled(_WANTED[one["type"]], one) for one in (same if kind in _TYPES else [worst]) if one["type"] in _WANTED
    ]
    if kind in _WANTED:
        message = f"must be {', or '.join(dict.fromkeys(wanted))}, not {json_word(value)}"
        return Complaint(field or None, f"{field or 'the body'} {message}")
    message = _filled(_MESSAGES.get(kind, "it is not what this field may be"), worst)
    return Complaint(field or None, f"{field}: {message}" if field else message)


MOST_SHOWN = 200
_MEDIA = ("audio", "document", "file", "video")  # in types of parts
_OWN = ("refused", "unknown")
_NOTHING = object()
_FILE = Path(__file__).with_suffix(".txt")
_MESSAGES = read_table("messages", _FILE)  # by pydantic's kind of error
_WANTED = read_table("wanted", _FILE)  # the type that a value must have, by kind of error
_BOUNDS = ("greater_than_equal", "less_than_equal", "greater_than", "less_than")
_TYPES = _WANTED.keys() - set(_BOUNDS)  # each alternative of a union has one


def _weight(detail: Any) -> tuple[bool, int, bool, bool]:
    """Rank errors: refusals first, then the deepest; an unknown type outranks a wrong literal."""
    kind = detail["type"]
    telling = kind not in _TYPES or kind == "literal_error"
    return kind == "refused", len(detail["loc"]) + (kind in _OWN), telling, kind == "union_tag_invalid"


def _filled(words: str, detail: Any) -> str:
    context = {name: f"{one:,}" if isinstance(one, int) else one for name, one in detail.get("ctx", {}).items()}
    return words.format_map({name: f"{one:g}" if isinstance(one, float) else one for name, one in context.items()})


def _at(data: object, path: list[str]) -> object:
    for part in path:
        data = _found(data, int(part) if isinstance(data, list) else part)
    return data


def _path(loc: tuple[int | str, ...], data: object, *, missing: bool) -> Iterator[str]:
    """The keys and indices of a location in the body, without pydantic's names of union members."""
    for at, part in enumerate(loc):
        found = _found(data, part)
        if found is not _NOTHING:
            data = found
        elif not (missing and at == len(loc) - 1):
            continue
        yield str(part)


def _found(data: object, part: int | str) -> object:
    if isinstance(data, dict):
        return data.get(part, _NOTHING)
    return data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else _NOTHING
