"""The recorder: wraps the engine's Runner and Sampler, and records each step of the watched sequences."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tokenwright.arrays import Floats
from tokenwright.backends.observation import Clock, Observed, Watched
from tokenwright.cache import KVStore
from tokenwright.decode.logits_processors import Doubles
from tokenwright.decode.sampler import Observe, unobserved
from tokenwright.engine import Chunk, Output, Pick, Result, Sequence, Step
from tokenwright.models.cost import CostModel
from tokenwright.trace.schema import StepFrame
from tokenwright.trace.step_record import Choice, ChunkFacts, HeldLogits, Recorded, StepTimes


class WatchedRunner(Protocol):
    store: KVStore

    def forward(self, step: Step) -> Output[Floats]: ...

    def observe(self, step: Step, watched: ListLike[Watched]) -> tuple[Output[Floats], Observed]: ...


class ObservedSampler(Protocol):
    def pick(self, output: Output[Floats], step: Step, observe: Observe = unobserved) -> list[Result]: ...


@dataclass(slots=True, eq=False)
class Watch:
    """A watched sequence. `frames` make the frames that the reader has not taken yet, from their step's text."""

    sequence: Sequence
    accepted: float  # when the request arrived, in seconds of the engine loop's clock
    watched: tuple[int, int]  # layer and head; replaced as one tuple: a step may be under way
    step: int = 0
    seen: int = 0  # tokens of the longest prefix computed so far
    held: HeldLogits = field(default_factory=HeldLogits)
    frames: deque[Callable[[str], StepFrame]] = field(default_factory=deque)


@dataclass(slots=True)
class _Draft:
    watch: Watch
    chunk: Chunk
    index: int
    row: Watched | None


class Recorder:
    """Records steps of watched sequences. Any thread may `watch` and `unwatch`; the engine thread calls the rest."""

    def __init__(
        self, runner: WatchedRunner, sampler: ObservedSampler, costs: CostModel, clock: Clock = time.perf_counter
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self.costs = costs
        self.clock = clock
        self._page_bytes = tuple(group.page_bytes(runner.store.page_size) for group in runner.store.groups)
        self._watches: dict[int, Watch] = {}
        self._drafts: list[_Draft] = []
        self._observed: Observed | None = None
        self._row_flop = 0, 0
        self._sampling_s = self._recording_s = 0.0
        self._done: list[tuple[Watch, Recorded]] = []

    def watch(self, watch: Watch) -> None:
        self._watches[watch.sequence.id] = watch

    def unwatch(self, watch: Watch) -> None:
        self._watches.pop(watch.sequence.id, None)

    def forward(self, step: Step) -> Output[Floats]:
        self._done = []  # drop those of a step that was interrupted after `pick`
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

    def pick(self, output: Output[Floats], step: Step) -> list[Result]:
        if not self._drafts or self._observed is None:
            return self.sampler.pick(output, step)
        began, observed = self.clock(), self._observed
        seen: dict[int, tuple[Floats, Doubles | None]] = {}
        results = self.sampler.pick(output, step, lambda chunk, *both: seen.update({chunk.sequence.id: both}))
        sampled = self.clock()
        picks = {result.parent: result for result in reversed(results) if isinstance(result, Pick)}  # the first of each
        recorded = []
        for draft in self._drafts:
            identity, choice = draft.chunk.sequence.id, None
            if (pick := picks.get(identity)) is not None:
                choice = Choice(pick, *seen[identity], draft.chunk.request.params.seed)
            recorded.append((draft.watch, self._recorded(draft, choice, output, observed)))
        self._recording_s = self.clock() - sampled + observed.looking_s
        self._sampling_s = sampled - began
        self._done, self._drafts = recorded, []
        return results

    def end_step(self, began: float, ended: float) -> None:
        """Complete the step's records with its begin and end, in seconds of the engine loop's clock."""
        whole, recording = ended - began - self._recording_s, self._recording_s / max(1, len(self._done))
        for watch, recorded in self._done:
            times = StepTimes(began - watch.accepted, whole, self._sampling_s, recording)
            watch.frames.append(partial(recorded.frame, watch.step, times))
            watch.step += 1
        self._done = []

    def _recorded(self, draft: _Draft, choice: Choice | None, output: Output[Floats], observed: Observed) -> Recorded:
        watch, chunk = draft.watch, draft.chunk
        facts = ChunkFacts(
            position=chunk.start,
            length=chunk.stop - chunk.start,
            rows=len(output.rows[draft.index]),
            recomputed=max(0, min(chunk.stop, watch.seen) - chunk.start),
            text=len(watch.sequence.tokens),
            cache=watch.sequence.cache,
            pages=tuple(map(len, chunk.tables)),
            index=draft.index,
            alone=len(output.logits) == 1,
        )
        about = facts, self._page_bytes, self._row_flop, draft.row, choice, observed, self.costs, watch.held
        recorded = Recorded(*about)
        watch.seen = max(watch.seen, chunk.stop)
        return recorded
