"""Inputs of each layer beside the residual stream (per-layer embeddings, as in Gemma 4). No tensors here.

inputs = factor (norm(project_scale project(x)) + scale table[token])       [layers, size], x being the embedding
x      = x + post_norm(out(activation(gate(x)) * inputs[layer]))            behind the MLP of each layer
"""

from dataclasses import dataclass

from tokenwright.models.op import Activation, Matrix, Norm, Weighted


@dataclass(frozen=True, slots=True)
class LayerInputs(Weighted):
    """How layers' inputs follow from a token and its embedding. Tokens beyond the table have the row of token 0."""

    table: Matrix  # [vocabulary, layers x size]
    scale: float
    project: Matrix  # [layers x size, width]
    project_scale: float
    norm: Norm  # of `size` numbers
    factor: float


@dataclass(frozen=True, slots=True)
class InputGate(Weighted):
    """How a layer adds its inputs to the residual stream: those from number `at` on."""

    at: int
    gate: Matrix  # [size, width]
    activation: Activation
    out: Matrix  # [width, size]
    post_norm: Norm
