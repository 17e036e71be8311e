"""Parts of a model's ops: matrices and norms by name, and the facts that every op has. Linear weights are [out, in]."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Literal

from tokenwright.config import LayerKV, Rope

Shape = tuple[int, ...]
XIELU = ("alpha_p", "alpha_n", "beta")
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "clamped_swiglu", "quick_gelu"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [out, inner] or an embedding table. parts: linear layers of the same input, with their outputs."""

    name: str
    parts: tuple[tuple[str, int], ...]
    inner: int
    bias: bool = False

    @classmethod
    def single(cls, name: str, out: int, inner: int, bias: bool = False) -> "Matrix":
        return cls(name, ((name, out),), inner, bias)

    @property
    def out(self) -> int:
        return sum(out for _, out in self.parts)

    @property
    def shapes(self) -> dict[str, Shape]:
        found: dict[str, Shape] = {}
        for name, out in self.parts:
            found[f"{name}.weight"] = (out, self.inner)
            if self.bias:
                found[f"{name}.bias"] = (out,)
        return found

    @property
    def matrices(self) -> "tuple[Matrix, ...]":
        return (self,)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm or LayerNorm over the last dimension, or over each of its equal `parts`."""

    name: str
    kind: Literal["rms", "layer"]
    size: int
    eps: float
    bias: bool = True
    parts: int = 1
    weighted: bool = True

    @property
    def shapes(self) -> dict[str, Shape]:
        weight: dict[str, Shape] = {f"{self.name}.weight": (self.size,)} if self.weighted else {}
        if self.kind == "rms" or not self.bias:
            return weight
        return weight | {f"{self.name}.bias": (self.size,)}

    @property
    def matrices(self) -> "tuple[Matrix, ...]":
        return ()


def numbers(name: str | None, count: int = 1) -> dict[str, Shape]:
    return {} if name is None else {f"{name}.weight": (count,)}


def union(each: Iterable[dict[str, Shape]]) -> dict[str, Shape]:
    return {name: shape for shapes in each for name, shape in shapes.items()}


@dataclass(frozen=True, slots=True)
class Scoring:
    """Attention scores: scale q k, then cap tanh(score / cap) if there is a soft cap."""

    scale: float
    cap: float | None = None


class Weighted:
    """A dataclass whose tensors belong to its fields, or to tuples in its fields, and to `learned_shapes`."""

    __slots__ = ()

    @property
    def learned_shapes(self) -> dict[str, Shape]:
        """The shapes of its tensors that belong to no matrix and no norm."""
        return {}

    @property
    def shapes(self) -> dict[str, Shape]:
        return union(one.shapes for one in _weighted(self)) | self.learned_shapes

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices, which may be quantised; other tensors stay dense."""
        return tuple(matrix for one in _weighted(self) for matrix in one.matrices)


def _weighted(value: Any) -> "Iterator[Matrix | Norm | Weighted]":
    for field in fields(value):
        found = getattr(value, field.name)
        every = found if isinstance(found, tuple) else (found,)
        yield from (one for one in every if isinstance(one, Matrix | Norm | Weighted))


class Op(Weighted):
    """One coarse operation: its weights, their cost, and its KV layout if it is attention."""

    adaptable: ClassVar[bool] = False  # whether a LoRA adapter can update its matrices beside the weights

    @property
    def multiplied(self) -> int:
        return sum(matrix.out * matrix.inner for matrix in self.matrices)

    @property
    def products(self) -> Mapping[str, int]:
        """`multiplied` by product: query, key, value, output, hidden or mlp_output."""
        return {"mlp_output" if self.kv is None else "output": self.multiplied}

    @property
    def idle(self) -> int:
        return 0

    def read(self, rows: int) -> dict[str, Shape]:  # noqa: ARG002  experts depend on it
        """The shapes of the tensors, or slices of them, that a step of `rows` rows reads from memory."""
        return self.shapes

    @property
    def kv(self) -> LayerKV | None:
        """The memory of its layer for a text, K and V or a state; None unless the op is attention or recurrent."""
        return None

    @property
    def halves(self) -> tuple[int, ...]:
        """The halves of a layer that it ends: 0 attention or a recurrence, 1 the MLP; () for a part of the next op."""
        return (1,) if self.kv is None else (0,)

    @property
    def pair_flops(self) -> int:
        """FLOP for one row and one token that it attends to, over all query heads."""
        return 0

    @property
    def rope(self) -> Rope | None:
        return None

    @property
    def parts(self) -> "tuple[Op, ...]":
        """The ops that it holds side by side, or itself."""
        return (self,)


@dataclass(frozen=True, slots=True)
class LayerInputs(Weighted):
    """Inputs of each layer beside the residual stream, from a token's embedding x (as in Gemma 4).

    inputs = factor (norm(project_scale project(x)) + scale table[token])       [layers, size]
    """

    table: Matrix  # [vocabulary, layers x size]
    scale: float
    project: Matrix  # [layers x size, width]
    project_scale: float
    norm: Norm  # of `size` numbers
    factor: float


@dataclass(frozen=True, slots=True)
class InputGate(Weighted):
    """How a layer adds its inputs after its MLP: x + post_norm(out(activation(gate(x)) * inputs)), from `at` on."""

    at: int
    gate: Matrix  # [size, width]
    activation: Activation
    out: Matrix  # [width, size]
    post_norm: Norm


class OpList(ABC):
    """The tensors of several ops together: of a model or a tower."""

    @property
    @abstractmethod
    def ops(self) -> tuple[Op, ...]: ...

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        return union(op.shapes for op in self.ops)

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        return {matrix.name: matrix for op in self.ops for matrix in op.matrices}

    @cached_property
    def dense(self) -> tuple[str, ...]:
        """The tensors outside matrices: norms, and learned tables."""
        inside = {name for matrix in self.matrices.values() for name in matrix.shapes}
        return tuple(name for name in self.shapes if name not in inside)

    @cached_property
    def parameters(self) -> int:
        return sum(map(prod, self.shapes.values()))
