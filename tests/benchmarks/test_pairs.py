"""Two editions in turn: the interval, every way to measure, and what is told."""

import sys
from math import comb
from pathlib import Path

import bits_models
import pairs
import pytest

from tokenwright import LLM


def test_the_interval_holds_the_true_median() -> None:
    for n, cut in ((6, 0), (9, 1), (30, 9)):
        middle, low, high = pairs.interval([float(n - at) for at in range(n)])
        assert (low, middle, high) == (1.0 + cut, (n + 1) / 2, float(n - cut))
        assert 2 * sum(comb(n, at) for at in range(cut + 1)) / 2**n <= 0.05
        assert 2 * sum(comb(n, at) for at in range(cut + 2)) / 2**n > 0.05
    assert pairs.interval([2.0, 1.0]) == (1.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("pairs") / "least"
    bits_models.write_model(home, pairs.LEAST)
    return home


def test_every_way_is_measured(least: Path) -> None:
    with LLM(least, device="cpu", pages=64) as llm:
        for way, streams in (("generate", 1), ("generate", 3), ("stream", 1), ("whole", 3), ("astream", 3)):
            case = pairs.Case("least", streams, 8, 6, way)  # type: ignore[arg-type]
            assert pairs.figure(llm, case, 0) > 0
        assert pairs.figure(llm, pairs.Case("least", 1, 40, 1), 0) > 0


def test_a_worker_measures_what_it_is_asked(least: Path, tmp_path: Path) -> None:
    with pairs.Worker("old", sys.executable, 1, tmp_path) as worker:
        figures = pairs.measure([worker], ["step-generate"], 2, {"least": str(least)})
        assert len(figures["step-generate"]["old"]) == 2
        with pytest.raises(SystemExit, match="old ended with code 1 on load"):
            worker.ask("load", model="least", path=str(tmp_path / "nowhere"))


def test_what_is_told() -> None:
    both = {"old": [100.0, 100.0], "new": [98.0, 102.0]}
    text = pairs.report({"step-stream": both, "256-generate": both, "256-astream": both})
    assert "1.000 (0.980 to 1.020)" in text
    assert "old, step-stream: 10000.0 us a step" in text
    assert "new, 256 in astream / in generate: 1.000" in text
    threads = {"old 1": [600.0, 600.0], "old 2": [60.0, 90.0], "new 1": [600.0, 600.0], "new 2": [660.0, 540.0]}
    text = pairs.busy_report({"stories-1": threads})
    assert "old: one 600.0, two 75.0 tok/s, 0.125 (0.100 to 0.150)" in text
    assert "new: one 600.0, two 600.0 tok/s, 0.950 (0.900 to 1.000)" in text
    assert "new / old with 2: 8.500" in text
