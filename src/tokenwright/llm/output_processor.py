"""Assembles a request's texts, pieces and completion from engine events; streams its pieces."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tokenwright import engine
from tokenwright.checkpoints.files.pooling import Pooling
from tokenwright.decode import BeamSearch, TextStopChecker
from tokenwright.engine.loop import Inbox
from tokenwright.engine.port import Delivery, RequestHandle
from tokenwright.errors import EngineError, GrammarError, ReplicaError, WorkerError
from tokenwright.llm.chat.answer_reader import AnswerReader
from tokenwright.llm.outputs import Completion, Piece, TreeToken, Usage
from tokenwright.llm.prompts.report import CacheReport
from tokenwright.llm.prompts.watch import PromptWatch

Report = Callable[[int, int], None]  # texts that have ended, tokens written


class ChoiceText:
    def __init__(self, sequence: engine.Sequence, choice: int) -> None:
        self.sequence = sequence
        self.choice = choice
        self.pieces: list[Piece] = []
        self.times: list[float] = []  # seconds from the request to each token
        self.score: float | None = None
        self.reason: engine.FinishReason | None = None
        self.stopped: str | int | None = None
        self.checker: engine.StopChecker = sequence.stop_checker  # the engine's until the text has ended

    def add(self, event: engine.Event, since: float, fresh: list[Piece]) -> None:
        """Record one event, `since` seconds after the request; append its piece to the step's, `fresh`."""
        match event:
            case engine.Token():
                piece = Piece(event.text, event.token, event.logprob, event.sampler_logprob, event.top, self.choice)
                self.times.append(since)
            case engine.Finished(reason=reason, text=text, stopped=stopped):
                self.reason, self.stopped = reason, stopped
                if not text:
                    return
                if fresh and fresh[-1].choice == self.choice:  # add held-back text to the last token
                    fresh[-1] = self.pieces[-1] = fresh[-1]._replace(text=fresh[-1].text + text)
                    return
                piece = Piece(text, None, 0.0, choice=self.choice)
            case _:
                return
        self.pieces.append(piece)
        fresh.append(piece)

    @property
    def mean_logprob(self) -> float:
        logprobs = [piece.logprob for piece in self.pieces if piece.token_id is not None]
        return sum(logprobs) / max(1, len(logprobs))


class HiddenPool:
    """Pools rows [n, width], added one by one in fp64, so that the mean does not depend on chunks."""

    def __init__(self) -> None:
        self._sum: NDArray[np.float64] | None = None
        self._first = self._last = np.empty(0, np.float32)
        self._count = 0

    def add(self, rows: NDArray[np.float32]) -> None:
        total = np.zeros(rows.shape[1]) if self._sum is None else self._sum
        for row in rows:
            total += row
        if len(rows):
            self._first = self._first if self._count else rows[0].copy()
            self._last = rows[-1].copy()
        self._sum = total
        self._count += len(rows)

    def pooled(self, pooling: Pooling) -> NDArray[np.float32]:
        """[width]; there must be a row."""
        assert self._sum is not None, "a text to embed has a token"
        if pooling == "mean":
            return (self._sum / self._count).astype(np.float32)
        return self._last if pooling == "last" else self._first


class OutputProcessor:
    """Assembles one request from its deliveries. A beam search has no pieces, and no texts before its end."""

    def __init__(self, handle: RequestHandle, layers: int, kv_bytes: Callable[[int], int], watch: PromptWatch) -> None:
        self.handle = handle
        self.watch = watch
        self.ended = False
        self.error: Exception | None = None
        self.reader: AnswerReader | None = None  # of a chat's texts
        self.prompt_logprobs: list[float] = []
        self.hidden = HiddenPool()  # over the hidden states of the prompt's tokens, if the request asks for them
        self._size = layers, kv_bytes
        self._texts = {handle.sequence.id: ChoiceText(handle.sequence, 0)}  # of a beam search the n best, at its end
        self._sequences = [handle.sequence]
        self._prompt_tops: list[tuple[engine.TopLogprob, ...]] = []
        self._step_times: list[float] = []  # beam search: seconds from the request to each pick

    @property
    def _search(self) -> BeamSearch | None:
        search: BeamSearch | None = self.handle.sequence.request.search
        return search

    @property
    def reason(self) -> engine.FinishReason | None:
        """The finish reason of the first text; None before its end, and after a failure."""
        return next(iter(self._texts.values())).reason

    @property
    def drafts(self) -> tuple[int, int]:
        """How many draft tokens were computed for all texts so far, and how many accepted."""
        counts = [one.counts for one in self._sequences]
        return sum(one.drafted for one in counts), sum(one.accepted for one in counts)

    @property
    def texts(self) -> list[ChoiceText]:
        """The texts so far, all of best_of; for a beam search only at its end."""
        return list(self._texts.values())

    @property
    def best(self) -> list[ChoiceText]:
        """The texts of the reply; with best_of and beam search the best first."""
        params = self.handle.sequence.request.params
        ranked = self.texts if params.best_of is None else sorted(self.texts, key=lambda text: -text.mean_logprob)
        return ranked if params.best_of is None else ranked[: params.n]

    def add(self, delivery: Delivery, *, split: bool = False) -> list[Piece]:
        """Record a step's events; return its pieces, in order. split: with the content and reasoning of a chat."""
        fresh: list[Piece] = []
        since, search = delivery.time - self.handle.submitted, self._search
        for event in delivery.events:
            match event:
                case engine.Token() if search is None:  # first, as nearly all events are tokens
                    self._texts[event.sequence].add(event, since, fresh)
                case engine.Forked(sequence=identity, branch=branch):
                    self._sequences.append(branch)
                    if search is None:
                        self._texts[identity] = ChoiceText(branch, branch.choices[0])
                case engine.PromptLogprobs(logprobs=logprobs, tops=tops):
                    self.prompt_logprobs += logprobs
                    self._prompt_tops += tops
                case engine.HiddenStates(rows=rows):
                    self.hidden.add(rows)
                case engine.Failed(error=error):
                    self.error = self.error or error
                case _ if search is None:
                    self._texts[event.sequence].add(event, since, fresh)
                case engine.Finished(reason=reason):
                    next(iter(self._texts.values())).reason = reason
        if search is not None:
            if delivery.ended or any(isinstance(event, engine.Token) for event in delivery.events):
                self._step_times.append(since)
            if delivery.ended and self.error is None:
                self._read_search(search)
        self._remember(delivery.ended)
        if split and self.reader is not None:
            return self.reader.split(fresh, {one.choice: one.reason for one in self.texts} if self.ended else {})
        return fresh

    def _remember(self, ended: bool) -> None:
        self.ended = ended
        if not ended or self.error is not None or self._search is not None:
            return
        text = next(iter(self._texts.values()))
        written = [piece.token_id for piece in text.pieces if piece.token_id is not None]
        if not written and text.reason is engine.FinishReason.ABORTED:
            return  # the prompt may not have been computed
        self.watch.ended(written, text.reason is engine.FinishReason.STOP)

    @property
    def cache(self) -> CacheReport:
        report = self.watch.report
        if not report.again or not self._first_s or self.handle.started is None:
            return report
        prefill_s = self._first_s - (self.handle.started - self.handle.submitted)
        return replace(report, seconds=prefill_s * report.again / max(1, report.computed))

    @property
    def _first_s(self) -> float | None:
        times = [*(text.times[0] for text in self._texts.values() if text.times), *self._step_times[:1]]
        return min(times, default=None)

    def abort(self) -> None:
        """Stop reading; unfinished texts end as ABORTED."""
        if not self.ended:
            self.ended = True
            for text in self._texts.values():
                text.reason = text.reason or engine.FinishReason.ABORTED

    def check(self) -> None:
        """Raises EngineError if the request has failed."""
        if isinstance(self.error, GrammarError | ReplicaError | WorkerError):
            raise self.error
        if self.error is not None:
            raise EngineError(str(self.error) or type(self.error).__name__) from self.error

    def _read_search(self, search: BeamSearch) -> None:
        """Make the texts of a finished beam search: a new stop checker reads each again."""
        found = search.best(search.params.n)
        if not found or self.reason is engine.FinishReason.ABORTED:
            return
        self._texts.clear()
        for place, hypothesis in enumerate(found):
            checker = cast("TextStopChecker", search.stop_checker.fork())
            text = self._texts[place] = ChoiceText(self.handle.sequence, place)
            for node in hypothesis.node.path():
                checker.advance(node.token)
                piece = Piece(checker.take_text(), node.token, node.logprob, node.sampler_logprob, node.top, place)
                text.pieces.append(piece)
            last = text.pieces[-1]
            text.pieces[-1] = last._replace(text=last.text + checker.finish())
            text.times = self._step_times[: len(text.pieces)]
            text.score, text.stopped, text.checker = hypothesis.score, checker.stopped, checker
            text.reason = engine.FinishReason.STOP if isinstance(checker.stopped, str) else hypothesis.reason

    def completion(self) -> Completion:
        """The text so far and its usage; of several texts the best or the first, with the rest in `others`."""
        params = self.handle.sequence.request.params
        each = [self._completion(text) for text in self.best]
        if self.ended and self._search is None:  # it ended before any fork: all n texts are equal
            each += each[:1] * (params.n - len(each))
        first = replace(each[0], others=tuple(each[1:]))
        if self._search is not None and self.ended:
            places = {node: place for place, node in enumerate(self._search.nodes())}
            tree = tuple(
                TreeToken(places.get(node.parent), node.token, node.logprob, node.score, node.reason)  # type: ignore[arg-type]
                for node in places
            )
            best = self._search.best(params.n)
            first = replace(first, tree=tree, ends=tuple(places[found.node] for found in best))
        return first

    def _completion(self, text: ChoiceText) -> Completion:
        tokens = [piece for piece in text.pieces if piece.token_id is not None]
        params = self.handle.sequence.request.params
        written, reader = "".join(piece.text for piece in text.pieces), self.reader
        return Completion(
            text=written,
            token_ids=tuple(piece.token_id for piece in tokens if piece.token_id is not None),
            logprobs=tuple(piece.logprob for piece in tokens),
            finish_reason=text.reason if self.ended else None,
            usage=self._usage(text, len(tokens)),
            sampler_logprobs=tuple(piece.sampler_logprob for piece in tokens),
            top_logprobs=tuple(piece.top for piece in tokens) if params.logprobs is not None else (),
            stopped=text.stopped if self.ended else None,
            complete=not self.ended or self._complete(text),
            score=text.score,
            prompt_logprobs=tuple(self.prompt_logprobs),
            prompt_top_logprobs=tuple(self._prompt_tops),
            cache=self.cache,
            **({"content": written} if reader is None else reader.fields(text.pieces, text.reason)),
        )

    def _complete(self, text: ChoiceText) -> bool:
        """Whether the text is complete by its grammar. Reads the stop checker only once the text has ended."""
        if text.reason in (None, engine.FinishReason.ABORTED):
            return self.handle.sequence.request.params.grammar is None
        return not isinstance(text.checker, TextStopChecker) or text.checker.complete(text.reason)

    def _usage(self, text: ChoiceText, tokens: int) -> Usage:
        handle, sequence, (layers, kv_bytes) = self.handle, text.sequence, self._size
        prompt, search = len(handle.sequence.request.prompt), self._search is not None
        forwarded = sum(one.counts.forwarded for one in self._sequences) if search else sequence.counts.forwarded
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=tokens,
            forward_tokens=forwarded,
            layer_tokens=forwarded * layers,
            reused_tokens=sequence.counts.reused,
            kv_bytes=kv_bytes(prompt + tokens - 1 if search else sequence.computed) if sequence.cache else 0,
            preemptions=sequence.counts.preemptions,
            seed=handle.sequence.request.params.seed,
            queue_s=0.0 if handle.started is None else handle.started - handle.submitted,
            token_s=tuple(text.times),
            drafted_tokens=sequence.counts.drafted,
            accepted_tokens=sequence.counts.accepted,
            disk_tokens=min(sequence.counts.restored, sequence.counts.reused),
        )


class Stream(AbstractContextManager["Stream"]):
    """An iterator over a request's pieces. Closing or garbage-collecting it early frees the request's pages.

    `completion`: the text read so far; final once the iteration has ended. owner: kept alive as long as the stream.
    """

    def __init__(self, handle: RequestHandle, inbox: Inbox, transcript: OutputProcessor, owner: object = None) -> None:
        self._handle = handle
        self._inbox = inbox
        self._transcript = transcript
        self._pieces: deque[Piece] = deque()
        self._owner = owner

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        """The next piece; blocks until there is one. Raises EngineError if the request failed."""
        while not self._pieces:
            if self._transcript.ended:
                self._transcript.check()
                raise StopIteration
            for delivery in self._inbox.get():
                self._pieces.extend(self._transcript.add(delivery, split=True))
        return self._pieces.popleft()

    @property
    def completion(self) -> Completion:
        return self._transcript.completion()

    def close(self) -> None:
        """Cancel the request; its text ends with the last piece that was read."""
        self._handle.cancel()
        self._transcript.abort()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._handle.cancel()


def completions_of(written: Iterable[OutputProcessor]) -> list[Completion]:
    """The completions of ended requests. Raises EngineError, with the other completions, if one failed."""
    ended = list(written)
    completions = [None if one.error else one.completion() for one in ended]
    for transcript in ended:
        if transcript.error is not None:
            raise EngineError(f"a prompt failed: {transcript.error}", completions) from transcript.error
    return [completion for completion in completions if completion is not None]


@contextmanager
def progress_bar(total: int) -> Iterator[Report]:
    from rich.console import Console  # takes longer to import than most of this package
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task, began = bar.add_task("prompts", total=total), time.monotonic()

        def report(ended: int, tokens: int) -> None:
            speed = tokens / max(1e-9, time.monotonic() - began)
            bar.update(task, completed=ended, description=f"prompts, {speed:,.0f} tok/s")

        yield report
