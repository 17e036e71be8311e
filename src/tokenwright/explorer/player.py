"""Watched runs: players step them, and call their viewers after every change.

A viewer never waits for the engine: `Player.turn` executes its commands. At engine speed the next step runs while
viewers get the last one, so a command takes effect a step later. A run that is paused for `LEASE_S` seconds frees its
pages; its frames stay, and a new run can resume from there.
"""

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from tokenwright.errors import CapacityError, EngineError
from tokenwright.llm.run import Run
from tokenwright.trace.schema import RunCard, RunState

LEASE_S = 600.0
AHEAD = 1  # steps that the engine computes meanwhile, at engine speed
MOST_LIVE = 80  # runs with pages: a class has 64 pupils and their teacher
MOST_KEPT = 32  # ended runs with frames
MOST_BYTES = 256 * 2**20  # of their frames together

Phase = Literal["paused", "running", "done", "failed", "expired"]
Listening = Callable[[], object]  # called after each change, by the thread that made it

log = logging.getLogger(__name__)


class Driven(NamedTuple):
    wake: Callable[[], object]  # turn at once; any thread may call it
    join: Callable[[], object]  # wait for the last turn


Turn = Callable[[], float | None]  # seconds until something else may be due; None: nothing will be
Drive = Callable[[Turn, str], Driven]


def undriven(turn: Turn, name: str) -> Driven:  # noqa: ARG001  (threads have names)
    """For an owner who calls `turn`: `join` turns until the end."""

    def join() -> None:
        while (rest := turn()) is not None:
            time.sleep(rest)

    return Driven(lambda: None, join)


@dataclass(slots=True)
class ViewerCommands:
    playing: bool = False
    pace: float | None = None
    steps: int = 0
    cache: bool = True
    closed: bool = False


class Player:
    """Steps one run as its viewers command. `join` waits for its last turn."""

    def __init__(self, run: Run, card: RunCard, lease_s: float = LEASE_S, drive: Drive = undriven) -> None:
        self.run = run
        self.card = card
        self.lease_s = lease_s
        self.phase: Phase = "paused"
        self.message = ""
        self.over = False  # after its last turn
        self._commands = ViewerCommands(cache=run.cache)
        self._lock = threading.RLock()
        self._viewers: list[Listening] = []
        self._since = time.monotonic()  # of the lease, or of the step under way
        self._wake, self.join = drive(self.turn, f"run {card.run}")

    @cached_property
    def card_text(self) -> str:
        return json.dumps(asdict(self.card))

    @property
    def live(self) -> bool:
        return self.phase in ("paused", "running") and not self._commands.closed

    @property
    def viewed(self) -> bool:
        return bool(self._viewers)

    def state(self, *, throttled: bool = False) -> RunState:
        with self._lock:
            lease = self.lease_s - (time.monotonic() - self._since) if self.phase == "paused" else None
            return RunState(
                state=self.phase,
                steps=self.run.first_step + len(self.run.frames),
                cache=self._commands.cache,
                pace=self._commands.pace,
                lease_s=lease and round(lease, 1),
                throttled=throttled,
                reason=self.run.reason and self.run.reason.value,
                message=self.message,
                watched=self.run.watched,
                summary=self.run.summary if self.phase == "done" else None,
            )

    def play(self, pace: float | None) -> None:
        with self._commanding() as commands:
            commands.playing, commands.pace = True, pace

    def pause(self) -> None:
        with self._commanding() as commands:
            commands.playing, commands.steps = False, 0

    def step(self) -> None:
        with self._commanding() as commands:
            commands.playing, commands.steps = False, commands.steps + 1

    def use_cache(self, on: bool) -> None:
        with self._commanding() as commands:
            commands.cache = on

    def watch(self, layer: int, head: int) -> None:
        """Raises RequestError for a layer or head that the model lacks."""
        with self._commanding():
            self.run.watch(layer, head)

    def renew(self) -> None:
        with self._commanding():
            pass

    def close(self) -> None:
        with self._commanding() as commands:
            commands.closed = True

    def enter(self, viewer: Listening) -> None:
        with self._lock:
            self._viewers.append(viewer)

    def leave(self, viewer: Listening) -> None:
        with self._lock:
            self._viewers.remove(viewer)
            if not self._viewers:
                self.pause()  # under the lock: a viewer that enters next may play

    @contextmanager
    def _commanding(self) -> Iterator[ViewerCommands]:
        with self._lock:
            yield self._commands
            if self.phase == "paused":
                self._since = time.monotonic()
        self._wake()
        self._tell()

    def _tell(self) -> None:
        for viewer in list(self._viewers):
            viewer()

    def _become(self, phase: Phase, message: str = "") -> None:
        if self.phase != phase:
            self._since = time.monotonic()
            self.phase, self.message = phase, message
            self._tell()

    def turn(self) -> float | None:
        """Make a step if one is due, or end the run. Returns the seconds to wait then; None: the run is over."""
        try:
            if (rest := None if self.over else self._turn()) is not None:
                return rest
        except EngineError:
            log.exception("run %s failed", self.card.run)
            self._become("failed", "the engine failed on this run; the server's log says more")
        except Exception:
            log.exception("run %s failed", self.card.run)
            self._become("failed", "this run met a fault of ours; the server's log says more")
        self.run.close()
        self.over = True
        return None

    def _turn(self) -> float | None:
        with self._lock:
            commands = self._commands
            if not self.run.ended and (rest := self._rest()) > 0:
                return rest
            commands.steps = max(0, commands.steps - 1)
        if self.run.ended:
            self._become("done")
            return None
        if commands.closed:
            self.run.close()
            self._become("expired")
            return None
        self._become("running")
        self._since = time.monotonic()
        if self.run.cache != commands.cache:
            self.run.cache = commands.cache
        self.run.step(ahead=AHEAD if commands.playing and commands.pace is None else 0)
        self._tell()
        return 0.0

    def _rest(self) -> float:
        """Seconds until a step is due, or the lease ends; at its end the run is closed."""
        commands, spent = self._commands, time.monotonic() - self._since
        if commands.closed or commands.steps:
            return 0.0
        if commands.playing:
            return 0.0 if commands.pace is None or self.phase != "running" else 1 / commands.pace - spent
        if self.run.pending:
            return 0.0
        if self.phase != "paused":
            self._become("paused")
            return self.lease_s
        commands.closed = spent >= self.lease_s
        return self.lease_s - spent


class Runs:
    def __init__(self, drive: Drive = undriven) -> None:
        self._drive = drive
        self._players: dict[str, Player] = {}
        self._guests: list[Run] = []
        self._dropped: list[Player] = []  # whose last turns may come
        self._lock = threading.Lock()

    def add(self, run: Run, card: RunCard) -> Player:
        """Close runs without viewers to make room. Raises CapacityError if others would lose pages."""
        with self._lock:
            try:
                self._make_place(run)
            except CapacityError:
                run.close()
                raise
            self._forget()
            player = self._players[card.run] = Player(run, card, drive=self._drive)
        return player

    def turn(self) -> float | None:
        turns = [player.turn() for player in (*self._dropped, *self._players.values())]
        return min((rest for rest in turns if rest is not None), default=None)

    def _make_place(self, run: Run) -> None:
        live = [player for player in self._players.values() if player.live]
        while len(live) >= MOST_LIVE or not run.fits_beside([*self._guests, *(player.run for player in live)]):
            left = next((player for player in live if not player.viewed), None)
            if left is None:
                raise CapacityError(
                    f"there is no room for one more run beside those that pages show ({len(live)}); close a page"
                )
            left.close()
            live.remove(left)

    @contextmanager
    def guests(self, runs: list[Run]) -> Iterator[None]:
        """Keep room for runs that the caller steps. Raises CapacityError as `add` does."""
        with self._lock:
            added: list[Run] = []
            try:
                for run in runs:
                    self._make_place(run)
                    self._guests.append(run)
                    added.append(run)
            except CapacityError:
                self._dismiss(added)
                raise
        try:
            yield
        finally:
            with self._lock:
                self._dismiss(added)

    def _dismiss(self, runs: list[Run]) -> None:
        for run in runs:
            self._guests.remove(run)

    def family(self, player: Player) -> list[tuple[str, Player]]:
        """The runs that forked from the same text, with their ids, this one included; the oldest first."""
        salt = player.run.start.salt
        return [(identity, one) for identity, one in list(self._players.items()) if one.run.start.salt == salt]

    def _forget(self) -> None:
        ended = [(identity, player.run.nbytes) for identity, player in self._players.items() if not player.live]
        while len(ended) > MOST_KEPT or sum(size for _, size in ended) > MOST_BYTES:
            self._drop(ended.pop(0)[0])

    def _drop(self, identity: str) -> Player | None:
        player = self._players.pop(identity, None)
        self._dropped = [one for one in (*self._dropped, player) if one is not None and not one.over]
        return player

    def get(self, identity: str) -> Player | None:
        return self._players.get(identity)

    def remove(self, identity: str) -> bool:
        with self._lock:
            player = self._drop(identity)
        if player is not None:
            player.close()
        return player is not None

    def close(self) -> None:
        """End all runs, and wait for their last turns, also of removed runs."""
        with self._lock:
            players, self._players = [*self._players.values(), *self._dropped], {}
        for player in players:
            player.close()
        for player in players:
            player.join()


def new_identity() -> str:
    return secrets.token_hex(8)
