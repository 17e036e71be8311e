"""The proposer of an engine: what steps of a model cost by their rows, from counts and a table."""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

from tokenwright.config import EngineConfig
from tokenwright.decode.speculate import SuffixProposer
from tokenwright.decode.step_costs import StepCosts
from tokenwright.engine import Proposer
from tokenwright.llm.model import ModelFacts

ROWS = (1, 2, 4, 8, 16, 32)
# Costs of a step of so many rows beside one of one row, by instruction set and format of the weights: `tokenwright
# bench`'s qwen05 with two threads. Other formats are like int8; "" is any other kernels, among them torch's.
MEASURED: Mapping[tuple[str, str], tuple[float, ...]] = MappingProxyType(
    {
        ("wide", "bfloat16"): (1.0, 1.05, 1.1, 1.2, 1.4, 2.1),
        ("wide", "int8"): (1.0, 1.08, 1.2, 1.42, 1.9, 3.0),
        ("wide", "int4"): (1.0, 1.15, 1.4, 1.9, 2.7, 4.6),
        ("avx2", "bfloat16"): (1.0, 1.15, 1.4, 2.0, 3.5, 7.0),
        ("avx2", "int8"): (1.0, 1.25, 1.7, 2.8, 5.2, 10.0),
        ("avx2", "int4"): (1.0, 1.35, 2.0, 3.4, 6.4, 12.5),
        ("", ""): (1.0, 1.5, 2.4, 4.2, 7.8, 15.0),
    }
)
FAR = 3.0  # a byte of K and V costs as much as so many of the weights, which are read in order


def proposer_of(options: EngineConfig, facts: ModelFacts, kv_bytes: int, weight_bytes: int) -> Proposer | None:
    """The proposer that the options ask for. kv_bytes: of one token in the cache. weight_bytes: of the model."""
    if options.speculate == "off":
        return None
    numbers = {rows: sum(map(prod, facts.graph.read(rows).values())) for rows in ROWS}  # of experts, more for more rows
    points = {rows: cost * numbers[rows] / numbers[1] for rows, cost in zip(ROWS, _table(facts), strict=True)}
    return SuffixProposer(StepCosts(points, FAR * kv_bytes / weight_bytes))


def _table(facts: ModelFacts) -> tuple[float, ...]:
    wide = "wide" if facts.kernels in ("amx", "avx512") else facts.kernels
    name = facts.weights.name if (wide, facts.weights.name) in MEASURED else "int8"
    return MEASURED.get((wide, name), MEASURED["", ""])
