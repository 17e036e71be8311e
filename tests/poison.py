"""A KV memory in which a read of a slot that was never written shows."""

import numpy as np

from tokenwright.arrays import BFLOAT16
from tokenwright.cache import KVStore
from tokenwright.cache.store import KVView, StateView

_NAN_BYTE = 0x7F  # a NaN in fp8; a code of int8 or int4, whose scale is NaN


def poison(store: KVStore) -> None:
    """Fill every slot with what decodes to NaN."""
    for view in store._views:
        if isinstance(view, StateView):
            view.memory[...] = float("nan")
        for part in view.parts if isinstance(view, KVView) else ():
            for side in (part.k, part.v):
                for memory, (dtype, _) in zip(side.memory, side.codec.parts(side.size), strict=True):
                    if hasattr(memory, "buffers"):  # on a GPU
                        from tests.backends.gpu import fill

                        fill(memory.buffers[0], 0xFF)  # a NaN in every float, and in the scales of codes
                    elif dtype == BFLOAT16:
                        memory.view(np.uint16)[...] = 0x7FC0
                    else:
                        memory[...] = _NAN_BYTE if dtype.itemsize == 1 else float("nan")
