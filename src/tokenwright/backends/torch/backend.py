"""The torch backend: it runs a batch op by op, with its decoder's kernels."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from tokenwright.arrays import Floats
from tokenwright.backends import Logits, Scored
from tokenwright.backends.array_passes import ArrayPasses
from tokenwright.backends.observation import Observed, Watched
from tokenwright.backends.torch.border import array, tensor
from tokenwright.backends.torch.counted import CountedKernels, WorkCounts
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.kernels import Values
from tokenwright.backends.torch.kv_codec import read
from tokenwright.backends.torch.observe import Observer
from tokenwright.backends.torch.tensor_batch import Batcher
from tokenwright.cache import KVStore, Side
from tokenwright.engine import Batch
from tokenwright.models.taps import Tap, ignore


class TorchBackend:
    """Implements `Backend` on any device that torch and the decoder's kernels run on."""

    def __init__(self, decoder: Decoder, store: KVStore) -> None:
        self.decoder = decoder
        self.store = store
        self.batcher = Batcher(decoder.graph, store)
        self._counted = CountedKernels(decoder.kernels)
        self._counting: Decoder | None = None

    def __call__(self, batch: Batch) -> Logits:
        return self._head(self.decoder, batch, self._blocks(self.decoder, batch, ignore))

    def observe(self, batch: Batch, watched: Sequence[Watched]) -> tuple[Logits, Observed]:
        if self._counting is None:
            self._counting = self.decoder.using(self._counted)
        counts = self._counted.counts = WorkCounts()
        observer = Observer(watched, counts, self.store)
        x = self._blocks(self._counting, batch, observer.tap)
        observer.end_blocks()
        logits = self._head(self._counting, batch, x)
        self.decoder.layer_tokens += len(batch.tokens) * self.decoder.graph.layers
        with torch.inference_mode():
            return logits, observer.observed(batch, logits, self.decoder.scorings)

    @torch.inference_mode()
    def _blocks(self, decoder: Decoder, batch: Batch, tap: Tap) -> Values:
        return decoder.forward(self.batcher(batch), self.store, tap)

    @torch.inference_mode()
    def _head(self, decoder: Decoder, batch: Batch, x: Values) -> Logits:
        rows = decoder.logits(x[batch.logits_rows.tolist()])
        hidden = array(decoder.hidden(x[batch.hidden_rows.tolist()])) if batch.hidden_rows else None
        return Logits(array(rows), hidden=hidden)


class OpByOp(ArrayPasses):
    """To look inside: arrays go in, and taps, weights and logits come out as arrays."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @torch.inference_mode()
    def run(self, batch: Batch, store: KVStore, tap: Tap, *, stored: bool = True) -> None:
        rows = Batcher(self.decoder.graph, store)(batch)
        rows = rows if stored else rows.unstored(store)
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
