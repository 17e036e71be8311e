"""The ops of several residual streams (`models/streams.py`), over tensors or arrays."""

from functools import partial
from typing import TYPE_CHECKING

from tokenwright.backends.torch.embedding import TorchInputGate
from tokenwright.backends.torch.kernels import Kernels, Values
from tokenwright.backends.torch.op_parts import Weights, dense, linear, norm, parted, scaled
from tokenwright.models.streams import Correct, Laurel, Merge, Predict, Spread, StreamRouter

if TYPE_CHECKING:
    from tokenwright.backends.torch.ops import ForwardState


class TorchSpread:
    """Makes the streams of the embedding."""

    def __init__(self, op: Spread, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.sizes = [out for _, out in op.project.parts]
        self.project = linear(weights, op.project)

    def __call__(self, x: Values, state: "ForwardState") -> Values:
        others = parted(self.kernels.linear(x, self.project), self.sizes, 1)
        state.streams[:] = [x, *(self.kernels.restored(one, x) for one in others)]
        return x


class _Routed:
    """An op with coefficients of each row."""

    def __init__(self, of: StreamRouter, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.norm, self.scale = norm(of.norm, kernels, weights), scaled(of.scale)
        self.router, self.matrix = linear(weights, of.matrix), linear(weights, of.coefficients)

    def coefficients(self, x: Values) -> Values:
        """[T, width] -> [T, outputs]."""
        routed = self.kernels.linear(self.scale(self.norm(x)), self.router)  # [T, streams]
        return self.kernels.linear(self.kernels.soft_cap(routed, 1.0), self.matrix)


class TorchPredict(_Routed):
    """Predicts all streams before a layer."""

    def __init__(self, op: Predict, kernels: Kernels, weights: Weights) -> None:
        super().__init__(op.router, kernels, weights)

    def __call__(self, x: Values, state: "ForwardState") -> Values:
        each, streams = self.coefficients(x), [*state.streams]
        for j, stream in enumerate(streams):
            by = each[:, j * len(streams) : (j + 1) * len(streams)]
            added = streams[0] * by[:, :1]
            for i in range(1, len(streams)):
                added = added + streams[i] * by[:, i : i + 1]
            state.streams[j] = added + stream
        return state.streams[0]


class TorchLaurel:
    """Adds a low-rank form of attention's input beside its result."""

    def __init__(self, op: Laurel, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.norm, self.post_norm = norm(op.norm, kernels, weights), norm(op.post_norm, kernels, weights)
        self.left, self.right = linear(weights, op.left), linear(weights, op.right)
        self.factor = scaled(op.factor)

    def __call__(self, x: Values, state: "ForwardState") -> Values:
        normed = self.norm(state.before[0])
        low = self.kernels.linear(normed, self.left)
        return self.factor(x + (self.post_norm(self.kernels.linear(low, self.right)) + normed))


class TorchCorrect(_Routed):
    """Corrects all streams behind a layer, and adds its inputs to all but the first."""

    def __init__(self, op: Correct, kernels: Kernels, weights: Weights) -> None:
        super().__init__(op.router, kernels, weights)
        self.inputs = TorchInputGate(op.inputs, kernels, weights)
        self.factors = None if op.scale is None else dense(weights, f"{op.scale}.weight")

    def __call__(self, x: Values, state: "ForwardState") -> Values:
        each = self.coefficients(x) + 1
        news = x - state.streams[0]
        first, *others = [one + news * each[:, i : i + 1] for i, one in enumerate(state.streams)]
        read = first if self.factors is None else first * self.factors
        added = self.inputs.added(read, state.inputs[0], partial(state.linear, self.kernels))
        state.streams[:] = [first, *(one + added for one in others)]
        return first


class TorchMerge:
    """Makes one stream of all for the head."""

    def __init__(self, op: Merge, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.each = [linear(weights, one) for one in op.each]
        self.factor = scaled(1 / (1 + len(op.each)))

    def __call__(self, x: Values, state: "ForwardState") -> Values:
        first, *others = state.streams
        for stream, matrix in zip(others, self.each, strict=True):
            x = x + self.kernels.restored(self.kernels.linear(stream, matrix), first)
        return self.factor(x)
