"""The trials of interrupts: a few of each kind pass, and every fault that they look for is counted."""

import signal
import time
from collections.abc import Iterator

import interrupts
import pytest
from interrupts import Trials
from interrupts_texts import NEIGHBOURS, Ids, Interrupter, judged


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    before = signal.getsignal(signal.SIGALRM)
    made = Trials(0)
    yield made
    made.pool.shutdown()
    made.llm.close()
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("case", ["signals", "cancels", "tasks", "closes"])
def test_trials_without_a_fault(trials: Trials, case: str) -> None:
    trials.counts.clear()
    for _ in range(4):
        interrupts.CASES[case][0](trials)
    assert trials.faults() == 0
    assert trials.counts["texts"] == 12


def test_every_fault_is_counted(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("lost")

    right = trials.right[NEIGHBOURS[0]][0]
    trials.counts.clear()
    for other in ((*right, 5), (5, *right[1:])):
        monkeypatch.setitem(trials.right, NEIGHBOURS[0], (other,))
        trials.wait(trials.neighbours())
    monkeypatch.setattr(interrupts, "stream", fail)
    trials.wait(trials.neighbours())
    trials.settle()
    assert {fault: trials.counts[fault] for fault in interrupts.FAULTS} == {
        "wrong": 1, "short": 1, "failed": 2, "hang": 0, "broken": 0, "left": 0
    }  # fmt: skip
    monkeypatch.setattr(interrupts, "prove", fail)
    monkeypatch.setattr(interrupts, "idle", lambda llm: False)
    monkeypatch.setattr(interrupts, "IDLE_S", 0.0)
    trials.settle()
    assert (trials.counts["broken"], trials.counts["left"]) == (1, 1)


def test_a_hang_ends_the_worker_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        assert code == interrupts.HUNG
        raise Ended

    made = Trials(1)
    monkeypatch.setattr(interrupts.os, "_exit", end)
    monkeypatch.setattr(interrupts, "HANG_S", 0.0)
    monkeypatch.setattr(interrupts, "generate", lambda *_: time.sleep(0.5))
    with pytest.raises(Ended):
        made.wait(made.neighbours())
    assert '"hang": 1' in capfd.readouterr().out
    made.pool.shutdown()
    made.llm.close()


def test_an_interrupt_is_raised_once_and_only_while_it_is_armed() -> None:
    before = signal.getsignal(signal.SIGALRM)
    interrupter = Interrupter()

    def wait() -> Ids:
        time.sleep(0.2)
        return ()

    assert interrupter.met(0.01, wait) is None
    assert interrupter.met(10.0, lambda: ((1,),)) == ((1,),)
    signal.raise_signal(signal.SIGALRM)  # raises nothing now
    signal.signal(signal.SIGALRM, before)


def test_a_text_is_right_short_or_wrong() -> None:
    right = ((1, 2, 3), (4, 5))
    assert judged(right, right) == "right"
    assert judged(((1, 2), (4, 5)), right) == judged((), right) == "short"
    assert judged(((1, 2, 4), (4, 5)), right) == judged((*right, (6,)), right) == "wrong"
