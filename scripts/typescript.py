"""Generates the page's types from the messages: `python scripts/typescript.py` writes them into web/src.

A module lists its dataclasses in `MESSAGES`, in an order in which each one comes after those that it has as fields or
in a module before it. Numbers declared with a `Wire` become a table of what each is, for the page's badges.
"""

import json
import re
import struct
from collections.abc import Iterable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tokenwright.explorer import room
from tokenwright.trace import rooms, schema
from tokenwright.trace.frame_codec import HEADER, NOTHING, NUMBERS
from tokenwright.trace.schema import MESSAGES, PARTS, VERSION, Half, StepFrame, Trace
from tokenwright.trace.wire import Source, Wire, wires

PANELS = "race times branches sampler block heads pages lab drafting beams calculator chat conversations learn"
TOPICS = (*(import_module(f"tokenwright.explorer.panels.{name}") for name in PANELS.split()), rooms, room)
WEB = Path("web", "src")

_READERS = {
    "B": "getUint8({at}) === 1",
    "I": "getUint32({at}, true)",
    "Q": "getBigUint64({at}, true)",
    "f": "getFloat32({at}, true)",
    "d": "getFloat64({at}, true)",
}


def files() -> dict[Path, str]:
    homes = {message.__name__: "../schema" for message in (*PARTS, *MESSAGES)}
    made = {WEB / "schema.ts": _core()}
    for topic in TOPICS:
        name = topic.__name__.rpartition(".")[2]
        made[WEB / "schema" / f"{name}.ts"] = _topic(topic, homes)
        homes |= {message.__name__: f"./{name}" for message in topic.MESSAGES}
    return made


def _opening(module: ModuleType) -> list[str]:
    return [f"// Generated from src/{module.__name__.replace('.', '/')}.py. Do not edit.", ""]


def _topic(topic: ModuleType, homes: dict[str, str]) -> str:
    body = [line for message in topic.MESSAGES for line in _interface(message)] + _tables(topic.MESSAGES)
    text = "\n".join(body)
    needed: dict[str, list[str]] = {}
    for name, home in (homes | {"About": "../schema", "Source": "../schema"}).items():
        if re.search(rf"\b{name}\b", text):
            needed.setdefault(home, []).append(name)
    imports = [f'import type {{ {", ".join(sorted(names))} }} from "{home}";' for home, names in needed.items()]
    return "\n".join([*_opening(topic), *imports, *([""] if imports else []), text])


def _core() -> str:
    lines = [
        *_opening(schema),
        f"export const VERSION = {VERSION};",
        "",
        f"export type Source = {' | '.join(json.dumps(source.value) for source in Source)};",
        "",
        *(line for message in (*PARTS, *MESSAGES) for line in _interface(message)),
        "export interface AttentionRow {",
        "  layer: number;",
        "  head: number;",
        "  argmax: number;",
        "  codes: Uint8Array; // round(255 sqrt(weight))",
        "}",
        "",
        "export interface StepFrame {",
        *(f"  {name}: {_number(name)}; // {_note(wire)}" for name, wire in NUMBERS.items()),
        "  layers: LayerTime[];",
        "  candidates: Candidate[];",
        "  attention: AttentionRow | null;",
        "  text: string;",
        "}",
        "",
        *_interface(Half),
        *_interface(Trace),
        "/** What a number is: where it comes from, its unit, a short name, and what it means. */",
        "export interface About {",
        "  source: Source;",
        "  unit: string;",
        "  label: string;",
        "  meaning: string;",
        "}",
        "",
        *_table("NUMBERS", NUMBERS),
        *_tables(MESSAGES),
        *_decoder(),
        "",
    ]
    return "\n".join(lines)


def _tables(messages: Iterable[type]) -> list[str]:
    """The tables of the messages that have numbers with a `Wire`: RACE_STEP of RaceStep."""
    found = [(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", message.__name__).upper(), wires(message)) for message in messages]
    return [line for name, its in found if its for line in _table(name, its)]


def _interface(kind: type) -> list[str]:
    hints = get_type_hints(kind)
    body = [f"  {field.name}: {_type(hints[field.name])};" for field in fields(kind)]
    return [f"export interface {kind.__name__} {{", *body, "}", ""]


def _type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(json.dumps(value) for value in get_args(hint))
    if get_origin(hint) is UnionType:
        return " | ".join(dict.fromkeys(_type(part) for part in get_args(hint)))
    if get_origin(hint) in (tuple, list):
        first, *rest = get_args(hint)
        if rest == [...] or get_origin(hint) is list:
            return f"({_type(first)})[]" if get_origin(first) in (UnionType, Literal) else f"{_type(first)}[]"
        return f"[{', '.join(_type(part) for part in (first, *rest))}]"
    plain = {int: "number", float: "number", str: "string", bool: "boolean", NoneType: "null"}
    return plain[hint] if hint in plain else str(hint.__name__)


def _number(name: str) -> str:
    hint, wire = get_args(get_type_hints(StepFrame, include_extras=True)[name])[0], NUMBERS[name]
    if wire.code == "Q":
        return "bigint"
    return _type(hint)


def _note(wire: Wire) -> str:
    return f"{wire.unit}; {wire.meaning}" if wire.unit else wire.meaning


def _table(name: str, its: dict[str, Wire]) -> list[str]:
    rows = (f"  {field}: {_about(wire)}," for field, wire in its.items())
    return [f"export const {name}: Record<string, About> = {{", *rows, "};", ""]


def _about(wire: Wire) -> str:
    parts = {"source": wire.source.value, "unit": wire.unit, "label": wire.label, "meaning": wire.meaning}
    return "{ " + ", ".join(f"{name}: {json.dumps(value)}" for name, value in parts.items()) + " }"


def _decoder() -> list[str]:
    reads, at = [], 1
    for name, wire in NUMBERS.items():
        read = "view." + _READERS[wire.code].format(at=at)
        optional = "null" in _number(name)
        reads.append(f"    {name}: {f'some({read})' if optional else read},")
        at += struct.calcsize("<" + wire.code)
    return _DECODER.format(reads="\n".join(reads), header=HEADER.size, nothing=NOTHING["I"], big=_bigs()).splitlines()


def _bigs() -> str:
    return ", ".join(json.dumps(name) for name, wire in NUMBERS.items() if wire.code == "Q")


_DECODER = """\
const some = (value: number): number | null => (value === {nothing} || Number.isNaN(value) ? null : value);

/** A frame from the wire. Throws for another version. */
export function decodeFrame(data: ArrayBuffer): StepFrame {{
  const view = new DataView(data);
  if (view.getUint8(0) !== VERSION) throw new Error(`The frame has version ${{view.getUint8(0)}}, not ${{VERSION}}.`);
  const frame: StepFrame = {{
{reads}
    layers: [],
    candidates: [],
    attention: null,
    text: "",
  }};
  for (let at = {header}; at < data.byteLength; ) {{
    const kind = view.getUint8(at);
    const length = view.getUint32(at + 1, true);
    at += 5;
    const end = at + length;
    if (kind === 1) {{
      for (let i = at; i < end; i += 8)
        frame.layers.push({{ attention_us: view.getUint32(i, true), mlp_us: view.getUint32(i + 4, true) }});
    }} else if (kind === 2) {{
      for (let i = at; i < end; i += 12)
        frame.candidates.push({{
          token: view.getUint32(i, true),
          logprob: view.getFloat32(i + 4, true),
          sampled: view.getFloat32(i + 8, true),
        }});
    }} else if (kind === 3) {{
      frame.attention = {{
        layer: view.getUint16(at, true),
        head: view.getUint16(at + 2, true),
        argmax: view.getUint32(at + 4, true),
        codes: new Uint8Array(data.slice(at + 8, end)),
      }};
    }} else if (kind === 4) {{
      frame.text = new TextDecoder().decode(new Uint8Array(data, at, length));
    }}
    at = end;
  }}
  return frame;
}}

const BIG = [{big}] as const;

/** A frame from JSON (a step of a trace file, or GET /runs/ID/steps/N). */
export function frameFromJson(values: Record<string, unknown>): StepFrame {{
  const frame = {{ ...values }} as unknown as StepFrame;
  for (const name of BIG) frame[name] = BigInt(values[name] as number | string);
  const row = values.attention as {{ codes: string }} | null;
  if (row) {{
    const codes = Uint8Array.from(atob(row.codes), (letter) => letter.charCodeAt(0));
    frame.attention = {{ ...(row as unknown as AttentionRow), codes }};
  }}
  return frame;
}}
"""


def main() -> None:
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
