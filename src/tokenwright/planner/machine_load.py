"""Whether the machine was quiet: the shares of processor time that other processes and the host (`steal`) took."""

import re
from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import TypeVar

from tokenwright.backends.spare_machine import ProcessorTimes, read_times

BUSY = "the machine was busy"
WRONG = "busy or wrong"
STEAL, OTHERS = 0.05, 0.15  # shares of the processors' time that a quiet machine stays below
SPREAD = 1.5  # greatest ratio of the upper to the lower quartile of measurements that agree
IMPOSSIBLE = 1.05
ATTEMPTS = 3
_OF_LIMIT = "of the limit"
SHORTEST = 0.2  # seconds of the processors' time, which the system counts in hundredths

T = TypeVar("T")


def load_between(before: ProcessorTimes | None, after: ProcessorTimes | None) -> str:
    """A sentence on the share of processor time that others took between two times; '' if small or unknown."""
    if before is None or after is None or after.total - before.total < SHORTEST:
        return ""
    passed = after.total - before.total
    stolen = (after.stolen - before.stolen) / passed
    others = (after.computing - before.computing - (after.own - before.own)) / passed
    if stolen > STEAL:
        return f"the host took {stolen:.0%} of the processors' time"
    return f"other processes took {others:.0%} of the processors' time" if others > OTHERS else ""


def beaten(what: str, share: float) -> str:
    return f"{what} reached {share:.0%} {_OF_LIMIT}" if share > IMPOSSIBLE else ""


def verdict(*reasons: str) -> str:
    return WRONG if any(_OF_LIMIT in reason for reason in reasons) else BUSY


def busy_warning(*reasons: str) -> str:
    """A warning about figures, or ''."""
    kinds = {re.sub(r"[\d.]+", "", reason): reason for reason in reversed(reasons) if reason}
    if not kinds:
        return ""
    return f"{verdict(*reasons)}: {'; '.join([*kinds.values()][::-1][:2])}. Run it again when nothing else runs."


def disagreement(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    low, high = (min(values), max(values)) if len(values) < 4 else quantiles(values, n=4)[::2]
    return f"its rounds differ by a factor of {high / low:.1f}" if high > SPREAD * low else ""


def quietly(measure: Callable[[], T], doubt: Callable[[T], str]) -> tuple[T, str]:
    """Measure until the machine is quiet and the result plausible, at most ATTEMPTS times. Returns the doubt too."""
    for _ in range(ATTEMPTS):
        before = read_times()
        found = measure()
        load = load_between(before, read_times())
        busy = doubt(found) or load
        if not busy:
            break
    return found, busy
