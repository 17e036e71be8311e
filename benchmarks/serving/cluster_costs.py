"""The cost of a step: assumed, or read from a JSON file."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: always, for each token of a prompt, and for each sequence that writes.

    key, prompt_key: for each cached token that is read by a sequence that writes, and by a token of a prompt.
    """

    base: float
    token: float
    sequence: float
    key: float = 0.0
    prompt_key: float = 0.0


@dataclass(frozen=True)
class Source:
    """Costs and where they are from. memory: tokens that a replica's cache has memory for, if that is known."""

    costs: Costs
    source: str
    memory: int | None = None


ASSUMED = Source(Costs(base=0.015, token=1 / 8000, sequence=0.0001), "assumed, for some 70 billion parameters")


def read_costs(path: Path) -> Source:
    """The costs in a JSON file: {"costs": {"base": s, "token": s, ...}, "source": text, "memory": tokens or null}."""
    said = json.loads(path.read_text(encoding="utf-8"))
    costs = {one.name: float(said["costs"][one.name]) for one in fields(Costs)}
    return Source(Costs(**costs), said["source"], said.get("memory"))
