"""A busy machine is noticed: by what others took of the processors, and by figures that cannot be right."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tokenwright.backends.spare_machine import ProcessorTimes, read_times
from tokenwright.bench import limits
from tokenwright.bench.limits import Probe, Rate
from tokenwright.bench.model_speed import Turn, doubtful
from tokenwright.planner import machine_load
from tokenwright.planner.machine_load import disagreement, load_between, quietly

START = ProcessorTimes(total=100.0, computing=40.0, stolen=1.0, own=10.0)
QUIET = ProcessorTimes(total=110.0, computing=49.0, stolen=1.0, own=18.9)  # nine of ten seconds, nearly all our own


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (QUIET, ""),
        (replace(QUIET, stolen=2.0), "the host took 10% of the processors' time"),
        (replace(QUIET, own=15.0), "other processes took 40% of the processors' time"),
        (replace(QUIET, own=15.0, total=100.1), ""),  # too short for the system's clock, which has hundredths
        (START, ""),
        (None, ""),
    ],
)
def test_the_load_of_others_by_hand(after: ProcessorTimes | None, told: str) -> None:
    assert load_between(START, after) == told
    assert load_between(None, after) == ""


def test_the_times_are_those_of_our_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu 9 9 9 9\ncpu0 100 200 300 400 500 600 700 800 90 90\ncpu1 1 1 1 1 1 1 1 1\ncpu2 200 0 0 0\nintr 5\n"
    )
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    times = read_times(stat)
    assert times is not None
    assert (times.total, times.computing, times.stolen) == (38.0, 21.0, 8.0)
    assert times.own > 0
    stat.write_text("nothing of the kind\n")
    assert read_times(stat) is None
    assert read_times(tmp_path / "none") is None


def test_repetitions_that_do_not_agree() -> None:
    assert disagreement([1.0]) == disagreement([1.0, 1.4]) == disagreement([1.0] * 8 + [9.0]) == ""
    assert disagreement([1.0, 2.0]) == "its rounds differ by a factor of 2.0"
    assert disagreement([1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0]).startswith("its rounds differ")


def turns(*shares: float) -> list[Turn]:
    return [Turn(10.0, 10.0 / share, share, "memory") for share in shares]


def test_a_share_above_the_limit_is_doubted() -> None:
    assert doubtful(turns(0.7, 1.04)) == ""
    assert doubtful(turns(32.11, 32.11)) == "the model reached 3211% of the limit"
    assert doubtful([Turn(10.0, 20.0, 0.5, "memory"), Turn(30.0, 60.0, 0.5, "memory")]).startswith("its rounds differ")


def times(*stolen: float) -> Iterator[ProcessorTimes]:
    """Two reads for each measurement, during which the host takes so much."""
    for share in stolen:
        yield START
        yield replace(QUIET, stolen=START.stolen + 10 * share)


def test_it_measures_again_until_the_machine_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, figures = times(0.5, 0.0, 0.0), iter((1, 2, 3))
    monkeypatch.setattr(machine_load, "read_times", lambda: next(reads))
    assert quietly(lambda: next(figures), lambda found: "") == (2, "")


def test_it_gives_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, figures = times(0.5, 0.0, 0.2), iter((1, 2, 3))
    monkeypatch.setattr(machine_load, "read_times", lambda: next(reads))
    found, reason = quietly(lambda: next(figures), lambda found: "it is even" if found == 2 else "")
    assert (found, reason) == (3, "the host took 20% of the processors' time")


def test_two_threads_that_are_slower_than_one_are_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "read_times", lambda: None)
    rates = iter((80.0, 100.0, 190.0, 100.0, *(80.0, 100.0) * 3))  # all threads, one thread; again
    probe = Probe(lambda seconds: next(rates))
    assert limits._rate(probe, 0.0) == Rate(190.0, 100.0)
    assert limits._rate(probe, 0.0).busy == limits.SLOWER


def test_a_limit_that_other_software_beats_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "read_times", lambda: None)
    assert limits._rate(Probe(lambda seconds: 100.0, "numpy's product", lambda seconds: 104.0), 0.0).busy == ""
    doubted = limits._rate(Probe(lambda seconds: 100.0, "numpy's product", lambda seconds: 600.0), 0.0)
    assert doubted == Rate(100.0, 100.0, "numpy's product reached 600% of the limit")
    assert machine_load.verdict(doubted.busy) == "busy or wrong"
    assert machine_load.busy_warning(doubted.busy).startswith(
        "busy or wrong: numpy's product reached 600% of the limit."
    )
    assert machine_load.verdict("the host took 20% of the processors' time") == "the machine was busy"
