"""The replay of recorded agents: what is found, edited, lost and read in small sessions, counted by hand."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.cache.agents import BLOCK, Machine, Replay, read_sessions


def trace(path: Path, *sessions: list[list[list[int]]]) -> Path:
    """A file of sessions; a request is its runs of blocks, and some tokens that fill none."""
    rows = []
    for number, prompts in enumerate(sessions):
        asks = [
            {"type": "n", "think": 1.0, "in": sum(n for _, n in runs) * BLOCK + 3, "out": 10, "runs": runs}
            for runs in prompts
        ]
        del asks[0]["think"]  # as some recorded ones lack it
        rows.append({"id": number, "requests": [asks[0], {"type": "subagent", "requests": asks[1:]}]})
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def machine(blocks: int, disk: int, rate: float = 1e9) -> Machine:
    return Machine(blocks * BLOCK, disk * BLOCK, prefill=64.0, decode=10.0, disk_rate=rate, kv_bytes=100)


GROWS = [[[1, 4]], [[1, 4], [5, 4]], [[1, 8], [9, 2]]]
EDITS = [[[1, 8]], [[1, 5], [9, 4]]]


def test_a_session_alone_computes_only_what_is_new(tmp_path: Path) -> None:
    [tally] = [Replay(read_sessions(trace(tmp_path / "t", GROWS), 9), 1, machine(40, 0)).run()]
    assert (tally.prompt, tally.found, tally.new, tally.edited, tally.lost) == (22 * 64 + 9, 12 * 64, 649, 0, 0)
    assert tally.first_s == pytest.approx([4 + 3 / 64, 4 + 3 / 64, 2 + 3 / 64])
    edited = Replay(read_sessions(trace(tmp_path / "t", EDITS), 9), 1, machine(40, 0)).run()
    assert (edited.found, edited.edited, edited.new) == (4 * 64, 4 * 64, (8 + 1) * 64 + 6)


@pytest.mark.parametrize(("disk", "rate", "read"), [(0, 1e9, 0), (40, 1e9, 20), (40, 99.0, 0)])
def test_two_agents_in_too_little_memory(tmp_path: Path, disk: int, rate: float, read: int) -> None:
    """Three pages hold one prompt; a disk keeps what they lose, unless it is slower than computing."""
    sessions = read_sessions(trace(tmp_path / "t", GROWS, GROWS), 9)
    tally = Replay(sessions, 2, machine(12, disk, rate)).run()
    assert tally.ideal == 24 * 64 and tally.found == tally.ideal - tally.lost
    assert (tally.read, tally.lost) == (read * 64, 0 if read else 20 * 64)
    assert tally.left_out == 0 and Replay(sessions, 2, machine(8, disk, rate)).run().left_out == 4
