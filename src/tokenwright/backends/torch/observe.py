"""Observes a pass that runs op by op: taps give times and queries, kernels give counts."""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tokenwright.backends import Logits, Scored
from tokenwright.backends.device import Device
from tokenwright.backends.observation import CANDIDATES, Observed, Watched, device_clock
from tokenwright.backends.torch.border import array, tensor
from tokenwright.backends.torch.counted import WorkCounts
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.backends.torch.tensor_batch import tensors_of
from tokenwright.cache import ChunkRows, KVStore, KVView
from tokenwright.engine import Batch
from tokenwright.models.taps import Site

log = logging.getLogger(__name__)

_KERNELS = ReferenceKernels()


class Observer:
    """Collects the facts of one pass. Its kernels give `counts`."""

    def __init__(self, watched: Sequence[Watched], counts: WorkCounts, store: KVStore) -> None:
        self._watched = watched
        self._counts = counts
        self._store = store
        self._clock = device_clock(Device.named(store.memory.name))
        self._ends: list[int] = []
        self._layer_flop = 0
        self._queries: dict[int, torch.Tensor] = {}  # watched row -> [H, D]
        self._sink_queries: dict[int, torch.Tensor] = {}

    def tap(self, site: Site, layer: int, value: torch.Tensor) -> None:
        match site:
            case Site.EMBEDDING | Site.ATTENTION | Site.MLP:
                self._ends.append(_ns(self._clock()))
            case Site.QUERY | Site.SINK_QUERY:
                kept = self._queries if site is Site.QUERY else self._sink_queries
                kept.update({i: value[one.row] for i, one in enumerate(self._watched) if one.layer == layer})

    def end_blocks(self) -> None:
        """End the blocks: only the head follows."""
        self._layer_flop = self._counts.flop

    def observed(self, batch: Batch, logits: Logits, scorings: Mapping[int, Scored]) -> Observed:
        """The facts of the pass, after its end; fills in the watched rows. scorings: of layers with attention."""
        ended, counts, chunks = self._clock(), self._counts, range(len(batch.output_rows))
        rows = batch.logits_rows.tolist()
        for i, one in enumerate(self._watched):
            if one.layer in scorings:
                self._weigh(i, one, batch, scorings[one.layer].of_head(one.head))
            else:
                one.weights = np.zeros(batch.position(one.row) + 1, np.float32)
            if one.row in rows:
                row = tensor(logits.rows[rows.index(one.row)])
                one.highest = row.topk(min(CANDIDATES, len(row))).indices.tolist()
                logprobs = row.log_softmax(-1)
                one.entropy = float(-(logprobs.exp() @ logprobs)) / math.log(2)

        def each(counter: Counter[int]) -> list[int]:
            return [counter[index] for index in chunks]

        return Observed(
            [*self._ends, _ns(ended)],
            self._clock() - ended,
            self._layer_flop,
            counts.flop - self._layer_flop,
            counts.weight_bytes,
            each(counts.attention_flop),
            each(counts.kv_read),
            each(counts.kv_written),
        )

    def _weigh(self, index: int, one: Watched, batch: Batch, scoring: Scored) -> None:
        """Compute the weights of a watched row. An error of torch must not fail the step."""
        store, query, sinks = self._store, self._queries[index], self._sink_queries.get(index)
        view, position = store.view(one.layer), batch.position(one.row)
        group = one.head * view.spec.layout.kv_heads // len(query)
        try:
            read = store.chunk_rows(batch.tables_of(one.row), range(1), position)
            sink_query = None if sinks is None else sinks[one.head]
            chunk = tensors_of(read, query.device)
            one.weights = array(attention_row(view, chunk, query[one.head], sink_query, group, scoring))
        except RuntimeError:  # most often out of memory
            log.exception("the row of layer %d, head %d could not be computed", one.layer, one.head)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def attention_row(
    view: KVView, chunk: ChunkRows, query: torch.Tensor, sink_query: torch.Tensor | None, group: int, scoring: Scored
) -> torch.Tensor:
    """Weights [position + 1], fp32, of a row's query [D], and of one for sinks, over the keys of KV head `group`."""
    k, positions = _KERNELS.keys(view.head(group), chunk, scoring.of_group(group))  # [t, 1, D], [t]
    others = None if sink_query is None else sink_query[None, None]
    weights = _KERNELS.weights(query[None, None], k, positions, chunk.start, view.spec.window, scoring, others)
    row = torch.zeros(chunk.stop, device=query.device)
    row[positions] = weights[0, 0, 0]
    return row
