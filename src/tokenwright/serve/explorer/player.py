"""Watched runs: each has a thread that steps it, and viewers that it calls after every change.

A run is paused (phase "paused") before its first step and between steps; it plays at a pace, or makes single steps. At
engine speed the next step is under way while viewers get the last one, so a command takes effect a step later. A
viewer never waits for the engine: it records commands, and the run's thread executes them. A run that is paused for
`LEASE_S` seconds without a request frees its pages; its frames stay, and a new run can resume from there.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from tokenwright.errors import CapacityError, EngineError
from tokenwright.trace.schema import RunCard, RunState

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server
    from tokenwright.llm.run import Run

LEASE_S = 600.0
AHEAD = 1  # steps that the engine computes while the viewers get the last one, at engine speed
MOST_LIVE = 8  # runs that have pages
MOST_KEPT = 32  # ended runs whose frames stay available
MOST_BYTES = 256 * 2**20  # of their frames together

Phase = Literal["paused", "running", "done", "failed", "expired"]
Viewer = Callable[[], object]  # called after each change, by the thread that made it

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ViewerCommands:
    """The current commands of a run's viewers."""

    playing: bool = False
    pace: float | None = None  # tokens per second; None: engine speed
    steps: int = 0  # single steps left
    cache: bool = True
    closed: bool = False


class Player:
    """Steps one run in its own thread, as its viewers command."""

    def __init__(self, run: Run, card: RunCard, lease_s: float = LEASE_S) -> None:
        self.run = run
        self.card = card
        self.card_text = json.dumps(asdict(card))  # serialised once: it has every token of the prompt
        self.lease_s = lease_s
        self.phase: Phase = "paused"
        self.message = ""
        self._commands = ViewerCommands(cache=run.cache)
        self._changed = threading.Condition()
        self._viewers: list[Viewer] = []
        self._paused_since = time.monotonic()
        self._thread = threading.Thread(target=self._live, name=f"run {card.run}", daemon=True)
        self._thread.start()

    @property
    def live(self) -> bool:
        """Whether the run can still generate."""
        return self.phase in ("paused", "running") and not self._commands.closed

    @property
    def alive(self) -> bool:
        """Whether the run's thread has not ended."""
        return self._thread.is_alive()

    @property
    def viewed(self) -> bool:
        """Whether the run has a viewer."""
        return bool(self._viewers)

    def state(self, *, throttled: bool = False) -> RunState:
        """The run's state, for a viewer that may be `throttled`."""
        with self._changed:
            lease = self.lease_s - (time.monotonic() - self._paused_since) if self.phase == "paused" else None
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
        """Step continuously, at `pace` tokens per second; None: at engine speed."""
        with self._commanding() as commands:
            commands.playing, commands.pace = True, pace

    def pause(self) -> None:
        with self._commanding() as commands:
            commands.playing, commands.steps = False, 0

    def step(self) -> None:
        """Generate one more token; pauses a run that plays."""
        with self._commanding() as commands:
            commands.playing, commands.steps = False, commands.steps + 1

    def use_cache(self, on: bool) -> None:
        """Switch the KV cache on or off, from the next step that begins."""
        with self._commanding() as commands:
            commands.cache = on

    def watch(self, layer: int, head: int) -> None:
        """Choose the attention row of later frames. Raises RequestError for a layer or head that the model lacks."""
        with self._commanding():
            self.run.watch(layer, head)

    def renew(self) -> None:
        """Restart the lease, because a viewer is active."""
        with self._commanding():
            pass

    def close(self) -> None:
        """End the run and free its pages."""
        with self._commanding() as commands:
            commands.closed = True

    def join(self) -> None:
        """Wait for the run's thread to end."""
        self._thread.join()

    def enter(self, viewer: Viewer) -> None:
        """Call a viewer after every change from now on."""
        with self._changed:
            self._viewers.append(viewer)

    def leave(self, viewer: Viewer) -> None:
        """Stop calling a viewer; a run without viewers is paused."""
        with self._changed:
            self._viewers.remove(viewer)
            if not self._viewers:
                self.pause()  # under the lock: a viewer that enters next may play

    @contextmanager
    def _commanding(self) -> Iterator[ViewerCommands]:
        with self._changed:
            yield self._commands
            self._paused_since = time.monotonic()
            self._changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        for viewer in list(self._viewers):
            viewer()

    def _become(self, phase: Phase, message: str = "") -> None:
        if self.phase != phase:
            self._paused_since = time.monotonic()
            self.phase, self.message = phase, message
            self._tell()

    def _live(self) -> None:
        try:
            while self._await_turn():
                self._turn()
        except EngineError:
            log.exception("run %s failed", self.card.run)
            self._become("failed", "the engine failed on this run; the server's log says more")
        except Exception:
            log.exception("run %s failed", self.card.run)
            self._become("failed", "this run met a fault of ours; the server's log says more")
        finally:
            self.run.close()

    def _await_turn(self) -> bool:
        """Wait until a viewer requests a step. False: the run has ended, was closed, or its lease expired."""
        with self._changed:
            commands = self._commands
            while not (self.run.ended or commands.closed or commands.playing or commands.steps or self.run.pending):
                self._become("paused")
                rest = self._paused_since + self.lease_s - time.monotonic()
                if rest <= 0:
                    commands.closed = True
                self._changed.wait(max(0.0, rest))
            commands.steps = max(0, commands.steps - 1)
        if self.run.ended:
            self._become("done")
            return False
        if commands.closed:
            self.run.close()
            self._become("expired")
            return False
        self._become("running")
        return True

    def _turn(self) -> None:
        """Run one step, then wait for the rest of its time at the pace."""
        began, commands = time.monotonic(), self._commands
        if self.run.cache != commands.cache:
            self.run.cache = commands.cache
        self.run.step(ahead=AHEAD if commands.playing and commands.pace is None else 0)
        self._tell()
        with self._changed:
            while commands.playing and commands.pace is not None and not commands.closed and not self.run.ended:
                rest = began + 1 / commands.pace - time.monotonic()
                if rest <= 0:
                    break
                self._changed.wait(rest)


class Runs:
    """All runs of a server, by id."""

    def __init__(self) -> None:
        self._players: dict[str, Player] = {}
        self._guests: list[Run] = []  # runs without a player
        self._dropped: list[Player] = []  # whose threads have perhaps not ended yet
        self._lock = threading.Lock()

    def add(self, run: Run, card: RunCard) -> Player:
        """Add a run such that all watched runs keep their pages: the engine preempts none of them for another.

        It closes runs without viewers to make room. Raises CapacityError if that does not suffice.
        """
        with self._lock:
            try:
                self._make_place(run)
            except CapacityError:
                run.close()
                raise
            self._forget()
            player = self._players[card.run] = Player(run, card)
        return player

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
        """Keep room for runs that the caller steps itself. Raises CapacityError as `add` does."""
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
        """The runs that forked from one and the same text, with their ids, this one included; the oldest first."""
        salt = player.run.start.salt
        return [(identity, one) for identity, one in list(self._players.items()) if one.run.start.salt == salt]

    def _forget(self) -> None:
        """Drop the oldest ended runs while they exceed MOST_KEPT or their frames MOST_BYTES."""
        ended = [(identity, player.run.nbytes) for identity, player in self._players.items() if not player.live]
        while len(ended) > MOST_KEPT or sum(size for _, size in ended) > MOST_BYTES:
            self._drop(ended.pop(0)[0])

    def _drop(self, identity: str) -> Player | None:
        player = self._players.pop(identity, None)
        self._dropped = [one for one in (*self._dropped, player) if one is not None and one.alive]
        return player

    def get(self, identity: str) -> Player | None:
        return self._players.get(identity)

    def remove(self, identity: str) -> bool:
        """End and drop a run; returns whether it existed."""
        with self._lock:
            player = self._drop(identity)
        if player is not None:
            player.close()
        return player is not None

    def close(self) -> None:
        """End all runs, and wait for their threads, also for the threads of removed runs."""
        with self._lock:
            players, self._players = [*self._players.values(), *self._dropped], {}
        for player in players:
            player.close()
        for player in players:
            player.join()


def new_identity() -> str:
    """A random id that clients cannot guess."""
    return secrets.token_hex(8)
