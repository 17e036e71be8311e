"""Places each text on a replica, and moves it to another when that one is lost.

The next replica gets the prompt and the tokens delivered so far. Draws depend only on seed and position, stop strings
and grammars are replayed, and a batch does not change bits: the rest of the text is the same. Belongs to one thread.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from tokenwright.cluster import replica_messages as messages
from tokenwright.cluster.routed_handle import RoutedHandle, TextInFlight, TextPaths
from tokenwright.cluster.router import ReplicaPages, RoutedReplica, Router, StoredPages
from tokenwright.engine import Event, Failed, Finished, FinishReason
from tokenwright.engine.loop import deliver_each
from tokenwright.engine.page_events import EvictionLog
from tokenwright.engine.port import Delivery, Listener
from tokenwright.engine.prefix_index import PrefixHashes
from tokenwright.engine.step import finished
from tokenwright.engine.warming import MOST_QUEUED, WarmRules
from tokenwright.errors import EngineError, ReplicaError
from tokenwright.llm.prompts.kept import KeptText, KeptTokens

log = logging.getLogger(__name__)
_NUMBERS = count()  # for warm-ups and queries


class Link(Protocol):
    """Sends messages to a replica; those to a dead one are lost."""

    def send(self, message: object) -> None: ...


@dataclass(slots=True, eq=False)
class Member:
    link: Link
    routed: RoutedReplica
    available: int  # pages, as last reported
    cached: int = 0


class Dispatcher:
    """retries: replicas that may die with a text before it fails. shared: replicas keep pages in one folder."""

    def __init__(self, retries: int, clock: Callable[[], float], *, shared: bool = False) -> None:
        self.members: list[Member] = []
        self.router = Router(StoredPages() if shared else None)
        self.paths = TextPaths()
        self.evictions = EvictionLog()
        self._retries = retries
        self._clock = clock
        self._handles: dict[RoutedHandle, None] = {}
        self._texts: dict[int, tuple[RoutedHandle, TextInFlight]] = {}
        self._waiting: dict[int, None] = {}  # numbers of texts without a replica, in order
        self._unable = ""  # why no replica will take the waiting texts
        self._warmed: dict[int, Callable[[int, int], object]] = {}  # callbacks of the last warm-ups, by number
        self._queries: dict[int, tuple[messages.KeptAsked, list[KeptTokens]]] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def texts_of(self, member: Member) -> int:
        return len(member.routed.texts)

    def add(self, handle: RoutedHandle) -> None:
        self._let_warm(False)
        self._handles[handle] = None
        texts = list(handle.texts.values())
        self._texts |= {text.number: (handle, text) for text in texts}
        for text in texts:
            if text.number in self._texts:  # else another text has failed, and so all
                self._place(handle, text)

    def join(self, link: Link, pages: ReplicaPages, available: int, place: int = 0, name: str = "") -> Member:
        """Add a replica whose pages are all free, and give it the waiting texts."""
        member = Member(link, RoutedReplica(pages, place=place, name=name), available)
        self.members.append(member)
        self._unable = ""
        self._place_waiting()
        return member

    def drain(self, member: Member) -> None:
        member.routed.taking = False

    def leave(self, member: Member, *, died: bool) -> None:
        """Move a replica's texts. died: one of them may have killed it, so each counts a loss."""
        self.members.remove(member)
        numbers = list(member.routed.texts)
        for number in numbers:
            self._texts[number][1].at = None
        for number in numbers:
            if number not in self._texts:
                continue
            handle, text = self._texts[number]
            text.losses += died
            self.paths.leave(number, "died" if died else "replaced")
            handle.moves += 1
            if text.losses > self._retries:
                self._fail(handle, text, f"{text.losses} replicas died with this text, one after another")
            else:
                self._place(handle, text)
        if numbers:
            moved = "its text continues" if len(numbers) == 1 else f"its {len(numbers)} texts continue"
            log.warning("replica %s is gone; %s on other replicas", member.routed.name, moved)

    def report(self, member: Member, report: messages.Report) -> None:
        member.routed.pages.apply(report.pages)
        if self.router.stored is not None:
            self.router.stored.add(report.pages)
        member.available, member.cached = report.available, report.cached
        taken = []
        for news in report.texts:
            found = self._texts.get(news.number)  # None: it has ended
            if found is not None and found[1].at is member.routed:  # else it has moved
                taken.append((found[0], self._take(member, *found, news)))
        self._deliver(taken)
        member.routed.others = max(0, report.sequences - len(member.routed.texts))

    def warm(self, order: messages.TextOrder, hashes: PrefixHashes, rules: WarmRules) -> None:
        """Let the replica that would take a text compute its prompt ahead, while the router has no texts."""
        chosen = self.router.choose((member.routed for member in self.members), hashes, order.prompt)
        if chosen is None:
            return
        number, link = next(_NUMBERS), self._link(chosen[0])
        self._warmed[number] = rules.computed  # not the rules, which hold a whole text
        if len(self._warmed) > MOST_QUEUED * len(self.members):
            del self._warmed[next(iter(self._warmed))]
        link.send(messages.RouterBusy(bool(self._texts)))
        link.send(messages.WarmOrder(number, order, tuple(rules.after), rules.spare))

    def warmed(self, chunk: messages.Warmed) -> None:
        if (computed := self._warmed.get(chunk.number)) is not None:
            computed(chunk.found, chunk.tokens)

    def _let_warm(self, free: bool) -> None:
        if self._warmed and not self._texts:
            for member in self.members:
                member.link.send(messages.RouterBusy(not free))

    @contextmanager
    def look(self, texts: Sequence[KeptText], owner: str) -> Iterator[list[KeptTokens]]:
        """Ask all replicas which texts they have cached; answers join the list until the context ends.

        A replica gets the ids of one text at a time, and only if it has forgotten them.
        """
        query, found = messages.KeptAsked(next(_NUMBERS), tuple(texts), owner), list[KeptTokens]()
        self._queries[query.number] = query, found
        try:
            for member in self.members:
                member.link.send(_with_ids(query, None))
            yield found
        finally:
            del self._queries[query.number]

    def answered(self, answer: messages.KeptFound, link: Link) -> None:
        query, found = self._queries.get(answer.number, (None, []))
        if query is None or answer.lacking is None:
            found.append(answer.found)
        else:
            link.send(_with_ids(query, answer.lacking))

    def abandon(self, why: str) -> None:
        """Fail all texts that have no replica, now and later, until a replica joins."""
        self._unable = why
        self._place_waiting()

    def tell(self, what: messages.TextCommand, handle: RoutedHandle) -> None:
        if what == "cancel":
            self._deliver([(handle, self._drop(handle, _aborted))])
            return
        handle.paused = what == "pause"
        for text in handle.texts.values():
            if text.at is not None:
                self._link(text.at).send(messages.Tell(text.number, what))

    def expire(self) -> None:
        """End waiting texts whose deadline has passed."""
        now = self._clock()
        for number in list(self._waiting):
            handle, text = self._texts[number]
            left = handle.seconds_left(now)
            if left is not None and left <= 0:
                self._end_late(handle, text)

    def close(self, error: EngineError) -> None:
        """Fail all requests, whatever their state."""
        handles, self._handles = self._handles, {}
        for handle in handles:
            try:
                handle.fail(error)
            except Exception:
                log.exception("a listener failed")

    def _place(self, handle: RoutedHandle, text: TextInFlight) -> None:
        now = self._clock()
        left = handle.seconds_left(now)
        if left is not None and left <= 0:
            self._end_late(handle, text)
            return
        request, tokens = handle.sequence.request, text.tokens
        hashes = text.sequence.prefix_hashes
        if not request.share:
            hashes = PrefixHashes(b"", hashes.page_size)  # without hashes nothing is shared
        chosen = self.router.choose((member.routed for member in self.members), hashes, tokens)
        if chosen is None and self._unable:
            self._fail(handle, text, self._unable)
            return
        if chosen is None:
            self._waiting[text.number] = None
            return
        routed, cached = chosen
        most = text.sequence.limit - len(tokens)
        self.router.assign(routed, text.number, hashes, len(tokens), cached, most)
        text.at, text.placed = routed, now
        self.paths.place(text.number, len(text.order.prompt), text.written, routed.place, routed.name)
        self._link(routed).send(messages.Begin(text.number, text.next_order(left), handle.paused))

    def release(self, owner: str, session: str) -> None:
        for member in self.members:
            member.link.send(messages.Release(owner, session))

    def _link(self, routed: RoutedReplica) -> Link:
        return next(member.link for member in self.members if member.routed is routed)

    def _place_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for number in waiting:
            if number in self._texts:
                self._place(*self._texts[number])

    def _take(self, member: Member, handle: RoutedHandle, text: TextInFlight, news: messages.TextNews) -> list[Event]:
        before = len(text.written)
        taken = [event for event in map(text.take, news.events) if event is not None]
        events = taken if text.shown else handle.show(text) + taken
        self._count(handle, text, news)
        if written := len(text.written) - before:
            self.router.wrote(member.routed, news.number, written)
        if news.ended:
            self.router.ended(member.routed, text.number, len(text.written))
            self._forget(handle, text)
            if any(isinstance(event, Failed) for event in taken):
                events += self._drop(handle, _aborted)
        return events

    def _count(self, handle: RoutedHandle, text: TextInFlight, news: messages.TextNews) -> None:
        counts = handle.sequence.counts
        if news.queue_s is not None and handle.started is None:
            handle.started = text.placed + news.queue_s
        if text.sequence is handle.sequence:
            counts.preemptions = news.preemptions
            counts.drafted, counts.accepted = news.drafted, news.accepted
            if not handle.moves:
                counts.prefix_hit = counts.reused = news.prefix_hit
                counts.restored, counts.declined = news.restored, news.declined
                counts.pinned = list(news.pinned)

    def _end_late(self, handle: RoutedHandle, text: TextInFlight) -> None:
        """End a text at its deadline, without what the stop checker held back."""
        checker = text.sequence.stop_checker
        for token in text.written:
            checker.advance(token)
        checker.take_text()
        events = [*handle.show(text), finished(text.sequence, FinishReason.TIME)]
        self._forget(handle, text)
        self._deliver([(handle, events)])

    def _fail(self, handle: RoutedHandle, text: TextInFlight, why: str) -> None:
        error = ReplicaError(f"{why}; {len(text.written)} tokens of it were delivered")
        self._deliver([(handle, self._drop(handle, lambda one: Failed(one.number, error)))])

    def _drop(self, handle: RoutedHandle, last: Callable[[TextInFlight], Event]) -> list[Event]:
        events: list[Event] = []
        for text in list(handle.texts.values()):
            if text.at is not None:
                self._link(text.at).send(messages.Tell(text.number, "cancel"))
                self.router.ended(text.at, text.number, None)
            self._forget(handle, text)
            events += [*handle.show(text), last(text)]
        return events

    def _forget(self, handle: RoutedHandle, text: TextInFlight) -> None:
        text.at = None
        self.paths.end(text.number)
        self._waiting.pop(text.number, None)
        del self._texts[text.number]
        self._let_warm(True)
        handle.end(text.number)

    def _deliver(self, each: Iterable[tuple[RoutedHandle, list[Event]]]) -> None:
        now, by_handle = self._clock(), dict[RoutedHandle, list[Event]]()
        for handle, events in each:
            by_handle[handle] = [*by_handle[handle], *events] if handle in by_handle else events
        by_listener: dict[Listener, list[Delivery]] = {}
        for handle, events in by_handle.items():
            if handle.ended:
                self._handles.pop(handle, None)
            if events:
                by_listener.setdefault(handle.listener, []).append(Delivery(handle, events, now, handle.ended))
        deliver_each(by_listener)


def _with_ids(query: messages.KeptAsked, number: int | None) -> messages.KeptAsked:
    """The query with the ids of one text only, or of none."""
    texts = (text if at == number else text._replace(ids=None) for at, text in enumerate(query.texts))
    return replace(query, texts=tuple(texts))


def _aborted(text: TextInFlight) -> Event:
    return Finished(text.number, FinishReason.ABORTED)
