"""Which models are in memory: on demand, within a limit, the longest unused one leaves; with models that are fakes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tokenwright.errors import CheckpointError
from tokenwright.serve.service.residents import ResidentModel, Residents, find
from tokenwright.serve.service.types import Busy, Missing, NotReady


class Fake:
    """A model that takes `size` bytes from when it begins to be loaded until it is closed."""

    def __init__(self, world: World, name: str, size: int) -> None:
        self.world, self.name, self.nbytes, self.progress = world, name, size, (0, 0)
        self.closed = self.failed = False
        world.opened.append(self)

    async def settled(self) -> None:
        self.world.held += self.nbytes
        self.world.most = max(self.world.most, self.world.held)
        await asyncio.sleep(0.001)
        if self.name in self.world.broken:
            raise CheckpointError("its file is damaged")

    def stop(self) -> None:
        pass

    def close(self) -> None:
        assert not self.closed, "a model is closed once"
        self.closed = True
        self.world.held -= self.nbytes


class World:
    def __init__(self, sizes: dict[str, int], limit: int, most: int = 100) -> None:
        self.opened: list[Fake] = []
        self.broken: set[str] = set()
        self.held = self.most = 0

        def entry(name: str, size: int) -> ResidentModel:
            return ResidentModel([name], lambda _: Fake(self, name, size), lambda: size)

        self.residents = Residents([entry(*one) for one in sizes.items()], limit, most)

    def find(self, name: str) -> ResidentModel:
        return find(name, self.residents.entries)

    async def use(self, name: str, seconds: float = 0.0) -> None:
        entry = self.find(name)
        opened = await self.residents.acquire(entry)
        assert isinstance(opened, Fake) and opened.name == name and not opened.closed
        await asyncio.sleep(seconds)
        assert not opened.closed, "a model that is used stays"
        self.residents.release(entry)

    def loaded(self) -> list[str]:
        return [one.name for one in self.opened]


def runs(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@runs
async def test_a_model_is_loaded_once_and_the_longest_unused_one_leaves() -> None:
    world = World({"a": 4, "b": 4, "c": 4}, limit=8)
    for name in ("a", "b", "a", "c", "a", "b"):
        await world.use(name)
    assert world.loaded() == ["a", "b", "c", "b"]  # c took the place of b, and b that of c
    assert world.most <= 8


@runs
async def test_many_requests_in_random_order_lose_none() -> None:
    world = World({"a": 4, "b": 5, "c": 6}, limit=10)
    draw = random.Random(3)
    order = [draw.choice("abc") for _ in range(300)]
    gate = asyncio.Semaphore(12)

    async def one(name: str) -> None:
        async with gate:
            await world.use(name, draw.random() / 1000)

    await asyncio.gather(*map(one, order))
    assert world.most <= 10
    residents = world.residents
    assert residents.waiting == 0 and all(entry.users == 0 for entry in residents.entries)
    assert world.held == residents.used == sum(one.nbytes for one in world.opened if not one.closed)
    assert residents.loads == len(world.opened) < 200


@runs
async def test_no_model_keeps_another_waiting_for_ever() -> None:
    """Requests for one model come without end, and one for another is served."""
    world = World({"a": 4, "b": 4}, limit=5)
    over = False

    async def again() -> None:
        while not over:
            await world.use("a", 0.002)

    busy = [asyncio.create_task(again()) for _ in range(4)]
    await asyncio.sleep(0.01)
    await world.use("b")
    over = True
    await asyncio.gather(*busy)
    assert world.loaded()[:2] == ["a", "b"]


@runs
async def test_a_model_that_cannot_be_read_fails_its_requests_alone_and_is_tried_again() -> None:
    world = World({"a": 4, "b": 4}, limit=5)
    world.broken.add("b")
    found = await asyncio.gather(*(world.use(name) for name in "abab"), return_exceptions=True)
    assert [type(one) for one in found] == [type(None), NotReady, type(None), NotReady]
    assert "b could not be read: its file is damaged" in str(found[1])
    assert world.find("b").failure == "its file is damaged"
    world.broken.clear()
    await world.use("b")
    assert world.find("b").failure == ""
    assert world.held == 4


@runs
async def test_a_model_whose_engine_has_failed_is_loaded_again() -> None:
    world = World({"a": 4, "b": 4}, limit=8)
    await world.use("a")
    world.opened[0].failed = True
    await asyncio.gather(*(world.use(name) for name in "aba"))
    assert world.opened[0].closed and sorted(world.loaded()) == ["a", "a", "b"]


@runs
async def test_a_model_that_is_too_large_is_refused_and_others_stay() -> None:
    world = World({"a": 4, "huge": 9}, limit=8)
    await world.use("a")
    with pytest.raises(NotReady, match=r"huge could not be read: it needs about 9 B, .*--memory"):
        await world.use("huge")
    assert world.find("a").state == "ready"


@runs
async def test_a_client_that_leaves_while_it_waits_holds_nothing() -> None:
    world = World({"a": 4, "b": 4}, limit=5)
    using = asyncio.create_task(world.use("a", 0.05))
    await asyncio.sleep(0.02)
    waits = [asyncio.create_task(world.use("b")) for _ in range(2)]
    await asyncio.sleep(0.005)
    waits[0].cancel()
    await asyncio.gather(using, *waits, return_exceptions=True)
    assert waits[0].cancelled() and waits[1].exception() is None
    assert world.find("b").users == 0 and world.residents.waiting == 0


@runs
async def test_keep_alive_says_who_leaves() -> None:
    world = World({"a": 4, "b": 4, "c": 4}, limit=8)
    world.find("a").pinned = True
    for name in ("a", "b", "c"):
        await world.use(name)
    assert [one.name for one in world.opened if one.closed] == ["b"]  # though a was used before it
    world.find("c").keep_s = 0.0
    await world.use("c")
    await asyncio.sleep(0.05)
    assert (world.find("c").state, world.find("a").state) == ("absent", "ready")


@runs
async def test_the_queue_is_bounded_and_ends_with_the_server() -> None:
    world = World({"a": 4, "b": 4}, limit=5, most=2)
    using = asyncio.create_task(world.use("a", 0.2))
    await asyncio.sleep(0.05)
    waits = [asyncio.create_task(world.use("b")) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(Busy):
        await world.use("b")
    world.residents.stop()
    found = await asyncio.gather(*waits, return_exceptions=True)
    assert all(isinstance(one, NotReady) for one in found)
    with pytest.raises(NotReady):
        await world.use("a")
    await using
    await asyncio.sleep(0.05)
    world.residents.close()
    assert world.held == 0


def test_names_are_found_with_ollamas_tag() -> None:
    world = World({"a": 1, "m": 1}, limit=5)
    assert world.find("m:latest") is world.find("m")
    with pytest.raises(Missing, match="does not exist here"):
        world.find("n")
