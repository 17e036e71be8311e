"""Measures of a model: prefill, decode, many streams, TTFT. Prompts are random, so they never hit a prefix cache."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

ENOUGH_S, MOST = 1.0, 10  # seconds of one measurement, and most repetitions

# Generates a number of tokens for each prompt, concurrently. Returns each stream's seconds to each token.
Write = Callable[[list[list[int]], int], list[list[float]]]


@dataclass(frozen=True)
class Measure:
    """Concurrent streams, each of `prompt` tokens and then `tokens` generated ones."""

    streams: int
    prompt: int
    tokens: int
    unit: str = "tok/s"

    @property
    def lower_is_better(self) -> bool:
        return self.unit == "ms"

    def figure(self, seconds: list[list[float]]) -> float:
        started = max(stream[0] for stream in seconds)
        if self.tokens == 1:
            return self.of_step(started)
        later = [at for stream in seconds for at in stream if at > started]
        return len(later) / (max(later) - started)

    def of_step(self, seconds: float) -> float:
        if self.lower_is_better:
            return seconds * 1000
        return self.streams * (self.prompt if self.tokens == 1 else 1) / seconds

    def within(self, context: int) -> "Measure":
        return replace(self, prompt=min(self.prompt, context - self.tokens))


MEASURES: Mapping[str, Measure] = {
    "prefill": Measure(1, 512, 1),
    "decode": Measure(1, 512, 65),
    "8": Measure(8, 32, 128),
    "16": Measure(16, 32, 128),
    "first": Measure(1, 32, 1, "ms"),
}


def warm_up(measures: Mapping[str, Measure], write: Write, vocab_size: int, *seeds: object) -> None:
    for measure in measures.values():
        write(prompts(measure, vocab_size, *seeds, "warm-up"), min(measure.tokens, 4))


def repeated(measure: Measure, write: Write, vocab_size: int, *seeds: object) -> Iterator[float]:
    began = time.perf_counter()
    for turn in range(MOST):
        yield measure.figure(write(prompts(measure, vocab_size, *seeds, turn), measure.tokens))
        if time.perf_counter() - began >= ENOUGH_S:
            break


def prompts(measure: Measure, vocab_size: int, *seeds: object) -> list[list[int]]:
    rng = random.Random(repr(seeds))
    return [[rng.randrange(5, vocab_size) for _ in range(measure.prompt)] for _ in range(measure.streams)]
