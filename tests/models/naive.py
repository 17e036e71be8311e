"""The naive loop over all tokens, in float64 and without a cache: what every way to keep K and V must come to.

Row i reads key j if j <= i and j is a sink or lies in the window. A key is turned by its own position, a query by its
row's; but where it meets a sink, by no more than the last position of sinks and window side by side. Keys and values
go through the codec, those of the first tokens through the native one. For llama-like models with plain RoPE.
"""

from collections.abc import Sequence

import torch

from tests.oracle.harness import Subject
from tests.tensors import decode, encode
from tokenwright.cache import LayerSpec
from tokenwright.cache.codec import Codec
from tokenwright.config import NoScaling, Rope


def naive_logits(subject: Subject, tokens: Sequence[int], specs: Sequence[LayerSpec]) -> torch.Tensor:
    """Logits [t, V] in fp64 at every position of a text."""
    config = subject.config
    weights = {name: weight.double() for name, weight in subject.weights.items()}
    x = weights["embed.weight"][list(tokens)]
    for layer, spec in enumerate(specs):
        at = f"layers.{layer}"
        x = x + _attention(subject, weights, f"{at}.attention", _norm(x, weights, f"{at}.attention_norm", config), spec)
        h = _norm(x, weights, f"{at}.mlp_norm", config)
        gate, up = _linear(h, weights, f"{at}.mlp.gate"), _linear(h, weights, f"{at}.mlp.up")
        x = x + _linear(gate * gate.sigmoid() * up, weights, f"{at}.mlp.down")
    head = "embed" if config.tied_head else "head"
    return _linear(_norm(x, weights, "norm", config), weights, head)


def _norm(x, weights, name, config):
    return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[f"{name}.weight"]


def _linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def _turned(x: torch.Tensor, rope: Rope, places: torch.Tensor) -> torch.Tensor:
    """[t, heads, D] by the angles of the places [t]."""
    assert rope.scaling == NoScaling()
    size = x.shape[-1]
    angles = places.double()[:, None, None] * rope.theta ** -(torch.arange(0, size, 2).double() / size)
    first, second = x[..., : size // 2], x[..., size // 2 :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _kept(x: torch.Tensor, codec: Codec, spec: LayerSpec) -> torch.Tensor:
    """[t, G, D] as it comes back from the cache."""
    both = [(x[: spec.first], spec.native), (x[spec.first :], codec)]
    return torch.cat([decode(one, encode(one, part), x.shape[-1], torch.float64) for part, one in both])


def _attention(subject, weights, name, x, spec):
    config, places = subject.config, torch.arange(len(x))
    q, k, v = (_linear(x, weights, f"{name}.{one}").view(len(x), -1, config.head_size) for one in "qkv")
    if config.qk_norm:
        q, k = _norm(q, weights, f"{name}.q_norm", config), _norm(k, weights, f"{name}.k_norm", config)
    window, sinks = spec.window.size or len(x), spec.window.sinks
    other, bias = q, torch.zeros_like(k)
    if spec.unbiased:  # keys are kept without it
        bias = bias + weights[f"{name}.k.bias"].view(-1, config.head_size)
    if config.rotary[int(name.split(".")[1])]:
        other = _turned(q, config.positions, places.clamp(max=sinks + window - 1))
        q, k, bias = (_turned(one, config.positions, places) for one in (q, k, bias))
    k, v = _kept(k - bias, spec.k, spec) + bias, _kept(v, spec.v, spec)
    k, v = (one.repeat_interleave(config.group, 1) for one in (k, v))
    sink = places < sinks
    scores = torch.where(sink, *(torch.einsum("ihd,jhd->hij", one, k) for one in (other, q))) / config.head_size**0.5
    i, j = places[:, None], places
    seen = (j <= i) & (sink | (i - j < window))
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    mixed = torch.einsum("hij,jhd->ihd", shares, v).flatten(1)
    return _linear(mixed, weights, f"{name}.o")
