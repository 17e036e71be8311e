"""Facts of one observed step: times, counts, and the attention of one head at each watched row."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenwright.arrays import Floats
from tokenwright.backends.device import Device, on_torch

CANDIDATES = 20  # the most probable next tokens that are told

Clock = Callable[[], float]  # seconds


def device_clock(device: Device) -> Clock:
    """The monotonic clock in seconds, read when `device` has finished its queued work."""
    if device.type == "cpu":
        return time.perf_counter
    waiting = on_torch(device)

    def now() -> float:
        waiting.wait()
        return time.perf_counter()

    return now


@dataclass(slots=True)
class Watched:
    """A watched row of a batch, with one head of one layer; a backend fills in the other fields.

    weights: what the head reads there, fp32 [position + 1], 0 at masked positions; None if it could not be computed.
    highest, entropy: of the row's logits, if it has any: the ids of the `CANDIDATES` highest, and -sum p log2 p, bits.
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

    ends: when the embedding, the halves of layers that ops end, and the pass had ended, in ns of the monotonic clock.
    looking_s: seconds after that which the watched rows took.
    layer_flop, head_flop: of the matrix products over all rows, in all layers and in the head. weight_bytes: read by
    these products. attention_flop, kv_read, kv_written: of each chunk, the last two in bytes.
    """

    ends: Sequence[int]  # [halves + 2]
    looking_s: float
    layer_flop: int
    head_flop: int
    weight_bytes: int
    attention_flop: Sequence[int]  # [C]
    kv_read: Sequence[int]  # [C]
    kv_written: Sequence[int]  # [C]
