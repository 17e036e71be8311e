"""Requests for real replicas of this machine, and a listener that keeps the times of their tokens."""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue

from tokenwright.cluster.cluster_llm import ClusterLLM
from tokenwright.cluster.processes import open_cluster
from tokenwright.cluster.routed_handle import TextWays
from tokenwright.engine import Request, SamplingParams, Token
from tokenwright.engine.loop import Delivery, RequestHandle

LEAST_ID = 300  # token ids from here on are ordinary ones


@dataclass(eq=False)
class Told:
    """A request's listener: when its tokens came. ended: is told it when the request has ended.

    ways: of the last texts, to learn the place of the replica that wrote it.
    """

    ended: SimpleQueue[Told]
    ways: TextWays
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    handle: RequestHandle | None = None
    place: int = 0

    def deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            written = [event.token for event in delivery.events if isinstance(event, Token)]
            self.tokens += written
            self.times += [delivery.time] * len(written)
            if delivery.ended:
                self.handle = delivery.handle
                self.place = self.ways.ways[delivery.handle.sequence.id].stays[-1].place
                self.ended.put(self)

    @property
    def submitted(self) -> float:
        assert self.handle is not None, "it has ended"
        return self.handle.submitted

    @property
    def wait(self) -> float:
        """Seconds until its first step began."""
        assert self.handle is not None and self.handle.started is not None, "it has ended"
        return self.handle.started - self.handle.submitted

    @property
    def ttft(self) -> float:
        return self.times[0] - self.submitted


class Load:
    """Asks replicas for texts of random tokens."""

    def __init__(self, llm: ClusterLLM, seed: int) -> None:
        self.llm = llm
        self.ended: SimpleQueue[Told] = SimpleQueue()
        self.draws = random.Random(seed)
        self._most = llm.llm_engine.facts.config.vocab_size - 1

    def prompt(self, tokens: int) -> list[int]:
        return [self.draws.randint(min(LEAST_ID, self._most // 2), self._most) for _ in range(tokens)]

    def request(self, prompt: list[int], written: int) -> Request:
        """A request that writes this number of tokens."""
        params = SamplingParams(max_tokens=written, ignore_eos=True, temperature=0.0)
        return self.llm.llm_engine.inputs.build(prompt, params)

    def ask(self, request: Request) -> Told:
        told = Told(self.ended, self.llm.cluster.dispatcher.ways, request.prompt)
        self.llm.submit([request], told)
        return told

    def wait(self, count: int) -> None:
        for _ in range(count):
            self.ended.get()


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[ClusterLLM]:
    llm = open_cluster(options.model, options.replicas, {"kv_memory": options.kv_memory << 20, "speculate": "off"})
    try:
        while len(llm.cluster.names) < options.replicas:
            time.sleep(0.05)
        gc.collect()
        gc.freeze()  # as the server does
        yield llm
    finally:
        llm.close()
