"""The calculator's figures. The page's types are generated from this module (typescript.py)."""

from dataclasses import dataclass
from typing import Annotated

from tokenwright.trace.wire import COUNTED, DERIVED, MEASURED, Wire


@dataclass(frozen=True, slots=True)
class CalculatorCard:
    """POST /calculate: the memory and the work of a model at a context, a batch and formats."""

    model: str
    models: tuple[str, ...]  # those that can be asked for beside the loaded one
    layers: int
    model_context: int
    context: int
    batch: int
    kv: str  # the format of K and V that was planned
    weights: str
    kv_per_token: Annotated[int, Wire("Q", DERIVED, "B", "a token", "sum over layers of 2 G D e")]
    kv_per_sequence: Annotated[
        int, Wire("Q", DERIVED, "B", "a sequence", "sum over layers of c min(t, s + W): at this context")
    ]
    kv_total: Annotated[int, Wire("Q", DERIVED, "B", "the batch", "batch times that of a sequence")]
    kv_allocated: Annotated[
        int | None, Wire("Q", COUNTED, "B", "allocated", "bytes of a KV memory that was allocated just now, and freed")
    ]
    kv_planned: Annotated[
        int | None,
        Wire("Q", DERIVED, "B", "in whole pages", "pages x page size x bytes, and a scratch page in each group"),
    ]
    refused: str  # why nothing was allocated
    weight_bytes: Annotated[int, Wire("Q", DERIVED, "B", "weights", "of all tensors, in this format")]
    loaded_bytes: Annotated[
        int | None, Wire("Q", COUNTED, "B", "weights in memory", "of the loaded model as it lies in memory")
    ]
    total_bytes: Annotated[int, Wire("Q", DERIVED, "B", "together", "weights and the K and V of the batch")]
    base_flops: Annotated[int, Wire("Q", DERIVED, "FLOP", "without attention", "2 (P_b + P_lm)")]
    slope_flops: Annotated[
        int,
        Wire(
            "Q",
            DERIVED,
            "FLOP",
            "for each token read",
            "4 H D over all layers: A(t) grows by it until windows are full",
        ),
    ]
    decode_flops: Annotated[int, Wire("Q", DERIVED, "FLOP", "a decode step", "2 (P_b + P_lm) + A(t), for the batch")]
    decode_bytes: Annotated[
        int, Wire("Q", DERIVED, "B", "read by a decode step", "the weights once, and K and V of every sequence")
    ]
    bandwidth: Annotated[
        float | None,
        Wire("d", MEASURED, "B/s", "memory bandwidth", "of this machine: reading a buffer beyond its caches"),
    ]
    tokens_per_s: Annotated[
        float | None,
        Wire(
            "d", DERIVED, "tok/s", "at most", "batch x bandwidth / bytes read: a model inside the caches can be faster"
        ),
    ]
    exceeds_at: Annotated[
        int | None,
        Wire(
            "Q",
            DERIVED,
            "tokens",
            "exceeds the weights at",
            "the context from which K and V of this batch take more than the weights",
        ),
    ]


MESSAGES = (CalculatorCard,)
