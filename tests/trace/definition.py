"""A head's attention row by its definition: everything is computed again from the tokens, and softmax(q k) in fp64."""

from collections.abc import Sequence

import numpy as np
import torch

from tokenwright.arrays import Array, Floats
from tokenwright.backends.torch.border import array, tensor
from tokenwright.backends.torch.kv_codec import decode, encode
from tokenwright.cache import LayerSpec
from tokenwright.decode.logits_processors import softmax
from tokenwright.engine.pictures import Spans
from tokenwright.llm.run import Run
from tokenwright.models.taps import Site
from tokenwright.trace.replay import AttentionReplay, QueryTap


def defined_row(
    replay: AttentionReplay, tokens: Sequence[int], limit: int, layer: int, head: int, spans: Spans = ()
) -> list[float]:
    """The expected `AttentionReplay.row` at the last of `tokens`."""
    spec = replay.specs[layer]
    seen, group, source = QueryTap(layer), replay.group(layer, head), layer - (spec.source or 0)
    keys: list[Array] = []

    def tap(site: Site, at: int, value: Floats) -> None:
        seen(site, at, value)
        if (site, at) == (Site.KEY, source):
            keys.append(value[:, group].copy())

    replay.computed(tokens, limit, tap, spans)
    query, sink_query = seen.last(layer, head)
    read = kept(spec, np.concatenate(keys))  # [t, D]
    places, scoring = np.arange(len(tokens)), replay.passes.scoring(layer, head)
    if spec.unbiased and scoring.key_bias is not None:
        read = read + scoring.key_bias.of_group(group).at(places)[:, 0]
    scores = read @ query.astype(np.float64)  # [t]
    sinks = places < spec.window.sinks
    if sink_query is not None:
        scores = np.where(sinks, read @ sink_query.astype(np.float64), scores)
    size = len(tokens) if spec.window.size is None else spec.window.size
    hidden = ~sinks & (places < len(tokens) - size)
    scores *= scoring.scale
    if scoring.cap is not None:
        scores = scoring.cap * np.tanh(scores / scoring.cap)
    scores[hidden] = -np.inf
    if scoring.sink_logits is not None:
        scores = np.concatenate((scores, scoring.sink_logits.astype(np.float64)))
    weights: list[float] = softmax(scores)[: len(tokens)].tolist()
    return weights


def kept(spec: LayerSpec, keys: Floats) -> Array:
    """Keys [t, D] of a whole text, as the cache decodes them, in fp64."""
    found = []
    for part in spec.parts:
        places = part.stored(range(len(keys)))
        encoded = encode(part.k.name, tensor(np.ascontiguousarray(keys[places.start : places.stop])))
        found.append(array(decode(part.k.name, encoded, keys.shape[-1], torch.float64)))
    return np.concatenate(found)


def row_of_run(run: Run, step: int, layer: int, head: int) -> list[float]:
    tokens, replay = run.tokens[: run.last_position(step) + 1], run._recording.replay
    limit, spans = run.sequence.limit, run.pictures
    return run.engine.inspect(lambda _: defined_row(replay, tokens, limit, layer, head, spans))
