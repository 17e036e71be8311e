"""The recurrence of `models.recurrent` in plain torch, token by token: the oracle of the native kernel."""

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from tokenwright.backends.torch.border import tensor
from tokenwright.cache import ChunkRows, StateView
from tokenwright.models.recurrent import Recurrence

UNIT_EPS = 1e-6  # added to a sum of squares when a vector is brought to length 1

Tensors = Mapping[str, torch.Tensor]  # by names without the layer's


def recur(
    projected: torch.Tensor,
    of: Recurrence,
    tensors: Tensors,
    view: StateView,
    chunks: Sequence[ChunkRows],
    wide: torch.dtype,
) -> torch.Tensor:
    """Projected rows [T, out] -> mixed ones [T, width]. The convolution's phase returns channels for the rule's."""
    mixed, memory = projected.new_empty(len(projected), of.width), tensor(view.memory)
    kept = {name: one.to(wide) for name, one in tensors.items()}
    for chunk in chunks:
        pages, ends = chunk.slots[view.group].tolist(), chunk.positions[view.group].tolist()
        state = (memory[pages[0]].clone() if chunk.start else memory.new_zeros(of.numbers)).to(wide)
        moved = slice(of.moved.start, of.moved.stop)
        history = state[: of.history].view(of.taps - 1, of.channels)
        heads = _by_head(state[of.history :], of)
        targets = dict(zip(ends[1:], pages[1:], strict=True))
        for position, row in enumerate(chunk.rows, chunk.start):
            at = projected[row].to(wide)
            behind, conv = at, of.places.conv
            if of.phase != "rule":
                channels, history = _convolved(at, of, kept, history)
                behind = torch.cat((at[:conv], channels, at[conv + of.channels :]))
            if of.phase != "convolution":
                result, heads = _stepped(behind, of, kept, heads)
                mixed[row] = _gated(result, at, of, kept).to(mixed.dtype)
            else:
                mixed[row] = channels.to(mixed.dtype)
            if position + 1 in targets:
                after = torch.cat((history.flatten(), _in_slabs(heads, of))).float()
                memory[targets[position + 1], moved] = after[moved]
            history, heads = history.float().to(wide), heads.float().to(wide)  # as read from memory
    return mixed


def _by_head(slabs: torch.Tensor, of: Recurrence) -> torch.Tensor:
    """A state in slabs of columns -> S [H, K, V]."""
    each = slabs.view(of.heads, of.value_size // of.columns, of.key_size, of.columns)
    return each.transpose(1, 2).reshape(of.heads, of.key_size, of.value_size)


def _in_slabs(heads: torch.Tensor, of: Recurrence) -> torch.Tensor:
    each = heads.reshape(of.heads, of.key_size, of.value_size // of.columns, of.columns)
    return each.transpose(1, 2).flatten()


def _convolved(
    row: torch.Tensor, of: Recurrence, tensors: Tensors, history: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    own = row[of.places.conv :][: of.channels]
    if of.places.before >= 0:
        own = own * row[of.places.before :][: of.channels]
    read = torch.cat((history, own[None]))  # [taps, channels]
    total = (read * tensors["conv.weight"].T).sum(0)
    if of.conv_bias:
        total = total + tensors["conv.bias"]
    return F.silu(total) if of.activated else total, read[1:]


def _stepped(
    row: torch.Tensor, of: Recurrence, tensors: Tensors, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixed [width] of a row after the convolution, and the next state [H, K, V]."""
    at = of.places
    if of.rule == "convolution":
        return row[at.conv :][: of.channels], state
    query, key = (
        row[place:][: of.key_heads * of.key_size].view(of.key_heads, of.key_size) for place in (at.query, at.key)
    )
    value = row[at.value :][: of.heads * of.value_size].view(of.heads, of.value_size)
    step = F.softplus(row[at.decay :][: len(tensors["dt.weight"])] + tensors["dt.weight"])
    if of.rule == "scan":
        decay = torch.exp(-tensors["a_log.weight"].exp().T * step)  # [K, V]
        state = state * decay + key[0, :, None] * (step * value[0])
        return (query[0] @ state[0] + tensors["skip.weight"] * value[0]), state
    if of.rule == "delta":
        query, key = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + UNIT_EPS) for one in (query, key))
        query, strength = query * of.key_size**-0.5, row[at.beta :][: of.heads].sigmoid() * of.beta_factor
    else:
        step = strength = step.clamp(of.least_step, of.most_step)
    each = of.heads // of.key_heads
    if of.in_turn:
        query, key = (one.repeat(each, 1) for one in (query, key))  # [H, K]
    else:
        query, key = (one.repeat_interleave(each, 0) for one in (query, key))
    step = step.view(of.heads, -1, 1)  # [H, K or 1, 1]
    state = state * torch.exp(-tensors["a_log.weight"].exp()[:, None, None] * step)
    written = value
    if of.rule == "delta":
        written = value - torch.einsum("hkv,hk->hv", state, key)
    state = state + key[:, :, None] * (strength[:, None] * written)[:, None]
    mixed = torch.einsum("hkv,hk->hv", state, query)
    if of.rule == "ssd":
        mixed = mixed + tensors["skip.weight"][:, None] * value
    return mixed.flatten(), state


def _gated(mixed: torch.Tensor, row: torch.Tensor, of: Recurrence, tensors: Tensors) -> torch.Tensor:
    gate = None if of.places.gate < 0 else row[of.places.gate :][: of.width]
    by = F.silu if of.gated_by == "silu" else torch.sigmoid
    if of.rule == "convolution":
        return mixed if gate is None else mixed * gate
    if gate is not None and (of.gate_first or of.norm is None):
        mixed = mixed * by(gate)
    if of.norm is not None:
        size = of.norm.size // of.norm.parts
        parts = mixed.view(-1, size)
        normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + of.norm.eps)
        mixed = (normed * tensors["norm.weight"].view(-1, size)).flatten()
        if gate is not None and not of.gate_first:
            mixed = mixed * by(gate)
    return mixed
