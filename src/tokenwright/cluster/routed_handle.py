"""A client's handle of a request whose texts replicas generate, and the router's record of each text."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from tokenwright.cluster.replica_messages import TextCommand, TextEvent, TextOrder, unpacked_event
from tokenwright.cluster.router import RoutedReplica
from tokenwright.engine import Event, Failed, Forked, HiddenStates, PromptLogprobs, Sequence, Token
from tokenwright.engine.port import Delivery, Listener
from tokenwright.errors import EngineError, RequestError
from tokenwright.trace.rooms import WayPart

Left = Literal["", "died", "replaced"]
MOST_PATHS = 32
UNPAUSED = "replicas cannot pause a text after each token; serve without --replicas to step through a run"


@dataclass(slots=True, eq=False)
class TextInFlight:
    sequence: Sequence
    order: TextOrder  # as first sent
    shown: bool  # the client knows of it
    at: RoutedReplica | None = None  # the replica that has it
    written: list[int] = field(default_factory=list)  # tokens since `order`
    logprobs: int = 0  # of prompt tokens already delivered
    hidden: int = 0  # rows of hidden states already delivered
    losses: int = 0  # replicas that died while they had it
    placed: float = 0.0

    @property
    def number(self) -> int:
        return self.sequence.id

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.request.prompt, *self.written]

    def next_order(self, seconds_left: float | None) -> TextOrder:
        order, params = self.order, self.order.params
        if seconds_left is not None:
            params = replace(params, max_seconds=seconds_left)
        start = order.prompt_logprobs_from
        if start is not None:
            start = None if self.written else start + self.logprobs
        return replace(
            order,
            params=params,
            written=(*order.written, *self.written),
            continued_logprob=self.sequence.counts.sampler_logprob,
            prompt_logprobs_from=start,
        )

    def take(self, sent: TextEvent) -> Event | None:
        """Translate a replica's event; None if another replica sent it already."""
        if type(sent) is Token:  # nearly always
            self.written.append(sent.token)
            self.sequence.counts.sampler_logprob += sent.sampler_logprob
            sent.sequence = self.sequence.id
            return sent
        match event := unpacked_event(sent):
            case PromptLogprobs(logprobs=logprobs):
                self.logprobs += len(logprobs)
            case HiddenStates(start=start, rows=rows):
                rows = rows[max(0, self.hidden - start) :]
                if not len(rows):
                    return None
                event = replace(event, start=self.hidden, rows=rows)
                self.hidden += len(rows)
        return replace(event, sequence=self.number)


class RoutedHandle:
    """texts: the texts that have not ended, by number. post(command, handle): passes it to the router's thread."""

    def __init__(
        self,
        clock: Callable[[], float],
        texts: list[TextInFlight],
        listener: Listener,
        submitted: float,
        post: "Callable[[TextCommand, RoutedHandle], None]",
    ) -> None:
        self.sequence = texts[0].sequence
        self.submitted = submitted
        self.started: float | None = None
        self.ended = False
        self.moves = 0
        self.listener = listener
        self.texts = {text.number: text for text in texts}
        self.paused = False
        self._clock = clock
        self._post = post

    def let_write(self, tokens: int) -> None:  # noqa: ARG002  (of the protocol)
        raise RequestError(UNPAUSED)

    def cancel(self) -> None:
        if not self.ended:
            self._post("cancel", self)

    def pause(self) -> None:
        self._post("pause", self)

    def resume(self) -> None:
        self._post("resume", self)

    def show(self, text: TextInFlight) -> list[Event]:
        """The event that introduces a text after the first, the first time only."""
        if text.shown:
            return []
        text.shown = True
        return [Forked(text.number, self.sequence.id, text.sequence)]

    def fail(self, why: EngineError) -> None:
        texts, self.texts = list(self.texts.values()), {}
        events = [event for text in texts for event in (*self.show(text), Failed(text.number, why))]
        events = events or [Failed(self.sequence.id, why)]  # a fault may have removed its texts
        self.ended = True
        self.listener.deliver([Delivery(self, events, self._clock(), True)])

    def end(self, number: int) -> None:
        del self.texts[number]
        self.ended = not self.texts

    def seconds_left(self, now: float) -> float | None:
        most = self.sequence.request.params.max_seconds
        return None if most is None else self.submitted + most - now


@dataclass(slots=True, eq=False)
class TextPath:
    number: int
    prompt: int
    written: list[int]
    stays: list[WayPart] = field(default_factory=list)
    ended: bool = False


class TextPaths:
    """The last texts' replicas. Belongs to the router's thread."""

    def __init__(self, most: int = MOST_PATHS) -> None:
        self.paths: dict[int, TextPath] = {}
        self._most = most

    def place(self, number: int, prompt: int, written: list[int], place: int, name: str) -> None:
        if number not in self.paths:
            self.paths[number] = TextPath(number, prompt, written)
            while len(self.paths) > self._most:
                del self.paths[next(iter(self.paths))]
        self.paths[number].stays.append(WayPart(place, name, len(written), ""))

    def leave(self, number: int, left: Left) -> None:
        if number in self.paths:
            stays = self.paths[number].stays
            stays[-1] = replace(stays[-1], left=left)

    def end(self, number: int) -> None:
        if number in self.paths:
            self.paths[number].ended = True
