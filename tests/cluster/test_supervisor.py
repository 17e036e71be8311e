"""Replicas that cannot be opened, that die, that hang and that are replaced: each seat is taken again."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tokenwright.cluster import supervisor as module
from tokenwright.cluster.cluster_loop import ClusterLoop
from tokenwright.cluster.dispatcher import Dispatcher
from tokenwright.cluster.replica_messages import (
    Ping,
    Pong,
    Progress,
    ReplicaOpened,
    ReplicaShape,
    ReplicaUnopened,
)
from tokenwright.cluster.supervisor import Supervisor
from tokenwright.engine import Group, Request, SamplingParams
from tokenwright.engine.loop import Inbox
from tokenwright.errors import CheckpointError, EngineError

SHAPE = ReplicaShape((Group(8),), 2, b"", 8, 8, 1, 1, "bfloat16")


class FakeLink:
    def __init__(self, name):
        self.name = name
        self.queue = asyncio.Queue()
        self.answers = True
        self.killed = self.closed = False

    def send(self, message):
        if isinstance(message, Ping) and self.answers:
            self.queue.put_nowait(Pong())

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
async def supervised(launcher, news):
    dispatcher = Dispatcher(3, asyncio.get_running_loop().time)
    supervisor = Supervisor(launcher, dispatcher, b"", 0.1, news.append)
    task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, dispatcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert all(link.closed for link in launcher.links)


async def until(known):
    async with asyncio.timeout(60):
        while not known():
            await asyncio.sleep(0.002)


def run(test):
    asyncio.run(test())


OPENED = [Progress(1, 2), ReplicaOpened(SHAPE)]


def test_replicas_join_and_a_dead_one_is_replaced(caplog):
    async def test():
        launcher, news = FakeLauncher(2, OPENED), []
        async with supervised(launcher, news) as (_, dispatcher):
            await until(lambda: len(dispatcher.members) == 2)
            assert news.count(SHAPE) == news.count(Progress(1, 2)) == 2
            launcher.links[0].kill()
            await until(lambda: len(launcher.links) == 3 and len(dispatcher.members) == 2)
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
            await until(lambda: dispatcher.members)
            assert [str(one) for one in news if isinstance(one, CheckpointError)] == ["no config.json", "still none"]
            assert len(launcher.links) == 3

    run(test)


def test_a_replica_that_does_not_answer_is_ended(monkeypatch):
    monkeypatch.setattr(module, "TICK_S", 0.005)
    monkeypatch.setattr(module, "PING_S", 0.01)
    monkeypatch.setattr(module, "HANG_S", 0.1)

    async def test():
        launcher = FakeLauncher(2, OPENED)
        async with supervised(launcher, []) as (_, dispatcher):
            await until(lambda: len(dispatcher.members) == 2)
            launcher.links[1].answers = False
            await until(lambda: launcher.links[1].killed)
            await until(lambda: len(dispatcher.members) == 2)
            await asyncio.sleep(0.3)
            assert not launcher.links[0].killed, "it answers"

    run(test)


def test_a_replica_that_cannot_be_started_or_sends_nonsense_is_started_again(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.01)

    async def test():
        launcher = FakeLauncher(1, OPENED, OSError(24, "Too many open files"), OPENED)
        async with supervised(launcher, []) as (_, dispatcher):
            await until(lambda: dispatcher.members)
            launcher.links[0].queue.put_nowait(ValueError("no message"))
            await until(lambda: len(launcher.links) == 2 and dispatcher.members)
            assert launcher.links[0].closed

    run(test)


def test_replicas_that_die_before_they_have_the_model_are_told(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.01)

    async def test():
        launcher, news = FakeLauncher(1, [Progress(1, 2), None]), []
        async with supervised(launcher, news):
            await until(lambda: any(isinstance(one, CheckpointError) for one in news))
            assert len(launcher.links) >= module.UNOPENED

    run(test)


def test_a_replica_that_dies_while_it_is_drained_is_replaced_once():
    async def test():
        launcher = FakeLauncher(1, OPENED)
        async with supervised(launcher, []) as (supervisor, dispatcher):
            await until(lambda: dispatcher.members)
            [member] = dispatcher.members
            member.routed.texts[1] = None  # it does not finish in time
            supervisor._drain_s = 60
            dispatcher.leave = lambda gone, died: dispatcher.members.remove(gone)
            rolled = asyncio.create_task(supervisor.roll())
            await until(lambda: not member.routed.taking)
            launcher.links[0].kill()
            await rolled
            assert len(launcher.links) == 2 and not launcher.links[1].killed

    run(test)


def test_a_router_that_fails_ends_all_requests_with_an_error():
    launcher = FakeLauncher(1, OPENED, RuntimeError("broken"), OPENED)
    loop = ClusterLoop(launcher, b"", 3, 0.1, shared=False)
    try:
        loop.opened(60, None)
        inbox = Inbox()
        loop.route([Request((1, 2), SamplingParams(n=2, max_tokens=3))], inbox, [])
        loop._asyncio.call_soon_threadsafe(launcher.links[0].kill)
        [delivery] = inbox.get()
        assert delivery.ended and "router" in str(delivery.events[0].error)
        with pytest.raises(EngineError, match="router"):
            loop.route([Request((1, 2), SamplingParams())], inbox, [])
    finally:
        loop.close()
    loop.roll()  # a SIGHUP that comes late


def test_all_are_replaced_one_after_another():
    async def test():
        launcher, least = FakeLauncher(3, OPENED), []
        async with supervised(launcher, []) as (supervisor, dispatcher):
            await until(lambda: len(dispatcher.members) == 3)
            rolled = asyncio.create_task(supervisor.roll())
            while not rolled.done():
                least.append(len(dispatcher.members))
                await asyncio.sleep(0)
            await rolled
            assert len(launcher.links) == 6
            assert all(link.closed for link in launcher.links[:3])
            assert min(least) >= 2 and len(dispatcher.members) == 3

    run(test)


def test_texts_of_a_retired_model_fail_once_no_replica_of_it_can_be_opened():
    launcher = FakeLauncher(2, OPENED, OPENED, [ReplicaUnopened("other files")])
    loop, other = (ClusterLoop(one, b"", 3, 0.0, shared=False) for one in (launcher, FakeLauncher(2, OPENED)))
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
        supervisor = Supervisor(launcher, dispatcher, b"", 0.1, lambda _: None, 1)
        task = asyncio.create_task(supervisor.run())
        for started in (1, 2, 3):
            await until(lambda: len(dispatcher.members) == started)  # noqa: B023
            await asyncio.sleep(0.05)
            assert len(launcher.links) == started
            await supervisor.start_one()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(test)
