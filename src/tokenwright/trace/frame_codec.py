"""Encodes frames as little-endian binary (`pack`, `unpack`), and as JSON with the same names (`as_json`).

    header     the numbers of `StepFrame` in the order of their declaration, without padding
    sections   (kind u8, length u32, payload) for each part that is not None

Attention weights w are coded as round(255 sqrt(w)), within 0.0039; linear codes would lose the many small ones.
"""

import base64
import math
import struct
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tokenwright.trace.schema import VERSION, AttentionRow, Candidate, LayerTime, StepFrame
from tokenwright.trace.wire import wires

EXACT = 2**53  # beyond it whole numbers are strings in JSON
NOTHING = {"I": 0xFFFFFFFF, "f": math.nan, "d": math.nan}  # stands for None in the header
NUMBERS = wires(StepFrame)
HEADER = struct.Struct("<B" + "".join(wire.code for wire in NUMBERS.values()))
SECTION = struct.Struct("<BI")
LAYERS, CANDIDATES, ATTENTION, TEXT = 1, 2, 3, 4
LAYER, CANDIDATE, ROW = struct.Struct("<II"), struct.Struct("<Iff"), struct.Struct("<HHI")


def decode_weights(codes: bytes) -> list[float]:
    return [(code / 255) ** 2 for code in codes]


def pack(frame: StepFrame) -> bytes:
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
    """The frame of packed data. Raises ValueError for another version."""
    version, *numbers = HEADER.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"the frame has version {version}; this program reads version {VERSION}")
    parts: dict[str, Any] = {
        name: None if (wire.code in NOTHING and (number == NOTHING[wire.code] or number != number)) else number
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


def as_json(frame: StepFrame) -> dict[str, Any]:
    """The frame as JSON; whole numbers beyond 2^53 are strings, codes are base64."""
    values = asdict(unpack(pack(frame)))  # through binary, so that fp32 fields have the same values
    for name, wire in NUMBERS.items():
        if wire.code == "Q" and values[name] > EXACT:
            values[name] = str(values[name])
    if frame.attention is not None:
        values["attention"]["codes"] = base64.b64encode(frame.attention.codes).decode()
    return values


def named_ids(frame: StepFrame) -> list[int]:
    return [candidate.token for candidate in frame.candidates]
