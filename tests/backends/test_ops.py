"""The torch backend's ops by their formulas, and how they take weights."""

import pytest
import torch
from torch.nn import functional as F

from tests.models.sized import Sized
from tokenwright.backends.native.compile import lacking
from tokenwright.backends.torch.kernels import Dense, Linear
from tokenwright.backends.torch.op_batch import OpBatch
from tokenwright.backends.torch.op_parts import linear, norm
from tokenwright.backends.torch.ops import OPS, ForwardState, TorchMLP
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.cache import KVStore
from tokenwright.models.graph import MLP, Embed, Graph, Head
from tokenwright.models.op import Matrix, Norm
from tokenwright.models.taps import Site

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


def test_layer_norm_centres_and_rms_norm_does_not() -> None:
    weights = tensors(("norm.weight", (64,)), ("norm.bias", (64,)))
    x = torch.randn(2, 64) + 3
    for one, same in ((Norm("norm", "layer", 64, 1e-5), True), (Norm("norm", "rms", 64, 1e-5), False)):
        part = norm(one, KERNELS, {**weights})
        assert torch.allclose(part(x), part(x + 10), atol=1e-4) is same


def mlp(op: MLP, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The op alone, its tap checked: it reads nothing of the batch but its adapters, and nothing of the store."""
    seen: list[tuple[Site, int, torch.Tensor]] = []
    nothing = torch.empty(0)
    batch, store = OpBatch(nothing, nothing, (), (), {}, {}, {}), object.__new__(KVStore)
    y = TorchMLP(op, KERNELS, {**weights})(x, ForwardState(batch, store, lambda *one: seen.append(one)))
    *_, (site, layer, value) = seen
    assert (site, layer) == (Site.MLP, op.layer)
    assert value is y
    return y


def test_a_gated_mlp_by_its_formula() -> None:
    x, before = torch.randn(2, 64), Norm("n", "rms", 64, 1e-5)
    both, down = Matrix("m.gate_up", (("m.gate", 96), ("m.up", 96)), 64), Matrix.single("m.down", 64, 96)
    op = MLP(3, before, both, down, "silu", gated=True)
    weights = tensors(*op.shapes.items())
    scale, gate, up, last = weights.values()
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * scale
    right = x + (F.silu(normed @ gate.T) * (normed @ up.T)) @ last.T
    torch.testing.assert_close(mlp(op, weights, x), right, rtol=1e-4, atol=1e-4)


def test_a_plain_mlp_by_its_formula() -> None:
    x, before = torch.randn(2, 64), Norm("n", "layer", 64, 1e-5)
    op = MLP(
        0, before, Matrix.single("m.up", 256, 64, True), Matrix.single("m.down", 64, 256, True), "gelu_tanh", False
    )
    weights = tensors(*op.shapes.items())
    scale, shift, up, up_bias, down, down_bias = weights.values()
    normed = F.layer_norm(x, (64,), scale, shift, 1e-5)
    right = x + F.gelu(normed @ up.T + up_bias, approximate="tanh") @ down.T + down_bias
    torch.testing.assert_close(mlp(op, weights, x), right, rtol=1e-4, atol=1e-4)


def test_what_nothing_runs_is_named() -> None:
    table, after = Matrix.single("embed", 8, 4), Norm("norm", "rms", 4, 1e-6)
    one = MLP(0, after, table, table, "relu", gated=False)
    assert lacking(Graph("A", 9, Embed(table), (one,), Head(after, table))) == []
    assert lacking(Graph("A", 9, Embed(table), (one, Sized({})), Head(after, table))) == ["Sized"]
    assert Sized not in OPS
