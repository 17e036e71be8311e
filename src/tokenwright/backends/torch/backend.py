"""The torch backend: it runs a batch op by op, with its decoder's kernels."""

import torch

from tokenwright.backends import Logits
from tokenwright.backends.torch.batch import Batcher
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.cache import KVStore
from tokenwright.engine import Batch
from tokenwright.models.taps import Tap, ignore


class TorchBackend:
    """Implements `Backend` on any device that torch and the decoder's kernels run on."""

    def __init__(self, decoder: Decoder, store: KVStore) -> None:
        self.decoder = decoder
        self.store = store
        self.batcher = Batcher(decoder.graph, store)

    @torch.inference_mode()
    def __call__(self, batch: Batch, tap: Tap = ignore) -> Logits:
        x = self.decoder.forward(self.batcher(batch), self.store, tap)  # [T, width]
        rows = self.decoder.logits(x[batch.logits_rows.tolist()])
        return Logits(rows, hidden=self.decoder.hidden(x[batch.hidden_rows.tolist()]) if batch.hidden_rows else None)
