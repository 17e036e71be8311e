"""Inputs of each layer beside the residual stream (per-layer embeddings, as in Gemma 4). No tensors here.

inputs = factor (norm(project_scale project(x)) + scale table[token])       [layers, size], x being the embedding
x      = x + post_norm(out(activation(gate(x)) * inputs[layer]))            behind the MLP of each layer
"""

from dataclasses import dataclass

from tokenwright.models.op import Activation, Matrix, Norm, Shape


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """How the inputs of all layers follow from a token and its embedding. norm: of each layer's by itself.

    Tokens beyond the table have the row of token 0.
    """

    table: Matrix  # [vocabulary, layers x size]
    scale: float
    project: Matrix  # [layers x size, width]
    project_scale: float
    norm: Norm  # of `size` numbers
    factor: float

    @property
    def shapes(self) -> dict[str, Shape]:
        return self.table.shapes | self.project.shapes | self.norm.shapes

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.table, self.project


@dataclass(frozen=True, slots=True)
class InputGate:
    """How a layer adds its inputs to the residual stream: those from number `at` on."""

    at: int
    gate: Matrix  # [size, width]
    activation: Activation
    out: Matrix  # [width, size]
    post_norm: Norm

    @property
    def shapes(self) -> dict[str, Shape]:
        return self.gate.shapes | self.out.shapes | self.post_norm.shapes

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.gate, self.out
