"""Computes a text once more and keeps its residual streams and attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.checks import is_whole, shown
from tokenwright.decode.logits_processors import Doubles, log_softmax
from tokenwright.errors import RequestError
from tokenwright.models.taps import Site
from tokenwright.trace.replay import AttentionReplay, QueryTap, StreamTap

MOST_OBSERVED = 4096
Head = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ObservedText:
    """Arrays in fp32 of a text of T tokens.

    hidden: [L + 1, T, width], the residual stream before and after each layer. attention: [T, T] of each requested
    head; row t has the weights with which token t reads. lens(position): the log-probabilities [L + 1, V] of the next
    token, as the head reads each layer's stream.
    """

    tokens: tuple[int, ...]
    hidden: Floats
    attention: Mapping[Head, Floats]
    lens: Callable[[int], Doubles] = field(repr=False)


def check_heads(observe: object, layers: int, heads: int, recurrent: Sequence[int]) -> tuple[Head, ...] | None:
    """The heads of an option `observe`; () for True, None for False. recurrent: the layers without heads."""
    if isinstance(observe, bool):
        return () if observe else None
    if not isinstance(observe, Sequence) or isinstance(observe, str):
        raise RequestError(f"observe must be True, or a list of (layer, head), not {shown(observe)}", "observe")
    for one in observe:
        pair = isinstance(one, tuple | list) and len(one) == 2 and all(map(is_whole, one))
        if not pair or not (0 <= one[0] < layers and 0 <= one[1] < heads):
            why = f"layers are from 0 to {layers - 1}, heads from 0 to {heads - 1}"
            raise RequestError(f"observe has {shown(one)}, which is no (layer, head): {why}", "observe")
        if one[0] in recurrent:
            others = ", ".join(str(layer) for layer in range(layers) if layer not in recurrent)
            there = f"the layers with attention are {others}" if others else "no layer of this model has attention"
            raise RequestError(f"layer {one[0]} keeps a state and has no attention heads; {there}", "observe")
    return tuple((layer, head) for layer, head in observe)


def observe_text(replay: AttentionReplay, tokens: Sequence[int], limit: int, heads: Sequence[Head]) -> ObservedText:
    """Compute a text once more, op by op. limit: its length at most, for its rotations."""
    if not tokens or (heads and len(tokens) > MOST_OBSERVED):
        raise RequestError(f"a text to observe has 1 to {MOST_OBSERVED:,} tokens, not {len(tokens):,}", "observe")
    kept: dict[tuple[Site, int], list[Floats]] = {}
    asked, streams = {layer for layer, _ in heads}, StreamTap()

    def tap(site: Site, layer: int, value: Floats) -> None:
        streams(site, layer, value)
        if layer in asked and site in (Site.QUERY, Site.SINK_QUERY):
            kept.setdefault((site, layer), []).append(value.copy())

    text = replay.computed(tokens, limit, tap)
    found = {place: np.concatenate(parts) for place, parts in kept.items()}
    seen = QueryTap()
    for (site, layer), rows in found.items():
        (seen.queries if site is Site.QUERY else seen.sinks)[layer] = rows
    hidden, chunk = streams.streams(), text.chunk(0, len(tokens))
    attention = {(layer, head): replay.weights(text, chunk, seen, layer, head)[0] for layer, head in heads}

    def lens(position: int) -> Doubles:
        return log_softmax(replay.passes.logits(np.ascontiguousarray(hidden[:, position])))

    return ObservedText(tuple(tokens), hidden, attention, lens)
