"""Which matrices a model is computed with, and in which format each is kept. No bytes of a checkpoint here.

Linear layers that read the same input are one matrix, their outputs one after the other: q, k and v; gate and up. All
else (norms, a table of positions) stays in fp32.
"""

from collections.abc import Mapping
from math import prod

import torch

from tokenwright.backends.packed import Packed, packed_sizes
from tokenwright.config import WEIGHT_GROUPS, ModelConfig, WeightFormat

Weights = dict[str, torch.Tensor | Packed]

FINER = WeightFormat("int8", WEIGHT_GROUPS["int8"])  # what the embedding and the head are kept in under int4


def matrices(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The matrices by their names, each with the linear layers (or the table) that it is made of."""
    found: dict[str, tuple[str, ...]] = {"embed": ("embed",)}
    for i in range(config.layers):
        attention, mlp = f"layers.{i}.attention", f"layers.{i}.mlp"
        found[f"{attention}.qkv"] = (f"{attention}.q", f"{attention}.k", f"{attention}.v")
        found[f"{attention}.o"] = (f"{attention}.o",)
        if config.gated:
            found[f"{mlp}.gate_up"] = (f"{mlp}.gate", f"{mlp}.up")
        else:
            found[f"{mlp}.up"] = (f"{mlp}.up",)
        found[f"{mlp}.down"] = (f"{mlp}.down",)
    if not config.tied_head:
        found["head"] = ("head",)
    return found


def format_of(name: str, form: WeightFormat) -> WeightFormat:
    """How the matrix of that name is kept where weights are in `form`: what is sensitive stays finer."""
    return FINER if form.name == "int4" and name in ("embed", "head") else form


def shape_of(config: ModelConfig, parts: tuple[str, ...]) -> tuple[int, int]:
    """[out, in] of the matrix that is made of these."""
    shapes = [config.shapes[f"{part}.weight"] for part in parts]
    return sum(shape[0] for shape in shapes), shapes[0][1]


def dense_names(config: ModelConfig) -> list[str]:
    """The tensors of `config.shapes` that belong to no matrix."""
    inside = {f"{part}.{kind}" for parts in matrices(config).values() for part in parts for kind in ("weight", "bias")}
    return [name for name in config.shapes if name not in inside]


def empty_weights(config: ModelConfig, form: WeightFormat) -> Weights:
    """Memory for all of a model's weights in a format that is not native; a tied head is the embedding itself."""
    weights: Weights = {}
    for name, parts in matrices(config).items():
        out, inner = shape_of(config, parts)
        bias = torch.zeros(out) if f"{parts[0]}.bias" in config.shapes else None
        weights[name] = Packed.empty(out, inner, format_of(name, form), bias)
    for name in dense_names(config):
        weights[name] = torch.empty(config.shapes[name])
    if config.tied_head:
        weights["head"] = weights["embed"]
    return weights


def weight_bytes(config: ModelConfig, form: WeightFormat) -> int:
    """Bytes that `empty_weights` takes."""
    total = 4 * sum(prod(config.shapes[name]) for name in dense_names(config))
    for name, parts in matrices(config).items():
        out, inner = shape_of(config, parts)
        codes, scales = packed_sizes(out, inner, format_of(name, form))
        total += codes + 2 * scales + (4 * out if f"{parts[0]}.bias" in config.shapes else 0)
    return total


def nbytes(weights: Mapping[str, torch.Tensor | Packed]) -> int:
    """Bytes in memory, a tied head counted once."""
    return sum(one.nbytes for one in {id(one): one for one in weights.values()}.values())


def unpacked(config: ModelConfig, weights: Weights) -> dict[str, torch.Tensor]:
    """The weights decoded, under the names of `config.shapes`, in fp32."""
    found: dict[str, torch.Tensor] = {}
    for name, parts in matrices(config).items():
        matrix = weights[name]
        assert isinstance(matrix, Packed), "matrices are packed"
        sizes = [config.shapes[f"{part}.weight"][0] for part in parts]
        for part, rows in zip(parts, torch.split(matrix.unpack(), sizes), strict=True):
            found[f"{part}.weight"] = rows
        if matrix.bias is not None:
            found |= {f"{part}.bias": bias for part, bias in zip(parts, torch.split(matrix.bias, sizes), strict=True)}
    for name in dense_names(config):
        dense = weights[name]
        assert isinstance(dense, torch.Tensor), "norms and positions are dense"
        found[name] = dense
    return {name: found[name] for name in config.shapes}
