"""The process that renders one chat template. It reads questions and writes answers as lines of JSON.

`renderer` starts it as a program; no module imports it, and it imports only jinja2 and the standard library. Templates
come with checkpoints, from untrusted authors. jinja2's sandbox keeps them from Python's internals, but does not bound
their work. So the process limits its memory, the CPU time of each question and the length of an answer, cannot open
files and has an empty environment. `renderer` limits the wall-clock time, and kills the process when it exceeds it.

First line in: {"template", "values", "seconds", "memory"}; first line out: {}. Then for each {"messages",
"add_generation_prompt", "most"}, and perhaps "tools" and "variables": {"text"}, or {"error"} with the end of a sentence
that begins with "the model's chat template". `most` is in characters.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2.debug  # noqa: F401 - jinja2 would import it later, when files can no longer be opened
from jinja2 import BaseLoader, Environment, Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefusal(TemplateError):
    """The template's own `raise_exception`."""


class TooLong(Exception):
    """The rendered text exceeds the limit of characters."""


class Alone(BaseLoader):
    """A loader that refuses every template, so that include, import and extends fail."""

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
    """JSON without HTML escapes, which jinja2's own filter would add."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag], loader=Alone()
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
    return "".join(pieces)


def complaint(error: Exception) -> str:
    """The error as the end of a sentence about the template, for the user who chose the model."""
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
    """Lower a soft limit of this process."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main() -> None:
    start = json.loads(sys.stdin.readline())
    time.tzset()
    warm = compiled(r"{{ [strftime_now('%c'), '\u0020'] | tojson | pprint }}{% if raise_exception %}{% endif %}")
    written(warm, {}, 1_000)  # reads now the files that Python loads lazily: the time zone and some modules
    os.environ.clear()
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_NOFILE, 0)
    limit(resource.RLIMIT_AS, start["memory"])
    answer: dict[str, str] = {}
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
            known = {name: ask[name] for name in ("messages", "add_generation_prompt")}
            values = start["values"] | known | {"documents": None}
            values |= {"tools": ask.get("tools")} | ask.get("variables", {})
            answer = {"text": written(template, values, ask["most"])}
        except Exception as error:
            answer = {"error": complaint(error)}


if __name__ == "__main__":
    main()
