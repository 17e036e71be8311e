"""The torch backend: it runs a batch op by op, with its decoder's kernels."""

from collections.abc import Sequence

import torch

from tokenwright.backends import Logits
from tokenwright.backends.observation import Observed, Watched
from tokenwright.backends.torch.border import array
from tokenwright.backends.torch.counted import CountedKernels, WorkCounts
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.kernels import Values
from tokenwright.backends.torch.observe import Observer
from tokenwright.backends.torch.tensor_batch import Batcher
from tokenwright.cache import KVStore
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
