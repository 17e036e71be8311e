"""Measures a model and its limits alternately, so that a slowdown affects both."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Literal, NamedTuple

from tokenwright.backends.layout import read_bytes
from tokenwright.bench.limits import Bound, Report, StepWork
from tokenwright.bench.measures import MEASURES, Measure, Write, repeated, warm_up
from tokenwright.engine import SamplingParams
from tokenwright.errors import RequestError
from tokenwright.formats import WeightFormat
from tokenwright.llm.llm import LLM
from tokenwright.models.cost import CostModel
from tokenwright.planner import machine_load

SHORTEST = max(measure.tokens for measure in MEASURES.values()) + 1  # tokens: the shortest context


@dataclass(frozen=True, slots=True)
class Figure:
    """The medians of a measure, its limit and its share. busy: why to doubt them, or ''."""

    name: str
    streams: int
    prompt: int
    tokens: int
    unit: str
    value: float
    limit: float
    share: float
    bound: Literal["memory", "matrix"]
    nbytes: float
    busy: str = ""


class Turn(NamedTuple):
    """A repetition, and the limit just after it."""

    value: float
    limit: float
    share: float
    bound: Literal["memory", "matrix"]


def work_of(measure: Measure, costs: CostModel, weights: WeightFormat) -> StepWork:
    """The least work of one step: prefill, or the mean of decode. weights: their resolved format."""
    if measure.tokens == 1:
        chunks = [(0, measure.prompt)]
    else:
        chunks = [(measure.prompt + written, 1) for written in range(measure.tokens - 1)]
    each = [costs.chunk(start, length) for start, length in chunks]
    products = sum(costs.block_weights * length + costs.head_weights for _, length in chunks) / len(chunks)
    rows = measure.streams * chunks[0][1]
    return StepWork(
        nbytes=read_bytes(costs.graph, weights, rows)
        + measure.streams * sum(cost.kv_read for cost in each) / len(each),
        weights=measure.streams * products,
        attention=measure.streams * (sum(cost.flops for cost in each) / len(each) / 2 - products),
    )


def writer(llm: LLM) -> Write:
    """A new salt for each call prevents prefix hits."""
    salts = count()

    def write(prompts: list[list[int]], tokens: int) -> list[list[float]]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        done = llm.generate(prompts, params, salt=f"bench {next(salts)}")
        return [list(one.usage.token_s) for one in done]

    return write


class Benchmark:
    """Measure a model and its limits. Raises RequestError if the context is too short."""

    def __init__(self, llm: LLM) -> None:
        if llm.context < SHORTEST:
            raise RequestError(
                f"the model's context of {llm.context} tokens is too short to measure; {SHORTEST} are needed"
            )
        self._vocab_size = llm.config.vocab_size
        self._write = writer(llm)
        self._measures = {name: measure.within(llm.context) for name, measure in MEASURES.items()}
        self._works = {name: work_of(one, llm.costs, llm.weights) for name, one in self._measures.items()}
        self._bound = Bound(self._works["decode"].nbytes, llm.weights.name)

    def figures(self, report: Report | None = None) -> list[Figure]:
        warm_up(self._measures, self._write, self._vocab_size)
        found: list[Figure] = []
        for name in self._measures:
            found.append(self._figure(name))
            if report is not None:
                report(len(found), len(self._measures))
        return found

    def _figure(self, name: str) -> Figure:
        measure, work = self._measures[name], self._works[name]
        turns, reason = machine_load.quietly(lambda: self._turns(name), doubtful)
        value, limit, share = (median(each) for each in zip(*(turn[:3] for turn in turns), strict=True))
        about = name, measure.streams, measure.prompt, measure.tokens, measure.unit
        return Figure(*about, value, limit, share, turns[-1].bound, work.nbytes, reason)

    def _turns(self, name: str) -> list[Turn]:
        measure, work = self._measures[name], self._works[name]
        turns = []
        for value in repeated(measure, self._write, self._vocab_size, name):
            least = self._bound(work)
            limit = measure.of_step(least.seconds)
            share = limit / value if measure.lower_is_better else value / limit
            turns.append(Turn(value, limit, share, least.bound))
        return turns


def doubtful(turns: Sequence[Turn]) -> str:
    share = median(turn.share for turn in turns)
    return machine_load.beaten("the model", share) or machine_load.disagreement([turn.value for turn in turns])
