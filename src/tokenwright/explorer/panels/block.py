"""Panel Block: the vectors of one token in one layer, and how one head's query meets the key of another token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.decode.logits_processors import Doubles
from tokenwright.engine import AttentionWindow
from tokenwright.errors import RequestError
from tokenwright.explorer.explorer import Explorer
from tokenwright.models.cost import CostModel
from tokenwright.models.graph import Attention, Graph
from tokenwright.models.op import Op
from tokenwright.models.rotary import RotaryTable
from tokenwright.models.taps import Site
from tokenwright.trace.replay import AttentionReplay, QueryTap, ReplayedText
from tokenwright.trace.wire import COUNTED, DERIVED, READ


@dataclass(frozen=True, slots=True)
class BlockStage:
    name: str  # input, norm, query, key, value, attention, output, residual, mlp_norm, hidden, mlp_output, result
    shape: tuple[int, ...]
    norm: Annotated[float, READ("", "norm", "the length of the vector, of all its numbers together: in a replay")]
    heads: tuple[float, ...]
    numbers: tuple[float, ...]
    flops: Annotated[int, DERIVED("FLOP", "FLOPs", "2 x inputs x outputs, or 4 H D for each token read")]
    share: Annotated[float, DERIVED("share", "share", "of the FLOPs of this token in this layer")]


@dataclass(frozen=True, slots=True)
class HeadRead:
    head: int
    position: int  # the one that the head reads most
    weight: float


@dataclass(frozen=True, slots=True)
class ContextShare:
    context: int
    share: float


@dataclass(frozen=True, slots=True)
class BlockView:
    position: int
    layer: int
    context: Annotated[int, COUNTED("tokens", "read", "tokens that this one attends to, itself included")]
    kv_bytes: Annotated[int, DERIVED("B", "K and V kept", "of this token in this layer")]
    flops: Annotated[int, DERIVED("FLOP", "FLOPs of the layer", "for this token, in this layer")]
    model_flops: Annotated[int, DERIVED("FLOP", "FLOPs of the model", "2 (P_b + P_lm) + A(t): all layers and the head")]
    stages: tuple[BlockStage, ...]
    reads: tuple[HeadRead, ...]
    by_context: tuple[ContextShare, ...]


@dataclass(frozen=True, slots=True)
class ReadPosition:
    position: int
    score: float
    weight: float


@dataclass(frozen=True, slots=True)
class WayView:
    reader: int
    position: int
    layer: int
    head: int
    group: int  # its KV head
    query: tuple[float, ...]  # [D], like the key
    key: tuple[float, ...]
    plain: tuple[float, ...]  # [D], the key before its rotation; empty where no rotation follows from the position
    plain_query: tuple[float, ...]  # likewise
    angles: tuple[float, ...]  # [D / 2], radians: number i and number i + D / 2 turn by angle i
    products: tuple[float, ...]
    value: tuple[float, ...]
    mixed: tuple[float, ...]  # [v], over all positions
    dot: Annotated[float, READ("", "q · k", "the sum of the products of query and key, number by number")]
    scale: Annotated[float, DERIVED("", "scale", "1 / sqrt(D), or what the model has in its place")]
    score: Annotated[float, READ("", "score", "scale x q · k, and the soft cap of models that have one")]
    weight: Annotated[float, READ("share", "weight", "e^score / the sum of e^score over all positions read")]
    reads: tuple[ReadPosition, ...]  # those with the largest weights


MESSAGES = (BlockStage, HeadRead, ContextShare, BlockView, ReadPosition, WayView)


def block(explorer: Explorer, identity: str, step: int, layer: int, position: int | None = None) -> BlockView:
    run = explorer.run(identity)
    last = run.last_position(step)
    at = computed(position, last, step)
    run.check(layer, 0)
    return run.look(lambda replay, text: block_view(replay, text, at, layer), at)


def way(explorer: Explorer, identity: str, step: int, layer: int, head: int, position: int) -> WayView:
    run = explorer.run(identity)
    run.check(layer, head)
    last = run.last_position(step)
    computed(position, last, step)
    return run.look(lambda replay, text: way_view(replay, text, last, layer, head, position), last)


def computed(position: int | None, last: int, step: int) -> int:
    """A position that a step knows, by default its last. Raises RequestError for a later one."""
    if position is not None and not 0 <= position <= last:
        raise RequestError(f"position must be from 0 to {last}: later tokens are not computed at step {step + 1}")
    return last if position is None else position


SHOWN = 48
CONTEXTS = (16, 128, 1024, 8192, 65536)  # of the compared FLOPs
_PLACES = (  # stages in their order: name, and site
    ("norm", Site.ATTENTION_INPUT),
    ("query", Site.QUERY),
    ("key", Site.KEY),
    ("value", Site.VALUE),
    ("attention", Site.MIXED),
    ("output", None),
    ("residual", Site.ATTENTION),
    ("mlp_norm", Site.MLP_INPUT),
    ("hidden", Site.MLP_HIDDEN),
    ("mlp_output", None),
    ("result", Site.MLP),
)


def block_view(replay: AttentionReplay, text: ReplayedText, position: int, layer: int) -> BlockView:
    """The token's vectors in one layer, with their norms and FLOPs."""
    seen: dict[Site, Doubles] = {}
    before: list[Doubles] = []
    queries = QueryTap(layer)

    def tap(site: Site, at: int, value: Floats) -> None:
        queries(site, at, value)
        if at == layer and site is not Site.EMBEDDING:
            seen[site] = value[-1].astype(np.float64)
        elif site is Site.EMBEDDING or (site in (Site.ATTENTION, Site.MLP) and at < layer):
            before[:] = [value[-1].astype(np.float64)]

    chunk = replay.replayed(text, position, tap)
    vectors: dict[str, Doubles] = {"input": before[0]}
    vectors |= {name: seen[site] for name, site in _PLACES if site is not None and site in seen}
    vectors["output"] = seen[Site.ATTENTION] - before[0]
    vectors["mlp_output"] = seen[Site.MLP] - seen[Site.ATTENTION]
    graph, specs = replay.decoder.graph, replay.specs
    context = specs[layer].window.tokens_read(position, chunk.stop)
    flops = _flops(graph, layer, context)
    total = sum(flops.values())
    names = ["input", *(name for name, _ in _PLACES if name in vectors)]
    rows = replay.weights(text, chunk, queries, layer)[:, 0]
    return BlockView(
        position=position,
        layer=layer,
        context=context,
        kv_bytes=specs[layer].stored_bytes(range(position, position + 1)),
        flops=total,
        model_flops=CostModel(graph, specs).chunk(position, 1).flops,
        stages=tuple(_stage(name, vectors[name], flops.get(name, 0), total) for name in names),
        reads=tuple(HeadRead(head, int(row.argmax()), float(row.max())) for head, row in enumerate(rows)),
        by_context=_by_context(graph, specs[layer].window, layer, position + 1),
    )


def _stage(name: str, vector: Doubles, flops: int, total: int) -> BlockStage:
    heads = np.linalg.norm(vector, axis=-1).tolist() if vector.ndim > 1 else ()
    norm, numbers = float(np.linalg.norm(vector)), tuple(vector.ravel()[:SHOWN].tolist())
    return BlockStage(name, tuple(vector.shape), norm, tuple(heads), numbers, flops, flops / total)


def _ops(graph: Graph, layer: int) -> Sequence[Op]:
    first = graph.blocks.index(graph.attention[layer])
    rest = [*graph.attention, None][layer + 1]
    stop = len(graph.blocks) if rest is None else graph.blocks.index(rest)
    return graph.blocks[first:stop]


def _flops(graph: Graph, layer: int, context: int) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for op in (part for one in _ops(graph, layer) for part in one.parts):
        for name, weights in op.products.items():
            found[name] = found.get(name, 0) + 2 * weights
        if op.pair_flops:
            found["attention"] = op.pair_flops * context
    return found


def _by_context(graph: Graph, window: AttentionWindow, layer: int, now: int) -> tuple[ContextShare, ...]:
    lengths = sorted({now, graph.context, *(length for length in CONTEXTS if length < graph.context)})
    shares = []
    for length in lengths:
        flops = _flops(graph, layer, window.tokens_read(length - 1, length))
        shares.append(ContextShare(length, flops["attention"] / sum(flops.values())))
    return tuple(shares)


MOST_READS = 12


def way_view(replay: AttentionReplay, text: ReplayedText, reader: int, layer: int, head: int, position: int) -> WayView:
    """Raises RequestError for a position that the layer does not read at `reader`."""
    mixed: list[Doubles] = []
    queries = QueryTap(layer)

    def tap(site: Site, at: int, value: Floats) -> None:
        queries(site, at, value)
        if at == layer and site is Site.MIXED:
            mixed[:] = [value[-1, head].astype(np.float64)]

    chunk = replay.replayed(text, reader, tap)
    group, scoring = replay.group(layer, head), replay.passes.scoring(layer, head)
    view = text.store.view(layer)
    keys, values, positions = replay.passes.cached(view, chunk, group)  # [t, D], [t, v], [t]
    found = np.flatnonzero(positions == position)
    if not len(found):
        raise RequestError(f"layer {layer} does not read token {position + 1} here: it is outside its window")
    at = int(found[0])
    query, sink = queries.last(layer, head)
    weights = replay.weights(text, chunk, queries, layer, head)[0, 0]  # [reader + 1], also where none is kept
    of_keys = np.broadcast_to(query, (len(positions), len(query)))
    if sink is not None:
        of_keys = np.where((positions < view.spec.window.sinks)[:, None], sink, of_keys)  # [t, D]
    products = of_keys.astype(np.float64) * keys.astype(np.float64)
    dots = products.sum(-1)
    scores = dots * scoring.scale
    if scoring.cap is not None:
        scores = scoring.cap * np.tanh(scores / scoring.cap)
    op = replay.decoder.graph.attention[layer]
    plain, angles = _unrotated(op, keys[at].astype(np.float64), position, text.limit)
    most = {*np.argsort(-weights, kind="stable")[:MOST_READS].tolist(), position}
    rows = [(place, i) for i, place in enumerate(positions.tolist()) if place in most]
    return WayView(
        reader=reader,
        position=position,
        layer=layer,
        head=head,
        group=group,
        query=tuple(of_keys[at].tolist()),
        key=tuple(keys[at].tolist()),
        plain=tuple(plain.tolist()),
        plain_query=tuple(_unrotated(op, of_keys[at].astype(np.float64), reader, text.limit)[0].tolist()),
        angles=tuple(angles.tolist()),
        products=tuple(products[at].tolist()),
        value=tuple(values[at].tolist()),
        mixed=tuple(mixed[0].tolist()),
        dot=float(dots[at]),
        scale=scoring.scale,
        score=float(scores[at]),
        weight=float(weights[position]),
        reads=tuple(ReadPosition(place, float(scores[i]), float(weights[place])) for place, i in rows),
    )


def _unrotated(op: Op, turned: Doubles, position: int, limit: int) -> tuple[Doubles, Doubles]:
    """A key or query [D] before its rotation, and the angle [D / 2] of each pair, if any."""
    if not isinstance(op, Attention) or op.rotary is None or op.rotary.sections or op.norms_last:
        return np.empty(0), np.empty(0)
    table, half = RotaryTable(op.rotary, op.head_size), op.head_size // 2
    at, one = (table.rows(np.array([place]), limit) for place in (position, 1))
    cos, sin = at.cos[0, :half].astype(np.float64), at.sin[0, :half].astype(np.float64)
    a, b = turned[:half], turned[half:]
    plain = np.concatenate((a * cos + b * sin, b * cos - a * sin)) / np.tile(cos * cos + sin * sin, 2)
    return plain, position * np.arctan2(one.sin[0, :half], one.cos[0, :half]).astype(np.float64)
