"""The recorder: wraps the engine's runner and sampler, and records each step of the watched sequences.

It is a Runner and a Sampler itself, so the engine needs no code for it. A step without a watched sequence passes
through unchanged. Of a watched sequence it records the times of the layers, the counts, the top candidates and one
attention row: fused kernels have no attention matrix, so it recomputes the row from the step's query and the cached
keys. The time that recording takes is measured separately and is not part of the step's time.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch

from tokenwright.backends import Scored
from tokenwright.cache import KVStore
from tokenwright.decode.sampler import Observe, uniform, unobserved
from tokenwright.engine import Chunk, Output, Pick, Result, Sequence, Step
from tokenwright.models.cost import CostModel
from tokenwright.models.taps import Site, Tap, ignore
from tokenwright.trace.counted import Counts
from tokenwright.trace.held import HeldLogits
from tokenwright.trace.rows import attention_row, coded
from tokenwright.trace.schema import AttentionRow, Candidate, LayerTime, StepFrame

CANDIDATES = 20

log = logging.getLogger(__name__)

Clock = Callable[[], float]  # seconds


def device_clock(device: torch.device) -> Clock:
    """The monotonic clock in seconds, read when `device` has finished its queued work."""
    wait: Callable[[], None]
    match device.type:
        case "cuda":
            wait = partial(torch.cuda.synchronize, device)
        case "mps":
            wait = torch.mps.synchronize
        case _:
            return time.perf_counter

    def now() -> float:
        wait()
        return time.perf_counter()

    return now


class TappedRunner(Protocol):
    """A Runner whose forward pass accepts a tap."""

    store: KVStore

    def forward(self, step: Step, tap: Tap = ignore) -> Output[torch.Tensor]: ...


class ObservedSampler(Protocol):
    """A Sampler that reports the logits and the distribution that it picked from."""

    def pick(self, output: Output[torch.Tensor], step: Step, observe: Observe = unobserved) -> list[Result]: ...


@dataclass(slots=True, eq=False)
class Watch:
    """One watched sequence. `frames` are those that its reader has not taken yet."""

    sequence: Sequence
    accepted: float  # when the request arrived, in seconds of the engine loop's clock
    watched: tuple[int, int]  # layer and head; replaced as one tuple: a step may be under way
    step: int = 0  # number of the next frame
    seen: int = 0  # tokens of the longest prefix computed so far
    held: HeldLogits = field(default_factory=HeldLogits)
    frames: deque[StepFrame] = field(default_factory=deque)


@dataclass(slots=True)
class _Draft:
    """An unfinished frame: what the tap has recorded of one watched chunk."""

    watch: Watch
    watched: tuple[int, int]  # at the start of the step
    chunk: Chunk
    index: int  # its place in the step
    row: int  # of its last token, among the rows of the step
    query: torch.Tensor | None = None  # [D]
    heads: int = 0  # query heads of the layer (H)
    sink_query: torch.Tensor | None = None  # [D], where the layer has one


@dataclass(slots=True)
class _Choice:
    """The sampler's input: logits [V], and the distribution [V] that it drew from, None if it was greedy."""

    logits: torch.Tensor
    chances: torch.Tensor | None


class Recorder:
    """Records the watched sequences of one engine.

    The engine loop reports the start and the end of every step (`end_step`). Any thread may call `watch` and `unwatch`;
    all other calls come from the engine thread.
    """

    def __init__(
        self,
        runner: TappedRunner,
        sampler: ObservedSampler,
        counts: Counts,
        costs: CostModel,
        scorings: list[Scored],
        clock: Clock = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self.counts = counts
        self.costs = costs
        self.scorings = scorings  # of each layer
        self.clock = clock
        self._watches: dict[int, Watch] = {}
        self._drafts: list[_Draft] = []
        self._marks: list[float] = []  # seconds, between the layers' attention and MLP halves
        self._parts: list[int] = []  # FLOP per row: of the layers, then of the head
        self._sampling_s = self._recording_s = 0.0
        self._done: list[tuple[Watch, StepFrame]] = []

    def watch(self, watch: Watch) -> None:
        """Record a sequence from its next step on, until `unwatch`."""
        self._watches[watch.sequence.id] = watch

    def unwatch(self, watch: Watch) -> None:
        """Stop recording a sequence."""
        self._watches.pop(watch.sequence.id, None)

    def forward(self, step: Step) -> Output[torch.Tensor]:
        """The runner's forward pass, with a tap if the step has a watched sequence."""
        self._done = []  # of a step that was interrupted after `pick`
        self._drafts = self._drafted(step) if self._watches else []
        if not self._drafts:
            return self.runner.forward(step)
        self.counts.reset()
        self._marks, self._parts = [], []
        output = self.runner.forward(step, self._tap)
        self._marks.append(self.clock())
        self._parts.append(self.counts.turn(len(output.logits)))
        return output

    def _drafted(self, step: Step) -> list[_Draft]:
        drafts, row = [], -1
        for index, chunk in enumerate(step.chunks):
            row += chunk.stop - chunk.start
            if (watch := self._watches.get(chunk.sequence.id)) is not None:  # read once: another thread may remove it
                drafts.append(_Draft(watch, watch.watched, chunk, index, row))
        return drafts

    def _tap(self, site: Site, layer: int, value: torch.Tensor) -> None:
        match site:
            case Site.EMBEDDING | Site.ATTENTION | Site.MLP:
                self._marks.append(self.clock())
                if site is Site.MLP and layer == self.costs.graph.layers - 1:
                    self._parts.append(self.counts.turn(len(value)))
            case Site.QUERY:
                for draft in self._drafts:
                    if draft.watched[0] == layer:
                        draft.query, draft.heads = value[draft.row, draft.watched[1]], value.shape[1]
            case Site.SINK_QUERY:
                for draft in self._drafts:
                    if draft.watched[0] == layer:
                        draft.sink_query = value[draft.row, draft.watched[1]]

    @torch.inference_mode()
    def pick(self, output: Output[torch.Tensor], step: Step) -> list[Result]:
        """The sampler's results, after recording the watched rows."""
        if not self._drafts:
            return self.sampler.pick(output, step)
        began = self.clock()
        choices: dict[int, _Choice] = {}
        results = self.sampler.pick(
            output, step, lambda chunk, *seen: choices.update({chunk.sequence.id: _Choice(*seen)})
        )
        sampled = self.clock()
        picks = {result.parent: result for result in reversed(results) if isinstance(result, Pick)}  # the first of each
        frames = []
        for draft in self._drafts:
            frame = self._frame(draft, len(output.rows[draft.index]))
            identity = draft.chunk.sequence.id
            if identity in picks:
                frame = _chosen(frame, picks[identity], choices[identity], draft.chunk)
                draft.watch.held.add(draft.watch.step, choices[identity].logits)
            frames.append((draft.watch, frame))
        self._recording_s = self.clock() - sampled
        self._sampling_s = sampled - began
        self._done, self._drafts = frames, []
        return results

    def end_step(self, began: float, ended: float) -> None:
        """Complete the frames of a finished step. `began`, `ended`: seconds of the engine loop's clock."""
        for watch, frame in self._done:
            whole = replace(
                frame,
                step=watch.step,
                began_us=_us(began - watch.accepted),
                step_us=_us(ended - began - self._recording_s),
                sampling_us=_us(self._sampling_s),
                recording_us=_us(self._recording_s / len(self._done)),
            )
            watch.frames.append(whole)
            watch.step += 1
        self._done = []

    def _frame(self, draft: _Draft, rows: int) -> StepFrame:
        watch, chunk = draft.watch, draft.chunk
        length, layers = chunk.stop - chunk.start, self._layers()
        block_row, head_row = self._parts
        kept = chunk.stop if watch.sequence.cache or not chunk.picks else 0
        store = self.runner.store
        tables = zip(store.groups, chunk.tables, strict=True)
        frame = StepFrame(
            step=0,
            start=chunk.start,
            length=length,
            recomputed=max(0, min(chunk.stop, watch.seen) - chunk.start),
            seq_len=len(watch.sequence.tokens),
            layer_tokens=length * len(layers),
            flops=block_row * length + head_row * rows + self.counts.attention_flops[draft.index],
            flops_derived=self.costs.chunk(chunk.start, length, rows).flops,
            weight_bytes=self.counts.weight_bytes,
            kv_read=self.counts.kv_read[draft.index],
            kv_written=self.counts.kv_written[draft.index],
            kv_resident=sum(spec.nbytes(kept) for spec in self.costs.specs),
            kv_allocated=sum(len(table) * group.page_bytes(store.page_size) for group, table in tables),
            began_us=0,
            step_us=0,
            attention_us=sum(layer.attention_us for layer in layers),
            mlp_us=sum(layer.mlp_us for layer in layers),
            head_us=_us(self._marks[-1] - self._marks[-2]),
            sampling_us=0,
            recording_us=0,
            token=None,
            rank=None,
            logprob=None,
            sampled=None,
            entropy=None,
            uniform=None,
            cache=watch.sequence.cache,
            layers=layers,
            candidates=(),
            attention=self._row(draft),
            text="",
        )
        watch.seen = max(watch.seen, chunk.stop)
        return frame

    def _layers(self) -> tuple[LayerTime, ...]:
        borders = [mark - self._marks[0] for mark in self._marks[:-1]]
        halves = [_us(after) - _us(before) for before, after in pairwise(borders)]
        return tuple(LayerTime(*pair) for pair in zip(halves[::2], halves[1::2], strict=True))

    def _row(self, draft: _Draft) -> AttentionRow | None:
        """The watched row, if the chunk picks a token. None also if torch fails: recording must not fail a step."""
        if draft.query is None or not draft.chunk.picks:
            return None
        (layer, head), chunk = draft.watched, draft.chunk
        store = self.runner.store
        view = store.view(layer)
        group = head * view.spec.layout.kv_heads // draft.heads
        scoring = self.scorings[layer].of_head(head)
        try:
            read = store.chunk_rows([table.pages for table in chunk.tables], range(1), chunk.stop - 1)
            weights = attention_row(view, read, draft.query, draft.sink_query, group, scoring)
            return coded(weights, layer, head)
        except RuntimeError:  # of torch, most often out of memory
            log.exception("the row of layer %d, head %d could not be computed", layer, head)
            return None


def _chosen(frame: StepFrame, pick: Pick, choice: _Choice, chunk: Chunk) -> StepFrame:
    """`frame` with the facts of the pick after a chunk."""
    logits, seed, token = choice.logits, chunk.request.params.seed, pick.tokens[0]
    total = logits.logsumexp(-1)
    highest = logits.topk(min(CANDIDATES, len(logits))).indices.tolist()
    ids = highest if token in highest else [*highest[:-1], token]
    models = (logits[ids] - total).tolist()
    samplers = [float(i == token) for i in ids] if choice.chances is None else choice.chances[ids].tolist()
    place = ids.index(token)
    return replace(
        frame,
        seq_len=chunk.stop + 1,
        token=token,
        rank=int((logits > logits[token]).sum()),
        logprob=models[place],
        sampled=samplers[place],
        entropy=float(total - (logits - total).exp_() @ logits) / math.log(2),  # -sum p log p, in bits
        uniform=None if seed is None or choice.chances is None else uniform(seed, chunk.stop, pick.choice),
        candidates=tuple(Candidate(*one) for one in zip(ids, models, samplers, strict=True)),
    )


def _us(seconds: float) -> int:
    return min(max(0, round(seconds * 1e6)), 2**32 - 2)  # a frame's field holds at most 71 minutes
