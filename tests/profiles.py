"""Hypothesis profiles: how many examples a property test draws, and whether it draws the same ones at every run.

    house       as many as the test says; new ones at each run, the same ones where CI is set
    ci          a sixth of them, and a quarter of rounds and cases, always the same ones; the default where CI is set
    sanitize    a twentieth, always the same ones: for scripts/sanitize, under which each takes long

`pytest --hypothesis-profile=house` chooses one. The shares hold for tests that take their settings from `examples`, or
a number of rounds from `share`, or their cases from `some`. A property test without settings draws hypothesis' 100.
"""

import os
from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings

Case = TypeVar("Case")

IN_CI = "CI" in os.environ
SHARES = {"house": (1, 1), "ci": (6, 4), "sanitize": (20, 20)}  # one of so many examples; of so many rounds or cases


def register() -> None:
    """Register the profiles and load the default one."""
    for name in SHARES:
        settings.register_profile(
            name,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=IN_CI or name != "house",
        )
    settings.load_profile("ci" if IN_CI else "house")


def share(count: int) -> int:
    """The profile's share of `count` rounds, at least two."""
    return _share(count, 1)


def some(cases: Sequence[Case], every: int = 1) -> Sequence[Case]:
    """The profile's share of `cases`, taken evenly; where that is not all, at most each case that `every` counts.

    A list that turns through several factors needs a distance that has no divisor in common with their numbers.
    """
    apart = SHARES[settings.get_current_profile_name()][1]
    return cases[:: max(apart, every) if apart > 1 else 1]


def examples(count: int, **options: Any) -> settings:
    """Settings of a property test whose examples take long: the profile's share of `count`."""
    return settings(max_examples=_share(count, 0), **options)


def _share(count: int, kind: int) -> int:
    return max(2, round(count / SHARES[settings.get_current_profile_name()][kind]))
