"""A page that watches a run: new frames go out, and its commands come in.

The page acknowledges the frames that it has shown, and gets at most `WINDOW` beyond them. Frames that wait for it come
without attention rows, which it can request.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from tokenwright.checks import shown
from tokenwright.errors import RequestError
from tokenwright.explorer.dataclass_reader import Between, read
from tokenwright.explorer.explorer import Explorer, Index, Step
from tokenwright.explorer.player import Player
from tokenwright.trace.frame_codec import named_ids, pack
from tokenwright.trace.schema import Labels, RunState

WINDOW = 8  # unacknowledged frames a page
SAMPLE = 4  # a page that is behind gets every fourth step's attention row


@dataclass(frozen=True, slots=True)
class Ack:
    op: Literal["ack"]
    step: Step


@dataclass(frozen=True, slots=True)
class Play:
    op: Literal["play"]
    pace: Annotated[float, Between(0.01, 1000)] | None


@dataclass(frozen=True, slots=True)
class PlainMessage:
    op: Literal["pause", "step"]


@dataclass(frozen=True, slots=True)
class UseCache:
    op: Literal["cache"]
    on: bool


@dataclass(frozen=True, slots=True)
class WatchMessage:
    op: Literal["watch"]
    layer: Index
    head: Index


Command = Ack | Play | PlainMessage | UseCache | WatchMessage
COMMANDS: dict[str, type[Command]] = {
    "ack": Ack,
    "play": Play,
    "pause": PlainMessage,
    "step": PlainMessage,
    "cache": UseCache,
    "watch": WatchMessage,
}


def command_of(text: str | bytes) -> Command:
    """Raises RequestError, naming the field."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("a command is a JSON object") from None
    if not isinstance(data, dict) or "op" not in data:
        raise RequestError("the field 'op' is required in it" if isinstance(data, dict) else "a command is an object")
    if not isinstance(op := data["op"], str) or op not in COMMANDS:
        raise RequestError(f"op {shown(op)} is not supported; it is {', '.join(map(repr, COMMANDS))}")
    return read(COMMANDS[op], data)


class Viewer:
    def __init__(self, explorer: Explorer, player: Player, since_step: int) -> None:
        self.explorer = explorer
        self.player = player
        first = player.run.first_step
        self.next = min(max(since_step, first), first + len(player.run.frames))
        self.shown = self.next - 1
        self.throttled = False
        self._said: RunState | None = None
        self._told: set[int] = set()  # ids whose token cards the page has

    def obey(self, text: str | bytes) -> None:
        match command_of(text):
            case Ack(step=step):
                self.shown = max(self.shown, min(step, self.next - 1))
            case Play(pace=pace):
                self.player.play(pace)
            case PlainMessage(op="pause"):
                self.player.pause()
            case PlainMessage():
                self.player.step()
            case UseCache(on=on):
                self.player.use_cache(on)
            case WatchMessage(layer=layer, head=head):
                self.player.watch(layer, head)

    def news(self) -> Iterator[str | bytes]:
        """The due messages: the run's card first, frames with their labels, and its state."""
        if self._said is None:
            yield self.player.card_text
        yield from self._frames()
        state = self.player.state(throttled=self.throttled)
        if self._said is None or _lasting(state) != _lasting(self._said):
            self._said = state
            yield json.dumps(asdict(state))

    def _frames(self) -> Iterator[str | bytes]:
        frames, first = self.player.run.frames, self.player.run.first_step
        while (behind := first + len(frames) - self.next) > 0 and self.next - 1 - self.shown < WINDOW:
            frame = frames[self.next - first]
            fresh = [token for token in named_ids(frame) if token not in self._told]
            if fresh:
                self._told.update(fresh)
                yield json.dumps(asdict(Labels(self.explorer.looks(fresh))))
            self.throttled = self.throttled and behind > 1
            dropped = self.throttled and frame.step % SAMPLE > 0
            yield pack(replace(frame, attention=None) if dropped else frame)
            self.next += 1
        if behind > 0:  # the credit is spent
            self.throttled = True


def _lasting(state: RunState) -> RunState:
    """A state without the counts that change constantly."""
    return replace(state, lease_s=None, steps=0)
