"""The input of a layer that predicts one token further, over tensors of torch or arrays."""

from typing import Protocol

from tokenwright.backends.torch.kernels import Kernels, Values, library_of
from tokenwright.backends.torch.op_batch import OpBatch
from tokenwright.backends.torch.op_parts import Weights, linear, norm
from tokenwright.models.next_input import NextInput


class _Step(Protocol):
    @property
    def batch(self) -> OpBatch: ...


class TorchNextInput:
    """Joins the embedding of each token and the hidden state of the token before, and projects them."""

    def __init__(self, op: NextInput, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.hidden_first = op.hidden_first
        self.token_norm, self.hidden_norm = (norm(one, kernels, weights) for one in (op.token_norm, op.hidden_norm))
        self.project = linear(weights, op.project)

    def __call__(self, x: Values, state: _Step) -> Values:
        library = library_of(x)
        halves = self.token_norm(x), self.hidden_norm(library.asarray(state.batch.before, dtype=x.dtype))
        both = library.concat(halves[::-1] if self.hidden_first else halves, 1)  # [T, 2 width]
        return self.kernels.linear(both, self.project)  # [T, width]
