"""The process that renders one chat template. `renderer` starts it; it imports only jinja2 and the standard library.

Templates are untrusted, and jinja2's sandbox does not bound their work. So the process limits its memory, the CPU time
of each question and the length of an answer, cannot open files and has an empty environment.

First line in: {"template", "values", "seconds", "memory"}; first line out: {}. Then for each {"messages",
"add_generation_prompt", "most" (characters)}, and perhaps "tools" and "variables": {"text", "spans"}, or {"error"}, the
end of a sentence that begins with "the model's chat template".
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn, Self, SupportsIndex

import jinja2.debug  # jinja2 would import it later, when files can no longer be opened
import jinja2.runtime
from jinja2 import BaseLoader, Environment, Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Origin = tuple[int, str]  # the index of a message, or -1, and the name of its field, or "tools"
Span = tuple[int, int, Origin, int]  # characters [start, stop) of a text, and where they begin in the field's own text


class Marked(str):
    """A text with the spans of it that come from the request, which adding, slicing and replacing keep."""

    _spans: tuple[Span, ...]

    def __new__(cls, text: str = "", spans: Iterable[Span] = ()) -> Self:
        made = super().__new__(cls, text)
        made._spans = tuple(spans)
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        if type(other) is str:
            return Marked(super().__add__(other), self._spans)
        return joined((self, other)) if isinstance(other, Marked) else super().__add__(other)

    def __radd__(self, other: str) -> str:
        spans = [(start + len(other), stop + len(other), origin, at) for start, stop, origin, at in self._spans]
        return Marked(other.__add__(self), spans)

    def __getitem__(self, at: SupportsIndex | slice) -> str:
        if isinstance(at, slice) and at.step in (None, 1):
            start, stop, _ = at.indices(len(self))
            return self._cut(start, max(start, stop))
        return super().__getitem__(at)

    def _cut(self, start: int, stop: int) -> "Marked":
        if stop - start == len(self):
            return self
        kept = [span for span in self._spans if span[0] < stop and span[1] > start]
        spans = [(max(a, start) - start, min(b, stop) - start, o, at + max(0, start - a)) for a, b, o, at in kept]
        return Marked(super().__getitem__(slice(start, stop)), spans)

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> str:
        return self._cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None) -> str:
        return self._cut(0, len(super().rstrip(chars)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(super().split(sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(super().rsplit(sep, maxsplit), len(sep or ""))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return super().replace(old, new, count)
        first, *rest = self.split(old, count)
        return joined([first, *(piece for part in rest for piece in (new, part))])

    def _parts(self, parts: list[str], width: int) -> list[str]:
        found, done = list[str](), -width
        for part in parts:
            start = self.find(part, done + width) if len(part) < len(self) else 0
            done = start + len(part)
            found.append(self._cut(start, done))
        return found


class Fields(dict[str, Any]):
    """An object of the request. A template gets its texts as Marked."""

    _origin: Origin

    def __getitem__(self, name: str) -> Any:
        return marked(super().__getitem__(name), self._origin)

    def get(self, name: str, default: Any = None) -> Any:
        return marked(super().get(name, default), self._origin)

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]


class Items(list[Any]):
    _origin: Origin

    def __getitem__(self, at: Any) -> Any:
        return marked(super().__getitem__(at), self._origin)

    def __iter__(self) -> Iterator[Any]:
        return (marked(one, self._origin) for one in super().__iter__())


def marked(value: Any, origin: Origin) -> Any:
    if isinstance(value, str):
        return value if isinstance(value, Marked) else Marked(value, [(0, len(value), origin, 0)] if value else ())
    if isinstance(value, Fields | Items) or not isinstance(value, dict | list):
        return value
    made: Fields | Items = Fields(value) if isinstance(value, dict) else Items(value)
    made._origin = origin
    return made


def joined(pieces: Iterable[object]) -> str:
    """`"".join` that keeps the texts' spans, and merges adjacent ones."""
    texts, spans, at = [one if isinstance(one, str) else str(one) for one in pieces], list[Span](), 0
    for text in texts:
        if isinstance(text, Marked):
            for start, stop, origin, source in text._spans:
                last = spans[-1] if spans else (0, -1, (-2, ""), 0)
                if last[1] == at + start and last[2] == origin and last[3] + last[1] - last[0] == source:
                    spans[-1] = (last[0], at + stop, origin, last[3])
                else:
                    spans.append((at + start, at + stop, origin, source))
        at += len(text)
    whole = "".join(texts)
    return Marked(whole, spans) if spans else whole


class TemplateRefusal(TemplateError): ...


class TooLong(Exception): ...


class NoFiles(BaseLoader):
    """Refuses every template, so that include, import and extends fail."""

    def get_source(self, environment: Environment, template: str) -> NoReturn:  # noqa: ARG002
        raise SecurityError(f"it asks for another file ({template!r})")


class GenerationTag(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: marks answers for training; rendered as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def refuse(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without HTML escapes, which jinja2's own filter would add. A marked value writes one span."""
    plain = dict.copy(value) if isinstance(value, Fields) else list.copy(value) if isinstance(value, Items) else value
    text = json.dumps(plain, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if isinstance(value, Fields | Items):
        return Marked(text, [(0, len(text), value._origin, 0)])
    return Marked(text, [(0, len(text), value._spans[0][2], 0)]) if isinstance(value, Marked) and value._spans else text


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class MarkedEnvironment(ImmutableSandboxedEnvironment):
    concat = staticmethod(joined)


def compiled(source: str) -> Template:
    vars(jinja2.runtime)["str_join"] = joined  # of the operator ~, which compiled templates import
    environment = MarkedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag], loader=NoFiles()
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": strftime_now}
    return environment.from_string(source)


def written(template: Template, values: Mapping[str, Any], most: int) -> str:
    pieces: list[str] = []
    for piece in template.generate(values):
        pieces.append(piece)
        most -= len(piece)
        if most < 0:
            raise TooLong
    return joined(pieces)


def marked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value if name == "role" else marked(value, (at, name)) for name, value in message.items()}
        for at, message in enumerate(messages)
    ]


def spans_of(text: str, messages: list[dict[str, Any]]) -> list[list[Any]]:
    """[start, stop, message, field, place] of each span. Content that lost its marks is searched for, in order."""
    known = text._spans if isinstance(text, Marked) else ()
    spans: list[list[Any]] = [[start, stop, *origin, source] for start, stop, origin, source in known]
    ends = {at: stop for _, stop, at, field, _ in spans if field == "content"}
    done = 0
    for at, message in enumerate(messages):
        if at not in ends and isinstance(core := message.get("content"), str) and (core := core.strip()):
            start = text.find(core, done)
            if start >= 0:
                spans.append([start, start + len(core), at, "content", 0])
                ends[at] = start + len(core)
        done = max(done, ends.get(at, 0))
    return sorted(spans, key=lambda span: span[0])


def answered(template: Template, values: Mapping[str, Any], ask: Mapping[str, Any]) -> dict[str, Any]:
    messages = ask["messages"]
    given = {**values, "messages": marked_messages(messages), "documents": None}
    given |= {"add_generation_prompt": ask["add_generation_prompt"], "tools": marked(ask.get("tools"), (-1, "tools"))}
    text = written(template, given | ask.get("variables", {}), ask["most"])
    return {"text": text, "spans": spans_of(text, messages)}


def complaint(error: Exception) -> str:
    """The end of a sentence about the template, for the user who chose the model."""
    shown = str(error)[:500].rstrip(".")
    if isinstance(error, TemplateRefusal):
        return f"refuses these messages: {shown}"
    if isinstance(error, TemplateSyntaxError):
        return f"is no template that jinja2 understands (line {error.lineno}): {shown}"
    if isinstance(error, SecurityError):
        return f"does what no template may: {shown}"
    if isinstance(error, MemoryError):
        return "takes more memory than it may have"
    if isinstance(error, RecursionError):
        return "calls itself without end"
    if isinstance(error, TooLong):
        return "writes without end: its text is far longer than the messages"
    return f"fails on these messages: {type(error).__name__}: {shown}"


def limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main() -> None:
    start = json.loads(sys.stdin.readline())
    time.tzset()
    warm = compiled(r"{{ [strftime_now('%c'), '\u0020'] | tojson | pprint }}{% if raise_exception %}{% endif %}")
    written(warm, {}, 1_000)  # loads files that Python reads lazily: the time zone and some modules
    os.environ.clear()
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_NOFILE, 0)
    limit(resource.RLIMIT_AS, start["memory"])
    answer: dict[str, Any] = {}
    template: Template | None = None
    while True:
        print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        ask = json.loads(line)
        limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + start["seconds"]) + 1)
        try:
            template = template or compiled(start["template"])
            answer = answered(template, start["values"], ask)
        except Exception as error:
            answer = {"error": complaint(error)}


if __name__ == "__main__":
    main()
