"""The RAM that a process may use: the least of what the machine, its control groups and its own limit leave.

A machine is free for work that can wait if it is not on battery and other programs rest.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.engines import until
from tests.processes import running
from tokenwright.backends import spare_machine
from tokenwright.backends.device import free_memory
from tokenwright.backends.ram import free_ram
from tokenwright.backends.spare_machine import SpareMachine

MIB = 2**20
TICKS = os.sysconf("SC_CLK_TCK")
V1_NONE = "9223372036854771712"  # how v1 writes "no limit"


@pytest.fixture
def machine(tmp_path):
    """A machine with 1000 MiB free, no control group and no limit; returns a function that writes its files."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    write({"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {1000 * 1024} kB\n", "proc/self/statm": "10 5 1 1 0 1 0"})
    return write


def v2(folder: str, limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup{folder}"
    return {
        f"{at}/memory.max": f"{limit}\n",
        f"{at}/memory.current": f"{used}\n",
        f"{at}/memory.stat": f"anon 7\ninactive_file {inactive}\nactive_file 99\n",
    }


def v1(folder: str, limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory{folder}"
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n",
        f"{at}/memory.usage_in_bytes": f"{used}\n",
        f"{at}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


def test_without_limits_it_is_what_the_machine_has(machine):
    assert free_ram(machine({})) == 1000 * MIB
    assert free_ram(machine({"proc/self/cgroup": "0::/\n", **v2("", "max", 5 * MIB)})) == 1000 * MIB
    assert free_ram(machine({"proc/self/cgroup": "4:memory:/\n", **v1("", V1_NONE, 5 * MIB)})) == 1000 * MIB


def test_files_that_were_read_count_as_free(machine):
    root = machine({"proc/self/cgroup": "0::/\n", **v2("", str(300 * MIB), 250 * MIB, inactive=100 * MIB)})
    assert free_ram(root) == 150 * MIB
    root = machine({"proc/self/cgroup": "3:cpu,memory:/\n0::/\n", **v1("", str(200 * MIB), 190 * MIB, inactive=MIB)})
    assert free_ram(root) == 11 * MIB


@pytest.mark.parametrize("version", [v1, v2])
def test_a_group_above_may_have_the_lower_limit(machine, version):
    line = "0::/a/b\n" if version is v2 else "4:memory:/a/b\n"
    files = {**version("/a/b", str(500 * MIB), 0), **version("/a", str(120 * MIB), 20 * MIB)}
    assert free_ram(machine({"proc/self/cgroup": line, **files})) == 100 * MIB


@pytest.mark.parametrize("version", [v1, v2])
def test_in_a_container_the_mount_is_the_group(machine, version):
    """Its path is the host's, which is not seen from inside."""
    line = "0::/docker/0123\n" if version is v2 else "4:memory:/docker/0123\n"
    assert free_ram(machine({"proc/self/cgroup": line, **version("", str(64 * MIB), 24 * MIB)})) == 40 * MIB


def test_more_used_than_allowed_leaves_nothing(machine):
    assert free_ram(machine({"proc/self/cgroup": "0::/\n", **v2("", "1000", 2000)})) == 0


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max address space         %-20s unlimited            bytes
"""


def test_the_limit_of_the_address_space_counts(machine):
    assert free_ram(machine({"proc/self/limits": LIMITS % "unlimited"})) == 1000 * MIB
    assert free_ram(machine({"proc/self/limits": LIMITS % (50 * MIB)})) == 50 * MIB - 10 * resource.getpagesize()


def test_a_system_that_tells_nothing(tmp_path):
    assert free_ram(tmp_path) is None


def test_this_machine_tells():
    free = free_memory(torch.device("cpu"))
    assert free is not None and free > MIB
    limit = "import resource as r; r.setrlimit(r.RLIMIT_AS, (2**24,) * 2)"  # less than the process has
    code = f"from tokenwright.backends.ram import free_ram\n{limit}\nprint(free_ram())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SpareMachine:
    monkeypatch.setattr(spare_machine, "LOOK_S", 0.0)
    return SpareMachine(tmp_path / "power", tmp_path / "stat")


def passes(
    spare: SpareMachine,
    busy_s: float,
    nice_s: float = 0.0,
    whole_s: float = 10.0,
    meanwhile: Callable[[], object] = lambda: None,
) -> bool:
    """Whether the machine is free after seconds in which programs took so much; each look begins anew.

    A processor that this process may not use is busy all the time.
    """
    own, other = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0)) + 1
    for looked in (False, True):
        busy, nice = (int(looked * one * TICKS) for one in (busy_s, nice_s))
        idle = int(looked * (whole_s - busy_s - nice_s) * TICKS)
        lines = f"cpu{own} {busy} {nice} 0 {idle} 0 0 0 0 0 0\ncpu{other} {int(looked * 100 * TICKS)} 0 0 0 0 0 0 0\n"
        spare._processors.write_text(f"cpu 0 0 0 0 0 0 0 0\n{lines}\nintr 9\n")
        free = spare.free
        meanwhile()
    return free


def test_other_programs_keep_a_machine_busy(spare: SpareMachine) -> None:
    assert passes(spare, 1.0) and not passes(spare, 5.0)
    assert passes(spare, 1.0, nice_s=8.0) is (os.nice(0) <= 0), "programs of a lower priority make way"
    spare._processors.unlink()
    assert not spare.free, "it is not known"
    assert not SpareMachine().free, "one look says nothing"


def test_processes_of_our_own_keep_no_machine_busy(spare: SpareMachine) -> None:
    """As the ranks of a model do, which compute a next turn."""
    with running([sys.executable, "-c", "while True: pass"]) as child:
        stat = Path(f"/proc/{child.pid}/stat")
        busy = partial(until, lambda: int(stat.read_text().split()[13]) >= 0.4 * TICKS)
        assert passes(spare, 0.4, whole_s=1.0, meanwhile=busy)
    assert not passes(spare, 0.4, whole_s=1.0)


def test_a_battery_keeps_a_machine_busy(spare: SpareMachine) -> None:
    assert passes(spare, 0.5)
    for name, kind, status in (
        ("AC", "Mains", "1"),
        ("BAT0", "Battery", "Charging"),
        ("mouse", "Battery", "Discharging"),
    ):
        (spare._power / name).mkdir(parents=True)
        (spare._power / name / "type").write_text(f"{kind}\n")
        (spare._power / name / "status").write_text(f"{status}\n")
    (spare._power / "mouse" / "scope").write_text("Device\n")
    assert passes(spare, 0.5)
    (spare._power / "BAT0" / "status").write_text("Discharging\n")
    assert not passes(spare, 0.5)


class Denied:
    """A folder that may be seen, and not be listed."""

    def is_dir(self) -> bool:
        return True

    def iterdir(self) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")


def test_devices_that_may_not_be_listed_keep_a_machine_busy(spare: SpareMachine) -> None:
    assert passes(spare, 0.5)
    spare._power = cast("Path", Denied())
    assert not passes(spare, 0.5), "an error in the engine's thread would end the engine"
