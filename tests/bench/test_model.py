"""A model beside its limits: what a step cannot do without, by hand; and that every measure is told."""

from pathlib import Path
from typing import Any

import pytest

from tests.models.fixtures import make_checkpoint
from tokenwright import LLM
from tokenwright.bench import model_speed as subject
from tokenwright.bench.limits import StepWork
from tokenwright.bench.measures import Measure
from tokenwright.bench.model_speed import Benchmark, work_of, writer
from tokenwright.cache import layer_specs
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.errors import RequestError
from tokenwright.formats import WeightFormat
from tokenwright.llm.outputs import Completion
from tokenwright.models.cost import CostModel

# The fixture llama2: 3 layers, 64 wide, 4 heads of 16, an MLP of 96, 320 ids, head and embedding apart.
LAYER = 4 * 64 * 64 + 3 * 64 * 96
HEAD = 320 * 64
NORMS = 7 * 64
KV = 3 * 2 * 64 * 4  # bytes a token, in float32
INT8_LAYER = 4 * 64 * (64 + 2) + 2 * 96 * (64 + 2) + 64 * (128 + 4)  # 96 inputs fill two slabs and two groups
INT8 = 3 * INT8_LAYER + 320 * (64 + 2) + 4 * NORMS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama2").path


@pytest.mark.parametrize(
    ("measure", "form", "work"),
    [
        (  # contexts of 11 and 12
            Measure(2, 10, 3),
            "float32",
            StepWork(4 * (3 * LAYER + NORMS + HEAD) + 2 * 11.5 * KV, 2 * (3 * LAYER + HEAD), 2 * 11.5 * 3 * 2 * 64),
        ),
        (Measure(1, 10, 3), "int8", StepWork(INT8 + 11.5 * KV, 3 * LAYER + HEAD, 11.5 * 3 * 2 * 64)),
        (  # each token of the prompt reads those before it and itself; the head is for the last one
            Measure(1, 10, 1),
            "float32",
            StepWork(4 * (3 * LAYER + NORMS + HEAD) + 10 * KV, 10 * 3 * LAYER + HEAD, 55 * 3 * 2 * 64),
        ),
    ],
)
def test_the_work_of_a_step_by_hand(folder: Path, measure: Measure, form: str, work: StepWork) -> None:
    graph = Checkpoint.open(folder).graph
    costs = CostModel(graph, layer_specs(graph, "float32"))
    assert work_of(measure, costs, WeightFormat.parse(form)) == work


@pytest.mark.usefixtures("quick")
def test_every_measure_is_told_with_its_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"prefill": Measure(1, 24, 1), "decode": Measure(1, 24, 5), "first": Measure(1, 8, 1, "ms")}
    monkeypatch.setattr(subject, "MEASURES", small)
    told: list[tuple[int, int]] = []
    with LLM(folder) as llm:
        figures = Benchmark(llm).figures(lambda done, total: told.append((done, total)))
    assert [one.name for one in figures] == list(small)
    assert told == [(1, 3), (2, 3), (3, 3)]
    for one in figures:
        better = one.limit / one.value if one.unit == "ms" else one.value / one.limit
        assert one.share == pytest.approx(better)  # of one pair
        assert one.value > 0


def test_nothing_of_an_earlier_text_is_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reused: list[int] = []
    with LLM(folder) as llm:
        generate = llm.generate

        def watched(*arguments: Any, **options: Any) -> list[Completion]:
            done = generate(*arguments, **options)
            reused.extend(one.usage.reused_tokens for one in done)
            return done

        monkeypatch.setattr(llm, "generate", watched)
        write, ids = writer(llm), [5 + at % 300 for at in range(64)]
        for _ in range(2):
            assert [len(seconds) for seconds in write([ids], 3)] == [3]
    assert reused == [0, 0]


@pytest.mark.usefixtures("quick")
def test_a_context_that_is_too_short_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "short", "llama2", changes={"max_position_embeddings": 100}).path
    with LLM(path) as llm, pytest.raises(RequestError, match=r"context of 100 tokens is too short .* 129 are needed"):
        Benchmark(llm)
