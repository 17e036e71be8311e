"""The parts a decoder is put together from. Each is chosen once, at construction; calling it has no branches.

A part holds its weights and the kernels that it computes with; what moves (the batch, the cache) is passed in.
"""

from collections.abc import Callable

import torch

from tokenwright.backends import Dense, Kernels, Linear
from tokenwright.backends.layout import Weights
from tokenwright.config import ModelConfig

Part = Callable[[torch.Tensor], torch.Tensor]


def linear(weights: Weights, name: str, *joined: str) -> Linear:
    """The linear layer `name`, [out, in]. Packed ones lie under that name.

    Others that read the same input are `joined` to it, their outputs one after the other: one product instead of
    several. These are taken out of `weights`, so that memory holds one layer's originals at a time.
    """
    packed = weights.get(name)
    if packed is not None and not isinstance(packed, torch.Tensor):
        return packed
    if not joined:
        return Dense(
            dense(weights, f"{name}.weight"), dense(weights, f"{name}.bias") if f"{name}.bias" in weights else None
        )
    biases = [dense(weights, f"{part}.bias") for part in joined if f"{part}.bias" in weights]
    layer = Dense(
        torch.cat([dense(weights, f"{part}.weight") for part in joined]), torch.cat(biases) if biases else None
    )
    for part in joined:
        del weights[f"{part}.weight"]
        weights.pop(f"{part}.bias", None)
    return layer


def dense(weights: Weights, name: str) -> torch.Tensor:
    """A tensor that is not packed."""
    tensor = weights[name]
    assert isinstance(tensor, torch.Tensor), f"{name} is not packed"
    return tensor


def norm(config: ModelConfig, kernels: Kernels, weights: Weights, name: str) -> Part:
    """The model's normalisation over the width."""
    weight, eps = dense(weights, f"{name}.weight"), config.norm_eps
    if config.norm == "rms":
        return lambda x: kernels.rms_norm(x, weight, eps)
    bias = dense(weights, f"{name}.bias")
    return lambda x: kernels.layer_norm(x, weight, bias, eps)


def mlp(config: ModelConfig, kernels: Kernels, weights: Weights, name: str) -> Part:
    """[T, width] -> [T, width]: gated (SwiGLU) or plain."""
    down = linear(weights, f"{name}.down")
    act = config.activation
    if config.gated:
        both = linear(weights, f"{name}.gate_up", f"{name}.gate", f"{name}.up")
        return lambda x: kernels.linear(kernels.gated(kernels.linear(x, both), act), down)
    up = linear(weights, f"{name}.up")
    return lambda x: kernels.linear(kernels.activate(kernels.linear(x, up), act), down)
