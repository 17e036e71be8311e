"""Replicas in simulated time: router, scheduler and page pool as they are, and steps that only take time."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from benchmarks.serving.cluster_arrivals import Ask
from benchmarks.serving.cluster_costs import Costs
from tokenwright.cluster.replica import PageNews
from tokenwright.cluster.router import ReplicaPages, RoutedReplica, Router
from tokenwright.engine import (
    Event,
    Finished,
    Group,
    PagePool,
    Pick,
    PrefixIndex,
    Request,
    SamplingParams,
    Scheduler,
    Step,
    Token,
)
from tokenwright.engine.prefix_index import PrefixHashes

CONTEXT = 1 << 30  # tokens that one text may have


@cache
def greedy(most: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=most)


class ModelledReplica:
    """A scheduler whose steps take simulated time. routed: as the router knows it."""

    def __init__(self, pages: int, page_size: int, budget: int, sequences: int, scale: int) -> None:
        pool = PagePool([Group(pages)], page_size)
        self.scheduler = Scheduler(pool, budget, sequences, PrefixIndex(pool, b"", b""))
        self.news = PageNews()
        pool.listen(self.news)
        self.routed = RoutedReplica(ReplicaPages(pool.groups, page_size, b"", b""))
        self.step: Step | None = None
        self.texts: dict[int, Ask] = {}
        self._picks: dict[int, Pick] = {}  # each text writes one token, again and again
        self._scale = scale

    def take(self, ask: Ask, most: int, hashes: PrefixHashes) -> int:
        """Queue a request that writes `written` tokens; its number. hashes: of its prompt, as the router has them."""
        request = Request(ask.tokens, greedy(most))
        ask.sequence = self.scheduler.new(request, request.limit(CONTEXT))
        if not self.scheduler.fits(ask.sequence):
            raise SystemExit(f"a text of {len(ask.tokens) * self._scale:,} tokens does not fit: raise --blocks")
        ask.sequence.prefix_hashes = hashes.fork()
        self.scheduler.add(ask.sequence)
        self.texts[ask.sequence.id] = ask
        self._picks[ask.sequence.id] = Pick(ask.sequence.id, (ask.answer,), (0.0,))
        return ask.sequence.id

    def begin(self) -> bool:
        """Begin a step; False where there is nothing to compute."""
        step = self.scheduler.schedule()
        self.step = step if step.chunks else None
        return self.step is not None

    def seconds(self, costs: Costs) -> float:
        """How long the step takes that has begun."""
        assert self.step is not None, "a step has begun"
        prompts = writing = 0
        keys = prompt_keys = 0.0
        for chunk in self.step.chunks:
            start, stop = chunk.start, chunk.stop
            if start < len(chunk.sequence.request.prompt):
                prompts += stop - start
                prompt_keys += (stop - start) * (start + stop + 1) / 2
            else:
                writing += 1
                keys += stop
        steps = self._scale if writing else 1
        spent = prompts * costs.token + writing * costs.sequence
        spent += self._scale * (keys * costs.key + prompt_keys * costs.prompt_key)
        return steps * costs.base + self._scale * spent

    def end(self) -> list[Event]:
        """End the step: its tokens and the texts that have ended."""
        assert self.step is not None, "a step has begun"
        picks = [self._picks[chunk.sequence.id] for chunk in self.step.chunks if chunk.picks]
        events = self.scheduler.commit(self.step, picks)
        self.step = None
        if changes := self.news.take():
            self.routed.pages.apply(changes)
        return events

    def forget(self, number: int) -> None:
        """A request has ended."""
        del self.texts[number], self._picks[number]


Choose = Callable[["Simulation", Ask, PrefixHashes], int]


def by_turns(simulation: Simulation, _: Ask, __: PrefixHashes) -> int:
    simulation.turn += 1
    return simulation.turn % len(simulation.replicas)


def least_loaded(simulation: Simulation, _: Ask, __: PrefixHashes) -> int:
    replicas = simulation.replicas
    return min(range(len(replicas)), key=lambda at: (len(replicas[at].texts), replicas[at].routed.chosen))


def power_of_two(simulation: Simulation, _: Ask, __: PrefixHashes) -> int:
    replicas = simulation.replicas
    drawn = simulation.random.sample(range(len(replicas)), min(2, len(replicas)))
    return min(drawn, key=lambda at: len(replicas[at].texts))


def by_router(simulation: Simulation, ask: Ask, hashes: PrefixHashes) -> int:
    chosen = simulation.router.choose(simulation.routed, hashes, ask.tokens)
    assert chosen is not None, "all take texts"
    return chosen[0].place


POLICIES: dict[str, Choose] = {
    "router": by_router,
    "least loaded": least_loaded,
    "power of two": power_of_two,
    "round robin": by_turns,
}


@dataclass
class Simulation:
    """Replicas, and the requests that come to them.

    seconds: of simulated time. choosing: real seconds that the choices of replicas took.
    """

    replicas: list[ModelledReplica]
    costs: Costs
    choose: Choose
    router: Router = field(default_factory=Router)
    random: random.Random = field(default_factory=lambda: random.Random(1))
    turn: int = 0
    seconds: float = 0.0
    choosing: float = 0.0
    asks: list[Ask] = field(default_factory=list)  # that were taken, in the order of their coming

    def __post_init__(self) -> None:
        self.routed = [replica.routed for replica in self.replicas]
        for place, routed in enumerate(self.routed):
            routed.place = place

    def run(self, asks: Sequence[Ask]) -> None:
        """Serve all requests, and those that follow them, to their ends."""
        coming = [(ask.arrival.at, number, ask) for number, ask in enumerate(asks)]
        heapq.heapify(coming)
        ends: list[tuple[float, int]] = []  # of steps: when, and whose
        number = len(coming)
        while coming or ends:
            if coming and (not ends or coming[0][0] <= ends[0][0]):
                self.seconds, _, ask = heapq.heappop(coming)
                place = self._take(ask)
            else:
                self.seconds, place = heapq.heappop(ends)
                for ask in self._end_step(self.replicas[place]):
                    number += 1
                    heapq.heappush(coming, (ask.arrival.at, number, ask))
            replica = self.replicas[place]
            if replica.step is None and replica.begin():
                heapq.heappush(ends, (self.seconds + replica.seconds(self.costs), place))

    def _take(self, ask: Ask) -> int:
        hashes = self.replicas[0].routed.pages.hashes(b"")
        began = time.perf_counter()
        place = self.choose(self, ask, hashes)
        self.choosing += time.perf_counter() - began
        self.asks.append(ask)
        replica, most = self.replicas[place], max(1, ask.written)
        ask.written = 0
        routed = replica.routed
        cached = routed.pages.cached(hashes, ask.tokens)
        number = replica.take(ask, most, hashes)
        self.router.assign(routed, number, hashes, len(ask.tokens), cached, ask.most)
        return place

    def _end_step(self, replica: ModelledReplica) -> list[Ask]:
        """End a replica's step; the requests that follow those that have ended."""
        following = []
        for event in replica.end():
            ask = replica.texts[event.sequence]
            if isinstance(event, Token):
                ask.times.append(self.seconds)
                ask.written += 1
                self.router.wrote(replica.routed, event.sequence, 1)
            elif isinstance(event, Finished):
                ask.ended = self.seconds
                self.router.ended(replica.routed, event.sequence, ask.written)
                replica.forget(event.sequence)
                if ask.follows is not None and (following_ask := ask.follows(ask)) is not None:
                    following.append(following_ask)
        return following
