"""Facts of one observed step: times, counts, and the attention of one head at each watched row."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenwright.arrays import Floats
from tokenwright.backends.device import Device, accelerator_of

CANDIDATES = 20  # how many of the most probable next tokens are reported

Clock = Callable[[], float]  # seconds


def device_clock(device: Device) -> Clock:
    """A monotonic clock in seconds that waits for the device's queued work."""
    if device.type == "cpu":
        return time.perf_counter
    waiting = accelerator_of(device)

    def now() -> float:
        waiting.wait()
        return time.perf_counter()

    return now


@dataclass(slots=True)
class Watched:
    """A watched row of a batch, with one head of one layer; a backend fills in the other fields.

    weights: fp32 [position + 1], 0 at masked positions; None if it failed. highest: CANDIDATES ids. entropy: in bits.
    """

    layer: int
    head: int
    row: int
    weights: Floats | None = None
    highest: Sequence[int] = ()
    entropy: float | None = None


@dataclass(slots=True)
class Observed:
    """The facts of one forward pass. Counts are of the operations that ran, over all rows or per chunk [C].

    ends: [halves + 2], of the embedding, each half layer and the pass, in monotonic ns. looking_s: seconds after that.
    """

    ends: Sequence[int]
    looking_s: float
    layer_flop: int
    head_flop: int
    weight_bytes: int
    attention_flop: Sequence[int]
    kv_read: Sequence[int]
    kv_written: Sequence[int]
