"""The reference kernels: plain torch, on any device, written for clarity. The oracle of every other kernel.

A row's result depends only on that row, up to the rounding of torch's products. `wide=torch.float64` sums in fp64 and
rounds once. In a quantised cache the smallest difference can change a code.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional as F

from tokenwright.arrays import Array
from tokenwright.backends.adapters import Make
from tokenwright.backends.packed import LANES, Packed
from tokenwright.backends.protocol import Scored
from tokenwright.backends.torch import kv_codec
from tokenwright.backends.torch.border import TensorRotation, array, tensor
from tokenwright.backends.torch.kernels import Dense, Linear
from tokenwright.backends.torch.recurrence import recur
from tokenwright.cache import ChunkRows, KVPart, KVView, Side, StateView
from tokenwright.engine.layer_group import AttentionWindow
from tokenwright.models.experts import Routing
from tokenwright.models.recurrent import Recurrence

MOST_DECODED = 1 << 22  # packed weights decoded at a time: 16 MiB in fp32
MOST_WEIGHTS = 1 << 26  # attention weights at a time: 256 MiB in fp32

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # gpt-oss: (value + 1) gate sigmoid(alpha gate), both clamped

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


class ReferenceKernels:
    """Implements `Kernels` in torch. `wide`: the dtype of sums, fp32 (with products in the dtype of `x`) or fp64."""

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        assert wide in (torch.float32, torch.float64), "sums are at least fp32"
        self.wide = wide

    def _in(self, x: torch.Tensor) -> torch.Tensor:
        """The input of a product, layer norm or activation: in fp64 if `wide` is."""
        return x if self.wide is torch.float32 else x.to(self.wide)

    def own(self, weight: Array | torch.Tensor) -> torch.Tensor:
        return tensor(weight)

    def linear(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        if isinstance(weight, Packed):
            return self._packed(x, weight)
        bias = None if weight.bias is None else self._in(weight.bias)
        return _as(F.linear(self._in(x), self._in(weight.weight), bias), x.dtype)

    def rows(self, weight: Linear, ids: torch.Tensor) -> torch.Tensor:
        return tensor(weight.rows(array(ids))) if isinstance(weight, Packed) else weight.weight[ids]

    def _packed(self, x: torch.Tensor, weight: Packed) -> torch.Tensor:
        """[T, in] -> [T, out], some blocks of outputs at a time."""
        wide, blocks = self._in(x), -(-weight.out // LANES)
        step = max(1, MOST_DECODED // (LANES * weight.inner))
        parts = []
        for first in range(0, blocks, step):
            rows = tensor(weight.blocks(first, min(first + step, blocks))).to(wide.dtype)
            at = first * LANES
            bias = None if weight.bias is None else tensor(weight.bias[at : at + len(rows)]).to(wide.dtype)
            parts.append(F.linear(wide, rows, bias))
        return _as(torch.cat(parts, -1), x.dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _as(x, self.wide)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if weight.dtype is not x.dtype:  # Gemma's fp32 weights: round only the product
            return _as(scaled * weight, x.dtype)
        return weight * _as(scaled, x.dtype)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return _as(F.layer_norm(self._in(x), x.shape[-1:], self._in(weight), self._in(bias), eps), x.dtype)

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return _as(ACTIVATIONS[activation](self._in(x)), x.dtype)

    def xielu(self, x: torch.Tensor, facts: Sequence[float]) -> torch.Tensor:
        wide = self._in(x)
        above, below, slope = facts
        high, low = wide.clamp(min=0), wide.clamp(max=0)
        return _as(above * high.square() + below * (torch.expm1(low) - low) + slope * wide, x.dtype)

    def sparse(self, x: torch.Tensor, deviations: float) -> torch.Tensor:
        wide = self._in(x)
        cutoff = wide.mean(-1, keepdim=True) + wide.std(-1, keepdim=True, correction=0) * deviations
        return _as((wide - cutoff).clamp(min=0), x.dtype)

    def restored(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        wide = self._in(x)
        size = self._in(like).square().mean(-1, keepdim=True).sqrt()
        return _as(wide * size / wide.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt(), x.dtype)

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        gates, values = x.chunk(2, dim=-1)
        if activation == "clamped_swiglu":
            gates, values = self._in(gates).clamp(max=SWIGLU_LIMIT), self._in(values).clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return _as((values + 1) * (gates * (gates * SWIGLU_ALPHA).sigmoid()), gates.dtype)
        return self.activate(gates, activation) * values

    def route(
        self, logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = _as(logits, self.wide)
        experts, gates = wide[:, : routing.experts], wide[:, routing.experts :]
        scores = experts.softmax(-1) if routing.scores == "softmax" else experts.sigmoid()  # [T, experts]
        ranks = scores if correction is None else scores + correction
        if routing.groups > 1:
            grouped = ranks.reshape(len(ranks), routing.groups, -1)  # [T, groups, experts of one]
            best = _highest(grouped.topk(routing.group_best).values.sum(-1), routing.chosen_groups)
            outside = torch.ones(grouped.shape[:2], dtype=torch.bool, device=best.device).scatter(1, best, False)
            ranks = grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)
        ids = _highest(ranks, routing.chosen)
        weights = scores.gather(1, ids)
        if routing.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        if routing.factor != 1:
            weights = weights * routing.factor
        return ids, _as(torch.cat((weights, gates.sigmoid()), 1), logits.dtype)

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return _as(self._in(x).div(cap).tanh_().mul_(cap), x.dtype)

    def rotate(self, x: torch.Tensor, rotation: TensorRotation) -> torch.Tensor:
        wide = _as(x, self.wide)
        first, second = wide.chunk(2, dim=-1)
        turned = wide * rotation.cos[:, None] + torch.cat((-second, first), dim=-1) * rotation.sin[:, None]
        return _as(turned, x.dtype)

    def store(self, view: KVView, slots: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> None:
        for part in view.parts:
            kv_codec.write(part.k, slots[part.group], k)
            kv_codec.write(part.v, slots[part.group], v)

    def attention(
        self,
        q: torch.Tensor,
        view: KVView,
        chunks: Sequence[ChunkRows],
        scoring: Scored,
        sink_q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], view.spec.layout.value_size)
        for chunk in chunks:
            k, positions = self.keys(view, chunk, scoring)  # [t, G, D], [t]
            values = self.values(view, chunk).permute(1, 0, 2)[:, None]  # [G, 1, t, D]
            block = max(1, MOST_WEIGHTS // (q.shape[1] * len(k)))  # rows at a time
            for first in range(0, len(chunk.rows), block):
                rows = slice(chunk.rows.start + first, chunk.rows.start + min(first + block, len(chunk.rows)))
                others = None if sink_q is None else sink_q[rows]
                start, ends = chunk.start + first, None if chunk.ends is None else chunk.ends[first : first + block]
                weights = self.weights(q[rows], k, positions, start, view.spec.window, scoring, others, ends)
                mixed = weights @ values  # [G, R, n, D]
                out[rows] = mixed.permute(2, 0, 1, 3).flatten(1, 2)  # [n, H, value size], rounded once
        return out

    def weighted(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return _as(self._in(x) * torch.sigmoid(self._in(gates)), x.dtype)

    def recur(
        self,
        projected: torch.Tensor,
        of: Recurrence,
        tensors: Mapping[str, torch.Tensor],
        view: StateView,
        chunks: Sequence[ChunkRows],
    ) -> torch.Tensor:
        return recur(projected, of, tensors, view, chunks, self.wide)

    def keys(self, view: KVView, chunk: ChunkRows, scoring: Scored | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The decoded keys [t, G, D] that a chunk reads, and their positions [t]. scoring: adds the key bias."""
        positions = _joined([tensor(chunk.positions[part.group]) for part in view.parts])
        keys = self._read(view.parts, [part.k for part in view.parts], chunk)
        if view.spec.unbiased and scoring is not None and scoring.key_bias is not None:
            keys = keys + tensor(scoring.key_bias.at(array(positions))).to(keys)
        return keys, positions

    def values(self, view: KVView, chunk: ChunkRows) -> torch.Tensor:
        return self._read(view.parts, [part.v for part in view.parts], chunk)

    def _read(self, parts: Sequence[KVPart], sides: Sequence[Side], chunk: ChunkRows) -> torch.Tensor:
        each = zip(parts, sides, strict=True)
        return _joined([kv_codec.read(side, chunk.slots[part.group], self.wide) for part, side in each])

    def weights(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        start: int,
        window: AttentionWindow,
        scoring: Scored,
        sink_q: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Weights [G, H / G, n, t] in `wide` of rows q [n, H, D] from position `start` on, over keys k [t, G, D].

        ends: [n], of the positions that each row reads; None: up to its own.
        """
        scores = self._scores(q, k)  # [G, R, n, t]
        if sink_q is not None:
            first = slice(window.sinks)  # every row reads the first positions up to its own
            scores[..., first] = self._scores(sink_q, k[first])
        rows = torch.arange(start, start + len(q), device=q.device)[:, None]
        hidden = positions > rows if ends is None else positions >= ends[:, None]  # [n, t]
        if window.size is not None:
            hidden |= (positions <= rows - window.size) & (positions >= window.sinks)
        scores.mul_(scoring.scale)
        if scoring.cap is not None:
            scores.div_(scoring.cap).tanh_().mul_(scoring.cap)
        scores.masked_fill_(hidden, float("-inf"))
        if scoring.sink_logits is None:
            return scores.softmax(-1)
        learned = _as(scoring.sink_logits, scores.dtype).view(*scores.shape[:2], 1, 1)  # [G, R, 1, 1]
        return torch.cat((scores, learned.expand(*scores.shape[:3], 1)), -1).softmax(-1)[..., :-1]

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """q k [G, H / G, n, t] of rows [n, H, D] and keys [t, G, D]."""
        queries = _as(q, self.wide).view(len(q), k.shape[1], -1, q.shape[2]).permute(1, 2, 0, 3)  # [G, R, n, D]
        return queries @ k.permute(1, 2, 0)[:, None]


def dense(dtype: torch.dtype, device: str) -> Make:
    return lambda weight: Dense(tensor(weight).to(device, dtype))


def _highest(ranks: torch.Tensor, count: int) -> torch.Tensor:
    """The ascending indices [T, count] of the highest ranks [T, n]; the lowest ones among equals."""
    return ranks.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(-1).values


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """As torch.cat, without a copy of a single tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As x.to(dtype), without a torch call if `x` has the dtype."""
    return x if x.dtype is dtype else x.to(dtype)
