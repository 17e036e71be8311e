"""Frames on the wire: binary and JSON say the same, to the bit, and the page's types are those of the schema."""

import json
import math
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scripts.test_scripts import script
from tests.trace.frames import from_json
from tokenwright.trace import schema, wire
from tokenwright.trace.frame_codec import NUMBERS, as_json, decode_weights, pack, unpack
from tokenwright.trace.schema import AttentionRow, Candidate, LayerTime, StepFrame

ROOT = Path(__file__).resolve().parents[2]
SINGLE = st.floats(width=32, allow_nan=False, allow_infinity=False)
BY_CODE = {
    "B": st.booleans(),
    "I": st.integers(0, 2**32 - 2),
    "Q": st.integers(0, 2**64 - 1),
    "f": SINGLE,
    "d": st.floats(allow_nan=False, allow_infinity=False),
}
OPTIONAL = {"token", "rank", "logprob", "sampled", "entropy", "uniform"}


def number(name):
    some = BY_CODE[NUMBERS[name].code]
    return st.none() | some if name in OPTIONAL else some


FRAMES = st.builds(
    StepFrame,
    **{name: number(name) for name in NUMBERS},
    layers=st.lists(st.builds(LayerTime, BY_CODE["I"], BY_CODE["I"]), max_size=4).map(tuple),
    candidates=st.lists(st.builds(Candidate, BY_CODE["I"], SINGLE, SINGLE), max_size=4).map(tuple),
    attention=st.none()
    | st.builds(AttentionRow, st.integers(0, 65535), st.integers(0, 65535), BY_CODE["I"], st.binary(max_size=50)),
    text=st.text(),
)


@given(FRAMES)
def test_a_frame_survives_the_wire_and_json(frame):
    assert unpack(pack(frame)) == frame
    assert from_json(json.loads(json.dumps(as_json(frame)))) == frame


@given(FRAMES)
def test_json_numbers_are_exact_for_a_reader_with_doubles(frame):
    for name, value in as_json(frame).items():
        if isinstance(value, int) and not isinstance(value, bool):
            assert int(float(value)) == value, name


def test_another_version_is_refused():
    frame = replace(example(), text="")
    data = bytes([schema.VERSION + 1]) + pack(frame)[1:]
    with pytest.raises(ValueError, match="has version"):
        unpack(data)


def example():
    numbers = dict.fromkeys(NUMBERS, 1) | {"cache": True, "logprob": -0.5, "uniform": 0.25}
    return StepFrame(
        **numbers,
        layers=(LayerTime(3, 4),),
        candidates=(Candidate(9, -0.5, 0.75),),
        attention=AttentionRow(1, 2, 0, bytes([255, 0])),
        text="é",
    )


def test_the_layout_is_what_the_page_reads():
    """Byte for byte, by hand: the page's decoder is generated and has no other witness here."""
    data = pack(example())
    codes = "".join(wire.code for wire in NUMBERS.values())
    size = struct.calcsize("<B" + codes)
    assert data[0] == schema.VERSION
    assert struct.unpack_from("<I", data, 1) == (1,)
    sections = data[size:]
    layers = struct.pack("<BIII", 1, 8, 3, 4)
    candidates = struct.pack("<BIIff", 2, 12, 9, -0.5, 0.75)
    attention = struct.pack("<BIHHI", 3, 10, 1, 2, 0) + bytes([255, 0])
    text = struct.pack("<BI", 4, 2) + "é".encode()
    assert sections == layers + candidates + attention + text


def test_the_bytes_of_a_long_texts_step_are_those_of_the_docs():
    """24 layers and 2,048 tokens, section by section: a number of heads adds nothing."""
    layers, tokens, text = 24, 2048, " wonderfully"
    frame = replace(
        example(),
        layers=(LayerTime(1, 1),) * layers,
        candidates=(Candidate(9, -0.5, 0.75),) * 20,
        attention=AttentionRow(1, 2, 0, bytes(tokens)),
        text=text,
    )
    sections = 4 * 5  # the kind and the length of each
    assert len(pack(frame)) == 146 + 8 * layers + 12 * 20 + tokens + 8 + len(text) + sections < 4100


def test_codes_lose_little_of_any_weight():
    for weight in [0.0, 1e-6, 1 / 2048, 0.01, 0.3, 0.999, 1.0]:
        code = round(255 * math.sqrt(weight))
        assert abs(decode_weights(bytes([code]))[0] - weight) <= 0.004


def test_a_flat_row_keeps_its_mass():
    code = round(255 * math.sqrt(1 / 2048))
    assert abs(sum(decode_weights(bytes([code] * 2048))) - 1) < 0.14, "the worst case: all are rounded alike"
    assert round(255 / 2048) == 0, "linear codes would lose it altogether"


def test_the_pages_types_are_generated_from_the_schema():
    made = script("typescript.py").files()
    kept = {path: (ROOT / path).read_text(encoding="utf-8") for path in made if (ROOT / path).exists()}
    assert made == kept, "run: python scripts/typescript.py"
    written = {path.relative_to(ROOT) for path in (ROOT / "web/src/schema").glob("*.ts")}
    assert written <= made.keys(), "a generated file's module is gone; delete the file"


def test_the_types_are_generated_without_torch():
    """From a checkout with nothing installed: only the sources are on the path."""
    watched = (
        "import sys; sys.path[:0] = ['scripts']; import typescript; sys.exit(sys.modules.get('torch') is not None)"
    )
    subprocess.run([sys.executable, "-c", watched], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": ROOT / "src"})


def test_every_number_says_where_it_comes_from():
    for name, number in NUMBERS.items():
        assert number.meaning, name
        assert number.source in wire.Source
