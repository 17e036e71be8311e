"""Reads a frame's JSON back."""

import base64
from typing import Any

from tokenwright.trace.frame_codec import NUMBERS
from tokenwright.trace.schema import AttentionRow, Candidate, LayerTime, StepFrame


def from_json(values: dict[str, Any]) -> StepFrame:
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
