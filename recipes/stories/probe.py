"""The trained model for inspection: the arithmetic of `model.py`, with attention weights and a cache exposed.

Training needs none of this. These functions return every attention weight, keep K and V between calls, store them in
fewer bits, apply an attention window, or plant one of the faults that users of the explorer have to find.

Shapes: `T` new tokens, `S` tokens in the cache with them, `H` query heads, `G` key and value heads, `D` head size.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.stories.model import Attention, Layer, Model, rotate

FAULTS = ("position off by one", "rope applied twice", "missing mask", "stale page", "eos at prefill ignored")
PAGE = 16


@dataclass(frozen=True)
class View:
    """How K and V are stored and attended to: `bits` 16 keeps them unchanged; `window` 0 attends to all positions.

    A row attends to the last `window` positions, its own included, at their true distance, and to the first `sinks`
    positions as if its own were `min(i, sinks + window - 1)`. `shift` is added to the positions of rows from
    `shift_from` on.
    """

    bits: int = 16
    group: int = 32
    window: int = 0
    sinks: int = 0
    shift_from: int = 0
    shift: int = 0
    rope_twice: bool = False
    unmasked: bool = False


FULL = View()


@dataclass
class Cache:
    """Rotated keys and the values of each layer, (G, S, D)."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def length(self, layer: int = 0) -> int:
        return self.keys[layer].shape[1] if layer < len(self.keys) else 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer] = torch.cat((self.keys[layer], k), dim=1)
            self.values[layer] = torch.cat((self.values[layer], v), dim=1)
        return self.keys[layer], self.values[layer]


def through_bits(x: Tensor, view: View) -> Tensor:
    """x (..., D) after quantising and dequantising: symmetric integers, one fp16 scale for each `group` of them."""
    if view.bits == 16:
        return x
    most = 2 ** (view.bits - 1) - 1
    parts = x.reshape(*x.shape[:-1], -1, view.group)
    scale = (parts.abs().amax(-1, keepdim=True) / most).half().float().clamp_min(1e-8)
    whole = torch.clamp(torch.round(parts / scale), -most, most)
    return torch.reshape(whole * scale, x.shape)


def seen(rows: Tensor, columns: Tensor, view: View) -> tuple[Tensor, Tensor]:
    """Masks of the (row, column) pairs that attend within the window, and through a sink."""
    causal = columns[None, :] <= rows[:, None]
    if view.unmasked:
        causal = torch.ones_like(causal)
    if not view.window:
        return causal, torch.zeros_like(causal)
    near = causal & (columns[None, :] > rows[:, None] - view.window)
    return near, causal & ~near & (columns[None, :] < view.sinks)


def attend_openly(part: Attention, x: Tensor, at: tuple[int, Cache], view: View, tables: tuple[Tensor, Tensor]
                  ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of the rows x (T, C) over the cache: the output (T, C), and the weights (H, T, S)."""
    (layer, cache), (cos, sin) = at, tables
    size, past = part.config.head_size, cache.length(layer)
    rows = torch.arange(past, past + len(x))
    places = rows + view.shift * (rows >= view.shift_from)
    q, k, v = (proj(x).view(len(x), -1, size).transpose(0, 1) for proj in (part.q_proj, part.k_proj, part.v_proj))
    turned = rotate(k, cos[places], sin[places])
    if view.rope_twice:
        turned = rotate(turned, cos[places], sin[places])
    keys, values = cache.extend(layer, through_bits(turned, view), through_bits(v, view))
    group = part.config.heads // part.config.kv_heads
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)  # H S D
    near, sink = seen(rows, torch.arange(keys.shape[1]), view)
    scores = rotate(q, cos[places], sin[places]) @ keys.transpose(-1, -2)  # H T S
    if sink.any():
        stand = rows.clamp_max(view.sinks + view.window - 1)
        scores = torch.where(sink, rotate(q, cos[stand], sin[stand]) @ keys.transpose(-1, -2), scores)
    weights = (scores * size**-0.5).masked_fill(~(near | sink), float("-inf")).softmax(-1)
    return part.o_proj((weights @ values).transpose(0, 1).reshape(len(x), -1)), weights


@torch.inference_mode()
def run(model: Model, ids: list[int], cache: Cache | None = None, view: View = FULL) -> tuple[Tensor, list[Tensor]]:
    """Logits (T, V) of the ids, which follow the tokens in the cache, and each layer's attention weights (H, T, S)."""
    cache = Cache() if cache is None else cache
    tables = model.get_buffer("cos"), model.get_buffer("sin")
    x, shown = model.embed_tokens(torch.tensor(ids)), []
    for number, layer in enumerate(model.layers):
        if not isinstance(layer, Layer):
            raise TypeError(f"layer {number} is a {type(layer).__name__}")
        added, weights = attend_openly(layer.self_attn, layer.input_layernorm(x), (number, cache), view, tables)
        x = x + added
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        shown.append(weights)
    return F.linear(model.norm(x), model.embed_tokens.weight), shown


def greedy(model: Model, ids: list[int], most: int, view: View = FULL, stops: tuple[int, ...] = (1, 4)) -> list[int]:
    """The greedy continuation with the cache, one token at a time, up to a stop token, which is left out."""
    cache, written = Cache(), list[int]()
    logits, _ = run(model, ids, cache, view)
    while len(written) < most and (token := int(logits[-1].argmax())) not in stops:
        written.append(token)
        logits, _ = run(model, [token], cache, view)
    return written


def log_probability(model: Model, ids: list[int], written: list[int]) -> float:
    """The sum of the continuation's log-probabilities, in nats."""
    logits, _ = run(model, ids + written)
    chances = logits[len(ids) - 1 : -1].log_softmax(-1)
    return float(chances.gather(1, torch.tensor(written)[:, None]).sum())


def divergence(model: Model, ids: list[int], start: int, view: View) -> float:
    """Mean KL (nats) from the full view to `view` over the rows from `start` on, on the same text."""
    full = run(model, ids)[0][start:].log_softmax(-1)
    other = run(model, ids, view=view)[0][start:].log_softmax(-1)
    return float((full.exp() * (full - other)).sum(-1).mean())
