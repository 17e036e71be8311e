"""Cut a model for ranks, processes that compute it together: which rows of each matrix a rank has. No tensors here.

Each matrix is cut between its outputs, so no sum is divided, and every output has the bits that one process computes.

    embed                rows of the vocabulary                    gathered (native/cpp/step/ranks.h)
    qkv, q_up, k_up ...  heads, with their KV heads                kept: attention reads its own heads
    heads' values                                                  gathered
    up                   hidden columns, of each expert; a gate with its value     kept
    activations                                                    gathered
    out, down, head      outputs                                   gathered

With a norm over all query heads each rank computes all of attention, and of recurrent layers all but the projections.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import singledispatch

import numpy as np
from numpy.typing import NDArray

from tokenwright.models.combined import Mixed, Parallel
from tokenwright.models.experts import Experts
from tokenwright.models.graph import MLP, Attention, Graph
from tokenwright.models.latent import LatentAttention
from tokenwright.models.op import Matrix, Op
from tokenwright.models.recurrent import Recurrent


@dataclass(frozen=True, slots=True)
class RowCut:
    """A rank's part of a tensor: the numbers of its rows. whole: outputs of a matrix that ranks gather, else 0."""

    rows: NDArray[np.int64]
    whole: int = 0

    @property
    def first(self) -> int:
        return int(self.rows[0]) if len(self.rows) else 0


Cuts = Mapping[str, RowCut]  # by the names of weights


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank, and the number of all. lanes: outputs of a matrix that its kernels compute at once."""

    rank: int
    count: int
    lanes: int

    def share(self, total: int, unit: int = 0) -> range:
        """This rank's part of `total` things in whole `unit`s, by default blocks of outputs."""

        unit = unit or (self.lanes if total >= self.lanes * self.count else 1)
        units = -(-total // unit)
        start, stop = (units * at // self.count * unit for at in (self.rank, self.rank + 1))
        return range(min(start, total), min(stop, total))

    def heads(self, heads: int, kv_heads: int) -> tuple[range, range]:
        ratio = heads // kv_heads
        if kv_heads >= self.count:
            own = self.share(kv_heads, 1)
            return range(own.start * ratio, own.stop * ratio), own
        group = self.rank * kv_heads // self.count
        same = [rank for rank in range(self.count) if rank * kv_heads // self.count == group]
        at = self.rank - same[0]
        first, last = (ratio * place // len(same) for place in (at, at + 1))
        if first == last:  # more ranks than query heads
            first, last = at % ratio, at % ratio + 1
        return range(group * ratio + first, group * ratio + last), range(group, group + 1)


def cut_graph(graph: Graph, place: RankPlace) -> tuple[Graph, Cuts]:
    """A rank's graph, whose attention has the rank's heads, and its cuts. Matrices keep their names and sizes."""
    cuts = {one.name: _gathered(one, place) for one in (graph.embed.table, graph.head.matrix)}
    blocks = []
    for op in graph.blocks:
        own, found = _cut(op, place)
        blocks.append(own)
        cuts |= found
    return replace(graph, blocks=tuple(blocks)), cuts


def _gathered(matrix: Matrix, place: RankPlace) -> RowCut:
    return RowCut(_joined(place.share(matrix.out)), matrix.out)


def _joined(*runs: range) -> NDArray[np.int64]:
    return np.concatenate([np.arange(run.start, run.stop) for run in runs])


def _shifted(run: range, by: int, times: int = 1) -> range:
    return range(by + run.start * times, by + run.stop * times)


@singledispatch
def _cut(op: Op, place: RankPlace) -> tuple[Op, dict[str, RowCut]]:  # noqa: ARG001
    return op, {}  # each rank computes all of it


@_cut.register
def _attention(op: Attention, place: RankPlace) -> tuple[Attention, dict[str, RowCut]]:
    out = {op.out.name: _gathered(op.out, place)}
    if any(norm is not None and norm.size != op.head_size for norm in (op.q_norm, op.k_norm)):
        return op, {op.qkv.name: _gathered(op.qkv, place)} | out
    heads, kv_heads = place.heads(op.heads, op.kv_heads)
    size, keys = op.head_size, op.heads * op.head_size
    values = keys + op.kv_heads * size
    runs = [_shifted(heads, 0, size)]
    runs += [_shifted(kv_heads, at, size) for at, made in zip((keys, values), op.projected[1:], strict=True) if made]
    if op.out_gate:
        runs.append(_shifted(heads, values + op.kv_heads * size, size))
    cuts = {op.qkv.name: RowCut(_joined(*runs))} | out
    if op.sink_logits is not None:
        cuts[f"{op.sink_logits}.weight"] = RowCut(_joined(heads))
    return replace(op, heads=len(heads), kv_heads=len(kv_heads)), cuts


@_cut.register
def _latent(op: LatentAttention, place: RankPlace) -> tuple[Op, dict[str, RowCut]]:
    heads, _ = place.heads(op.heads, op.heads)
    size = op.nope_size + op.rope_size
    cuts = {
        op.k_up.name: RowCut(_joined(_shifted(heads, 0, op.rank))),
        op.v_up.name: RowCut(_joined(_shifted(heads, 0, op.value_size))),
        op.out.name: _gathered(op.out, place),
    }
    queries = _shifted(heads, 0, size)
    if op.q_up is None:  # each rank computes the latent
        cuts[op.down.name] = RowCut(_joined(queries, range(op.q_rows, op.down.out)))
    else:
        cuts[op.down.name], cuts[op.q_up.name] = _gathered(op.down, place), RowCut(_joined(queries))
    return replace(op, heads=len(heads)), cuts


@_cut.register
def _mlp(op: MLP, place: RankPlace) -> tuple[Op, dict[str, RowCut]]:
    if op.deviations is not None:  # which depend on all gates of a row
        return op, {op.down.name: _gathered(op.down, place)}
    return op, _pair(op.up, op.down, op.gated, place)


def _pair(up: Matrix, down: Matrix, gated: bool, place: RankPlace) -> dict[str, RowCut]:
    own = place.share(down.inner)
    runs = (own, _shifted(own, down.inner)) if gated else (own,)
    return {up.name: RowCut(_joined(*runs)), down.name: _gathered(down, place)}


@_cut.register
def _parallel(op: Parallel, place: RankPlace) -> tuple[Op, dict[str, RowCut]]:
    attention, cuts = _attention(op.attention, place)
    return replace(op, attention=attention), cuts | _mlp(op.mlp, place)[1]


@_cut.register
def _experts(op: Experts, place: RankPlace) -> tuple[Op, dict[str, RowCut]]:
    inner, width = op.down.inner, op.down.out // op.experts
    own, outputs = place.share(inner, place.lanes), place.share(width, place.lanes)
    each = 2 * inner if op.gated else inner

    def runs() -> Iterable[range]:
        for at in range(0, op.experts * each, each):
            yield _shifted(own, at)
            if op.gated:
                yield _shifted(own, at + inner)

    down = _joined(*(_shifted(outputs, at * width) for at in range(op.experts)))
    cuts = {op.up.name: RowCut(_joined(*runs())), op.down.name: RowCut(down, width)}
    return op, cuts | (_pair(*op.shared, op.gated, place) if op.shared else {})


@_cut.register
def _mixed(op: Mixed, place: RankPlace) -> tuple[Op, dict[str, RowCut]]:
    return op, _mlp(op.mlp, place)[1] | _experts(op.experts, place)[1]


@_cut.register
def _recurrent(op: Recurrent, place: RankPlace) -> tuple[Op, dict[str, RowCut]]:
    return op, {one.name: _gathered(one, place) for one in (op.project, op.out)}
