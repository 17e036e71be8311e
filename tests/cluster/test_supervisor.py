"""Replicas that cannot be opened, that die, that hang and that are replaced: each seat is taken again."""

import asyncio
import socket
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest

from tests.engines import reached, until
from tokenwright.cluster import supervisor as module
from tokenwright.cluster.cluster_loop import ClusterLoop
from tokenwright.cluster.dispatcher import Dispatcher
from tokenwright.cluster.processes import ProcessLink
from tokenwright.cluster.replica import messages_of
from tokenwright.cluster.replica_messages import (
    Alive,
    Begin,
    Ping,
    Pong,
    Progress,
    ReplicaOpened,
    ReplicaShape,
    ReplicaUnopened,
    Report,
    TextNews,
    framed,
)
from tokenwright.cluster.supervisor import RouterSettings, Supervisor
from tokenwright.engine import Finished, FinishReason, Group, Request, SamplingParams
from tokenwright.engine.loop import Inbox
from tokenwright.errors import CheckpointError, EngineError, ReplicaError

SETTINGS = RouterSettings(drain_s=0.1)
SHAPE = ReplicaShape((Group(8),), 2, b"", 8, 8, 1, 1, "bfloat16")


class FakeLink:
    def __init__(self, name):
        self.name = name
        self.queue = asyncio.Queue()
        self.answers = (Alive(), Pong())
        self.killed = self.closed = False

    def send(self, message):
        for answer in self.answers if isinstance(message, Ping) else ():
            self.queue.put_nowait(answer)

    async def messages(self):
        while (message := await self.queue.get()) is not None:
            if isinstance(message, Exception):
                raise message
            yield message

    def kill(self):
        self.killed = True
        self.queue.put_nowait(None)

    async def close(self):
        self.closed = True


class FakeLauncher:
    """opens: what each replica says first, in turn; the last one for all that follow."""

    def __init__(self, replicas, *opens):
        self.replicas = replicas
        self.opens = list(opens)
        self.links = []

    def __len__(self):
        return self.replicas

    def close(self):
        pass

    async def start(self, number):
        if isinstance(self.opens[0], Exception):
            raise self.opens.pop(0)
        link = FakeLink(f"{number}-{len(self.links)}")
        self.links.append(link)
        for message in self.opens.pop(0) if len(self.opens) > 1 else self.opens[0]:
            link.queue.put_nowait(message)
        return link


@asynccontextmanager
async def supervised(launcher, news, settings=SETTINGS):
    dispatcher = Dispatcher(3, asyncio.get_running_loop().time)
    supervisor = Supervisor(launcher, dispatcher, b"", settings, news.append)
    task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, dispatcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert all(link.closed for link in launcher.links)


def run(test):
    asyncio.run(test())


OPENED = [Progress(1, 2), ReplicaOpened(SHAPE)]


def test_replicas_join_and_a_dead_one_is_replaced(caplog):
    async def test():
        launcher, news = FakeLauncher(2, OPENED), []
        async with supervised(launcher, news) as (_, dispatcher):
            await reached(lambda: len(dispatcher.members) == 2)
            assert news.count(SHAPE) == news.count(Progress(1, 2)) == 2
            launcher.links[0].kill()
            await reached(lambda: len(launcher.links) == 3 and len(dispatcher.members) == 2)
            assert launcher.links[0].closed and not launcher.links[1].killed
            died, joined = caplog.messages
            assert f"{launcher.links[0].name} has died" in died and f"{launcher.links[2].name} takes texts" in joined

    run(test)


def test_a_model_that_cannot_be_opened_is_told_and_tried_again_later(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.01)

    async def test():
        launcher, news = (
            FakeLauncher(1, [ReplicaUnopened("no config.json")], [ReplicaUnopened("still none")], OPENED),
            [],
        )
        async with supervised(launcher, news) as (_, dispatcher):
            await reached(lambda: dispatcher.members)
            assert [str(one) for one in news if isinstance(one, CheckpointError)] == ["no config.json", "still none"]
            assert len(launcher.links) == 3

    run(test)


@pytest.mark.parametrize(
    ("answers", "said"),
    [((), "sent nothing"), ((Alive(),), "ended no step"), ((Alive(), Pong()), None)],
)
def test_a_replica_that_does_not_answer_is_ended(monkeypatch, caplog, answers, said):
    """A stopped process after the heartbeat, one whose engine hangs later, and neither by a pause of the router."""
    monkeypatch.setattr(module, "TICK_S", 0.005)
    monkeypatch.setattr(module, "PING_S", 0.01)
    monkeypatch.setattr(module, "HANG_S", 0.4)

    async def test():
        launcher = FakeLauncher(2, OPENED)
        async with supervised(launcher, [], RouterSettings(heartbeat_s=0.2)) as (_, dispatcher):
            await reached(lambda: len(dispatcher.members) == 2)
            launcher.links[1].answers = answers
            if said is None:
                time.sleep(0.6)
                await asyncio.sleep(0.3)
                assert not launcher.links[1].killed
            else:
                await reached(lambda: launcher.links[1].killed)
                await reached(lambda: len(dispatcher.members) == 2)
                await asyncio.sleep(0.6)
                assert said in caplog.text
            assert not launcher.links[0].killed, "it answers"

    run(test)


def test_a_replica_that_cannot_be_started_or_sends_nonsense_is_started_again(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.01)

    async def test():
        launcher = FakeLauncher(1, OPENED, OSError(24, "Too many open files"), RuntimeError("a launcher's"), OPENED)
        async with supervised(launcher, []) as (_, dispatcher):
            await reached(lambda: dispatcher.members)
            for at, error in enumerate((ValueError("no message"), KeyError("Popen"), TimeoutError("no route"))):
                launcher.links[at].queue.put_nowait(error)
                await reached(lambda: len(launcher.links) == at + 2 and dispatcher.members)  # noqa: B023
                assert launcher.links[at].closed

    run(test)


def test_replicas_that_die_before_they_have_the_model_are_told(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.01)

    async def test():
        launcher, news = FakeLauncher(1, [Progress(1, 2), None]), []
        async with supervised(launcher, news):
            await reached(lambda: any(isinstance(one, CheckpointError) for one in news))
            assert len(launcher.links) >= module.UNOPENED

    run(test)


def test_a_replica_that_dies_while_it_is_drained_is_replaced_once():
    async def test():
        launcher = FakeLauncher(1, OPENED)
        async with supervised(launcher, []) as (supervisor, dispatcher):
            await reached(lambda: dispatcher.members)
            [member] = dispatcher.members
            member.routed.texts[1] = None  # it does not finish in time
            supervisor._settings = RouterSettings(drain_s=60)
            dispatcher.leave = lambda gone, died: dispatcher.members.remove(gone)
            rolled = asyncio.create_task(supervisor.roll())
            await reached(lambda: not member.routed.taking)
            launcher.links[0].kill()
            await rolled
            assert len(launcher.links) == 2 and not launcher.links[1].killed

    run(test)


@pytest.mark.parametrize("place", ["_place", "report", "leave", "expire", "tell", "_forget"])
def test_a_router_that_fails_ends_all_requests_with_an_error(caplog, place):
    """Whatever of it fails, in its tasks or for a client's thread, and in whatever state that leaves its texts."""
    launcher = FakeLauncher(1, OPENED)
    loop, watched = ClusterLoop(launcher, b"", SETTINGS, shared=False), threading.Event()
    loop.watched.append(watched.set)

    def broken(*_, **__):
        raise LookupError("planted")

    try:
        loop.opened(60, None)
        inbox = Inbox()
        [first] = loop.route([Request((1, 2), SamplingParams(n=2, max_tokens=3))], inbox, [])
        until(lambda: loop.dispatcher._texts)
        setattr(loop.dispatcher, place, broken)
        ended = TextNews(first.sequence.id, [Finished(0, FinishReason.EOS, "")], True, 0.0, 0, 0, 0)
        asked = {"report": Report([], [], 8, 0), "_forget": Report([], [ended], 8, 0)}
        if place in asked:
            loop._asyncio.call_soon_threadsafe(launcher.links[0].queue.put_nowait, asked[place])
        if place == "_place":
            loop.route([Request((1, 2), SamplingParams(max_tokens=3))], inbox, [])
        if place == "leave":
            loop._asyncio.call_soon_threadsafe(launcher.links[0].kill)
        if place == "tell":
            first.cancel()
        left = 2 if place == "_place" else 1
        while left:
            for delivery in inbox.get():
                assert delivery.ended and "LookupError: planted" in str(delivery.events[0].error)
                left -= 1
        with pytest.raises(EngineError, match=r"router.*planted"):
            loop.route([Request((1, 2), SamplingParams())], inbox, [])
        assert watched.wait(60)
        assert "in broken" in caplog.text, "with the place where it failed"
    finally:
        loop.close()
    loop.roll()  # a SIGHUP that comes late


def test_texts_fail_once_replicas_die_again_and_again_before_they_open(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    monkeypatch.setattr(module, "MOST_AGAIN_S", 0.05)
    launcher = FakeLauncher(1, OPENED, *[[None]] * (2 * module.UNOPENED), OPENED)
    loop = ClusterLoop(launcher, b"", SETTINGS, shared=False)
    request = Request((1, 2), SamplingParams(max_tokens=3))
    try:
        loop.opened(60, None)
        loop.route([request], inbox := Inbox(), [])
        loop._asyncio.call_soon_threadsafe(launcher.links[0].kill)
        for _ in range(2):  # one that waits, and one that comes
            [delivery] = inbox.get()
            [event] = delivery.events
            assert isinstance(event.error, ReplicaError) and "ended before they had opened the model" in str(
                event.error
            )
            assert len(launcher.links) >= 1 + module.UNOPENED
            loop.route([request], inbox, [])
        while not (loop.dispatcher.members and loop.dispatcher.members[0].routed.texts):
            loop.route([request], Inbox(), [])  # taken again, once a replica is there
    finally:
        loop.close()


def test_texts_fail_once_no_replica_has_come_for_long(monkeypatch):
    monkeypatch.setattr(module, "TICK_S", 0.005)
    monkeypatch.setattr(module, "MOST_WITHOUT_S", 0.1)
    launcher = FakeLauncher(1, OPENED, [])  # the second one never opens, and never dies
    loop = ClusterLoop(launcher, b"", SETTINGS, shared=False)
    try:
        loop.opened(60, None)
        loop.route([Request((1, 2), SamplingParams(max_tokens=3))], inbox := Inbox(), [])
        loop._asyncio.call_soon_threadsafe(launcher.links[0].kill)
        [delivery] = inbox.get()
        assert "no replica has taken texts" in str(delivery.events[0].error)
    finally:
        loop.close()


def test_all_are_replaced_one_after_another():
    async def test():
        launcher, least = FakeLauncher(3, OPENED), []
        async with supervised(launcher, []) as (supervisor, dispatcher):
            await reached(lambda: len(dispatcher.members) == 3)
            rolled = asyncio.create_task(supervisor.roll())
            while not rolled.done():
                least.append(len(dispatcher.members))
                await asyncio.sleep(0)
            await rolled
            assert len(launcher.links) == 6
            assert all(link.closed for link in launcher.links[:3])
            assert min(least) >= 2 and len(dispatcher.members) == 3

    run(test)


class Seen(Counter):
    """Counts that remember all values that they had."""

    def __init__(self):
        super().__init__()
        self.values_set = []

    def __setitem__(self, name, value):
        self.values_set.append(value)
        super().__setitem__(name, value)


def test_counts_of_experts_are_sums_that_never_fall():
    async def test():
        launcher = FakeLauncher(2, OPENED)
        async with supervised(launcher, []) as (supervisor, dispatcher):
            await reached(lambda: len(dispatcher.members) == 2)
            supervisor.experts = seen = Seen()

            async def counted(link, named, total):
                link.queue.put_nowait(Report([], [], 8, 0, experts={"named": named}))
                await reached(lambda: supervisor.experts == {"named": total})
                assert max(seen.values_set) == total, "another thread may read it at any time"

            first, second = launcher.links
            await counted(first, 5, 5)
            await counted(second, 7, 12)
            await counted(first, 9, 16)
            first.kill()
            await reached(lambda: len(launcher.links) == 3 and len(dispatcher.members) == 2)
            await counted(launcher.links[2], 2, 18)  # a new replica begins at 0

    run(test)


def test_texts_of_a_retired_model_fail_once_no_replica_of_it_can_be_opened():
    launcher = FakeLauncher(2, OPENED, OPENED, [ReplicaUnopened("other files")])
    at_once = RouterSettings(drain_s=0.0)
    loop, other = (ClusterLoop(one, b"", at_once, shared=False) for one in (launcher, FakeLauncher(2, OPENED)))
    try:
        loop.opened(60, None), other.opened(60, None)
        request = Request((1, 2), SamplingParams(n=2, max_tokens=3))
        loop.route([request], inbox := Inbox(), [])
        asyncio.run(loop.retire(other))
        assert [link.killed or link.closed for link in launcher.links].count(True) == 1, "one stays for the text"
        loop._asyncio.call_soon_threadsafe(next(link for link in launcher.links if not link.closed).kill)
        [delivery] = inbox.get()
        assert delivery.ended and all("0 tokens of it" in str(event.error) for event in delivery.events[::2])
        loop.route([request], inbox, [])
        assert inbox.get()[0].ended, "one that comes late fails, too"
        assert len(launcher.links) == 3, "it is not tried again"
    finally:
        loop.close()
        other.close()


def test_a_cluster_that_takes_places_starts_its_replicas_one_by_one():
    async def test():
        launcher = FakeLauncher(3, OPENED)
        dispatcher = Dispatcher(3, asyncio.get_running_loop().time)
        supervisor = Supervisor(launcher, dispatcher, b"", SETTINGS, lambda _: None, 1)
        task = asyncio.create_task(supervisor.run())
        for started in (1, 2, 3):
            await reached(lambda: len(dispatcher.members) == started)  # noqa: B023
            await asyncio.sleep(0.05)
            assert len(launcher.links) == started
            await supervisor.start_one()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(test)


class SocketReplica:
    """Says that it is open; once it is let, it ends each text that it is sent."""

    def __init__(self, answering):
        ours, self.connection = socket.socketpair()
        self.ours = ours
        self.begun = threading.Event()
        self.connection.sendall(framed([ReplicaOpened(SHAPE)]))
        self.thread = threading.Thread(target=self.answer if answering else lambda: None)
        self.thread.start()

    def answer(self):
        for message in messages_of(self.connection):
            if isinstance(message, Begin):
                news = TextNews(message.number, [Finished(0, FinishReason.EOS, "end")], True, 0.0, 0, 0, 0)
                self.connection.sendall(framed([Report([], [news], 8, 0)]))

    def die(self):
        """With unread messages, so that the other end is reset."""
        self.connection.close()


class SocketLauncher(FakeLauncher):
    """Replicas behind real links: at first those that read nothing and die when they are told to, then others."""

    def __init__(self, replicas):
        super().__init__(replicas)
        self.made = []

    def close(self):
        for replica in self.made:
            with suppress(OSError):  # it has died
                replica.connection.shutdown(socket.SHUT_RDWR)
            replica.thread.join()
            replica.die()

    async def start(self, number):
        replica = SocketReplica(answering=len(self.made) >= self.replicas)
        self.made.append(replica)
        process = SimpleNamespace(pid=len(self.made), kill=replica.die, wait=lambda: 0)
        return ProcessLink(process, *await asyncio.open_connection(sock=replica.ours))


@pytest.mark.parametrize("replicas", [2, 5])
def test_replicas_that_die_at_once_leave_a_router_that_goes_on(replicas):
    """Over real sockets: uvloop raises for a write to one whose other end has just died."""
    launcher = SocketLauncher(replicas)
    loop = ClusterLoop(launcher, b"", RouterSettings(retries=9), shared=False)
    try:
        loop.opened(60, None)
        until(lambda: len(loop.dispatcher.members) >= replicas)
        inbox = Inbox()
        requests = [Request((1, 2), SamplingParams(max_tokens=3)) for _ in range(3 * replicas)]
        handles = loop.route(requests, inbox, [])

        def die():
            for replica in launcher.made[:replicas]:
                replica.die()

        loop._asyncio.call_soon_threadsafe(die)
        left = set(handles)
        while left:
            for delivery in inbox.get():
                assert [type(one) for one in delivery.events] == [Finished]
                left.discard(delivery.handle)
        loop.check()
    finally:
        loop.close()
