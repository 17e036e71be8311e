"""Pins: prefixes whose pages stay in the pool for a while, because a client has asked for it.

A pin has page tables like a sequence, so its pages are not evicted. It ends if unused for its `ttl_s`, with its
session, or, oldest use first, for a new pin beyond the share of pages and for a text that needs pages to go on.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tokenwright.engine.layer_group import PageTables
from tokenwright.engine.prefix_index import PrefixHashes, PrefixIndex

SHARE = 0.5  # of the pages of each group
MOST_SESSIONS = 64  # that a pin remembers
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a prompt, in tokens, up to which it is to stay cached, for `ttl_s` seconds after its last use."""

    at: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a request asks the prefix cache to keep its prefixes."""

    marks: tuple[Mark, ...] = ()
    owner: str = ""  # the client, whose new pins end its older ones first
    session: str = ""  # its pins are released together
    explicit: bool = False  # nothing after the last mark is cached
    last: bool = False  # the session ends with this request


NO_RETENTION = Retention()


@dataclass(slots=True, eq=False)
class Pin:
    """A pinned prefix of `tokens` tokens. It ends when all of its sessions are released."""

    owner: str
    sessions: dict[str, None]  # the last that asked for it
    tokens: int
    ttl_s: float
    until: float
    last: bytes  # the hash of its last full page, or the root
    tables: PageTables

    @property
    def session(self) -> str:
        return next(reversed(self.sessions))

    def add_session(self, session: str) -> None:
        self.sessions.pop(session, None)
        self.sessions[session] = None
        if len(self.sessions) > MOST_SESSIONS:
            del self.sessions[next(iter(self.sessions))]


class Pins:
    """The pins of a pool, which have at most `share` of the pages of each group together."""

    def __init__(
        self, prefixes: PrefixIndex, share: float = SHARE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self._prefixes = prefixes
        self._pool = prefixes.pool
        self._most = [int(group.pages * share) for group in self._pool.groups]
        self._pins: OrderedDict[tuple[str, bytes], Pin] = OrderedDict()  # the one used longest ago first
        self._pinned: dict[str, list[Counter[int]]] = {}  # by owner and group, how many pins have a page
        self.next_end = NEVER  # no pin's time is over before this

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def pages(self, owner: str | None = None) -> list[int]:
        owners = self._pinned.values() if owner is None else [self._pinned[owner]] if owner in self._pinned else []
        return [sum(len(pinned[number]) for pinned in owners) for number in range(len(self._most))]

    def pin(self, hashes: PrefixHashes, tokens: Sequence[int], mark: Mark, retention: Retention) -> int:
        """Pin the cached part of the prefix before a mark, or renew its pin. Returns its tokens, 0 if not granted."""
        length = self._prefixes.match_prefix(hashes, tokens, mark.at)
        if not length:
            return 0
        owner, size = retention.owner, hashes.page_size
        key = owner, hashes.hash(tokens, (length - 1) // size, length)
        if (known := self._pins.get(key)) is not None:
            known.ttl_s = mark.ttl_s
            known.add_session(retention.session)
            self._renew(key, known)
            return length
        tables = self._pool.tables()
        self._prefixes.attach_prefix(tables, hashes, tokens, length)
        if not any(tables):
            return length  # the row after it reads no page (a window of one token)
        if any(len(table) > most for table, most in zip(tables, self._most, strict=True)):
            self._pool.release(tables)
            return 0
        made = Pin(owner, {retention.session: None}, length, mark.ttl_s, 0.0, hashes.before(length // size), tables)
        self._renew(key, made)
        pinned = self._pinned.setdefault(owner, [Counter() for _ in self._most])
        for number, table in enumerate(tables):
            pinned[number].update(table.values())
        while any(pages > most for pages, most in zip(self.pages(), self._most, strict=True)):
            if not self._make_room(key):
                self._end(key)
                return 0
        return length

    def _renew(self, key: tuple[str, bytes], pin: Pin) -> None:
        pin.until = self.clock() + pin.ttl_s
        self.next_end = min(self.next_end, pin.until)
        self._pins[key] = pin
        self._pins.move_to_end(key)

    def _make_room(self, new: tuple[str, bytes]) -> bool:
        """End the oldest other pin of the new pin's owner, or of an owner that has more pages."""
        own = sum(self.pages(new[0]))
        for key in self._pins:
            if key != new and (key[0] == new[0] or sum(self.pages(key[0])) > own):
                self._end(key)
                return True
        return False

    def _end(self, key: tuple[str, bytes]) -> None:
        pin = self._pins.pop(key)
        pinned = self._pinned[pin.owner]
        for counts, table in zip(pinned, pin.tables, strict=True):
            counts.subtract(table.values())
            for page in [page for page in table.values() if not counts[page]]:
                del counts[page]
        if not any(pinned):
            del self._pinned[pin.owner]
        self._pool.release(pin.tables)

    def used(self, hashes: PrefixHashes, tokens: int, owner: str) -> None:
        if any(pin.owner == owner for pin in self):
            found = {hashes.root, *hashes.hashes[: tokens // hashes.page_size]}
            for key, pin in list(self._pins.items()):
                if pin.owner == owner and pin.tokens <= tokens and pin.last in found:
                    self._renew(key, pin)

    def expire(self) -> None:
        if not self._pins or (now := self.clock()) < self.next_end:
            return
        for key in [key for key, pin in self._pins.items() if pin.until <= now]:
            self._end(key)
        self.next_end = min((pin.until for pin in self), default=NEVER)

    def end_oldest(self, owner: str | None) -> bool:
        """End the oldest pin that is not of `owner`, or (None) the oldest of all."""
        for key in self._pins:
            if key[0] != owner:
                self._end(key)
                return True
        return False

    def release(self, owner: str, session: str) -> int:
        """Take a session from its pins, and end those without another session. Returns how many pins it had."""
        found = [key for key, pin in self._pins.items() if pin.owner == owner and session in pin.sessions]
        for key in found:
            del self._pins[key].sessions[session]
            if not self._pins[key].sessions:
                self._end(key)
        return len(found)
