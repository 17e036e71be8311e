"""The graph's ops over tensors or arrays. Constructors handle the differences of models, so calls have few branches."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Protocol, TypeVar

from tokenwright.backends import Scored
from tokenwright.backends.layout import xielu_of
from tokenwright.backends.torch import embedding
from tokenwright.backends.torch.expert_mixture import TorchExperts
from tokenwright.backends.torch.kernels import Kernels, Linear, Values, in_fp32, library_of
from tokenwright.backends.torch.op_batch import ForwardState
from tokenwright.backends.torch.op_parts import (
    Weights,
    after,
    by_row,
    clipped,
    dense,
    factors,
    key_bias,
    like,
    linear,
    norm,
    over_heads,
    parted,
    scaled,
    sparse,
)
from tokenwright.cache import KVView
from tokenwright.config import Rope
from tokenwright.models.combined import Mixed, Parallel
from tokenwright.models.experts import Experts
from tokenwright.models.graph import MLP, Attention, Deepstack, Head, NextInput, Normed
from tokenwright.models.latent import LatentAttention
from tokenwright.models.op import Op
from tokenwright.models.recurrent import Recurrence, Recurrent
from tokenwright.models.residual_streams import Correct, Laurel, Merge, Predict, Spread
from tokenwright.models.taps import Site

AnyOp = TypeVar("AnyOp")


class RunningOp(Protocol):
    def __call__(self, x: Values, state: ForwardState) -> Values:
        """[T, width] -> [T, width]; calls the tap at the op's sites."""


class TorchAttention:
    """Attention: project, norm, rotate, store K and V, attend, project back."""

    def __init__(self, op: Attention, kernels: Kernels, weights: Weights) -> None:
        self.op: Attention | LatentAttention = op
        self.kernels = kernels
        self.layer = op.layer
        self.names = op.qkv.name, op.out.name
        self.heads = [*op.projected, *([op.heads] if op.out_gate else [])]
        learned = None if op.sink_logits is None else dense(weights, f"{op.sink_logits}.weight")
        self.norm = norm(op.norm, kernels, weights)
        self.qkv = linear(weights, op.qkv)
        self.scoring = Scored(op.scoring.scale, op.scoring.cap, learned, key_bias(op, self.qkv))
        self.out = linear(weights, op.out)
        self.q_norm, k_norm = (over_heads(one, op.head_size, kernels, weights) for one in (op.q_norm, op.k_norm))
        v_norm = norm(op.v_norm, kernels, weights)
        self.q_norm = clipped(self.q_norm, op.clip)
        self.norms = clipped(k_norm, op.clip), clipped(v_norm, op.clip), norm(op.out_norm, kernels, weights)
        self.after = after(op.post_norm, op.residual_scale, kernels, weights)

    def __call__(self, x: Values, state: ForwardState) -> Values:
        if isinstance(self.op, Attention) and self.op.kept:
            state.before[:] = [x]
        x = x + self.added(x, state)
        state.tap(Site.ATTENTION, self.layer, x)
        return x

    def added(self, x: Values, state: ForwardState) -> Values:
        """[T, width] -> [T, width]: the addition to the residual stream."""
        return self.attended(*self.projected(x, state), state)

    def projected(self, x: Values, state: ForwardState) -> tuple[Values, Values | None, Values | None]:
        """Store K and V of the rows [T, width]; return their queries, those for sinks, and the gates [T, H, D]."""
        tap, view = state.tap, state.store.view(self.layer)
        normed = self.norm(x)
        tap(Site.ATTENTION_INPUT, self.layer, normed)
        projected = state.linear(self.kernels, normed, self.qkv, self.names[0])
        projected = projected.reshape(len(x), sum(self.heads), -1)  # [T, H + 2 G (+ H), D]
        q, k, v, *gates = parted(projected, self.heads, 1)  # [T, H, D], [T, G, D], [T, G, D]
        assert isinstance(self.op, Attention), "latent attention has another form"
        plain = q if self.op.norms_last else self.q_norm(q)
        q, sink_q = self._rotated(plain, state), self._rotated_for_sinks(plain, view, state)
        if self.op.norms_last:
            q, sink_q = self.q_norm(q), sink_q if sink_q is None else self.q_norm(sink_q)
        tap(Site.QUERY, self.layer, q)
        if sink_q is not None:
            tap(Site.SINK_QUERY, self.layer, sink_q)
        if self.op.source is None:
            self._store(k, v if self.op.values == "own" else k, view, state, self.op.norms_last)
        return q, sink_q, gates[0] if gates else None

    def attended(self, q: Values, sink_q: Values | None, gates: Values | None, state: ForwardState) -> Values:
        """[T, H, D] -> [T, width]: attend to the stored K and V, and project back."""
        view = state.store.view(self.layer)
        mixed = self.kernels.attention(q, view, state.batch.chunks, self.scoring, sink_q)
        state.tap(Site.MIXED, self.layer, mixed)
        if gates is not None:
            mixed = self.kernels.weighted(mixed, gates)
        return self.after(state.linear(self.kernels, self.norms[2](by_row(mixed)), self.out, self.names[1]))

    def _store(self, k: Values, v: Values, view: KVView, state: ForwardState, norms_last: bool) -> None:
        """Norm K and V [T, G, D], rotate K, and store both."""
        k_norm, v_norm, _ = self.norms
        v = v_norm(v)
        if view.spec.unbiased and self.scoring.key_bias is not None:
            k = k - like(self.scoring.key_bias.numbers, k)
        k = k_norm(self._rotated(k, state)) if norms_last else self._rotated(k_norm(k), state)
        state.tap(Site.KEY, self.layer, k)
        state.tap(Site.VALUE, self.layer, v)
        self.kernels.store(view, state.batch.slots, k, v)

    @property
    def rope(self) -> Rope | None:
        return self.op.rotary

    def _rotated(self, x: Values, state: ForwardState) -> Values:
        return x if self.rope is None else self.kernels.rotate(x, state.batch.rotations[self.rope])

    def _rotated_for_sinks(self, q: Values, view: KVView, state: ForwardState) -> Values | None:
        """The queries [T, H, D] rotated for the keys of sinks, if there are any."""
        if self.rope is None or not view.spec.window.sinks:
            return None
        return self.kernels.rotate(q, state.batch.sink_rotations[self.rope, view.spec.window])


class TorchLatentAttention(TorchAttention):
    """Latent attention: the cache has one row for all heads, and queries are absorbed."""

    op: LatentAttention

    def __init__(self, op: LatentAttention, kernels: Kernels, weights: Weights) -> None:
        self.op = op
        self.kernels = kernels
        self.layer = op.layer
        self.scoring = Scored(op.scoring.scale, op.scoring.cap)
        self.norm, self.q_norm, self.kv_norm = (norm(one, kernels, weights) for one in (op.norm, op.q_norm, op.kv_norm))
        self.down = linear(weights, op.down)
        self.q_up = None if op.q_up is None else linear(weights, op.q_up)
        self.up = [linear(weights, one).split(op.heads) for one in (op.k_up, op.v_up)]  # latent to keys and values
        self.out = linear(weights, op.out)
        self.after = after(op.post_norm, op.residual_scale, kernels, weights)

    def added(self, x: Values, state: ForwardState) -> Values:
        batch, tap, view, op = state.batch, state.tap, state.store.view(self.layer), self.op
        normed = self.norm(x)
        tap(Site.ATTENTION_INPUT, self.layer, normed)
        projected = state.linear(self.kernels, normed, self.down, op.down.name)
        q, latent, part = parted(projected, [op.q_rows, op.rank, op.rope_size], 1)
        if self.q_up is not None and op.q_up is not None:
            q = state.linear(self.kernels, self.q_norm(q), self.q_up, op.q_up.name)
        heads = q.reshape(len(x), op.heads, -1)  # [T, H, nope + rope]
        still, turning = parted(heads, [op.nope_size, op.rope_size], 2)
        absorbed = self._by_head(still, self.up[0])  # [T, H, R]
        concat = library_of(x).concat
        rows = concat((absorbed, self._rotated(turning, state)), -1)  # [T, H, R + rope]
        tap(Site.QUERY, self.layer, rows)
        sink_part = self._rotated_for_sinks(turning, view, state)
        sink_rows = None if sink_part is None else concat((absorbed, sink_part), -1)
        if sink_rows is not None:
            tap(Site.SINK_QUERY, self.layer, sink_rows)
        latent = self.kv_norm(latent)[:, None]  # [T, 1, R]
        key = concat((latent, self._rotated(part[:, None], state)), -1)  # [T, 1, R + rope]
        tap(Site.KEY, self.layer, key)
        tap(Site.VALUE, self.layer, latent)
        self.kernels.store(view, batch.slots, key, latent)
        mixed = self.kernels.attention(rows, view, batch.chunks, self.scoring, sink_rows)  # [T, H, R]
        tap(Site.MIXED, self.layer, mixed)
        values = by_row(self._by_head(mixed, self.up[1]))  # [T, H x value]
        return self.after(state.linear(self.kernels, values, self.out, op.out.name))

    def _by_head(self, x: Values, weights: Sequence[Linear]) -> Values:
        """[T, H, in] -> [T, H, out] by the heads' own matrices."""
        return library_of(x).stack([self.kernels.linear(x[:, head], one) for head, one in enumerate(weights)], 1)


class TorchRecurrent:
    """A recurrence: project, rewrite the state row by row, project back."""

    def __init__(self, op: Recurrent, kernels: Kernels, weights: Weights) -> None:
        self.kernels, self.layer, self.beside = kernels, op.layer, op.beside
        self.factors = factors(op.factors)
        self.names = (op.project.name, op.out.name)
        self.recurrence = of = op.recurrence
        self.tensors = {name.removeprefix(f"{of.name}."): dense(weights, name) for name in of.shapes}
        convolved = [self.tensors[f"{part}.weight"] for part, _ in of.parts]
        self.tensors["conv.weight"] = library_of(convolved[0]).concat(convolved, 0)
        self.norm = norm(op.norm, kernels, weights)
        self.project = linear(weights, op.project)
        self.inner = [
            (one, linear(weights, one.matrix), [(each.size, norm(each, kernels, weights)) for each in one.norms])
            for one in op.inner
        ]
        self.out = linear(weights, op.out)
        self.after = after(op.post_norm, op.residual_scale, kernels, weights)

    def __call__(self, x: Values, state: ForwardState) -> Values:
        normed = self.norm(state.before[0] if self.beside else x)
        state.tap(Site.ATTENTION_INPUT, self.layer, normed)
        rows = self.factors(state.linear(self.kernels, normed, self.project, self.names[0]))
        of = self.recurrence
        if self.inner:
            rows = self._extended(rows, self._recur(rows, of.of_phase("convolution"), state), state)
            of = of.of_phase("rule")
        mixed = self._recur(rows, of, state)
        x = x + self.after(state.linear(self.kernels, mixed, self.out, self.names[1]))
        state.tap(Site.ATTENTION, self.layer, x)
        return x

    def _recur(self, rows: Values, of: Recurrence, state: ForwardState) -> Values:
        return self.kernels.recur(rows, of, self.tensors, state.store.states(self.layer), state.batch.chunks)

    def _extended(self, rows: Values, channels: Values, state: ForwardState) -> Values:
        conv, concat = self.recurrence.places.conv, library_of(rows).concat
        rows = concat((rows[:, :conv], channels, rows[:, conv + channels.shape[1] :]), 1)
        for one, weight, norms in self.inner:
            read = rows[:, one.at : one.at + one.matrix.inner]
            more = state.linear(self.kernels, read, weight, one.matrix.name)
            sizes = [size for size, _ in norms]
            parts = parted(more, [*sizes, more.shape[1] - sum(sizes)], 1)
            normed = [function(part) for (_, function), part in zip(norms, parts, strict=False)]
            rows = concat((rows, *normed, *parts[len(norms) :]), 1)
        return rows


class TorchMLP:
    def __init__(self, op: MLP, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.layer = op.layer
        self.names = op.up.name, op.down.name
        self.activation = op.activation
        self.norm = norm(op.norm, kernels, weights)
        self.up = linear(weights, op.up)
        self.down = norm(op.down_norm, kernels, weights), linear(weights, op.down)
        self.gated = op.gated
        self.learned = None if op.learned is None else xielu_of(op.learned, weights)
        each = factors([(out, one) for (_, out), one in zip(op.up.parts, op.factors, strict=False)])
        self.factors = sparse(each, op.deviations, kernels)
        self.after = after(op.post_norm, op.residual_scale, kernels, weights)
        self.end = embedding.LayerEnd(op.inputs, op.stream, kernels, weights)

    def __call__(self, x: Values, state: ForwardState) -> Values:
        x = self.end(x + self.added(x, state), state)
        state.tap(Site.MLP, self.layer, x)
        return x

    def added(self, x: Values, state: ForwardState) -> Values:
        normed = self.norm(x)
        state.tap(Site.MLP_INPUT, self.layer, normed)
        projected = self.factors(state.linear(self.kernels, normed, self.up, self.names[0]))
        if self.learned is None:
            activate = self.kernels.gated if self.gated else self.kernels.activate
            hidden = activate(projected, self.activation)
        else:
            hidden = self.kernels.xielu(projected, self.learned)
        state.tap(Site.MLP_HIDDEN, self.layer, hidden)
        return self.after(state.linear(self.kernels, self.down[0](hidden), self.down[1], self.names[1]))


class TorchParallel:
    def __init__(self, op: Parallel, kernels: Kernels, weights: Weights) -> None:
        self.attention = TorchAttention(op.attention, kernels, weights)
        self.mlp = TorchMLP(op.mlp, kernels, weights)

    def __call__(self, x: Values, state: ForwardState) -> Values:
        after = self.attention(x, state)
        after = after + self.mlp.added(x, state)
        state.tap(Site.MLP, self.mlp.layer, after)
        return after


class TorchMixed:
    """An MLP and experts, and a norm of the sum of their results."""

    def __init__(self, op: Mixed, kernels: Kernels, weights: Weights) -> None:
        self.mlp, self.experts = TorchMLP(op.mlp, kernels, weights), TorchExperts(op.experts, kernels, weights)
        self.norm = norm(op.post_norm, kernels, weights)
        self.end = embedding.LayerEnd(op.inputs, op.stream, kernels, weights)

    def __call__(self, x: Values, state: ForwardState) -> Values:
        x = self.end(x + self.norm(self.mlp.added(x, state) + self.experts.added(x)), state)
        state.tap(Site.MLP, self.mlp.layer, x)
        return x


class TorchNormed:
    def __init__(self, op: Normed, kernels: Kernels, weights: Weights) -> None:
        self.norm = norm(op.norm, kernels, weights)

    def __call__(self, x: Values, state: ForwardState) -> Values:  # noqa: ARG002  as all ops
        return self.norm(x)


class TorchHead:
    """Logits [n, vocabulary] in fp32 of rows [n, width] of the residual stream."""

    def __init__(self, op: Head, kernels: Kernels, weights: Weights) -> None:
        self.kernels = kernels
        self.norm = norm(op.norm, kernels, weights)
        self.matrix = linear(weights, op.matrix)
        self.scale = scaled(op.scale)
        self.cap = op.cap

    def __call__(self, x: Values) -> Values:
        logits = self.kernels.linear(self.scale(self.norm(x)), self.matrix)
        return in_fp32(logits if self.cap is None else self.kernels.soft_cap(logits, self.cap))


OPS: Mapping[type[Op], Callable[[Any, Kernels, Weights], RunningOp]] = {
    Attention: TorchAttention, LatentAttention: TorchLatentAttention, MLP: TorchMLP, Experts: TorchExperts,
    Parallel: TorchParallel, Mixed: TorchMixed, Recurrent: TorchRecurrent, NextInput: embedding.TorchNextInput,
    Spread: embedding.TorchSpread, Predict: embedding.TorchPredict, Laurel: embedding.TorchLaurel,
    Correct: embedding.TorchCorrect, Merge: embedding.TorchMerge, Deepstack: embedding.TorchDeepstack,
    Normed: TorchNormed,
}  # fmt: skip


# Parts that call kernels.
_HOLDING = (
    TorchAttention,
    TorchMLP,
    TorchExperts,
    embedding.LayerEnd,
    embedding.TorchInputGate,
    embedding.TorchLayerInputs,
)


def running(op: Op, kernels: Kernels, weights: Weights) -> RunningOp:
    return OPS[type(op)](op, kernels, weights)


def using(op: AnyOp, before: Kernels, kernels: Kernels) -> AnyOp:
    """A copy of an op of `before` with other kernels, over the same weights. Norms keep their kernels."""
    other = copy(op)
    for name, value in vars(op).items():
        if value is before:
            setattr(other, name, kernels)
        elif isinstance(value, _HOLDING):
            setattr(other, name, using(value, before, kernels))
    return other
