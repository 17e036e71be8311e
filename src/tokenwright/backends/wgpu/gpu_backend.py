"""Computes a step by one submission: the batch as words, a compiled graph's dispatches, and the returned bytes."""

import weakref
from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate
from typing import Any, Self

import numpy as np

from tokenwright.arrays import Array, Floats
from tokenwright.backends import Logits
from tokenwright.backends.layout import Weights, nbytes
from tokenwright.backends.native.program import NativeBackend, NativeDecoder
from tokenwright.backends.observation import Observed, Watched
from tokenwright.backends.wgpu.cut import cut
from tokenwright.backends.wgpu.dispatches import GROUPS, HIDDEN, ROWS, TOP, WANTED, WIDE, Compiler, check_store
from tokenwright.backends.wgpu.gpu import Buffer, Gpu
from tokenwright.backends.wgpu.uploads import WeightsOnGpu
from tokenwright.cache import KVStore
from tokenwright.engine import Batch
from tokenwright.errors import RequestError
from tokenwright.models.graph import Graph
from tokenwright.models.rotary import RotaryTable
from tokenwright.models.taps import Site, Tap, ignore

FEW = 2  # most rows in tiles of one
MOST_ROWS = 32768  # of a grid's second dimension


class GpuDecoder:
    """A graph that no kernel lacks (`refuse`), over weights on a GPU. Empties `weights`.

    first: the number of layers before them, which the CPU computes.
    """

    before: NativeDecoder | None = None

    def __init__(self, graph: Graph, gpu: Gpu, weights: Weights, wide: bool = True, first: int = 0) -> None:
        self.graph, self.last, self.gpu, self.wide, self.first = graph, graph, gpu, wide, first
        self.weight_bytes = nbytes(weights)
        if first:
            self.before, self.last = cut(graph, weights, first)
        self.on_gpu = WeightsOnGpu(gpu, weights)
        self.layer_tokens = 0

    def again(self) -> Self:
        other = copy(self)
        other.layer_tokens = 0
        return other


class GpuBackend:
    def __init__(self, decoder: GpuDecoder, store: KVStore) -> None:
        self.decoder, self.store, self.gpu, first = decoder, store, decoder.gpu, decoder.first
        self.before = None if decoder.before is None else NativeBackend(decoder.before, store.of_layers(0, first))
        on_gpu = store.of_layers(first, len(store.specs)) if first else store
        check_store(on_gpu)
        self.compiled = Compiler(self.gpu, decoder.last, decoder.on_gpu, on_gpu, decoder.wide, first)
        views = [on_gpu.view(layer) for layer in range(len(on_gpu.specs))]
        self._groups = sorted({part.group for view in views for part in view.parts})  # others are another model's
        self._tables = {turn: RotaryTable(turn[0], size) for turn, size in self.compiled.head_sizes.items()}
        self._workspace: dict[str, Buffer] = {}
        self._room = [0, 0, 0, 0]  # rows by ROWS, WANTED and HIDDEN, and words
        self._readback: Any = None
        self.forced: Mapping[tuple[Site, int], Array] = {}  # with a tap: replaces the values at a site
        self._last: Any = None  # a weak reference to the last logits

    def __call__(self, batch: Batch) -> Logits:
        """The logits of a batch. Raises CapacityError if memory is lacking, EngineError if the device fails."""
        return self.tapped(batch, ignore)

    def tapped(self, batch: Batch, tap: Tap) -> Logits:
        """Compute like a call, with a submission for each site of the tap, which gets copies of all but K and V."""
        assert not batch.adapters and batch.before is None and not batch.pictures, "the model has none"
        if (last := self._last and self._last()) is not None:
            last.keep()
        counts = (len(batch.tokens), len(batch.logits_rows), len(batch.hidden_rows))
        words, rotations = self._words(batch)
        self._grow(counts, len(words))
        self.gpu.write(self._workspace["step"], 0, words)
        self.gpu.write(self._workspace["rotations"], 0, rotations)
        if self.before is not None:
            rows = array("q", range(counts[ROWS]))
            found = self.before(replace(batch, logits_rows=array("q"), hidden_rows=rows)).hidden
            self.gpu.write(self._workspace["x"], 0, found)  # type: ignore[arg-type]
        read = {"found": 12 * counts[WANTED], "hidden states": 4 * counts[HIDDEN] * self.decoder.graph.width}
        draws, self.gpu.draws = self.gpu.draws, False
        read["top"] = 4 * (1 + 2 * TOP) * counts[WANTED] * draws
        ends = list(accumulate(read.values()))
        with self.gpu.guarded():
            encoder = self._computed(counts, tap, draws)
            for (name, size), end in zip(read.items(), ends, strict=True):
                if size:
                    encoder.copy_buffer_to_buffer(self._workspace[name], 0, self._readback, end - size, size)
        self.gpu.submit(encoder)
        parts = np.split(self.gpu.fetched(self._readback, ends[-1]).view(np.uint32), [end // 4 for end in ends[:-1]])
        self.decoder.layer_tokens += counts[ROWS] * self.decoder.graph.layers
        return self._logits(*parts)

    def observe(self, batch: Batch, watched: Sequence[Watched]) -> tuple[Logits, Observed]:  # noqa: ARG002
        raise RequestError("a GPU's steps cannot be observed; use device cpu", "device")

    def _logits(self, summary: Array, states: Array, top: Array) -> Logits:
        graph, summary = self.decoder.graph, summary.reshape(-1, 3)
        best = tuple(summary[:, 0].tolist())
        highest, totals = summary[:, 1].copy().view(np.float32), summary[:, 2].copy().view(np.float32)
        rows = DeviceLogits(self.gpu, self._workspace["logits"], graph.vocab_size, best, highest, top)
        self._last = weakref.ref(rows)
        hidden = states.view(np.float32).reshape(-1, graph.width) if len(states) else None
        return Logits(rows, best, tuple(totals.tolist()), hidden)  # type: ignore[arg-type]

    def _words(self, batch: Batch) -> tuple[Array, Floats]:
        store, groups, turns = self.store, len(self.store.groups), self.compiled.turns
        rows, tables = len(batch.tokens), []
        places = np.empty(rows, np.uint32)
        each = np.zeros((groups, 2, rows), np.uint32)  # of a group: slots, and places of page tables
        angles: list[list[Array]] = [[] for _ in turns]
        head = GROUPS + 2 * groups + len(turns)
        end = head + (2 + 2 * groups) * rows + len(batch.logits_rows) + len(batch.hidden_rows)
        for index, (row, count, start, limit) in enumerate(batch.each_chunk()):
            here, positions = slice(row, row + count), np.arange(start, start + count)
            places[here] = positions
            for group in self._groups:
                pages = batch.tables[index * groups + group]
                each[group, 0, here] = store.slots(group, pages, range(start, start + count))
                each[group, 1, here] = end
                tables.append(np.frombuffer(pages, np.int32).view(np.uint32))
                end += len(pages)
            for (turn, number), table in zip(turns.items(), self._tables.values(), strict=True):
                turned = positions if turn[1] is None else positions.clip(max=turn[1].edge)
                angles[number].append(table.rows(turned, limit).halves.reshape(-1))
        wanted, hidden = (np.array(one, np.int64) for one in (batch.logits_rows, batch.hidden_rows))
        parts = [np.frombuffer(batch.tokens, np.int64), places, wanted, hidden, *each.reshape(-1, rows), *tables]
        begins = head + np.cumsum([0, *map(len, parts)])
        header = np.zeros(head, np.uint32)
        header[:3] = rows, len(wanted), len(hidden)
        header[3:7] = begins[:4]
        header[GROUPS : GROUPS + 2 * groups] = begins[4 : 4 + 2 * groups]
        joined = [np.concatenate(one) for one in angles]
        header[GROUPS + 2 * groups :] = np.cumsum([0, *map(len, joined)])[: len(turns)]
        rotations = np.concatenate(joined) if joined else np.zeros(0, np.float32)
        return np.concatenate((header, *parts)).astype(np.uint32), rotations

    def _grow(self, counts: Sequence[int], words: int) -> None:
        needed = [*counts, words]
        if any(self._room) and all(have >= need for have, need in zip(self._room, needed, strict=True)):
            return
        room = [max(have, 1 << max(0, need - 1).bit_length()) for have, need in zip(self._room, needed, strict=True)]
        angles = sum(self.compiled.head_sizes.values())
        sizes = {name: 4 * size * room[counted] for name, (size, counted) in self.compiled.words.items()}
        sizes |= {"step": 4 * room[3], "rotations": 4 * angles * room[ROWS]}
        self._workspace, self._readback, self._room = {}, None, [0] * len(room)  # freed first; a failure leaves none
        for one in self.compiled.dispatches:
            one.bound = None
        self._workspace = {name: self.gpu.buffer(size) for name, size in sizes.items()}
        for one in self.compiled.dispatches:
            buffers = [self._workspace[it] if isinstance(it, str) else it for it in one.buffers]
            one.bound = self.gpu.group(one.kernel, buffers, self.compiled.facts, one.facts)
        self._readback = self.gpu.readback(
            4 * (4 + 2 * TOP) * room[WANTED] + 4 * self.decoder.graph.width * room[HIDDEN]
        )
        self._room = room

    def _computed(self, counts: Sequence[int], tap: Tap, draws: bool) -> Any:
        """An encoder that computes the step; with a tap, from the last site on."""
        encoder = self.gpu.device.create_command_encoder()
        compute = encoder.begin_compute_pass()
        for one in self.compiled.dispatches:
            rows = counts[one.counted] * one.each
            if not rows or one.drawn > draws:
                continue
            kernel, blocks = one.kernel, one.blocks
            if one.wide is not None and rows > FEW:
                kernel, rows = one.wide, -(-rows // WIDE)
            if blocks is None:
                blocks, rows = -(-rows // 64), 1
            compute.set_pipeline(kernel.pipeline)
            compute.set_bind_group(0, one.bound)
            compute.dispatch_workgroups(blocks, min(rows, MOST_ROWS), -(-rows // MOST_ROWS))
            if tap is not ignore and one.sites:
                compute.end()
                self.gpu.submit(encoder)
                for site, layer, name, numbers in one.sites:
                    read = self.gpu.read(self._workspace[name], 0, 4 * counts[ROWS] * numbers)
                    tap(site, layer, read.view(np.float32).reshape(counts[ROWS], numbers))
                    if (given := self.forced.get((site, layer))) is not None:
                        self.gpu.write(self._workspace[name], 0, given)
                encoder = self.gpu.device.create_command_encoder()
                compute = encoder.begin_compute_pass()
        compute.end()
        return encoder


class DeviceLogits:
    """Logits [W, vocabulary] that stay on the device until they are read, at the latest before the next step."""

    def __init__(self, gpu: Gpu, buffer: Buffer, size: int, best: Sequence[int], highest: Floats, top: Array) -> None:
        self.gpu, self.buffer, self.size, self.shape = gpu, buffer, size, (len(best), size)
        self.best, self.highest, self.top = best, highest, top.reshape(-1, 1 + 2 * TOP)  # `top.wgsl`; none: no rows
        self.row: tuple[DeviceLogits, int] | None = None  # set for one row [vocabulary] of these
        self._rows: Floats | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def keep(self) -> Floats:
        if self.row is not None:
            return np.asarray(self.row[0].keep()[self.row[1]])
        if self._rows is None:
            rows = self.gpu.read(self.buffer, 0, 4 * len(self) * self.size).view(np.float32).reshape(-1, self.size)
            self._rows = np.pad(rows, ((0, 0), (0, self.shape[1] - self.size)), constant_values=-np.inf)
        return self._rows

    def widened(self, size: int) -> Self:
        """With ids after the last, whose logits are -inf."""
        self.shape = len(self), size
        return self

    def item(self, token: int) -> float:
        """A logit of a single row; one of the highest without reading the row."""
        ids, logits = self.few(0)
        if token == self.best[0]:
            return float(self.highest[0])
        return float(logits[ids == token][0] if token in ids else self.keep()[token])

    def few(self, k: int) -> Any:
        """The ids, ascending, and logits of a single row that are among the highest; None for fewer than k."""
        self.gpu.draws |= k > 0
        top = self.top.reshape(-1)
        ids = top[1 : 1 + int(top[0])] if len(top) else top
        order = np.argsort(ids)
        return (ids[order], top[1 + TOP :][order].view(np.float32)) if k <= len(ids) else None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.keep(), dtype, copy=copy)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, int) or self.row is not None:
            return self.keep()[key]
        some = slice(key, key + 1)
        one = DeviceLogits(self.gpu, self.buffer, self.size, self.best[some], self.highest[some], self.top[some])
        one.row, one.shape = (self, key), (self.shape[1], 1)
        return one
