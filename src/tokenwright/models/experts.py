"""The op of a mixture of experts: a router chooses some of many MLPs for each row.

scores   = softmax or sigmoid of router(x)                       [experts]
ranks    = scores, plus a learned bias of each expert where the model has one
chosen   = the k experts of the highest ranks; with groups, from the groups whose best ranks have the largest sums
weights  = their scores, divided by their sum where the model says so, times a factor
result   = sum of weights_e expert_e(x) over the chosen in order, plus gate(x) shared(x) if there is a shared expert
"""

from dataclasses import dataclass
from typing import Literal

from tokenwright.models.op import Activation, Matrix, Norm, Op, Shape, numbers

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How the router's logits choose experts. The lowest number wins among equal ranks, of experts and of groups."""

    experts: int
    chosen: int  # k, for each row
    scores: Scores = "softmax"
    renormalise: bool = True
    shared_gate: bool = False  # one more output, whose sigmoid weights the shared expert
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1  # how many ranks a group sums
    factor: float = 1.0


@dataclass(frozen=True)
class Experts(Op):
    """x + residual_scale post_norm(experts(norm(x))); None: no such norm."""

    layer: int
    norm: Norm | None
    routing: Routing
    router: Matrix  # [experts, width], and one more row for the shared expert's gate
    up: Matrix  # [experts x 2 m, width], of each its gates, then its values; or, not gated, [experts x m, width]
    down: Matrix  # [experts x width, m]
    activation: Activation
    shared: tuple[Matrix, Matrix] | None = None  # up and down for all rows
    post_norm: Norm | None = None
    residual_scale: float = 1.0
    correction: str | None = None  # name of the ranks' biases [experts]
    gated: bool = True
    router_norm: Norm | None = None  # None: the router reads norm(x)
    router_scale: float = 1.0
    weight_scales: str | None = None  # name of the weights' last factors [experts]

    @property
    def learned_shapes(self) -> dict[str, Shape]:
        return numbers(self.correction, self.experts) | numbers(self.weight_scales, self.experts)

    @property
    def experts(self) -> int:
        return self.routing.experts

    @property
    def chosen(self) -> int:
        return self.routing.chosen

    @property
    def multiplied(self) -> int:
        return sum(one.out * one.inner for one in self.matrices) - self._unused

    @property
    def idle(self) -> int:
        biases = sum(one.out for one in (self.up, self.down) if one.bias)
        return self._unused + biases // self.experts * (self.experts - self.chosen)

    @property
    def _unused(self) -> int:
        every = sum(one.out * one.inner for one in (self.up, self.down))
        return every // self.experts * (self.experts - self.chosen)

    def read(self, rows: int) -> dict[str, Shape]:
        met = self.experts_met(rows)
        return {name: shape for name, shape in self.shapes.items() if _expert(name) < met}

    def experts_met(self, rows: int) -> int:
        """The expected number of distinct experts that `rows` rows choose, each as likely as the others."""
        return round(self.experts * (1 - (1 - self.chosen / self.experts) ** rows))


def _expert(name: str) -> int:
    _, found, rest = name.partition(".experts.")
    return int(rest.partition(".")[0]) if found else -1
