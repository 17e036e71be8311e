"""Computes a mixture of experts over tensors or arrays."""

from typing import TYPE_CHECKING

from tokenwright.backends.packed import Packed
from tokenwright.backends.torch.kernels import Kernels, Linear, Values, library_of
from tokenwright.backends.torch.op_parts import Weights, after, dense, linear, norm, scaled
from tokenwright.models.experts import Experts
from tokenwright.models.taps import Site

if TYPE_CHECKING:
    from tokenwright.backends.torch.op_batch import ForwardState


class TorchExperts:
    """A mixture in which each expert computes the rows that chose it."""

    def __init__(self, op: Experts, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.layer = op.layer
        self.routing = op.routing
        correction = None if op.correction is None else dense(weights, f"{op.correction}.weight")
        self.activation = op.activation
        self.gated = op.gated
        self.norm = norm(op.norm, kernels, weights)
        self.router = linear(weights, op.router)
        ups, downs = (linear(weights, one).split(op.routing.experts) for one in (op.up, op.down))
        self.experts = list(zip(ups, downs, strict=True))
        self.shared = None if op.shared is None else (linear(weights, op.shared[0]), linear(weights, op.shared[1]))
        own_norm = None if op.router_norm is None else norm(op.router_norm, kernels, weights)
        self.own_input = own_norm, scaled(op.router_scale)
        scales = None if op.weight_scales is None else dense(weights, f"{op.weight_scales}.weight")
        self.learned = correction, scales
        self.after = after(op.post_norm, op.residual_scale, kernels, weights)

    def __call__(self, x: Values, state: "ForwardState") -> Values:
        rows = self.norm(x)
        state.tap(Site.MLP_INPUT, self.layer, rows)
        x = x + self._of(x, rows)
        state.tap(Site.MLP, self.layer, x)
        return x

    def added(self, x: Values) -> Values:
        return self._of(x, self.norm(x))

    def _of(self, x: Values, rows: Values) -> Values:
        (own_norm, scale), (correction, scales) = self.own_input, self.learned
        asked = rows if own_norm is None else own_norm(x)
        logits = scale(self.kernels.linear(asked, self.router))
        chosen, weights = self.kernels.route(logits, self.routing, correction)
        if scales is not None:
            weights = weights * scales[chosen]
        total = library_of(rows).zeros_like(rows)
        for expert in sorted(set(chosen.flatten().tolist())):
            at, place = library_of(chosen).where(chosen == expert)  # [n], [n]
            up, down = (one.in_memory() if isinstance(one, Packed) else one for one in self.experts[expert])
            total[at] += weights[at, place, None] * self._mlp(rows[at], up, down)
        if self.shared is not None:
            result = self._mlp(rows, *self.shared)
            total += weights[:, -1:] * result if self.routing.shared_gate else result
        return self.after(total)

    def _mlp(self, rows: Values, up: Linear, down: Linear) -> Values:
        activate = self.kernels.gated if self.gated else self.kernels.activate
        return self.kernels.linear(activate(self.kernels.linear(rows, up), self.activation), down)
