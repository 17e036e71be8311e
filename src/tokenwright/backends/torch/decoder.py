"""One decoder for every graph: embed, then the blocks' ops on a residual stream, then the head."""

from copy import copy
from typing import Any, Self

from tokenwright.backends import Scored
from tokenwright.backends.adapters import NO_ADAPTERS, Beside
from tokenwright.backends.layout import nbytes
from tokenwright.backends.packed import Packed
from tokenwright.backends.torch.embedding import TorchEmbed
from tokenwright.backends.torch.kernels import Dense, Kernels, Values, in_fp32
from tokenwright.backends.torch.op_batch import ForwardState, OpBatch
from tokenwright.backends.torch.op_parts import Weights
from tokenwright.backends.torch.ops import TorchAttention, TorchHead, TorchParallel, running, using
from tokenwright.cache import KVStore
from tokenwright.models.graph import Graph
from tokenwright.models.taps import Tap, ignore


class Decoder:
    """A graph over weights under our names, run op by op. layer_tokens: tokens times layers computed so far."""

    def __init__(self, graph: Graph, kernels: Kernels, weights: Weights, adapters: Beside = NO_ADAPTERS) -> None:
        self.graph = graph
        self.kernels = kernels
        self.adapters = adapters
        self.weight_bytes = nbytes(weights)
        for name, one in weights.items():
            if not isinstance(one, Packed):
                weights[name] = kernels.own(one)
        self.embed = TorchEmbed(graph.embed, kernels, weights)
        self.blocks = [running(op, kernels, weights) for op in graph.blocks]
        self.head = TorchHead(graph.head, kernels, weights)
        self.layer_tokens = 0

    @property
    def device(self) -> Any:
        matrix = self.head.matrix
        return matrix.weight.device if isinstance(matrix, Dense) else "cpu"

    @property
    def scorings(self) -> dict[int, Scored]:
        each = [op.attention if isinstance(op, TorchParallel) else op for op in self.blocks]
        return {op.layer: op.scoring for op in each if isinstance(op, TorchAttention)}

    def again(self) -> Self:
        return self.using(self.kernels)

    def using(self, kernels: Kernels) -> Self:
        """The same model over the same weights with other kernels, and its own counter."""
        other = copy(self)
        other.kernels = kernels
        other.embed = using(self.embed, self.kernels, kernels)
        other.blocks = [using(op, self.kernels, kernels) for op in self.blocks]
        other.head = using(self.head, self.kernels, kernels)
        other.layer_tokens = 0
        return other

    def forward(self, batch: OpBatch, store: KVStore, tap: Tap = ignore) -> Values:
        """Store the step's K and V and return the residual stream [T, width] after the last layer. Calls `tap`."""
        state = ForwardState(batch, store, tap, self.adapters)
        x = self.embed(state)
        for op in self.blocks:
            x = op(x, state)
        self.layer_tokens += len(x) * self.graph.layers
        return x

    def logits(self, x: Values) -> Values:
        """Logits [n, vocabulary] in fp32 of rows [n, width] of the residual stream."""
        return self.head(x)

    def hidden(self, x: Values) -> Values:
        """The final norm [n, width] in fp32 of rows [n, width] of the residual stream."""
        return in_fp32(self.head.norm(x))
