"""The embedding, the layer inputs that it makes, and several residual streams, over tensors or arrays."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tokenwright.backends.torch.kernels import Kernels, Linear, Values, library_of
from tokenwright.backends.torch.op_batch import OpBatch
from tokenwright.backends.torch.op_parts import Weights, dense, linear, norm, parted, scaled
from tokenwright.models.graph import Deepstack, Embed, NextInput
from tokenwright.models.op import InputGate, LayerInputs
from tokenwright.models.residual_streams import Correct, Laurel, Merge, Predict, Spread, StreamRouter
from tokenwright.models.taps import Site

if TYPE_CHECKING:
    from tokenwright.backends.torch.op_batch import ForwardState

Multiply = Callable[[Values, Linear, str], Values]  # multiplies by a matrix and the adapters' updates of its name


class TorchEmbed:
    def __init__(self, op: Embed, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.table = linear(weights, op.table)
        self.positions = None if op.positions is None else dense(weights, "positions.weight")
        self.scale = scaled(op.scale)
        self.norm = norm(op.norm, kernels, weights)
        self.inputs = None if op.inputs is None else TorchLayerInputs(op.inputs, kernels, weights)

    def __call__(self, state: "ForwardState") -> Values:
        x = self.norm(self.scale(self.kernels.rows(self.table, state.batch.tokens)))
        if self.positions is not None:
            x = x + self.positions[state.batch.positions]
        for rows, one in state.batch.inserted:
            x[rows] = library_of(x).asarray(one, dtype=x.dtype)
        if self.inputs is not None:
            state.inputs[:] = [self.inputs(x, state.batch.tokens)]
        state.tap(Site.EMBEDDING, 0, x)
        return x


class TorchDeepstack:
    def __init__(self, op: Deepstack, kernels: Kernels, weights: Weights) -> None:  # noqa: ARG002  as all ops
        self.index = op.index

    def __call__(self, x: Values, state: "ForwardState") -> Values:
        for rows, one in state.batch.deep[self.index] if state.batch.deep else ():
            x[rows] += library_of(x).asarray(one, dtype=x.dtype)
        return x


class _Step(Protocol):
    @property
    def batch(self) -> OpBatch: ...


class TorchNextInput:
    def __init__(self, op: NextInput, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.hidden_first = op.hidden_first
        self.token_norm, self.hidden_norm = (norm(one, kernels, weights) for one in (op.token_norm, op.hidden_norm))
        self.project = linear(weights, op.project)

    def __call__(self, x: Values, state: _Step) -> Values:
        library = library_of(x)
        halves = self.token_norm(x), self.hidden_norm(library.asarray(state.batch.before, dtype=x.dtype))
        both = library.concat(halves[::-1] if self.hidden_first else halves, 1)
        return self.kernels.linear(both, self.project)


class TorchLayerInputs:
    def __init__(self, op: LayerInputs, kernels: Kernels, weights: Weights) -> None:
        self.op = op
        self.kernels = kernels
        self.table, self.project = linear(weights, op.table), linear(weights, op.project)
        self.norm = norm(op.norm, kernels, weights)

    def __call__(self, x: Values, tokens: Values) -> Values:
        """[T, width] -> [T, layers x size]."""
        op = self.op
        read = self.kernels.linear(x, self.project) * op.project_scale
        read = self.norm(read.reshape(len(x), -1, op.norm.size)).reshape(len(x), -1)
        known = tokens * (tokens < op.table.out)  # tokens beyond the table have the first row
        return (read + self.kernels.rows(self.table, known) * op.scale) * op.factor


class TorchInputGate:
    def __init__(self, op: InputGate, kernels: Kernels, weights: Weights) -> None:
        self.op = op
        self.kernels = kernels
        self.gate, self.out = linear(weights, op.gate), linear(weights, op.out)
        self.norm = norm(op.post_norm, kernels, weights)

    def added(self, x: Values, inputs: Values, multiply: Multiply) -> Values:
        op = self.op
        hidden = self.kernels.activate(multiply(x, self.gate, op.gate.name), op.activation)
        return self.norm(multiply(hidden * inputs[:, op.at : op.at + op.gate.out], self.out, op.out.name))


class LayerEnd:
    """Ends a layer after its MLP: adds the layer's inputs, and multiplies the residual stream by a factor."""

    def __init__(self, inputs: InputGate | None, stream: str | None, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.inputs = None if inputs is None else TorchInputGate(inputs, kernels, weights)
        self.stream = scaled(1.0 if stream is None else float(dense(weights, f"{stream}.weight")[0]))

    def __call__(self, x: Values, state: "ForwardState") -> Values:
        if self.inputs is not None:
            x = x + self.inputs.added(x, state.inputs[0], partial(state.linear, self.kernels))
        return self.stream(x)


class TorchSpread:
    def __init__(self, op: Spread, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.sizes = [out for _, out in op.project.parts]
        self.project = linear(weights, op.project)

    def __call__(self, x: Values, state: "ForwardState") -> Values:
        others = parted(self.kernels.linear(x, self.project), self.sizes, 1)
        state.streams[:] = [x, *(self.kernels.restored(one, x) for one in others)]
        return x


class _Routed:
    def __init__(self, of: StreamRouter, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.norm, self.scale = norm(of.norm, kernels, weights), scaled(of.scale)
        self.router, self.matrix = linear(weights, of.matrix), linear(weights, of.coefficients)

    def coefficients(self, x: Values) -> Values:
        """[T, width] -> [T, outputs]."""
        routed = self.kernels.linear(self.scale(self.norm(x)), self.router)  # [T, streams]
        return self.kernels.linear(self.kernels.soft_cap(routed, 1.0), self.matrix)


class TorchPredict(_Routed):
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
    """Corrects all streams after a layer, and adds its inputs to all but the first."""

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
    def __init__(self, op: Merge, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.each = [linear(weights, one) for one in op.each]
        self.factor = scaled(1 / (1 + len(op.each)))

    def __call__(self, x: Values, state: "ForwardState") -> Values:
        first, *others = state.streams
        for stream, matrix in zip(others, self.each, strict=True):
            x = x + self.kernels.restored(self.kernels.linear(stream, matrix), first)
        x = self.factor(x)
        state.tap(Site.MERGED, 0, x)
        return x
