"""One decoder for every graph: embed, then the blocks' ops on a residual stream, then the head."""

from dataclasses import dataclass

import torch

from tokenwright.backends import Kernels
from tokenwright.backends.layout import Weights, nbytes
from tokenwright.backends.torch.batch import Batch
from tokenwright.backends.torch.ops import RunState, TorchEmbed, TorchHead, running
from tokenwright.cache import KVStore
from tokenwright.models.graph import Graph
from tokenwright.models.taps import Tap, ignore


@dataclass(frozen=True, slots=True)
class Logits:
    """Rows of logits [n, vocabulary] in fp32, and of each what kernels saw on the way, where they did.

    best: the index of the largest, the lowest of equals. log_totals: log(sum(exp)), NaN where one is not finite.
    """

    rows: torch.Tensor
    best: tuple[int, ...] = ()
    log_totals: tuple[float, ...] = ()


class Decoder:
    """A graph over weights under our names, op by op. It keeps no state between calls.

    Building it uses `weights` up: what it joins is taken out of the dictionary.

    `weight_bytes`: in memory. `layer_tokens` counts every token that went through a layer.
    """

    def __init__(self, graph: Graph, kernels: Kernels, weights: Weights) -> None:
        self.graph = graph
        self.kernels = kernels
        self.weight_bytes = nbytes(weights)
        self.embed = TorchEmbed(graph.embed, weights)
        self.blocks = [running(op, kernels, weights) for op in graph.blocks]
        self.head = TorchHead(graph.head, kernels, weights)
        self.layer_tokens = 0

    def forward(self, batch: Batch, store: KVStore, tap: Tap = ignore) -> torch.Tensor:
        """The residual stream after the last layer, [T, width]; the step's K and V land in the store.

        `tap` is called at every site (`models.taps`) on the way.
        """
        state = RunState(batch, store, tap)
        x = self.embed(state)
        for op in self.blocks:
            x = op(x, state)
        self.layer_tokens += len(x) * self.graph.layers
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocabulary] in fp32 of rows [n, width] of the residual stream."""
        return self.head(x)
