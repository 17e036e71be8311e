"""A reference forward pass beside the engine: chunk by chunk over a cache of its own, with attention in torch.

The planted faults of the challenge `agree` and the maps of the challenge `heads` are computed here, and never by the
engine that serves. Matrix products may use the engine's kernels, which give the same rows; rotation, the cache and
attention are the reference's.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tokenwright.backends import Kernels, Linear, ReferenceKernels, Scored
from tokenwright.backends.torch.tensor_batch import Batcher, TorchBatch
from tokenwright.cache import KVStore, layer_specs
from tokenwright.engine import one_chunk
from tokenwright.engine.page_table import PageTable
from tokenwright.engine.window import AttentionWindow
from tokenwright.learn.work import PAGE, CheckWork
from tokenwright.models.rotary import Rotation
from tokenwright.models.taps import Tap, ignore

Shift = Callable[[TorchBatch, Batcher], TorchBatch]


class Reference(ReferenceKernels):
    """The reference kernels, but for matrix products, which `plain` computes."""

    def __init__(self, plain: Kernels) -> None:
        super().__init__()
        self.plain = plain

    def linear(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        return self.plain.linear(x, weight)


class RotatedTwice(Reference):
    """A planted fault: the rotation of positions is applied twice, to queries and keys."""

    def rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return super().rotate(super().rotate(x, rotation), rotation)


class Unmasked(Reference):
    """A planted fault: no causal mask, so that the rows of a chunk attend to later ones."""

    def weights(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        start: int,
        window: AttentionWindow,  # noqa: ARG002  (nothing is hidden)
        scoring: Scored,
        sink_q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return super().weights(q, k, positions, max(start, len(k)), AttentionWindow(), scoring, sink_q)


class ForwardPass:
    """The forward pass of one text of at most `limit` tokens, whose K and V are in fp32 in a cache of its own."""

    def __init__(self, work: CheckWork, limit: int, kernels: type[Reference] = Reference) -> None:
        loaded = work.llm.loaded
        self.work = work
        self.limit = limit
        self.decoder = loaded.decoder.using(kernels(loaded.decoder.kernels))
        self.store = KVStore(layer_specs(loaded.graph, "float32"), -(-limit // PAGE), PAGE, loaded.device)
        self.batcher = Batcher(loaded.graph, self.store)
        table = PageTable({page: page for page in range(-(-limit // PAGE))})
        self.tables = [table] * len(self.store.groups)

    @torch.inference_mode()
    def rows(self, tokens: Sequence[int], start: int, tap: Tap = ignore, shift: Shift | None = None) -> torch.Tensor:
        """Logits [n, vocabulary] of `tokens` from position `start` on; their K and V go to the cache.

        shift: changes the chunk before it is computed. Raises Stopped where the work must end.
        """
        self.work.check()
        batch = self.batcher(one_chunk(tokens, start, self.tables, self.limit))
        x = self.decoder.forward(batch if shift is None else shift(batch, self.batcher), self.store, tap)
        return self.decoder.logits(x).cpu()


def one_further(limit: int) -> Shift:
    """A planted fault: the position of each row is one too high, while its K and V go to the right slot."""

    def shift(batch: TorchBatch, batcher: Batcher) -> TorchBatch:
        positions = batch.positions + 1
        rotations = {rope: table.rows(positions.cpu(), limit) for rope, table in batcher.tables.items()}
        return replace(batch, positions=positions, rotations=rotations)

    return shift
