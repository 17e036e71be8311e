"""How the torch backend's ops take weights."""

import pytest
import torch

from tests.models.sized import Sized
from tokenwright.backends.native.compile import lacking
from tokenwright.backends.torch.kernels import Dense, Linear
from tokenwright.backends.torch.op_parts import linear
from tokenwright.backends.torch.ops import OPS
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.models.graph import MLP, Embed, Graph, Head
from tokenwright.models.op import Matrix, Norm

KERNELS = ReferenceKernels()


def tensors(*shapes: tuple[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, shape in shapes}


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_side_by_side_are_one(bias: bool) -> None:
    matrix = Matrix("qk", (("q", 6), ("k", 2)), 4, bias)
    weights = tensors(*matrix.shapes.items())
    apart, x = dict(weights), torch.randn(3, 4)
    parts = [KERNELS.linear(x, linear({**apart}, Matrix.single(name, out, 4, bias))) for name, out in matrix.parts]
    joined = linear({**apart}, matrix)
    assert isinstance(joined, Dense)
    assert (joined.bias is None) is not bias
    torch.testing.assert_close(KERNELS.linear(x, joined), torch.cat(parts, -1))
    given = {**weights}
    whole: Linear = linear(given, matrix)  # type: ignore[arg-type]
    assert given == {"qk": whole}, "what was joined is given up, so that memory does not hold it twice"
    assert linear(given, matrix) is whole, "ops may share a matrix"  # type: ignore[arg-type]


def test_a_single_linear_layer_is_not_copied() -> None:
    weights = tensors(("down.weight", (3, 4)))
    down: Linear = linear({**weights}, Matrix.single("down", 3, 4))
    assert isinstance(down, Dense)
    assert down.weight is weights["down.weight"]


def test_what_nothing_runs_is_named() -> None:
    table, after = Matrix.single("embed", 8, 4), Norm("norm", "rms", 4, 1e-6)
    one = MLP(0, after, table, table, "relu", gated=False)
    assert lacking(Graph("A", 9, Embed(table), (one,), Head(after, table))) == []
    assert lacking(Graph("A", 9, Embed(table), (one, Sized({})), Head(after, table))) == ["Sized"]
    assert Sized not in OPS
