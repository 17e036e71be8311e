"""A model run op by op to look inside: arrays go in, and taps, weights and logits come out as arrays."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from tokenwright.arrays import Array, Floats
from tokenwright.backends import Scored
from tokenwright.backends.array_passes import ArrayPasses
from tokenwright.backends.torch.border import array, tensor
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.kv_codec import decode, encode, read
from tokenwright.backends.torch.tensor_batch import Batcher
from tokenwright.cache import KVStore, LayerSpec, Side
from tokenwright.engine import Batch
from tokenwright.models.taps import Tap


class OpByOp(ArrayPasses):
    """Implements `Passes` with a decoder over tensors."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @torch.inference_mode()
    def run(self, batch: Batch, store: KVStore, tap: Tap, *, stored: bool = True) -> None:
        rows = Batcher(self.decoder.graph, store)(batch)
        if not stored:
            scratch = (torch.full_like(slots, store.scratch(group)) for group, slots in enumerate(rows.slots))
            rows = replace(rows, slots=tuple(scratch))
        self.decoder.forward(rows, store, lambda site, layer, value: tap(site, layer, array(value)))

    @torch.inference_mode()
    def logits(self, x: Floats) -> Floats:
        return array(self.decoder.logits(tensor(x).to(self.decoder.device)))

    def scoring(self, layer: int, head: int | None = None) -> Scored:
        found = super().scoring(layer, head)
        learned = found.sink_logits
        return found if learned is None else replace(found, sink_logits=array(learned.float()))

    @torch.inference_mode()
    def decoded(self, side: Side, slots: NDArray[np.int64]) -> Floats:
        device = tensor(side.memory[0]).device
        return array(read(side, tensor(slots).to(device), torch.float32))

    def kept(self, spec: LayerSpec, keys: Floats) -> Array:
        found = []
        for part in spec.parts:
            places = part.stored(range(len(keys)))
            encoded = encode(part.k.name, tensor(np.ascontiguousarray(keys[places.start : places.stop])))
            found.append(array(decode(part.k.name, encoded, keys.shape[-1], torch.float64)))
        return np.concatenate(found)
