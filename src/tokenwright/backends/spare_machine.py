"""Whether the machine is free for work that can wait."""

import os
import time
from pathlib import Path
from threading import Lock

POWER = Path("/sys/class/power_supply")
PROCESSORS = Path("/proc/stat")
BUSY = 0.25  # of the processors' time, which other programs take
LOOK_S = 0.5  # between two looks


class SpareMachine:
    """Whether the machine is free: not on battery, other programs at rest. Without Linux it counts as busy."""

    def __init__(self, power: Path = POWER, processors: Path = PROCESSORS) -> None:
        self._power, self._processors = power, processors
        self._lock = Lock()
        self._looked, self._free = 0.0, False
        self._last: tuple[float, float, float] | None = None

    @property
    def free(self) -> bool:
        """Whether the machine was free at the last look; known from the second look on."""
        with self._lock:
            if (now := time.monotonic()) >= self._looked + LOOK_S:
                self._looked = now
                self._free = self._rests() and not self._on_battery()
            return self._free

    def _rests(self) -> bool:
        before, self._last = self._last, self._times()
        if before is None or self._last is None:
            return False
        whole, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        return whole > 0 and busy - own < BUSY * whole

    def _times(self) -> tuple[float, float, float] | None:
        """Seconds of the processors that this process may use: all, those in use, and this process's."""
        try:
            lines = (line.split() for line in self._processors.read_text().splitlines() if line.startswith("cpu"))
            rows = {name: [int(one) / os.sysconf("SC_CLK_TCK") for one in fields[:8]] for name, *fields in lines}
            names = (f"cpu{number}" for number in os.sched_getaffinity(os.getpid()))  # a replica has its own
            own = [rows[name] for name in names if name in rows] or [rows["cpu"]]
            user, nice, system, idle, waiting, *others = map(sum, zip(*own, strict=True))
        except (OSError, ValueError, KeyError):
            return None
        yielding = nice if os.nice(0) <= 0 else 0.0  # programs of a lower priority make way
        busy = user + nice + system + sum(others) - yielding
        return busy + yielding + idle + waiting, busy, time.process_time()

    def _on_battery(self) -> bool:
        try:
            supplies = list(self._power.iterdir()) if self._power.is_dir() else []  # no such devices
            kinds = {one: (one / "type").read_text().strip() for one in supplies if (one / "type").is_file()}
            batteries = [one for one, kind in kinds.items() if kind == "Battery" and not (one / "scope").is_file()]
            return any((one / "status").read_text().strip() == "Discharging" for one in batteries)
        except OSError:
            return True


MACHINE = SpareMachine()
