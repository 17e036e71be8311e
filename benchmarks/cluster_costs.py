"""What a step costs: assumed, or read from a file that a fit on this machine or a table of others has written."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


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

    def save(self, path: Path, **more: float) -> None:
        path.write_text(json.dumps({**asdict(self), **more}, indent=1) + "\n", encoding="utf-8")


ASSUMED = Source(Costs(base=0.015, token=1 / 8000, sequence=0.0001), "assumed, for some 70 billion parameters")


def least_squares(counts: Array, seconds: Array, scale: Array) -> Array:
    """Costs whose sums by `counts` come nearest to the seconds, in parts of `scale`; none of them is negative."""
    sizes = counts.max(axis=0)  # costs differ by many powers of ten
    sizes[sizes == 0] = 1
    rows, found, used = counts / sizes / scale[:, None], np.zeros(len(sizes)), list(range(len(sizes)))
    while used:
        some = np.linalg.lstsq(rows[:, used], seconds / scale, rcond=None)[0]
        if (some >= 0).all():
            found[used] = some / sizes[used]
            break
        used.pop(int(some.argmin()))
    return found


def read_costs(path: Path) -> Source:
    """The costs in a file of `Source.save`."""
    said = json.loads(path.read_text(encoding="utf-8"))
    costs = {one.name: float(said["costs"][one.name]) for one in fields(Costs)}
    return Source(Costs(**costs), said["source"], said.get("memory"))
