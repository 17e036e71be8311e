"""A reference forward pass beside an engine: chunk by chunk over a cache of its own, with attention in torch.

Matrix products may use the engine's kernels, which give the same rows; rotation, the cache and attention are the
reference's. Arrays go in and come out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tokenwright.arrays import Floats
from tokenwright.backends import Scored
from tokenwright.backends.device import Device
from tokenwright.backends.kv_sizing import memory_of
from tokenwright.backends.torch.border import TensorRotation, array, tensor
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.kernels import Kernels, Linear
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.backends.torch.tensor_batch import Batcher
from tokenwright.cache import KVStore, layer_specs
from tokenwright.engine import one_chunk
from tokenwright.engine.page_table import PageTable
from tokenwright.engine.window import AttentionWindow
from tokenwright.models.taps import Site, Tap, ignore

PAGE = 16  # tokens


class Reference(ReferenceKernels):
    """The reference kernels, but for matrix products, which `plain` computes."""

    def __init__(self, plain: Kernels) -> None:
        super().__init__()
        self.plain = plain

    def linear(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        found: torch.Tensor = self.plain.linear(x, weight)
        return found


class RotatedTwice(Reference):
    """A planted fault: the rotation of positions is applied twice, to queries and keys."""

    def rotate(self, x: torch.Tensor, rotation: TensorRotation) -> torch.Tensor:
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


FAULTS: Mapping[str, type[Reference]] = {"": Reference, "twice": RotatedTwice, "unmasked": Unmasked}


class ReferencePass:
    """The forward pass of one text of at most `limit` tokens, whose K and V are in fp32 in a cache of its own.

    fault: a key of FAULTS.
    """

    def __init__(self, decoder: Decoder, limit: int, device: Device, fault: str = "") -> None:
        self.kernels = FAULTS[fault](decoder.kernels)
        self.decoder = decoder.using(self.kernels)
        self.limit = limit
        pages = -(-limit // PAGE)
        self.store = KVStore(layer_specs(decoder.graph, "float32"), pages, PAGE, memory_of(device))
        self.batcher = Batcher(decoder.graph, self.store)
        table = PageTable({page: page for page in range(pages)})
        self.tables = [table] * len(self.store.groups)

    @torch.inference_mode()
    def rows(self, tokens: Sequence[int], start: int, tap: Tap = ignore, *, further: bool = False) -> Floats:
        """Logits [n, vocabulary] of `tokens` from position `start` on; their K and V go to the cache.

        further: plant a fault: the position of each row is one too high, while its K and V go to the right slot.
        """
        batch = self.batcher(one_chunk(tokens, start, self.tables, self.limit))
        if further:
            positions = batch.positions + 1
            rotations = {rope: self.batcher.rotated(rope, positions, self.limit) for rope in self.batcher.tables}
            batch = replace(batch, positions=positions, rotations=rotations)

        def with_arrays(site: Site, layer: int, value: Any) -> None:
            tap(site, layer, array(value))

        return array(self.decoder.logits(self.decoder.forward(batch, self.store, with_arrays)))

    def weights(self, layer: int, queries: Floats, keys: Floats, window: AttentionWindow) -> Floats:
        """Weights [H, t, t] of a layer's queries [t, H, D] over keys [t, G, D] of a whole text."""
        positions, scoring = torch.arange(len(keys)), self.decoder.scorings[layer]
        found = self.kernels.weights(tensor(queries), tensor(keys).float(), positions, 0, window, scoring)
        return array(found.flatten(0, 1))
