"""Panel Block: one token in one layer."""

from dataclasses import dataclass
from typing import Annotated

from tokenwright.errors import RequestError
from tokenwright.explorer.explorer import Explorer
from tokenwright.trace.wire import COUNTED, DERIVED, READ


@dataclass(frozen=True, slots=True)
class BlockStage:
    name: str  # input, norm, query, key, value, attention, output, residual, mlp_norm, hidden, mlp_output, result
    shape: tuple[int, ...]
    norm: Annotated[
        float, READ("", "norm", "the length of the vector, of all its numbers together: computed in a replay")
    ]
    heads: tuple[float, ...]
    numbers: tuple[float, ...]
    flops: Annotated[int, DERIVED("FLOP", "FLOPs", "2 x inputs x outputs, or 4 H D for each token read")]
    share: Annotated[float, DERIVED("share", "share", "of the FLOPs of this token in this layer")]


@dataclass(frozen=True, slots=True)
class HeadRead:
    head: int
    position: int  # the one that the head reads most
    weight: float


@dataclass(frozen=True, slots=True)
class ContextShare:
    context: int
    share: float


@dataclass(frozen=True, slots=True)
class BlockView:
    position: int
    layer: int
    context: Annotated[int, COUNTED("tokens", "read", "tokens that this one attends to, itself included")]
    kv_bytes: Annotated[int, DERIVED("B", "K and V kept", "of this token in this layer")]
    flops: Annotated[int, DERIVED("FLOP", "FLOPs of the layer", "for this token, in this layer")]
    model_flops: Annotated[
        int, DERIVED("FLOP", "FLOPs of the model", "2 (P_b + P_lm) + A(t): for this token, in all layers and the head")
    ]
    stages: tuple[BlockStage, ...]
    reads: tuple[HeadRead, ...]
    by_context: tuple[ContextShare, ...]


MESSAGES = (BlockStage, HeadRead, ContextShare, BlockView)


def block(explorer: Explorer, identity: str, step: int, layer: int, position: int | None = None) -> BlockView:
    from tokenwright.explorer.views import block_view

    run = explorer.run(identity)
    last = run.last_position(step)
    at = computed(position, last, step)
    run.check(layer, 0)
    return run.look(lambda replay, text: block_view.block(replay, text, at, layer), at)


def computed(position: int | None, last: int, step: int) -> int:
    """A position that a step knows, by default its last. Raises RequestError for a later one."""
    if position is not None and not 0 <= position <= last:
        raise RequestError(f"position must be from 0 to {last}: later tokens are not computed at step {step + 1}")
    return last if position is None else position
