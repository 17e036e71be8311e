"""The decoder's parts: fused products against separate ones, norms and MLPs by their formulas."""

import pytest
import torch

from tests.models.fixtures import make_config
from tokenwright.backends import ReferenceKernels
from tokenwright.backends.torch.parts import linear, mlp, norm
from tokenwright.checkpoints.families import parse_config


def tensors(*shapes: tuple[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, shape in shapes}


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_side_by_side_are_one(bias: bool) -> None:
    shapes = [("q.weight", (6, 4)), ("k.weight", (2, 4))]
    weights = tensors(*shapes, *([("q.bias", (6,)), ("k.bias", (2,))] if bias else []))
    kernels, x = ReferenceKernels(), torch.randn(3, 4)
    parts = [kernels.linear(x, linear(weights, name)) for name in ("q", "k")]
    assert (linear(weights, "q").bias is None) is not bias
    torch.testing.assert_close(kernels.linear(x, linear(weights, "qk", "q", "k")), torch.cat(parts, -1))
    assert not weights, "what was joined is given up, so that memory does not hold it twice"


def test_a_single_linear_layer_is_not_copied() -> None:
    weights = tensors(("down.weight", (3, 4)))
    assert linear(weights, "down").weight is weights["down.weight"]


def test_gpt2s_norm_centres_and_llamas_does_not() -> None:
    weights = tensors(("norm.weight", (64,)), ("norm.bias", (64,)))
    x = torch.randn(2, 64) + 3
    kernels = ReferenceKernels()
    for kind, same in (("gpt2", True), ("llama2", False)):
        part = norm(parse_config(make_config(kind))[1], kernels, weights, "norm")
        assert torch.allclose(part(x), part(x + 10), atol=1e-4) is same


def test_the_mlps_of_gpt2_and_llama_by_their_formulas() -> None:
    x, kernels = torch.randn(2, 64), ReferenceKernels()
    gated = tensors(("m.gate.weight", (96, 64)), ("m.up.weight", (96, 64)), ("m.down.weight", (64, 96)))
    gate, up, down = gated.values()
    right = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(mlp(parse_config(make_config("llama2"))[1], kernels, gated, "m")(x), right)
    plain = tensors(
        ("m.up.weight", (256, 64)), ("m.up.bias", (256,)), ("m.down.weight", (64, 256)), ("m.down.bias", (64,))
    )
    up, up_bias, down, down_bias = plain.values()
    right = torch.nn.functional.gelu(x @ up.T + up_bias, approximate="tanh") @ down.T + down_bias
    torch.testing.assert_close(mlp(parse_config(make_config("gpt2"))[1], kernels, plain, "m")(x), right)
