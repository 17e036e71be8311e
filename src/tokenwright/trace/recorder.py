"""The recorder: wraps the engine's runner and sampler, and records each step of the watched sequences.

It is a Runner and a Sampler itself, so the engine needs no code for it. A step without a watched sequence passes
through unchanged. Of a watched sequence it records the times of the layers, the counts, the top candidates and one
attention row, most of which the runner tells of a step that it observes. The time that recording takes is measured
separately and is not part of the step's time.
"""

import time
from collections import deque
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

import torch

from tokenwright.backends.observed import Clock, Observed, Watched
from tokenwright.cache import KVStore
from tokenwright.decode.sampler import Observe, uniform, unobserved
from tokenwright.engine import Chunk, Output, Pick, Result, Sequence, Step
from tokenwright.models.cost import CostModel
from tokenwright.trace.held import HeldLogits
from tokenwright.trace.rows import coded
from tokenwright.trace.schema import Candidate, LayerTime, StepFrame


class WatchedRunner(Protocol):
    """A Runner that can tell the facts of a step."""

    store: KVStore

    def forward(self, step: Step) -> Output[torch.Tensor]: ...

    def observe(self, step: Step, watched: ListLike[Watched]) -> tuple[Output[torch.Tensor], Observed]: ...


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
    """An unfinished frame: a watched chunk, and its last token's row if that picks a token."""

    watch: Watch
    chunk: Chunk
    index: int  # its place in the step
    row: Watched | None


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
        runner: WatchedRunner,
        sampler: ObservedSampler,
        costs: CostModel,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self.costs = costs
        self.clock = clock
        self._watches: dict[int, Watch] = {}
        self._drafts: list[_Draft] = []
        self._observed: Observed | None = None
        self._row_flop = 0, 0  # of the layers and of the head
        self._sampling_s = self._recording_s = 0.0
        self._done: list[tuple[Watch, StepFrame]] = []

    def watch(self, watch: Watch) -> None:
        """Record a sequence from its next step on, until `unwatch`."""
        self._watches[watch.sequence.id] = watch

    def unwatch(self, watch: Watch) -> None:
        """Stop recording a sequence."""
        self._watches.pop(watch.sequence.id, None)

    def forward(self, step: Step) -> Output[torch.Tensor]:
        """The runner's forward pass, observed if the step has a watched sequence."""
        self._done = []  # of a step that was interrupted after `pick`
        self._drafts = self._drafted(step) if self._watches else []
        if not self._drafts:
            return self.runner.forward(step)
        output, observed = self.runner.observe(step, [draft.row for draft in self._drafts if draft.row])
        rows, wanted = sum(chunk.stop - chunk.start for chunk in step.chunks), len(output.logits)
        # Experts differ in rows, but each row meets as many.
        self._row_flop = observed.layer_flop // rows, observed.head_flop // wanted if wanted else 0
        self._observed = observed
        return output

    def _drafted(self, step: Step) -> list[_Draft]:
        drafts, row = [], -1
        for index, chunk in enumerate(step.chunks):
            row += chunk.stop - chunk.start
            if (watch := self._watches.get(chunk.sequence.id)) is not None:  # read once: another thread may remove it
                drafts.append(_Draft(watch, chunk, index, Watched(*watch.watched, row) if chunk.picks else None))
        return drafts

    @torch.inference_mode()
    def pick(self, output: Output[torch.Tensor], step: Step) -> list[Result]:
        """The sampler's results, after recording the watched rows."""
        if not self._drafts or self._observed is None:
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
                assert draft.row is not None, "the chunk picks a token"
                frame = _chosen(frame, picks[identity], choices[identity], draft.chunk, draft.row)
                draft.watch.held.add(draft.watch.step, choices[identity].logits)
            frames.append((draft.watch, frame))
        self._recording_s = self.clock() - sampled + self._observed.looking_s
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
        watch, chunk, index, row, observed = draft.watch, draft.chunk, draft.index, draft.row, self._observed
        assert observed is not None, "the step was observed"
        length, layers = chunk.stop - chunk.start, _layers(observed)
        block_row, head_row = self._row_flop
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
            flops=block_row * length + head_row * rows + observed.attention_flop[index],
            flops_derived=self.costs.chunk(chunk.start, length, rows).flops,
            weight_bytes=observed.weight_bytes,
            kv_read=observed.kv_read[index],
            kv_written=observed.kv_written[index],
            kv_resident=self.costs.kept_bytes(kept),
            kv_allocated=sum(len(table) * group.page_bytes(store.page_size) for group, table in tables),
            began_us=0,
            step_us=0,
            attention_us=sum(layer.attention_us for layer in layers),
            mlp_us=sum(layer.mlp_us for layer in layers),
            head_us=_us(observed.ends[-1] - observed.ends[-2]),
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
            attention=None if row is None or row.weights is None else coded(row.weights, row.layer, row.head),
            text="",
        )
        watch.seen = max(watch.seen, chunk.stop)
        return frame


def _layers(observed: Observed) -> tuple[LayerTime, ...]:
    borders = [_us(end - observed.ends[0]) for end in observed.ends[:-1]]
    halves = [after - before for before, after in pairwise(borders)]
    return tuple(LayerTime(*pair) for pair in zip(halves[::2], halves[1::2], strict=True))


def _chosen(frame: StepFrame, pick: Pick, choice: _Choice, chunk: Chunk, row: Watched) -> StepFrame:
    """`frame` with the facts of the pick after a chunk."""
    logits, seed, token = choice.logits.numpy(), chunk.request.params.seed, pick.tokens[0]
    own = float(logits[token])
    total = own - pick.logprobs[0]
    ids = row.highest if token in row.highest else [*row.highest[:-1], token]
    values: list[float] = logits[ids].tolist()
    samplers = [float(i == token) for i in ids] if choice.chances is None else choice.chances[ids].tolist()
    return replace(
        frame,
        seq_len=chunk.stop + 1,
        token=token,
        rank=sum(value > own for value in values) if token in row.highest else int((logits > own).sum()),
        logprob=pick.logprobs[0],
        sampled=samplers[ids.index(token)],
        entropy=row.entropy,
        uniform=None if seed is None or choice.chances is None else uniform(seed, chunk.stop, pick.choice),
        candidates=tuple(
            Candidate(i, value - total, chance) for i, value, chance in zip(ids, values, samplers, strict=True)
        ),
    )


def _us(seconds: float) -> int:
    return min(max(0, round(seconds * 1e6)), 2**32 - 2)  # a frame's field holds at most 71 minutes
