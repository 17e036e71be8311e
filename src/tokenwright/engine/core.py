"""The engine computes steps, and guarantees that every request ends. One thread owns it (`loop.py`)."""

import logging
import time
from typing import Any, Protocol, TypeVar

from tokenwright.engine.page_pool import PagePool
from tokenwright.engine.pictures import Pixels, longest
from tokenwright.engine.prefix_index import PrefixIndex
from tokenwright.engine.request import FinishReason, Request, Sequence, State
from tokenwright.engine.scheduler import Scheduler
from tokenwright.engine.step import Event, Output, Result, Step, finished, with_faults
from tokenwright.engine.warming import Warming, WarmRules
from tokenwright.errors import CapacityError, ContextError, RequestError, WorkerError

log = logging.getLogger(__name__)

T = TypeVar("T")

PICTURES_S = 0.25  # the most seconds of work on pictures between two steps


class Runner(Protocol[T]):
    """Computes a step: stores the K and V of its tokens in the cache, and returns the rows of logits it asks for."""

    def forward(self, step: Step) -> Output[T]: ...


class Sampler(Protocol[T]):
    """Returns the results of every chunk that picks or needs prompt logprobs. A pick has the drafts it accepts."""

    def pick(self, output: Output[T], step: Step) -> list[Result]: ...


class Engine:
    """Runs requests over one page pool. `context`: the most tokens that one sequence may have."""

    def __init__(self, runner: Runner[Any], sampler: Sampler[Any], scheduler: Scheduler, context: int) -> None:
        self.runner = runner
        self.sampler = sampler
        self.scheduler = scheduler
        self.context = context
        self.clock = time.perf_counter
        self._ended: list[Event] = []  # last events of requests that ended without a step

    @property
    def pool(self) -> PagePool:
        return self.scheduler.pool

    @property
    def prefixes(self) -> PrefixIndex:
        return self.scheduler.kv.prefixes

    @property
    def busy(self) -> bool:
        if self._ended:
            return True
        for sequence in self.scheduler.sequences.values():
            if sequence.group.pause_at is None or not sequence.paused:
                return True
        return False

    @property
    def due(self) -> bool:
        warming = self.scheduler.warming
        return self.busy or bool(warming.queue and warming.due)

    def submit(self, request: Request) -> Sequence:
        """Queue a request and return its sequence, whose counts may be read at any time.

        Raises RequestError for an empty prompt, ContextError for one beyond the context, CapacityError for a request
        that the whole pool could not hold. Every accepted request ends in a Finished or a Failed event.
        """
        sequence = self.accept(request)
        self.add(sequence)
        return sequence

    def accept(self, request: Request) -> Sequence:
        """A new sequence, not queued yet. Raises what `submit` raises. Any thread may call it."""
        if not request.prompt:
            raise RequestError("the prompt has no tokens, and the model needs one to go on from; give it some text")
        if len(request.prompt) > self.context:
            raise ContextError(len(request.prompt), self.context)
        limits = {"token_budget": self.scheduler.token_budget, "max_sequences": self.scheduler.max_sequences}
        low = [name for name, limit in limits.items() if limit < request.width]
        if low:
            raise CapacityError(
                f"{request.width} beams advance in one step, and this engine computes {min(limits.values())} at once; "
                f"search fewer, or raise {' and '.join(low)}"
            )
        if request.pictures:
            self._check_pictures(request)
        sequence = self.scheduler.new(request, request.limit(self.context))
        if not self.scheduler.fits(sequence):
            needed = self.scheduler.max_pages(sequence)
            has = [group.pages for group in self.pool.groups]
            pairs = zip(self.pool.groups, needed, strict=True)
            short = [group for group, pages in pairs if pages > group.pages]
            chunk = all(group.window.size is not None for group in short)  # windows need pages for a chunk
            less = "lower token_budget" if chunk else "lower max_tokens, shorten the prompt"
            raise CapacityError(
                f"the request may come to {sequence.max_computed} tokens in the KV cache, which need {_each(needed)} "
                f"pages, and it has {_each(has)}; {less}, or raise kv_memory"
            )
        return sequence

    def _check_pictures(self, request: Request) -> None:
        if any(one.stop >= len(request.prompt) for one in request.pictures):
            raise RequestError("the prompt ends with a picture, and the model goes on from text; add some after it")
        if (rows := longest(request.pictures)) > self.scheduler.token_budget:
            raise CapacityError(
                f"a picture of {rows} tokens is computed in one step, and this engine computes "
                f"{self.scheduler.token_budget} at once; raise token_budget"
            )

    def add(self, sequence: Sequence) -> None:
        reason, parent = sequence.exhausted(), sequence.request.parent
        if reason is not None and not sequence.needs_rows:
            self._ended.append(finished(sequence, reason))
        elif reason is None and parent is not None:
            self.scheduler.fork(parent, sequence, sequence.request.shared)
        else:
            self.scheduler.add(sequence)

    def step(self) -> list[Event]:
        """Compute one step, and slices of the awaited picture.

        An error of the model ends this step's requests, an error of a tower those that need the picture.
        """
        warming = self.scheduler.warming
        if not self.busy:
            self._warm(warming)
        elif warming.queue:
            warming.give_up()
        began, step = self.clock(), self.scheduler.schedule()
        events = self._compute(step) if step.chunks else []
        if (awaited := self.scheduler.pictures.first) is not None:
            events += self._compute_picture(awaited, self.clock() - began if step.chunks else 0)
        ended, self._ended = self._ended, []
        return [*ended, *events, *self.scheduler.expire()]

    def _compute(self, step: Step) -> list[Event]:
        try:
            output = self.runner.forward(step)
            picks = self.sampler.pick(output, step)
            if output.faults:
                picks = with_faults(output.faults, step, picks)
        except WorkerError:
            raise
        except Exception as error:
            return [one for chunk in step.chunks for one in self.scheduler.end_group(chunk.sequence.group, error)]
        return self.scheduler.commit(step, picks)

    def _compute_picture(self, awaited: Pixels, seconds: float) -> list[Event]:
        """Compute slices of a picture for as long as the step took, so texts keep at least half their speed."""
        until = self.clock() + min(seconds, PICTURES_S)
        try:
            while not self.scheduler.pictures.compute() and self.clock() < until:
                pass
        except Exception as error:
            return self._fail_picture(awaited, error)
        return []

    def _fail_picture(self, pixels: Pixels, error: Exception) -> list[Event]:
        """End the texts that need a picture which cannot be computed."""
        scheduler, events = self.scheduler, list[Event]()
        for sequence in list(scheduler.sequences.values()):
            if sequence.id in scheduler.sequences and sequence.request.pictures:
                runs = sequence.state is State.RUNNING
                start = sequence.computed if runs else scheduler.kv.loadable_prefix(sequence)
                needed = (one.pixels.digest for one in sequence.request.pictures if one.stop > start)
                if pixels.digest in needed:
                    events += scheduler.end_group(sequence.group, error)
        return events

    def warm(self, request: Request, rules: WarmRules) -> None:
        """Compute a prompt except its last token while the engine is idle. Raises what `submit` raises."""
        self.scheduler.warming.add(self.accept(request), rules)

    def _warm(self, warming: Warming) -> None:
        """Compute a chunk of the oldest warm-up, or a slice of its picture. An error ends only the warm-up."""
        if not warming.due:
            return
        pictures = self.scheduler.pictures
        pictures.first = None  # the request that awaited it may have been cancelled
        chunk = warming.chunk(pictures.ready_stop)
        try:
            if chunk is None:
                pictures.compute()
                return
            step = Step((chunk,))
            output = self.runner.forward(step)
            for error in output.faults.values():
                raise error
            self.sampler.pick(output, step)
        except WorkerError:
            raise
        except Exception:
            log.exception("a warm-up failed")
            warming.drop()
        else:
            warming.commit(chunk)

    def pause(self, sequence: int, at: int | None = 0) -> None:
        """Pause a request once its text has `at` tokens, prompt included; None resumes it.

        Its pages stay until others need them.
        """
        if (found := self.scheduler.sequences.get(sequence)) is not None:
            found.group.pause_at = at

    def let_write(self, sequence: int, tokens: int) -> None:
        if (found := self.scheduler.sequences.get(sequence)) is not None:
            found.group.pause_at = len(found.tokens) + tokens

    def resume(self, sequence: int) -> None:
        self.pause(sequence, None)

    def use_cache(self, sequence: int, cache: bool) -> None:
        """Switch a request's KV cache on or off between two steps: without it, each token computes all K and V anew."""
        if (found := self.scheduler.sequences.get(sequence)) is None:
            return
        found.group.cache = cache
        for one in found.group.sequences:
            if not cache:  # others may share its pages, which it would overwrite
                self.scheduler.kv.drop(one)

    def abort(self, sequence: int) -> list[Event]:
        """End a request in any state, and return its last event."""
        found = self.scheduler.sequences.get(sequence)
        return [] if found is None else self.scheduler.end_group(found.group, FinishReason.ABORTED)


def _each(pages: list[int]) -> str:
    return " + ".join(map(str, pages))
