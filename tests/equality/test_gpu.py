"""A text on a GPU is the naive one to the bit, however it comes about: every way, with kinds and formats by turns."""

from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.gpu import needs_gpu, weights_of
from tests.equality import test_schedules, ways
from tests.equality.harness import NEW, WAYS, Bench, Case, Seen, alone, checkpoint_of, compare
from tokenwright.backends.device import Device
from tokenwright.backends.runner import ModelRunner
from tokenwright.backends.wgpu.gpu import open_gpu
from tokenwright.backends.wgpu.gpu_backend import GpuDecoder
from tokenwright.cache import LayerSpec
from tokenwright.engine import Output, Step

pytestmark = needs_gpu
assert ways.LATE  # imported for what it registers

CASES = (  # kind, cache, sampling, weights
    ("GQA", "native", "greedy", "float32"),
    ("window + sinks", "int8", "seeded", "int8"),
    ("hybrid", "int4", "greedy", "bfloat16"),
    ("experts", "fp8", "seeded", "int4"),
    ("soft caps", "k=int8,v=int4", "greedy", "float32"),
)
CUT = ("hybrid", "int8", "greedy", "int8")  # its first layer stays on the CPU
KINDS = ("GQA", "hybrid", "window + sinks")  # in random schedules
LONG = ("batch of 1, 2, 8 and 17",)  # 28 texts: random schedules have batches in every run
TURNS = [pytest.param(*one, marks=[pytest.mark.sweep] * (one[1] in LONG)) for one in enumerate(WAYS)]


@cache
def gpu_decoder(kind: str, weights: str) -> GpuDecoder:
    return GpuDecoder(checkpoint_of(kind)[0].graph, open_gpu(None), weights_of(kind, weights))


class Read:
    """A runner whose logits are arrays, as the harness keeps them."""

    def __init__(self, runner: ModelRunner, wrong: int | None = None) -> None:
        self.runner, self.wrong, self.steps = runner, wrong, count()

    def forward(self, step: Step) -> Output[Any]:
        output = self.runner.forward(step)
        output.logits = np.array(output.logits)
        if next(self.steps) == self.wrong:
            output.logits[-1, -1] = np.nextafter(output.logits[-1, -1], np.float32(np.inf))
        return output


class GpuCase(Case):
    @property
    def device(self) -> Device:
        return Device("gpu")

    def decoder(self, kernels: Any) -> Any:
        return gpu_decoder(self.kind, self.weights)

    def bench(self, **options: Any) -> Bench:
        return super().bench(around=Read, **options)


class CutCase(GpuCase):
    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(replace(one, on_host=layer < 1) for layer, one in enumerate(super().specs))

    def decoder(self, kernels: Any) -> Any:
        weights = weights_of(self.kind, self.weights)
        return GpuDecoder(checkpoint_of(self.kind)[0].graph, open_gpu(None), weights, first=1)


@pytest.mark.parametrize(("turn", "way"), TURNS, ids=list(WAYS))
def test_the_text_is_the_naive_ones_to_the_bit(turn: int, way: str, tmp_path: Path) -> None:
    WAYS[way](GpuCase(*CASES[(turn + 1) % len(CASES)]), tmp_path)


@pytest.mark.parametrize("way", ["a prefix found, at every cut", "saved and restored"])
def test_a_model_cut_between_two_processors_writes_the_naive_text(way: str, tmp_path: Path) -> None:
    WAYS[way](CutCase(*CUT), tmp_path)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(6, 505))])
def test_a_random_schedule_changes_no_bit(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def case(kind: str, *more: str) -> GpuCase:
        return GpuCase(KINDS[test_schedules.HYBRIDS.index(kind) % len(KINDS)], *more)

    monkeypatch.setattr(test_schedules, "Case", case)
    assert test_schedules.schedule(seed, tmp_path) == 0


def test_one_bit_is_seen() -> None:
    case = GpuCase(*CASES[0])
    bench = Case.bench(case, around=lambda runner: Read(runner, wrong=NEW - 2))
    with pytest.raises(AssertionError, match="1 of 12 rows differ"):
        compare(case, "alone", Seen(*vars(alone(case, bench)).values()), case.naive())
