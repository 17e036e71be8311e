"""The recorder: wraps the engine's Runner and Sampler, and records each step of the watched sequences.

The engine thread makes a record (Recorded), from which the run's reader makes a frame.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import mul
from typing import Protocol

from tokenwright.arrays import Floats
from tokenwright.backends.observation import Clock, Observed, Watched
from tokenwright.cache import KVStore
from tokenwright.decode.logits_processors import Doubles
from tokenwright.decode.sampler import Observe, uniform, unobserved
from tokenwright.engine import Chunk, Output, Pick, Result, Sequence, Step
from tokenwright.models.cost import CostModel
from tokenwright.models.graph import Graph
from tokenwright.trace.rows import coded
from tokenwright.trace.schema import AttentionRow, Candidate, LayerTime, StepFrame

MOST_BYTES = 16 * 2**20  # of the logits of one run


class HeldLogits:
    """The last rows of logits [V], fp32, by step: as many as `most` bytes hold, at least one. Thread-safe."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = most
        self.nbytes = 0
        self._rows: OrderedDict[int, Floats] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, step: int, logits: Floats, *, alone: bool) -> None:
        """Drops the oldest rows if there is no room. `logits` must not change later; one of several rows is copied."""
        row = logits if alone else logits.copy()
        with self._lock:
            self._drop(self._rows.pop(step, None))  # the row of a failed attempt
            while self._rows and self.nbytes + row.nbytes > self.most:
                self._drop(self._rows.popitem(last=False)[1])
            self._rows[step] = row
            self.nbytes += row.nbytes

    def _drop(self, row: Floats | None) -> None:
        self.nbytes -= 0 if row is None else row.nbytes

    def get(self, step: int) -> Floats | None:
        with self._lock:
            row = self._rows.get(step)
            return None if row is None else row.copy()

    @property
    def first(self) -> int | None:
        with self._lock:
            return next(iter(self._rows), None)


@dataclass(slots=True)
class Choice:
    """The logits [V] of a choice, and `chances`, the distribution [V] that it was drawn from; None if greedy."""

    pick: Pick
    logits: Floats
    chances: Doubles | None
    seed: int | None


@dataclass(slots=True)
class StepTimes:
    """Seconds: from the run's acceptance to the step, of the step and its parts, and of recording."""

    began: float
    whole: float
    sampling: float
    recording: float


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    position: int
    length: int
    rows: int
    recomputed: int
    text: int  # tokens before the step's own
    cache: bool
    pages: tuple[int, ...]  # in use, of each group
    index: int
    alone: bool


@dataclass(slots=True)
class Recorded:
    chunk: ChunkFacts
    page_bytes: tuple[int, ...]
    row_flop: tuple[int, int]  # FLOP per row in all layers, and in the head
    row: Watched | None
    choice: Choice | None
    observed: Observed
    costs: CostModel
    held: HeldLogits

    def frame(self, step: int, times: StepTimes, text: str) -> StepFrame:
        """Holds the logits from now on; call it once. text: what can be shown, if the step chose a token."""
        began, observed, chunk, choice = time.perf_counter(), self.observed, self.chunk, self.choice
        if choice is not None:
            self.held.add(step, choice.logits, alone=chunk.alone)
        layers = _layers(observed, self.costs.graph)
        candidates = () if choice is None else self._candidates(choice)
        of_token = {one.token: one for one in candidates}
        token = None if choice is None else choice.pick.tokens[0]
        stop = chunk.position + chunk.length
        derived = self.costs.flops(chunk.position, chunk.length, chunk.rows)
        resident = self.costs.kept_bytes(stop) if chunk.cache or self.row is None else 0
        block_row, head_row = self.row_flop
        attention, rank, drawn = self._attention(), self._rank(candidates), self._uniform()
        recording = times.recording + time.perf_counter() - began
        return StepFrame(
            step=step,
            start=chunk.position,
            length=chunk.length,
            recomputed=chunk.recomputed,
            seq_len=chunk.text if token is None else stop + 1,
            layer_tokens=chunk.length * len(layers),
            flops=block_row * chunk.length + head_row * chunk.rows + observed.attention_flop[chunk.index],
            flops_derived=derived,
            weight_bytes=observed.weight_bytes,
            kv_read=observed.kv_read[chunk.index],
            kv_written=observed.kv_written[chunk.index],
            kv_resident=resident,
            kv_allocated=sum(map(mul, chunk.pages, self.page_bytes)),
            began_us=_us(times.began),
            step_us=_us(times.whole),
            attention_us=sum(layer.attention_us for layer in layers),
            mlp_us=sum(layer.mlp_us for layer in layers),
            head_us=_us((observed.ends[-1] - observed.ends[-2]) / 1e9),
            sampling_us=_us(times.sampling),
            recording_us=_us(recording),
            token=token,
            rank=rank,
            logprob=None if choice is None else choice.pick.logprobs[0],
            sampled=None if token is None else of_token[token].sampled,
            entropy=None if self.row is None or choice is None else self.row.entropy,
            uniform=drawn,
            cache=chunk.cache,
            layers=layers,
            candidates=candidates,
            attention=attention,
            text="" if token is None else text,
        )

    def _candidates(self, choice: Choice) -> tuple[Candidate, ...]:
        assert self.row is not None, "the chunk picks a token"
        token, highest, logits = choice.pick.tokens[0], list(self.row.highest), choice.logits
        ids = highest if token in highest else [*highest[:-1], token]
        total = float(logits[token]) - choice.pick.logprobs[0]
        samplers = [float(i == token) for i in ids] if choice.chances is None else choice.chances[ids].tolist()
        each = zip(ids, logits[ids].tolist(), samplers, strict=True)
        return tuple(Candidate(i, value - total, chance) for i, value, chance in each)

    def _rank(self, candidates: tuple[Candidate, ...]) -> int | None:
        if self.choice is None or self.row is None:
            return None
        token = self.choice.pick.tokens[0]
        logits = self.choice.logits
        if token in self.row.highest:
            own = next(one.logprob for one in candidates if one.token == token)
            return sum(one.logprob > own for one in candidates)
        return int((logits > logits[token]).sum())

    def _uniform(self) -> float | None:
        choice = self.choice
        if choice is None or choice.seed is None or choice.chances is None:
            return None
        return uniform(choice.seed, self.chunk.position + self.chunk.length, choice.pick.choice)

    def _attention(self) -> AttentionRow | None:
        row = self.row
        return None if row is None or row.weights is None else coded(row.weights, row.layer, row.head)


def _layers(observed: Observed, graph: Graph) -> tuple[LayerTime, ...]:
    """The figures of each layer: not every one has both halves, and an MLP may follow two layers."""
    first = observed.ends[0]
    took = (after - before for before, after in pairwise((end - first + 500) // 1000 for end in observed.ends[:-1]))
    halves, layer = [[0, 0] for _ in range(graph.layers)], -1
    for op in graph.blocks:
        layer += op.kv is not None
        for half in op.halves:
            halves[layer][half] += next(took)
    return tuple(LayerTime(*both) for both in halves)


def _us(seconds: float) -> int:
    return min(max(0, round(seconds * 1e6)), 2**32 - 2)  # a frame's field holds at most 71 minutes


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
        picks = {
            result.sequence: result for result in reversed(results) if isinstance(result, Pick)
        }  # the first of each
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
            pages=tuple(map(len, watch.sequence.tables)),
            index=draft.index,
            alone=len(output.logits) == 1,
        )
        watch.seen = max(watch.seen, chunk.stop)
        flop = self._row_flop
        return Recorded(facts, self._page_bytes, flop, draft.row, choice, observed, self.costs, watch.held)
