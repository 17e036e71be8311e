"""A machine is free for work that can wait if it is not on battery and other programs rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenwright.serve.service import next_turns
from tokenwright.serve.service.next_turns import SpareMachine

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SpareMachine:
    monkeypatch.setattr(next_turns, "LOOK_S", 0.0)
    return SpareMachine(tmp_path / "power", tmp_path / "stat")


def passes(machine: SpareMachine, busy_s: float, nice_s: float = 0.0, whole_s: float = 10.0) -> bool:
    """Whether the machine is free after seconds in which others took so much; each look begins anew."""
    for looked in (False, True):
        busy, nice = (int(looked * one * TICKS) for one in (busy_s, nice_s))
        idle = int(looked * (whole_s - busy_s - nice_s) * TICKS)
        machine._processors.write_text(f"cpu  {busy} {nice} 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n")
        free = machine.free
    return free


def test_other_programs(machine: SpareMachine) -> None:
    assert passes(machine, 1.0) and not passes(machine, 5.0)
    assert passes(machine, 1.0, nice_s=8.0) is (os.nice(0) <= 0), "programs of a lower priority make way"
    machine._processors.unlink()
    assert not machine.free, "it is not known"
    assert not SpareMachine().free, "one look says nothing"


def test_battery(machine: SpareMachine) -> None:
    assert passes(machine, 0.5)
    for name, kind, status in (
        ("AC", "Mains", "1"),
        ("BAT0", "Battery", "Charging"),
        ("mouse", "Battery", "Discharging"),
    ):
        (machine._power / name).mkdir(parents=True)
        (machine._power / name / "type").write_text(f"{kind}\n")
        (machine._power / name / "status").write_text(f"{status}\n")
    (machine._power / "mouse" / "scope").write_text("Device\n")
    assert passes(machine, 0.5)
    (machine._power / "BAT0" / "status").write_text("Discharging\n")
    assert not passes(machine, 0.5)
