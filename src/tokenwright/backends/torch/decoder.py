"""One decoder for every family: embed, then layers of attention and MLP on a residual stream, then the head.

What differs between families is chosen when it is built; `forward` is the same few lines for all of them.
"""

import torch

from tokenwright.backends import Kernels
from tokenwright.backends.layout import Weights, nbytes
from tokenwright.backends.torch.attention import Attention
from tokenwright.backends.torch.batch import TorchBatch
from tokenwright.backends.torch.parts import dense, linear, mlp, norm
from tokenwright.cache import KVStore, KVView
from tokenwright.config import Learned, ModelConfig
from tokenwright.models.taps import Site, Tap, ignore


class Layer:
    """A transformer block in the pre-norm order."""

    def __init__(self, config: ModelConfig, kernels: Kernels, weights: Weights, index: int) -> None:
        self.index = index
        self.attention_norm = norm(config, kernels, weights, f"layers.{index}.attention_norm")
        self.attention = Attention(config, kernels, weights, index)
        self.mlp_norm = norm(config, kernels, weights, f"layers.{index}.mlp_norm")
        self.mlp = mlp(config, kernels, weights, f"layers.{index}.mlp")

    def __call__(self, x: torch.Tensor, batch: TorchBatch, view: KVView, tap: Tap) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), batch, view, tap)
        tap(Site.ATTENTION, self.index, x)
        x = x + self.mlp(self.mlp_norm(x))  # [T, width]
        tap(Site.MLP, self.index, x)
        return x


class Decoder:
    """A model's arithmetic over weights under our names (`ModelConfig.shapes`).

    It holds nothing of a sequence: K and V live in the store that `forward` is given. Between calls it keeps one
    counter, `layer_tokens`: each token counts once for each layer that it went through. `weight_bytes`: of the weights
    in memory. The constructor empties `weights`: it moves the tensors that it joins out of the dictionary.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.weight_bytes = nbytes(weights)
        self.embedding = linear(weights, "embed")
        self.positions = dense(weights, "positions.weight") if isinstance(config.positions, Learned) else None
        self.layers = [Layer(config, kernels, weights, index) for index in range(config.layers)]
        self.norm = norm(config, kernels, weights, "norm")
        self.head = linear(weights, "embed" if config.tied_head else "head")
        self.layer_tokens = 0

    def forward(self, batch: TorchBatch, store: KVStore, tap: Tap = ignore) -> torch.Tensor:
        """The residual stream after the last layer, [T, width]; the step's K and V land in the store.

        `tap` is called at every site (`trace.sites`) on the way.
        """
        x = self.embedding.rows(batch.tokens)  # [T, width]
        if self.positions is not None:
            x = x + self.positions[batch.positions]
        tap(Site.EMBEDDING, 0, x)
        for index, layer in enumerate(self.layers):
            x = layer(x, batch, store.view(index), tap)
            self.layer_tokens += len(x)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocabulary] in fp32 of rows [n, width] of the residual stream."""
        return self.kernels.linear(self.norm(x), self.head).float()
