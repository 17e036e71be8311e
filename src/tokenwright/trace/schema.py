"""What a run tells about itself: the frame of a step and the messages around it, declared once.

A frame goes over the wire in little-endian binary (`pack`, `unpack`), and as JSON with the same names (`as_json`,
`from_json`). The page's types and its decoder are generated from this file: `python src/tokenwright/trace/schema.py`
prints `web/src/schema.ts`. It imports the standard library alone, so that this works anywhere.

    header     the numbers of `StepFrame` in the order of their declaration, without padding
    sections   (kind u8, length u32, payload) for each part that is there

Attention weights w are coded as round(255 sqrt(w)): linear codes would lose the many small ones (a flat row over
2,048 tokens has none above 1/255); the square root loses at most 0.0039 of any weight.
"""

import base64
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

VERSION = 1
EXACT = 2**53  # whole numbers beyond it are strings in JSON
NOTHING = {"I": 0xFFFFFFFF, "f": math.nan, "d": math.nan}  # stands for None in the header


class Source(StrEnum):
    """Where a number comes from. The page shows it as a badge."""

    MEASURED = "measured"  # by the monotonic clock of the engine's process
    COUNTED = "counted"  # by the engine, where the work is done
    DERIVED = "derived"  # by a formula, from shapes alone
    GIVEN = "given"  # a name or a choice


@dataclass(frozen=True, slots=True)
class Wire:
    """How one number of the header travels, what it is, and in which unit."""

    code: Literal["B", "I", "Q", "f", "d"]  # as in `struct`
    source: Source
    unit: str
    label: str  # a short name for people
    meaning: str


_M, _C, _D, _G = Source.MEASURED, Source.COUNTED, Source.DERIVED, Source.GIVEN


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the most probable next tokens."""

    token: int
    logprob: float  # the model's, natural logarithm, over the whole vocabulary at temperature 1
    sampled: float  # its probability after the sampler; 0: the sampler had cut it


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """What one head of one layer read to choose a token: a weight for each position up to the row's own."""

    layer: int
    head: int
    argmax: int  # the position of the largest weight; codes may tie
    codes: bytes  # round(255 sqrt(weight)) for positions 0, 1, ...


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Microseconds of one layer's two halves."""

    attention_us: int
    mlp_us: int


@dataclass(frozen=True, slots=True)
class StepFrame:
    """One step of the engine, as far as one run is concerned."""

    step: Annotated[int, Wire("I", _C, "", "step", "number of this step in the run, from 0")]
    start: Annotated[int, Wire("I", _C, "tokens", "first position computed", "first position that was computed")]
    length: Annotated[int, Wire("I", _C, "tokens", "tokens computed", "tokens sent through the layers")]
    recomputed: Annotated[int, Wire("I", _C, "tokens", "computed again", "of these, such as had been computed before")]
    seq_len: Annotated[
        int, Wire("I", _C, "tokens", "length of the text", "tokens of the text after this step, prompt included")
    ]
    layer_tokens: Annotated[int, Wire("Q", _C, "", "layer-tokens", "tokens times layers that they went through")]
    flops: Annotated[
        int, Wire("Q", _C, "FLOP", "FLOPs", "of the matrix products that ran, the hidden half of a chunk included")
    ]
    flops_derived: Annotated[
        int, Wire("Q", _D, "FLOP", "FLOPs by formula", "2 (P_b n + P_lm) + sum of A(t): what the step must compute")
    ]
    weight_bytes: Annotated[
        int, Wire("Q", _C, "B", "weights read", "weights read by matrix products, for the whole batch")
    ]
    kv_read: Annotated[int, Wire("Q", _C, "B", "K and V read", "K and V read by attention")]
    kv_written: Annotated[int, Wire("Q", _C, "B", "K and V written", "K and V stored")]
    kv_resident: Annotated[
        int, Wire("Q", _C, "B", "K and V kept", "for the next step; without the cache only between the parts of a text")
    ]
    kv_allocated: Annotated[int, Wire("Q", _C, "B", "pages in use", "pages in use, times their size")]
    began_us: Annotated[
        int, Wire("Q", _M, "us", "began after", "from the acceptance of the run to the begin of this step")
    ]
    step_us: Annotated[int, Wire("I", _M, "us", "time of the step", "the whole step, scheduling included")]
    attention_us: Annotated[int, Wire("I", _M, "us", "time in attention", "the attention halves of all layers")]
    mlp_us: Annotated[int, Wire("I", _M, "us", "time in the MLPs", "the MLP halves of all layers")]
    head_us: Annotated[int, Wire("I", _M, "us", "time in the LM head", "final norm and language-model head")]
    sampling_us: Annotated[int, Wire("I", _M, "us", "time for choosing the token", "choosing the token")]
    recording_us: Annotated[
        int, Wire("I", _M, "us", "time for recording", "the attention row and the candidates; not part of the step")
    ]
    token: Annotated[
        int | None, Wire("I", _G, "", "id of the token", "the id that was chosen; none while a prompt is read in parts")
    ]
    rank: Annotated[int | None, Wire("I", _C, "", "rank", "how many ids were more probable than the one chosen")]
    logprob: Annotated[float | None, Wire("f", _C, "nat", "log p", "of the token, by the model, at temperature 1")]
    sampled: Annotated[
        float | None, Wire("f", _C, "", "p after the sampler", "probability of the token after the sampler")
    ]
    entropy: Annotated[float | None, Wire("f", _C, "bit", "entropy", "of the model's distribution at temperature 1")]
    uniform: Annotated[
        float | None, Wire("d", _C, "", "random number", "the random number that was drawn; none when greedy")
    ]
    cache: Annotated[bool, Wire("B", _G, "", "KV cache", "whether this step used and kept the KV cache")]
    layers: tuple[LayerTime, ...]
    candidates: tuple[Candidate, ...]  # the most probable first
    attention: AttentionRow | None  # none: no row was asked for, or it was dropped for a slow reader
    text: str  # what can be shown now; a character cut by a token border is held back


def _wires(kind: type) -> dict[str, Wire]:
    """The annotated fields of a message, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: get_args(hint)[1] for name, hint in hints.items() if get_origin(hint) is Annotated}


NUMBERS = _wires(StepFrame)
HEADER = struct.Struct("<B" + "".join(wire.code for wire in NUMBERS.values()))
SECTION = struct.Struct("<BI")
LAYERS, CANDIDATES, ATTENTION, TEXT = 1, 2, 3, 4
LAYER, CANDIDATE, ROW = struct.Struct("<II"), struct.Struct("<Iff"), struct.Struct("<HHI")


def decode_weights(codes: bytes) -> list[float]:
    """The weights that codes stand for."""
    return [(code / 255) ** 2 for code in codes]


def pack(frame: StepFrame) -> bytes:
    """A frame in binary."""
    values = [getattr(frame, name) for name in NUMBERS]
    numbers = [NOTHING[w.code] if v is None else v for v, w in zip(values, NUMBERS.values(), strict=True)]
    parts = [HEADER.pack(VERSION, *numbers)]
    for kind, payload in _sections(frame):
        parts += [SECTION.pack(kind, len(payload)), payload]
    return b"".join(parts)


def _sections(frame: StepFrame) -> Iterator[tuple[int, bytes]]:
    yield LAYERS, b"".join(LAYER.pack(layer.attention_us, layer.mlp_us) for layer in frame.layers)
    yield CANDIDATES, b"".join(CANDIDATE.pack(c.token, c.logprob, c.sampled) for c in frame.candidates)
    if (row := frame.attention) is not None:
        yield ATTENTION, ROW.pack(row.layer, row.head, row.argmax) + row.codes
    if frame.text:
        yield TEXT, frame.text.encode()


def unpack(data: bytes) -> StepFrame:
    """The frame of `pack`. Raises ValueError for another version."""
    version, *numbers = HEADER.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"the frame has version {version}; this program reads version {VERSION}")
    parts: dict[str, Any] = {
        name: None if _is_nothing(number, wire.code) else number
        for (name, wire), number in zip(NUMBERS.items(), numbers, strict=True)
    }
    parts |= {"cache": bool(parts["cache"]), "layers": (), "candidates": (), "attention": None, "text": ""}
    at = HEADER.size
    while at < len(data):
        kind, length = SECTION.unpack_from(data, at)
        at += SECTION.size
        payload = data[at : at + length]
        at += length
        match kind:
            case 1:
                parts["layers"] = tuple(LayerTime(*pair) for pair in LAYER.iter_unpack(payload))
            case 2:
                parts["candidates"] = tuple(Candidate(*three) for three in CANDIDATE.iter_unpack(payload))
            case 3:
                layer, head, argmax = ROW.unpack_from(payload)
                parts["attention"] = AttentionRow(layer, head, argmax, payload[ROW.size :])
            case 4:
                parts["text"] = payload.decode()
    return StepFrame(**parts)


def _is_nothing(number: float, code: str) -> bool:
    return code in NOTHING and (number == NOTHING[code] or number != number)


def as_json(frame: StepFrame) -> dict[str, Any]:
    """A frame as JSON values, as exact as in binary: whole numbers beyond 2^53 are strings, codes are base64."""
    values = asdict(unpack(pack(frame)))  # through binary: fp32 fields say what the wire says
    for name, wire in NUMBERS.items():
        if wire.code == "Q" and values[name] > EXACT:
            values[name] = str(values[name])
    if frame.attention is not None:
        values["attention"]["codes"] = base64.b64encode(frame.attention.codes).decode()
    return values


def from_json(values: dict[str, Any]) -> StepFrame:
    """The frame of `as_json`."""
    row = values["attention"]
    whole = {name: int(values[name]) for name, wire in NUMBERS.items() if wire.code == "Q"}
    return StepFrame(
        **values
        | whole
        | {
            "layers": tuple(LayerTime(**layer) for layer in values["layers"]),
            "candidates": tuple(Candidate(**candidate) for candidate in values["candidates"]),
            "attention": row and AttentionRow(**row | {"codes": base64.b64decode(row["codes"])}),
        }
    )


# The messages around the frames, as JSON.


@dataclass(frozen=True, slots=True)
class Loading:
    """GET /status: how far the model is. It is asked again until `phase` is ready or failed."""

    phase: Literal["loading", "ready", "failed"]
    done: int  # bytes of weights read
    total: int  # bytes in all; 0: not known yet
    message: str  # of a failure, what to do about it


@dataclass(frozen=True, slots=True)
class ModelCard:
    """GET /model: everything that the page's formulas need."""

    name: str
    version: str  # of Tokenwright
    device: str
    dtype: str
    layers: int  # L
    width: int  # d
    heads: int  # H
    kv_heads: int  # G
    head_size: int  # D
    vocab_size: int  # V
    context: int  # most tokens of a text
    windows: tuple[int | None, ...]  # the attention window of each layer in tokens; null: full
    block_weights: int  # P_b: weights of all matrix products in the layers
    head_weights: int  # P_lm: width x vocabulary, also where it is tied
    weight_bytes: int  # of all weights in memory, as they are packed there
    kv_bytes_per_token: int
    page_size: int  # tokens
    pages: int  # of the whole pool
    eos_ids: tuple[int, ...]
    temperature: float  # what the checkpoint suggests
    top_k: int
    top_p: float


@dataclass(frozen=True, slots=True)
class TokenCard:
    """A token for people: `text` is what it looks like, a cut character as <0xE2>."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True, slots=True)
class RunCard:
    """POST /runs and the first message of the stream: what is being run. Enough to run it again."""

    run: str
    model: str
    prompt: str  # as text
    tokens: tuple[TokenCard, ...]  # of the prompt
    written: tuple[TokenCard, ...]  # tokens that were already there when the run began, after the prompt
    written_text: str
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    max_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    first_step: int
    watched: tuple[int, int]  # layer and head of the attention row that comes with each frame
    kind: Literal["run"] = "run"


@dataclass(frozen=True, slots=True)
class Summary:
    """A finished run in figures. Layer-tokens are tokens times layers that they went through.

    With the cache, N tokens of prompt and T written ones take N + T - 1 tokens through the layers; without it, the sum
    of t for t = N .. N + T - 1.
    """

    written: Annotated[int, Wire("Q", _C, "tokens", "written", "tokens that the model wrote")]
    layer_tokens: Annotated[int, Wire("Q", _C, "", "this run", "layer-tokens of this run")]
    cached: Annotated[int, Wire("Q", _D, "", "with the cache", "layers x (N + T - 1): each token is computed once")]
    naive: Annotated[
        int, Wire("Q", _D, "", "without", "layers x sum of t for t = N .. N + T - 1: the whole text at every step")
    ]
    times: Annotated[float, Wire("d", _D, "times", "times", "layer-tokens without the cache, divided by those with it")]
    reused: Annotated[
        int,
        Wire("Q", _D, "", "reused", "layer-tokens without the cache, minus those of this run: their K and V were kept"),
    ]
    prefix: Annotated[int, Wire("Q", _C, "tokens", "prefix", "tokens of the prompt found in the cache at the start")]
    ttft_us: Annotated[
        int,
        Wire("Q", _M, "us", "first token after", "engine time up to the first token; waiting for a viewer excluded"),
    ]
    engine_us: Annotated[int, Wire("Q", _M, "us", "engine time", "all steps; waiting between them excluded")]
    tokens_per_s: Annotated[
        float | None, Wire("d", _M, "tok/s", "speed", "tokens after the first, divided by the time of their steps")
    ]


@dataclass(frozen=True, slots=True)
class RunState:
    """What the run is doing. Sent whenever it changes."""

    state: Literal["paused", "running", "done", "failed", "expired"]
    steps: int  # frames so far, from 0
    cache: bool
    pace: float | None  # tokens per second; null: as fast as the engine
    lease_s: float | None  # seconds that the engine keeps its pages while paused
    throttled: bool  # the reader is behind: attention rows are left out
    reason: str | None  # eos, stop, length, context, aborted
    message: str  # of a failure
    watched: tuple[int, int]
    summary: Summary | None  # of a run that is done and wrote a token
    kind: Literal["state"] = "state"


@dataclass(frozen=True, slots=True)
class HeadMasses:
    """GET /runs/ID/heads: what every head did at a step, by its whole row. Lists go by layer, then by head."""

    step: int
    sink: tuple[float, ...]  # weight of the first token
    local: tuple[float, ...]  # weight of the last eight positions, the row's own included
    entropy: tuple[float, ...]  # of the row in bits, divided by that of an even one: 0 one token, 1 all alike
    kind: Literal["heads"] = "heads"


@dataclass(frozen=True, slots=True)
class Labels:
    """The looks of tokens that frames name; each is sent once, before the frame that needs it."""

    tokens: tuple[TokenCard, ...]
    kind: Literal["labels"] = "labels"


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole run in a file: trace.json."""

    format: Literal["tokenwright-trace"]
    version: int
    model: ModelCard
    run: RunCard
    state: RunState
    labels: tuple[TokenCard, ...]
    steps: tuple[StepFrame, ...]


MESSAGES = (Loading, ModelCard, TokenCard, RunCard, Summary, RunState, HeadMasses, Labels)
PARTS = (Candidate, LayerTime)
_READERS = {
    "B": "getUint8({at}) === 1",
    "I": "getUint32({at}, true)",
    "Q": "getBigUint64({at}, true)",
    "f": "getFloat32({at}, true)",
    "d": "getFloat64({at}, true)",
}


def typescript() -> str:
    """The page's side of this file: types, where each number comes from, and the decoder."""
    lines = ["// Generated by src/tokenwright/trace/schema.py. Do not edit.", ""]
    lines += [f"export const VERSION = {VERSION};", ""]
    lines += [f"export type Source = {' | '.join(json.dumps(source.value) for source in Source)};", ""]
    for message in (*PARTS, *MESSAGES):
        lines += _interface(message)
    lines += [
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
        "export interface Trace {",
        '  format: "tokenwright-trace";',
        "  version: number;",
        "  model: ModelCard;",
        "  run: RunCard;",
        "  state: RunState;",
        "  labels: TokenCard[];",
        "  steps: StepFrame[];",
        "}",
        "",
        "/** What a number is: where it comes from, its unit, a short name, and what it means. */",
        "export interface About {",
        "  source: Source;",
        "  unit: string;",
        "  label: string;",
        "  meaning: string;",
        "}",
        "",
        *_table("NUMBERS", NUMBERS),
        *_table("SUMMARY", _wires(Summary)),
        *_decoder(),
    ]
    return "\n".join(lines)


def _interface(kind: type) -> list[str]:
    hints = get_type_hints(kind)
    body = [f"  {field.name}: {_type(hints[field.name])};" for field in fields(kind)]
    return [f"export interface {kind.__name__} {{", *body, "}", ""]


def _type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(json.dumps(value) for value in get_args(hint))
    if get_origin(hint) is UnionType:
        return " | ".join(_type(part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        first, *rest = get_args(hint)
        if rest == [...]:
            return f"({_type(first)})[]" if get_origin(first) is UnionType else f"{_type(first)}[]"
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


def _table(name: str, wires: dict[str, Wire]) -> list[str]:
    rows = (f"  {field}: {_about(wire)}," for field, wire in wires.items())
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


if __name__ == "__main__":
    print(typescript())
