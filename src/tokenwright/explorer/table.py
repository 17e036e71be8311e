"""The table of what the page can ask: a method, a path, and the function that answers.

    route, places = find("GET", "/runs/5f0c/attention")
    answer = route.answer(explorer, **route.arguments(places, {"step": "3", "layer": "0", "head": "1"}))

The server's HTTP (serve/explorer/routes.py) and a browser's worker read it alike.
A function's parameters say what it takes:

    explorer    the first one
    body        a dataclass, read from a POST's JSON (dataclass_reader.py)
    salt        the caller's: texts with different salts share no pages
    owner       the name of the caller's key, by which prompts are remembered
    work        the means of a check (learn/work.py), which may be cancelled; such functions run one at a time
    others      the parts of the path in braces, then parameters of the query

It returns JSON (a dataclass or a dict), no content (None), binary (bytes), a file (`Download`) or a `MessageStream`.
A generator yields between parts of its work, and its last item is the answer; it is closed if the page leaves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from inspect import Parameter, isgeneratorfunction, signature
from math import isfinite
from typing import Any

from tokenwright.errors import RequestError
from tokenwright.explorer import room
from tokenwright.explorer.dataclass_reader import read, read_parameter
from tokenwright.explorer.explorer import Explorer, PanelError
from tokenwright.explorer.panels import (
    beams,
    block,
    branches,
    calculator,
    chat,
    conversations,
    drafting,
    export,
    heads,
    lab,
    learn,
    pages,
    race,
    runs,
    sampler,
    times,
)

GIVEN = ("salt", "owner", "work")  # from the caller of a route, not its request


@dataclass(frozen=True)
class PanelRoute:
    method: str
    path: str  # with the names of its parts in braces
    answer: Callable[..., Any]
    status: int = 200

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        return dict(list(signature(self.answer).parameters.items())[1:])

    @property
    def in_parts(self) -> bool:
        return isgeneratorfunction(self.answer)

    def arguments(self, places: Mapping[str, str], query: Mapping[str, str], body: object = None) -> dict[str, Any]:
        """The arguments of a request. body: its parsed JSON. Raises RequestError, which names the field."""
        found: dict[str, Any] = {}
        for name, one in self.parameters.items():
            text = places.get(name, query.get(name))
            if name == "body":
                found[name] = read(one.annotation, body)
            elif text is not None and name not in GIVEN:
                found[name] = read_parameter(one.annotation, text, name)
            elif one.default is Parameter.empty and name not in GIVEN:
                raise RequestError(f"{name}: this field is required", name)
        return found


TABLE = (
    PanelRoute("GET", "/status", runs.status),
    PanelRoute("GET", "/model", runs.model),
    PanelRoute("GET", "/replicas", runs.replicas),
    PanelRoute("POST", "/runs", Explorer.begin, 201),
    PanelRoute("GET", "/runs/{identity}", runs.state),
    PanelRoute("DELETE", "/runs/{identity}", runs.end),
    PanelRoute("GET", "/runs/{identity}/steps/{step}", runs.one_step),
    PanelRoute("GET", "/runs/{identity}/attention", runs.attention),
    PanelRoute("GET", "/runs/{identity}/heads", runs.masses),
    PanelRoute("GET", "/runs/{identity}/logits", sampler.logits),
    PanelRoute("GET", "/runs/{identity}/sampler", sampler.sampler),
    PanelRoute("POST", "/runs/{identity}/fork", Explorer.fork, 201),
    PanelRoute("GET", "/runs/{identity}/branches", branches.branches),
    PanelRoute("GET", "/runs/{identity}/trace.json", export.trace),
    PanelRoute("GET", "/runs/{identity}/perfetto.json", export.perfetto),
    PanelRoute("GET", "/runs/{identity}/times", times.times),
    PanelRoute("GET", "/runs/{identity}/block", block.block),
    PanelRoute("GET", "/runs/{identity}/way", block.way),
    PanelRoute("GET", "/runs/{identity}/lens", heads.lens),
    PanelRoute("GET", "/runs/{identity}/atlas", heads.atlas),
    PanelRoute("GET", "/runs/{identity}/matrix", heads.matrix),
    PanelRoute("GET", "/runs/{identity}/drafts", drafting.drafts),
    PanelRoute("POST", "/runs/{identity}/lab", lab.lab),
    PanelRoute("GET", "/pages", pages.pages),
    PanelRoute("POST", "/batches", pages.begin, 201),
    PanelRoute("POST", "/batches/{identity}/write", pages.write),
    PanelRoute("DELETE", "/batches/{identity}", pages.end),
    PanelRoute("POST", "/race", race.race),
    PanelRoute("POST", "/beams", beams.beams),
    PanelRoute("POST", "/calculate", calculator.calculate),
    PanelRoute("GET", "/chat/model", chat.model),
    PanelRoute("GET", "/conversations", conversations.conversations),
    PanelRoute("GET", "/learn", learn.learn),
    PanelRoute("POST", "/check/{challenge}", learn.check),
    PanelRoute("POST", "/learn/score", learn.score),
    PanelRoute("POST", "/room/teacher", room.teach),
    PanelRoute("POST", "/room/pupil", room.join),
)


def find(method: str, path: str) -> tuple[PanelRoute, dict[str, str]]:
    """A request's route, and the parts of its path. Raises PanelError."""
    parts = path.split("/")
    for route in TABLE:
        names = route.path.split("/")
        pairs = list(zip(names, parts, strict=False))
        fits = all(name == part or name[:1] == "{" for name, part in pairs)
        if route.method == method and len(names) == len(parts) and fits:
            return route, {name[1:-1]: part for name, part in pairs if name[:1] == "{"}
    raise PanelError("missing", f"there is no {path[:200]} here")


def values_of(answer: object) -> Any:
    """A message as JSON's values; numbers that JSON lacks are null."""
    if is_dataclass(answer) and not isinstance(answer, type):
        return {one.name: values_of(getattr(answer, one.name)) for one in fields(answer)}
    if isinstance(answer, dict):
        return {name: values_of(one) for name, one in answer.items()}
    if isinstance(answer, list | tuple):
        return [values_of(one) for one in answer]
    return None if isinstance(answer, float) and not isfinite(answer) else answer
