"""Facts of one observed step: times, counts, and the attention of one head at each watched row."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenwright.arrays import Floats
from tokenwright.backends.device import Device, accelerator_of

CANDIDATES = 20  # the most probable next tokens that are told

Clock = Callable[[], float]  # seconds


def device_clock(device: Device) -> Clock:
    """The monotonic clock in seconds, read when `device` has finished its queued work."""
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

    weights: the head's attention, fp32 [position + 1], 0 at masked positions; None if it could not be computed.
    highest, entropy: the ids of the `CANDIDATES` highest logits, and -sum p log2 p in bits, if the row has logits.
    """

    layer: int
    head: int
    row: int
    weights: Floats | None = None
    highest: Sequence[int] = ()
    entropy: float | None = None


@dataclass(slots=True)
class Observed:
    """The facts of one forward pass. Counts are of the operations that ran.

    ends: when the embedding, each half layer and the pass ended, in ns of the monotonic clock. looking_s: seconds after
    that for the watched rows. FLOP and weight_bytes are of the matrix products over all rows; the rest is per chunk.
    """

    ends: Sequence[int]  # [halves + 2]
    looking_s: float
    layer_flop: int
    head_flop: int
    weight_bytes: int
    attention_flop: Sequence[int]  # [C]
    kv_read: Sequence[int]  # [C]
    kv_written: Sequence[int]  # [C]
