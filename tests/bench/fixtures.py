"""Limits of a moment over little memory: what they come to means nothing, what is done with them does."""

import pytest

from tokenwright.bench import limits, measures
from tokenwright.planner import bandwidth, machine_load


def read_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner's bandwidth is measured once, whoever else is busy, and in the caches."""
    monkeypatch.setattr(bandwidth, "beyond_caches", lambda place: 1 << 20)
    monkeypatch.setattr(machine_load, "quietly", lambda measure, doubt: (measure(), ""))


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TURN", 0.0)
    monkeypatch.setattr(limits, "_CALL", 0.0)
    monkeypatch.setattr(limits, "_SIDE", 64)
    monkeypatch.setattr(limits, "beyond_caches", lambda place: 1 << 20)
    monkeypatch.setattr(limits, "cache_sizes", lambda: [1 << 12, 1 << 16])
    monkeypatch.setattr(measures, "ENOUGH_S", 0.0)
    monkeypatch.setattr(machine_load, "quietly", lambda measure, doubt: (measure(), ""))
