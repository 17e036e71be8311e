"""One head at one step, number by number: its query, the key and value of one cell, their product, and the softmax.

The query is run again read-only (replay.py); key and value are read from the cache, as kept.
"""

import torch

from tokenwright.backends import ReferenceKernels
from tokenwright.backends.torch.observe import attention_row
from tokenwright.errors import RequestError
from tokenwright.models.taps import Site
from tokenwright.trace.frame_codec import decode_weights
from tokenwright.trace.messages.way import ReadPosition, WayView
from tokenwright.trace.replay import AttentionReplay, ReplayedText
from tokenwright.trace.rows import coded

MOST_READS = 12

_KERNELS = ReferenceKernels()


@torch.inference_mode()
def way(replay: AttentionReplay, text: ReplayedText, reader: int, layer: int, head: int, position: int) -> WayView:
    """The way of one head at position `reader` into the cell of `position`.

    Raises RequestError for a position that the layer does not read there.
    """
    seen: dict[Site, torch.Tensor] = {}

    def tap(site: Site, at: int, value: torch.Tensor) -> None:
        if at == layer and site in (Site.QUERY, Site.SINK_QUERY, Site.MIXED):
            seen[site] = value[-1, head].float()

    chunk = replay.replayed(text, reader, tap)
    group, scoring = replay.group(head), replay.decoder.scorings[layer].of_head(head)
    view = text.store.view(layer)
    keys, positions = _KERNELS.keys(view.head(group), chunk)  # [t, 1, D], [t]
    values = _KERNELS.values(view.head(group), chunk)  # [t, 1, v]
    found = (positions == position).nonzero()
    if not len(found):
        raise RequestError(f"layer {layer} does not read position {position} here: it is outside its window")
    at = int(found[0])
    sink = seen.get(Site.SINK_QUERY)
    weights = attention_row(view, chunk, seen[Site.QUERY], sink, group, scoring)  # [reader + 1]
    sinks = positions < view.spec.window.sinks if sink is not None else torch.zeros_like(positions, dtype=torch.bool)
    queries = seen[Site.QUERY].expand(len(positions), -1)
    queries = queries if sink is None else torch.where(sinks[:, None], sink, queries)  # [t, D]
    dots = (queries.double() * keys[:, 0].double()).sum(-1)  # [t]
    scores = dots * scoring.scale
    if scoring.cap is not None:
        scores = scoring.cap * (scores / scoring.cap).tanh()
    coded_row = decode_weights(coded(weights, layer, head).codes)  # what every other view of the row shows
    most = set(weights.topk(min(MOST_READS, len(weights))).indices.tolist()) | {position}
    rows = [(place, i) for i, place in enumerate(positions.tolist()) if place in most]
    return WayView(
        reader=reader,
        position=position,
        layer=layer,
        head=head,
        group=group,
        query=tuple(queries[at].tolist()),
        key=tuple(keys[at, 0].tolist()),
        products=tuple((queries[at].double() * keys[at, 0].double()).tolist()),
        value=tuple(values[at, 0].tolist()),
        mixed=tuple(seen[Site.MIXED].tolist()),
        dot=float(dots[at]),
        scale=scoring.scale,
        score=float(scores[at]),
        weight=coded_row[position],
        reads=tuple(ReadPosition(place, float(scores[i]), coded_row[place]) for place, i in rows),
    )
