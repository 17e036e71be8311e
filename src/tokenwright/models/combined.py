"""Ops that add the results of attention, an MLP or experts that read the same input."""

from dataclasses import dataclass
from typing import ClassVar

from tokenwright.config import LayerKV, Rope
from tokenwright.models.experts import Experts
from tokenwright.models.graph import MLP, Attention, Graph
from tokenwright.models.op import InputGate, Norm, Op, Shape, numbers


@dataclass(frozen=True)
class Parallel(Op):
    """x + attention(x) + mlp(x): both read the same x, through norms of their own or through one (of one name)."""

    attention: Attention
    mlp: MLP
    adaptable: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[Op, ...]:
        return self.attention, self.mlp

    @property
    def kv(self) -> LayerKV:
        return self.attention.kv

    @property
    def halves(self) -> tuple[int, ...]:
        return 0, 1

    @property
    def pair_flops(self) -> int:
        return self.attention.pair_flops

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope


@dataclass(frozen=True)
class Mixed(Op):
    """x + post_norm(mlp(x) + experts(x)), each with its own norms of x and of its result."""

    mlp: MLP
    experts: Experts
    post_norm: Norm
    inputs: InputGate | None = None
    stream: str | None = None

    @property
    def layer(self) -> int:
        return self.mlp.layer

    @property
    def parts(self) -> tuple[Op, ...]:
        return self.mlp, self.experts

    @property
    def learned_shapes(self) -> dict[str, Shape]:
        return numbers(self.stream)

    @property
    def multiplied(self) -> int:
        own = sum(one.out * one.inner for one in (self.inputs.matrices if self.inputs else ()))
        return self.mlp.multiplied + self.experts.multiplied + own

    @property
    def idle(self) -> int:
        return self.experts.idle

    def read(self, rows: int) -> dict[str, Shape]:
        others = {name: shape for name, shape in self.shapes.items() if name not in self.experts.shapes}
        return others | self.experts.read(rows)


def mixtures(graph: Graph) -> tuple[Experts, ...]:
    """The mixtures of experts, in the order in which a step computes them."""
    every = (op.experts if isinstance(op, Mixed) else op for op in graph.blocks)
    return tuple(op for op in every if isinstance(op, Experts))
