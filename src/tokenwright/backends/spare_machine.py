"""Tells whether the machine is free for work that can wait, by the time that programs take of our processors."""

import os
import time
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from threading import Lock

POWER = Path("/sys/class/power_supply")
PROCESSORS = Path("/proc/stat")
CHILDREN = "task/*/children"  # of /proc/self: ranks, and processes of templates and grammars
BUSY = 0.25  # the share of the processors' time from which other programs count as busy
LOOK_S = 0.5  # seconds between two measurements


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Seconds since the start, summed over our processors. own: ours and our children's. nice: of low priority."""

    total: float
    computing: float
    stolen: float
    own: float
    nice: float = 0.0

    @property
    def others(self) -> float:
        """The time of other programs and the host, without programs of low priority, which yield."""
        return self.computing + self.stolen - self.own - (self.nice if os.nice(0) <= 0 else 0.0)


def read_times(stat: Path = PROCESSORS) -> ProcessorTimes | None:
    try:
        lines = (line.split() for line in stat.read_text(encoding="ascii").splitlines() if line.startswith("cpu"))
        second, ours = os.sysconf("SC_CLK_TCK"), {f"cpu{at}" for at in os.sched_getaffinity(0)}  # a replica has a share
        rows = {name: [int(one) / second for one in fields[:8]] for name, *fields in lines}
        usable = [rows[name] for name in ours & rows.keys()] or [rows["cpu"]]
        user, nice, system, idle, waiting, *interrupts, stolen = map(sum, zip_longest(*usable, fillvalue=0.0))
        children = " ".join(one.read_text() for one in Path("/proc/self").glob(CHILDREN)).split()
        spent = (Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:13] for one in children)
        own = time.process_time() + sum(int(one) for each in spent for one in each) / second
    except (OSError, ValueError, KeyError):
        return None
    computing = user + nice + system + sum(interrupts)
    return ProcessorTimes(computing + idle + waiting + stolen, computing, stolen, own, nice)


class SpareMachine:
    """Whether the machine is free: not on battery, other programs at rest. Without Linux it counts as busy."""

    def __init__(self, power: Path = POWER, processors: Path = PROCESSORS) -> None:
        self._power, self._processors = power, processors
        self._lock = Lock()
        self._looked, self._free = 0.0, False
        self._last: ProcessorTimes | None = None

    @property
    def free(self) -> bool:
        """Whether the machine was free between the last two measurements; False before the second."""
        with self._lock:
            if (now := time.monotonic()) >= self._looked + LOOK_S:
                self._looked = now
                self._free = self._rests() and not self._on_battery()
            return self._free

    def _rests(self) -> bool:
        before, self._last = self._last, read_times(self._processors)
        if before is None or self._last is None:
            return False
        whole = self._last.total - before.total
        return whole > 0 and self._last.others - before.others < BUSY * whole

    def _on_battery(self) -> bool:
        try:
            supplies = list(self._power.iterdir()) if self._power.is_dir() else []  # no such devices
            kinds = {one: (one / "type").read_text().strip() for one in supplies if (one / "type").is_file()}
            batteries = [one for one, kind in kinds.items() if kind == "Battery" and not (one / "scope").is_file()]
            return any((one / "status").read_text().strip() == "Discharging" for one in batteries)
        except OSError:
            return True


MACHINE = SpareMachine()
