"""A run: one text, generated step by step and recorded in frames.

It is paused before every step; `Run.step` resumes it for one token. A frame has the step's computation, cost, top
logprobs and the attention row of one head. Between steps a caller may switch the cache and replay any head's row.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListLike
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tokenwright.arrays import Floats
from tokenwright.checks import check_bool, check_whole, is_whole, shown
from tokenwright.decode.logits_processors import adjusted
from tokenwright.engine import Engine, FinishReason, PagePool, Request, SamplingParams, Sequence
from tokenwright.engine.pictures import Spans
from tokenwright.errors import RequestError
from tokenwright.llm.asking import transcript
from tokenwright.llm.engine import LLMEngine, Recording
from tokenwright.llm.input_processor import Prompt, RequestOptions
from tokenwright.llm.outputs import Completion
from tokenwright.llm.run_trace import trace_of
from tokenwright.llm.web_page import alone, framed
from tokenwright.trace.recorder import Watch
from tokenwright.trace.replay import AttentionReplay, ReplayedText
from tokenwright.trace.rows import coded, masses
from tokenwright.trace.schema import AttentionRow, HeadMasses, StepFrame, Summary
from tokenwright.trace.summary import StepSums, summarise


@dataclass(frozen=True, slots=True)
class Start:
    """The beginning of a run. `params` have the drawn seed; `first_step` and `earlier` continue a lost run."""

    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str
    watched: tuple[int, int]
    first_step: int = 0
    earlier: tuple[StepSums, ...] = ()


@dataclass(frozen=True, slots=True)
class PageUse:
    """The pages of a run and their bytes; `shared`: those in tables of other runs too."""

    pages: int
    nbytes: int
    shared: int
    shared_bytes: int


def _page_use(pool: PagePool, sequence: Sequence, sizes: Iterable[int]) -> PageUse:
    counts = [(len(table), size) for table, size in zip(sequence.tables, sizes, strict=True)]
    shared = [(count, size) for count, (_, size) in zip(pool.shared(sequence.tables), counts, strict=True)]
    total, both = (sum(count * size for count, size in one) for one in (counts, shared))
    return PageUse(sequence.pages, total, sum(count for count, _ in shared), both)


T = TypeVar("T")


MOST_ROWS = 64 * 2**20  # bytes of attention rows that a run keeps; `attention` replays older ones
FRAME_BYTES = 5000  # about the size of one frame without its row


class FrameLog:
    """All frames of a run; attention rows only of the last ones, MOST_ROWS bytes in all."""

    def __init__(self) -> None:
        self.frames: list[StepFrame] = []
        self.row_bytes = 0
        self._stripped = 0  # how many frames have lost their row

    def add(self, fresh: list[StepFrame]) -> None:
        """Append complete frames, as other threads read the list; remove the oldest rows beyond MOST_ROWS."""
        self.frames += fresh
        self.row_bytes += sum(len(frame.attention.codes) for frame in fresh if frame.attention)
        while self.row_bytes > MOST_ROWS and self._stripped < len(self.frames):
            frame = self.frames[self._stripped]
            self.row_bytes -= len(frame.attention.codes) if frame.attention else 0
            self.frames[self._stripped] = replace(frame, attention=None)
            self._stripped += 1


class Run(AbstractContextManager["Run"]):
    """One recorded text. Raises RequestError for a layer or head that the model lacks, and for another text's steps."""

    def __init__(self, engine: LLMEngine, recording: Recording, request: Request, start: Start) -> None:
        self.engine = engine
        self.start = start
        self._recording = recording
        self._inbox = engine.inbox()
        [self._handle] = engine.submit([request], self._inbox, paused=True)
        self._transcript = transcript(engine, self._handle)
        self._log = FrameLog()
        self._cache = self._handle.sequence.cache
        self._read = self._let = len(self.sequence.tokens)  # tokens of the text that were read, and may be written
        try:
            self._watch = Watch(self.sequence, self._handle.submitted, start.watched, start.first_step, self._seen())
            self.watch(*start.watched)
        except RequestError:
            self._handle.cancel()
            raise
        recording.recorder.watch(self._watch)

    def _seen(self) -> int:
        """How many tokens earlier steps computed. Raises RequestError for steps of another text."""
        seen = max((step.start + step.length for step in self.start.earlier), default=0)
        if len(self.start.earlier) > self.first_step or seen > len(self.tokens):
            raise RequestError("earlier: these are not the steps before first_step of this text; send those of the run")
        return seen

    @property
    def first_step(self) -> int:
        return self.start.first_step

    @property
    def frames(self) -> list[StepFrame]:
        return self._log.frames

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of the whole text so far, prompt included."""
        return tuple(self.sequence.tokens)

    @property
    def cache(self) -> bool:
        """Whether the next step uses the KV cache."""
        return self._cache

    @cache.setter
    def cache(self, on: bool) -> None:
        check_bool("cache", on)
        self._cache = on
        self._handle.use_cache(on)

    @property
    def nbytes(self) -> int:
        return self._log.row_bytes + self._watch.held.nbytes + FRAME_BYTES * len(self.frames)

    def fits_beside(self, others: Iterable["Run"]) -> bool:
        """Whether the KV cache can hold this run and the others at their maximum lengths."""
        scheduler = self.engine.loop.engine.scheduler
        return scheduler.pool.fits([scheduler.max_pages(run.sequence) for run in (self, *others)])

    @property
    def ended(self) -> bool:
        return self._transcript.ended

    @property
    def reason(self) -> FinishReason | None:
        """The finish reason; None before the end, and after a failure."""
        return self._transcript.reason

    @property
    def watched(self) -> tuple[int, int]:
        """Layer and head of the attention row in each frame."""
        return self._watch.watched

    def watch(self, layer: int, head: int) -> None:
        """Choose the attention row of later frames. Raises RequestError for a layer or head that the model lacks."""
        self.check(layer, head)
        self._watch.watched = layer, head

    @property
    def pending(self) -> bool:
        """Whether `step` has let the engine write a token that no later step has returned."""
        return self._let > self._read and not self.ended

    def step(self, ahead: int = 0) -> list[StepFrame]:
        """Generate one token; return its frames: several for a prompt of several chunks, none after the end.

        ahead: tokens that the engine may write beyond it, for later steps to return. Raises EngineError.
        """
        text = ""
        try:
            self._let = max(self._let, self._read + 1 + ahead)
            self._handle.let_write_up_to(self._let)
            text = self._next_text()
        finally:
            if self._transcript.ended:
                self._recording.recorder.unwatch(self._watch)
            fresh = self._fresh(text)
            self._log.add(fresh)
        return fresh

    def _fresh(self, text: str) -> list[StepFrame]:
        fresh: list[StepFrame] = []
        while self._watch.frames:
            fresh.append(self._watch.frames.popleft()(text))
            if fresh[-1].token is not None:
                self._read += 1
                break
        return fresh

    def _next_text(self) -> str:
        while not self._transcript.ended:
            deliveries = self._inbox.get()
            pieces = [piece for delivery in deliveries for piece in self._transcript.add(delivery)]
            if pieces:
                return "".join(piece.text for piece in pieces)
        self._transcript.check()
        return ""

    def frame(self, step: int) -> StepFrame:
        """The frame of a step. Raises RequestError for an unknown step."""
        if not is_whole(step) or not 0 <= step - self.first_step < len(self.frames):
            first, last = self.first_step + 1, self.first_step + len(self.frames)
            there = f"steps {first} to {last}" if self.frames else "none yet"
            named = f"{step + 1}, counted from 1" if is_whole(step) else shown(step)
            raise RequestError(f"there is no step {named}: this run has {there}")
        return self.frames[step - self.first_step]

    @property
    def sequence(self) -> Sequence:
        """Its sequence in the engine, which owns it; its counts may be read at any time."""
        return self._handle.sequence

    @property
    def pictures(self) -> Spans:
        """The pictures of its prompt."""
        return self.sequence.request.pictures

    def context(self, step: int) -> int:
        """The tokens before a step's token. Raises RequestError for an unknown step, or one that chose no token."""
        frame = self.frame(step)
        if frame.token is None:
            raise RequestError(f"step {step + 1} read a part of the prompt and chose no token; take a later one")
        return frame.start + frame.length

    def logits(self, step: int) -> Floats:
        """The logits [V], fp32, before a step's token; held only for the last steps. Raises RequestError for others."""
        self.context(step)
        row = self._watch.held.get(step)
        if row is None:
            first = self._watch.held.first
            assert first is not None, "the newest row is always held"
            raise RequestError(f"the logits of step {step + 1} are no longer held; from step {first + 1} on they are")
        return row

    def adjusted_logits(self, step: int, params: SamplingParams | None = None) -> Floats:
        """`logits` after the bans and penalties of `params`; None: the run's own, as its sampler had them: [V].

        Raises RequestError for a grammar, whose bans are not kept, and for ids and words that the model lacks.
        """
        request = self._handle.sequence.request
        chosen = params or request.params
        if chosen.grammar is not None:
            raise RequestError("the bans of a grammar are not kept with a step; give params without a grammar")
        text, constraints = self.tokens[: self.context(step)], self.engine.inputs.constraints(chosen)
        return adjusted(self.logits(step), text, request.prompt_length, chosen, constraints)

    def attention(self, step: int, layer: int, head: int) -> AttentionRow:
        """A head's attention row at a step's last token, from the cache or recomputed. Raises RequestError."""
        self.check(layer, head)
        position = self.last_position(step)
        return coded(self.look(lambda replay, text: replay.row(text, position, layer, head), position), layer, head)

    def heads(self, step: int) -> HeadMasses:
        """Every head's attention at a step's last token, as `attention`. Raises RequestError for an unknown step."""
        position = self.last_position(step)
        return masses(self.look(lambda replay, text: replay.rows(text, position), position), step)

    def last_position(self, step: int) -> int:
        """The position of a step's last token. Raises RequestError for an unknown step."""
        frame = self.frame(step)
        return frame.start + frame.length - 1

    def look(self, read: Callable[[AttentionReplay, ReplayedText], T], position: int, rows: int = 1) -> T:
        """Call `read` between two steps, with a read-only replay of `rows` rows of the text from `position` on.

        Freed pages are recomputed. Raises RequestError for a recurrent model, whose earlier states are overwritten.
        """
        if self.engine.facts.graph.recurrent:
            raise RequestError(
                "layers of this model rewrite a state at each token, so earlier steps cannot be replayed"
            )
        sequence, store, replay = self.sequence, self.engine.store, self._recording.replay

        def between_steps(engine: Engine) -> T:  # noqa: ARG001  (`inspect` only keeps it between steps)
            text = ReplayedText(self.tokens, sequence.limit, store, sequence.tables, self.pictures)
            if sequence.computed < position + rows or not text.holds(position, rows):
                text = replay.rebuilt(self.tokens, sequence.limit, self.pictures)
            return read(replay, text)

        return self.engine.inspect(between_steps)

    def check(self, layer: int, head: int) -> None:
        """Raises RequestError for a layer or head that the model lacks."""
        config = self.engine.facts.config
        for name, value, count in (("layer", layer, config.layers), ("head", head, config.heads)):
            if not is_whole(value) or not 0 <= value < count:
                raise RequestError(f"{name} must be from 0 to {count - 1}, not {shown(value)}")

    def pages(self, others: Iterable["Run"] = ()) -> list[PageUse]:
        sequences = [run.sequence for run in (self, *others)]
        store = self.engine.store
        sizes = [group.page_bytes(store.page_size) for group in store.groups]

        def between_steps(engine: Engine) -> list[PageUse]:
            return [_page_use(engine.pool, sequence, sizes) for sequence in sequences]

        return self.engine.inspect(between_steps)

    @property
    def steps(self) -> list[StepSums]:
        return [*self.start.earlier, *self.frames]

    @property
    def summary(self) -> Summary | None:
        """The summary of the steps so far; None before the first token."""
        return summarise(self.steps, self.engine.facts.config.layers)

    @property
    def completion(self) -> Completion:
        return self._transcript.completion()

    def trace(self) -> dict[str, Any]:
        """The steps so far as values of a trace file, for the explorer's page."""
        return trace_of(self.engine, self)

    def _repr_html_(self) -> str:
        """The explorer's page with the run, for a notebook. Raises RequestError without the page."""
        return framed(alone(self.trace()))

    def close(self) -> None:
        """End the text and free its pages. The frames remain."""
        self._recording.recorder.unwatch(self._watch)
        self._handle.cancel()
        self._transcript.abort()

    def __exit__(self, *_: object) -> None:
        self.close()


def start_run(
    engine: LLMEngine,
    prompt: Prompt,
    params: SamplingParams,
    *,
    cache: bool = True,
    written: ListLike[int] = (),
    watched: tuple[int, int] = (0, 0),
    first_step: int = 0,
    earlier: ListLike[StepSums] = (),
    pictures: Spans = (),
) -> Run:
    """A run of a prompt, as `LLM.run` says. watched: the layer and head of the attention row in each frame."""
    check_whole("first_step", first_step)
    recording = _recording(engine, params)
    ids, salt = engine.inputs.ids(prompt), secrets.token_hex(8)  # so it finds no pages of another text
    options = RequestOptions(cache, salt, pictures=pictures)
    request = engine.inputs.build(ids, params, options, written=written)
    params = replace(params, seed=request.params.seed)
    return Run(engine, recording, request, Start(tuple(ids), params, salt, watched, first_step, tuple(earlier)))


def fork_run(engine: LLMEngine, run: Run, step: int, token: int | None, sampling: Mapping[str, Any]) -> Run:
    params = engine.inputs.params(run.start.params, sampling)
    recording = _recording(engine, params)
    if run.engine is not engine:
        raise RequestError("this run is another LLM's; fork it with the LLM that made it")
    start, context = run.start, run.context(step)
    last = run.tokens[context] if token is None else token
    written = engine.inputs.ids([*run.tokens[len(start.prompt) : context], last])
    if len(written) >= params.max_tokens:
        raise RequestError(f"max_tokens is {params.max_tokens}, which step {step + 1} reaches; raise it")
    options = RequestOptions(run.cache, start.salt, pictures=run.pictures)
    request = engine.inputs.build(start.prompt, params, options, written=written)
    if request.stop_checker.stopped is not None or (last in engine.inputs.eos_ids and not params.ignore_eos):
        raise RequestError(f"the text ends with the token {last} at step {step + 1}; take another token or step")
    request = replace(request, parent=run.sequence, shared=context)
    params = replace(params, seed=request.params.seed)
    return Run(engine, recording, request, Start(start.prompt, params, start.salt, run.watched, step + 1))


def _recording(engine: LLMEngine, params: SamplingParams) -> Recording:
    if max(params.choices, params.beams) > 1 or params.mirostat:  # a fork of a run does not know Mirostat's state
        raise RequestError("a run follows one text from any step; leave n, best_of, beams and mirostat out")
    if engine.recording is None:
        raise RequestError('this LLM records nothing; open it with LLM(..., trace=True), or use "stream"')
    return engine.recording
