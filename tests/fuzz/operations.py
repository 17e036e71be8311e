"""Requests for every route of the server's apps, so a new route is fuzzed without a change here.

The routes, their parameters and the schemas of their bodies are read from the apps. A body follows its schema, and the
names of its fields choose the values (`HINTS`): a field called `pattern` gets patterns. Some requests are left valid,
so that they reach the engine; in others a few fields, the bytes of the body, the headers or the framing are odd.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from pydantic import BaseModel, TypeAdapter

from tests.fuzz import values
from tests.fuzz.values import Draw
from tokenwright.explorer.table import GIVEN, TABLE, PanelRoute

REFS = "#/components/schemas/"
PANELS = {(route.method, route.path): route for route in TABLE}
MOST_BODY = 16 * 2**20 + 100  # bytes: a little more than the server takes
HOST = "127.0.0.1:80"  # a name of this machine, whose port may be any
SLEEP = b""  # among the pieces of a request: a pause
Make = Callable[[Draw], Any]


def texts(draw: Draw) -> Any:
    return draw.choice((values.text(draw), draw.some(lambda one: values.text(one, 300), 3000), "Hello", [values.PLAIN]))


def form(draw: Draw) -> Any:
    found = values.schema(draw)
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": found}, "schema": found}
    return draw.choice((found, wrapped, wrapped, {"format": wrapped}, "json", {"type": "json_object"}))


# Names of fields; their hard values; their valid values, where those are not what the schema of the body says.
HINTS: tuple[tuple[str, Make, Make | None], ...] = (
    ("response_format|format|text_format|output_format|output_config|text", form, None),
    (".*schema|guided_json|parameters", values.schema, values.schema),
    (".*(pattern|regex)", values.pattern, values.pattern),
    (".*(grammar|ebnf)", values.grammar, values.grammar),
    (".*choice", lambda draw: draw.some(values.name, 2000), None),
    ("keep_alive|.*timeout.*|.*seconds|.*_ms", values.duration, lambda _: "5m"),
    ("messages", values.conversation, lambda _: [values.PLAIN]),
    ("input", lambda draw: draw.choice((values.conversation, texts))(draw), lambda _: "Hello"),
    ("prompt|content|query|text_1|text_2|suffix|system|instructions", texts, lambda _: "Hello"),
    ("documents|.*sequences|stop|.*breakers|samplers", lambda draw: draw.some(values.text, 500), lambda _: ["a"]),
    ("tools|functions", lambda draw: draw.some(values.tool, 400), None),
    (".*bias", values.biases, None),
    ("metadata|.*kwargs|options", values.tree, None),
    ("tokens|context|.*token_ids|prediction", lambda draw: draw.some(values.number, 20_000), lambda _: [5, 6]),
    ("model|name|source", values.text, lambda draw: draw.choice(("tiny", "tiny", "tiny", "twin"))),
    ("destination", values.text, lambda draw: f"copy{draw.randrange(9)}"),
    ("m.*_tokens|n_predict|num_predict|n|best_of|beams", values.number, lambda draw: draw.choice((1, 2, 4, 8))),
    ("images?", lambda draw: ["A" * draw.size(10**6)], None),
)


@dataclass(frozen=True)
class Asked:
    """A request as it is sent. pieces: how many its body is sent in. pause_s: between them. leave_s: after so many
    seconds the client leaves. said: the Content-Length, where it is wrong. replica: the body is for a replica's socket.
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    chunked: bool = False
    pieces: int = 1
    pause_s: float = 0.0
    leave_s: float | None = None
    said: int | None = None
    version: str = "1.1"
    replica: bool = False

    def parts(self) -> list[bytes]:
        """The bytes to send, with SLEEP where the client pauses."""
        step = max(1, -(-len(self.body) // self.pieces))
        body = [self.body[at : at + step] for at in range(0, len(self.body), step)]
        if self.chunked:
            body = [b"%x\r\n%s\r\n" % (len(one), one) for one in body] + [b"0\r\n\r\n"]
        if not self.replica:
            length = len(self.body) if self.said is None else self.said
            framing = ("Transfer-Encoding", "chunked") if self.chunked else ("Content-Length", str(length))
            headers = (*self.headers, *([framing] if self.body or self.said is not None else []))
            lines = (f"{self.method} {self.target} HTTP/{self.version}", *(f"{a}: {b}" for a, b in headers), "", "")
            body.insert(0, "\r\n".join(lines).encode("utf-8", "surrogatepass"))
        return [part for one in body for part in (one, *([SLEEP] if self.pause_s else []))]

    def dumped(self) -> dict[str, Any]:
        return self.__dict__ | {"body": base64.b64encode(self.body).decode()}

    @classmethod
    def loaded(cls, found: dict[str, Any]) -> "Asked":
        headers = tuple((one, two) for one, two in found["headers"])
        return cls(**found | {"body": base64.b64decode(found["body"]), "headers": headers})


@dataclass(frozen=True)
class Operation:
    """A route. parameters: of its query; those of its path are in braces. schema: of its body."""

    method: str
    path: str
    parameters: tuple[str, ...] = ()
    schema: Any = None


@dataclass
class Operations:
    """All operations of some apps, and the schemas that their bodies refer to. ids: seen in replies, for later ones."""

    every: list[Operation] = field(default_factory=list)
    schemas: dict[str, Any] = field(default_factory=dict)
    ids: list[str] = field(default_factory=lambda: ["none", "1"])

    def add(self, app: FastAPI) -> None:
        """Add the routes of an app, those outside its published document as well."""
        routes = [route for route in app.routes if isinstance(route, APIRoute | APIWebSocketRoute)]
        for route in (one for one in routes if isinstance(one, APIRoute)):
            route.include_in_schema = True
        app.openapi_schema = None
        document = app.openapi()
        self.schemas |= document["components"]["schemas"]
        for route in routes:
            for method in getattr(route, "methods", ("WEBSOCKET",)):
                about = document["paths"].get(route.path_format, {}).get(method.lower(), {})
                names = tuple(one["name"] for one in about.get("parameters", ()) if one["in"] == "query")
                found = Operation(method, route.path_format, names, self._schema(route, about))
                if (panel := PANELS.get((method, route.path_format))) is not None:
                    asked = (one for one in panel.parameters if one not in ("body", *GIVEN) and one not in panel.path)
                    found = replace(found, parameters=tuple(asked), schema=self._panel(panel))
                self.every += [found] if found not in self.every else []

    def _schema(self, route: APIRoute | APIWebSocketRoute, about: Mapping[str, Any]) -> Any:
        if "requestBody" in about:
            return about["requestBody"]["content"]["application/json"]["schema"]
        for one in get_type_hints(route.endpoint).values():
            if isinstance(one, type) and issubclass(one, BaseModel):
                found = TypeAdapter(one).json_schema(ref_template=REFS + "{model}")
                self.schemas |= found.pop("$defs", {})
                return found
        return None

    def _panel(self, panel: PanelRoute) -> Any:
        """The schema of what a panel of the page sends."""
        if "body" not in panel.parameters:
            return None
        kind: Any = panel.parameters["body"].annotation
        found = TypeAdapter(kind).json_schema(ref_template=REFS + "{model}")
        self.schemas |= found.pop("$defs", {})
        return found

    def ask(self, draw: Draw, keys: Sequence[str], without: str) -> Asked:
        """A request to one of the operations. without: a pattern of the fields whose hard values are left out."""
        chosen = draw.choice(self.every)
        maker = Maker(draw, self.schemas, self.ids, without)
        path = re.sub(r"\{\w+\}", lambda _: maker.parameter(), chosen.path)
        query = "&".join(f"{one}={maker.parameter()}" for one in chosen.parameters)
        headers = [("Host", HOST), ("Content-Type", "application/json"), ("Connection", "close")]
        headers += [("Authorization", f"Bearer {one}") for one in keys if draw.chance(0.95)]
        body = b"" if chosen.schema is None else maker.body(chosen.schema)[:MOST_BODY]
        asked = Asked(chosen.method, path + (f"?{query}" if query else ""), tuple(headers), body)
        if chosen.method == "WEBSOCKET":
            key = (("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", "YQ" * 11 + "=="))
            headers = [*headers[:2], ("Connection", "Upgrade"), ("Upgrade", "websocket"), *key]
            asked = replace(asked, method="GET", headers=tuple(headers), leave_s=0.2)
        return transported(draw, asked) if draw.chance(0.3) else asked


class Maker:
    """Makes the parameters and the body of one request. wild: the share of values that are hard or odd."""

    def __init__(self, draw: Draw, schemas: Mapping[str, Any], ids: Sequence[str], without: str) -> None:
        self.draw, self.schemas, self.ids, self.without = draw, schemas, ids, re.compile(without or "$^")
        self.wild = draw.choice((0.0, 0.05, 0.15, 0.15, 0.5))
        self.room = 400  # values that the body may still have

    def parameter(self) -> str:
        draw = self.draw
        found = draw.choice((draw.choice(self.ids), draw.randrange(4), values.number(draw), values.text(draw, 2000)))
        return quote(str(found), safe="", errors="surrogatepass")

    def body(self, schema: Any) -> bytes:
        """The bytes of a body, of which one in eight is no JSON any more."""
        data = json.dumps(values.tree(self.draw) if self.draw.chance(0.02) else self.made(schema)).encode()
        return garbled(self.draw, data) if self.draw.chance(0.12) else data

    def made(self, schema: Any, name: str = "") -> Any:
        """A value of a schema, or what its field's name suggests."""
        draw, self.room = self.draw, self.room - 1
        if "$ref" in schema:
            schema = self.schemas[schema["$ref"].removeprefix(REFS)]
        hard, valid = next(((one, two) for names, one, two in HINTS if re.fullmatch(names, name)), (None, None))
        if not self.without.fullmatch(name):
            if draw.chance(self.wild):
                return (values.tree if hard is None or draw.chance(0.1) else hard)(draw)
            if valid is not None:
                return valid(draw)
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                some = [one for one in schema[key] if one.get("type") != "null"] or schema[key]
                return self.made(draw.choice(some), name)
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else draw.choice(schema["enum"])
        return self._typed(schema, name)

    def _typed(self, schema: Any, name: str) -> Any:
        draw, kind, most = self.draw, schema.get("type"), 3 if self.room > 0 else 0
        if kind == "object" or "properties" in schema:
            known = schema.get("properties", {})
            more = draw.sample(sorted(known), min(len(known), draw.size(10))) if most else []
            chosen = dict.fromkeys([*schema.get("required", ()), *more, *({"model"} & known.keys())])
            odd = draw.chance(self.wild) or isinstance(schema.get("additionalProperties"), dict)
            return {values.name(draw): 1 for _ in "a" if odd} | {
                one: self.made(known.get(one, {}), one) for one in chosen
            }
        if kind == "array":
            size = max(schema.get("minItems", 0), draw.randrange(1 + most))
            return [self.made(schema.get("items", {}), "" if name.endswith("s") else name) for _ in range(size)]
        if kind in ("integer", "number"):
            return draw.choice((schema.get("minimum", 0), schema.get("maximum", 4), 1, 0.5 if kind == "number" else 2))
        named = draw.choice(self.ids) if name.endswith("id") else "Hello"
        return draw.chance(0.5) if kind == "boolean" else named if kind == "string" else values.tree(draw)


def garbled(draw: Draw, data: bytes) -> bytes:
    """A body that is cut, has a byte or a number changed, a key twice, or is nested without an end."""
    at = draw.randrange(len(data) + 1)
    odd = draw.choice((b"1e400", b"-0", b"1E-999", b"01", b"0x1", b"9" * draw.size(50_000), b"-", b"NaN"))
    numbers = re.sub(rb"(?<=[ \[:,])-?\d+(\.\d+)?(?=[,\]}])", lambda _: odd, data, count=3)
    nested = draw.choice((b"[", b'{"a":', b"[[],", b'"\\ud800')) * draw.size(100_000)
    changed = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    twice = b'{"model": "tiny", ' + data[1:]
    return draw.choice(
        (data[:at], changed, data[:at] + data[at // 2 :], twice, numbers, nested, data.decode().encode("utf-16"))
    )


def transported(draw: Draw, asked: Asked) -> Asked:
    """The same request with odd headers, another framing, a wrong length, pauses, or a client that leaves."""
    value = re.sub(r"[\r\n\0]", "", values.text(draw, 40_000))
    odd = (
        *(("Content-Encoding", "gzip"), ("Expect", "100-continue"), ("Origin", "http://foreign.example")),
        *(("X-Request-Id", value), ("Upgrade", "h2c"), ("Cookie", "a=b; " * draw.size(3000))),
        ("Content-Type", draw.choice(("text/plain", "application/json; charset=utf-16", "multipart/form-data"))),
        *(("Range", "bytes=" + "0-1," * draw.size(3000)), ("Accept-Encoding", "gzip, " * draw.size(2000))),
        ("Authorization", draw.choice(("Basic", "Bearer")) + " " + value[:3000]),
        (re.sub(r"[^a-z]", "-", values.name(draw)[:200]), "x"),
    )
    more = draw.sample(odd, draw.randrange(3)) + ([("X-More", "1")] * draw.size(300) if draw.chance(0.1) else [])
    pieces = 1 + draw.size(min(300, len(asked.body)))
    said = draw.choice((0, len(asked.body) // 2, len(asked.body) + 9, 10**12)) if draw.chance(0.15) else None
    leaves = said is not None or draw.chance(0.3)
    return replace(
        asked,
        method=draw.choice(("PUT", "HEAD", "OPTIONS", "A" * 50)) if draw.chance(0.1) else asked.method,
        headers=(*asked.headers, *more),
        chunked=bool(asked.body) and draw.chance(0.3),
        pieces=pieces,
        pause_s=draw.choice((0.0, 0.0, 0.5 / pieces)),
        leave_s=draw.choice((0.0, 0.02, 0.1, 0.3)) if leaves else asked.leave_s,
        said=said,
        version=draw.choice(("1.1", "1.1", "1.0")),
    )


def frames(draw: Draw) -> Asked:
    """Messages for a replica's socket, some with a value changed, in frames of right and wrong lengths."""
    from tokenwright.cluster.replica_messages import Begin, Ping, Tell, TextOrder, framed
    from tokenwright.engine import SamplingParams

    order = TextOrder((5, 6), (), SamplingParams(max_tokens=4))
    some = [
        Begin(draw.randrange(3), order, draw.chance(0.1)),
        *(Tell(1, what) for what in ("cancel", "pause", "resume")),
        Ping(),
    ]
    data = b""
    for one in draw.choices(some, k=draw.randrange(1, 5)):
        message = json.loads(framed([one])[4:])
        if draw.chance(0.6):
            change(draw, message)
        frame = json.dumps(message).encode()
        frame = frame[: draw.randrange(len(frame))] if draw.chance(0.1) else frame
        length = draw.choice((0, 2**32 - 1, len(frame) + 5)) if draw.chance(0.1) else len(frame)
        data += b"" if b'"End"' in frame else length.to_bytes(4, "little") + frame  # End is an order to end the process
    return Asked("", "replica", body=data, pieces=1 + draw.size(20), leave_s=0.2, replica=True)


def change(draw: Draw, value: Any) -> None:
    """Replace a value somewhere in a JSON value."""
    hard = (values.tree, values.number, values.pattern, values.grammar, lambda one: json.dumps(values.schema(one)))
    for key in draw.sample(list(value) if isinstance(value, dict) else range(len(value)), min(1, len(value))):
        if isinstance(value[key], dict | list) and value[key] and draw.chance(0.8):
            change(draw, value[key])
        else:
            value[key] = draw.choice(hard)(draw)


def operations_of(kind: str) -> Operations:
    """The routes of a server of this kind."""
    from tokenwright.serve.app import make_app
    from tokenwright.serve.many import make_many_app
    from tokenwright.serve.service.model_host import ModelHost
    from tokenwright.serve.transport.guard import Policy

    found, never = Operations(), lambda _: None
    found.add(make_app(ModelHost("tiny", never), ["x"], None))  # type: ignore[arg-type,return-value]
    if kind == "many":
        found.add(make_many_app([], never, 1, Policy.of(None), None))  # type: ignore[arg-type,return-value]
    return found
