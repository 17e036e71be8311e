"""One head at one step: its query, the key and value of one cell as cached, their product, and the softmax."""

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.errors import RequestError
from tokenwright.explorer.panels.way import ReadPosition, WayView
from tokenwright.models.taps import Site
from tokenwright.trace.frame_codec import decode_weights
from tokenwright.trace.replay import AttentionReplay, ReplayedText
from tokenwright.trace.rows import coded

MOST_READS = 12


def way(replay: AttentionReplay, text: ReplayedText, reader: int, layer: int, head: int, position: int) -> WayView:
    """Raises RequestError for a position that the layer does not read at `reader`."""
    seen: dict[Site, Floats] = {}

    def tap(site: Site, at: int, value: Floats) -> None:
        if at == layer and site in (Site.QUERY, Site.SINK_QUERY, Site.MIXED):
            seen[site] = value[-1, head].astype(np.float32)

    chunk = replay.replayed(text, reader, tap)
    group, scoring = replay.group(layer, head), replay.passes.scoring(layer, head)
    view = text.store.view(layer)
    keys, values, positions = replay.passes.cached(view, chunk, group)  # [t, D], [t, v], [t]
    found = np.flatnonzero(positions == position)
    if not len(found):
        raise RequestError(f"layer {layer} does not read token {position + 1} here: it is outside its window")
    at = int(found[0])
    query, sink = seen[Site.QUERY], seen.get(Site.SINK_QUERY)
    weights = replay.passes.row(view, chunk, query, sink, group, scoring)  # [reader + 1]
    queries = np.broadcast_to(query, (len(positions), len(query)))
    if sink is not None:
        queries = np.where((positions < view.spec.window.sinks)[:, None], sink, queries)  # [t, D]
    products = queries.astype(np.float64) * keys.astype(np.float64)
    dots = products.sum(-1)  # [t]
    scores = dots * scoring.scale
    if scoring.cap is not None:
        scores = scoring.cap * np.tanh(scores / scoring.cap)
    coded_row = decode_weights(coded(weights, layer, head).codes)  # what every other view of the row shows
    most = {*np.argsort(-weights, kind="stable")[:MOST_READS].tolist(), position}
    rows = [(place, i) for i, place in enumerate(positions.tolist()) if place in most]
    return WayView(
        reader=reader,
        position=position,
        layer=layer,
        head=head,
        group=group,
        query=tuple(queries[at].tolist()),
        key=tuple(keys[at].tolist()),
        products=tuple(products[at].tolist()),
        value=tuple(values[at].tolist()),
        mixed=tuple(seen[Site.MIXED].tolist()),
        dot=float(dots[at]),
        scale=scoring.scale,
        score=float(scores[at]),
        weight=coded_row[position],
        reads=tuple(ReadPosition(place, float(scores[i]), coded_row[place]) for place, i in rows),
    )
