"""A prefix cache that outlives the process: restarts, other models, other processes, kills, and what replies say."""

import logging
import os
import random
import subprocess
import sys
import textwrap
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.invariants import check_invariants
from tests.models.fixtures import make_checkpoint
from tests.processes import running
from tests.vocabulary import most, text_of
from tokenwright import LLM, RequestError
from tokenwright.cache.disk_pages import DiskPages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("kv") / "model", "qwen2").path


def disk_of(llm: LLM) -> DiskPages:
    disk = llm.engine.prefixes.tier
    assert isinstance(disk, DiskPages)
    return disk


@pytest.mark.parametrize("options", [{}, {"kv": "int4"}, {"window": 24, "sinks": 3}, {"kv": "int8,first=20"}])
def test_after_a_restart_the_prompt_is_read(folder: Path, tmp_path: Path, options: dict[str, object]) -> None:
    prompt = text_of(121)
    with LLM(folder, **options) as plain:  # type: ignore[arg-type]
        [expected] = plain.generate([prompt], most(12))
    usages = []
    for _ in range(2):
        with LLM(folder, kv_disk=tmp_path / "kv", **options) as llm:  # type: ignore[arg-type]
            [done] = llm.generate([prompt], most(12))
        assert (done.token_ids, done.logprobs) == (expected.token_ids, expected.logprobs), "to the bit"
        usages.append(done.usage)
    assert (usages[0].disk_tokens, usages[1].disk_tokens, usages[1].reused_tokens) == (0, 112, 112)
    assert usages[1].forward_tokens == usages[0].forward_tokens - 112


def test_a_hit_in_memory_is_not_read(folder: Path, tmp_path: Path) -> None:
    with LLM(folder, kv_disk=tmp_path) as llm:
        usages = [llm.generate([text_of(65)], most(2))[0].usage for _ in range(2)]
        assert [(one.reused_tokens, one.disk_tokens) for one in usages] == [(0, 0), (64, 0)]


def test_pages_that_memory_has_evicted_are_read(folder: Path, tmp_path: Path) -> None:
    with LLM(folder, kv_disk=tmp_path, pages=8) as llm:
        [first] = llm.generate([text_of(97)], most(4))
        llm.generate([text_of(97, seed=1)], most(4))
        disk_of(llm).writer.flush()  # a page that waits to be written cannot be read
        [again] = llm.generate([text_of(97)], most(4))
        assert again.token_ids == first.token_ids
        assert (again.usage.reused_tokens, again.usage.disk_tokens) == (96, 80), "its first page was evicted last"


@pytest.mark.parametrize("options", [{}, {"kv": "int8"}, {"kv": "int4"}, {"window": 24, "sinks": 3}])
def test_files_without_a_name_keep_what_memory_evicts_and_leave_nothing(
    folder: Path, tmp_path: Path, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(DiskPages, "_worth", lambda *_: True)  # however fast the disk is
    with LLM(folder, **options) as plain:  # type: ignore[arg-type]
        expected = [(one.token_ids, one.logprobs) for one in plain.generate([text_of(97)], most(4))]
    for found in (80, 80):  # a second process knows nothing of the first
        with LLM(folder, kv_disk="auto", pages=8 if "window" not in options else 12, **options) as llm:  # type: ignore[arg-type]
            disk = disk_of(llm)
            for seed in (0, 1, 2):
                first = llm.generate([text_of(97, seed)], most(4))[0]
                assert first.usage.disk_tokens == 0
                disk.writer.flush()
            assert llm.generate([text_of(97)], most(4), salt="b")[0].usage.disk_tokens == 0
            again = llm.generate([text_of(97)], most(4))
            assert [(one.token_ids, one.logprobs) for one in again] == expected, "to the bit"
            assert again[0].usage.disk_tokens >= found
            assert not [one for one in tmp_path.rglob("*") if one.is_file()], "no file has a name"
            llm.inspect(lambda engine: check_invariants(engine.scheduler))


def test_salts_models_and_formats_keep_apart(folder: Path, tmp_path: Path) -> None:
    with LLM(folder, kv_disk=tmp_path) as llm:
        llm.generate([text_of(65)], most(2), salt="a")
    other = make_checkpoint(tmp_path / "other", "qwen2", seed=5).path
    for model, options, salt, found in [
        (folder, {}, "a", 64),
        (folder, {}, "b", 0),
        (folder, {}, "", 0),
        (folder, {"kv": "int8"}, "a", 0),
        (folder, {"page_size": 8}, "a", 0),
        (folder, {"dtype": "bfloat16"}, "a", 0),
        (other, {}, "a", 0),
    ]:
        with LLM(model, kv_disk=tmp_path, **options) as llm:  # type: ignore[arg-type]
            assert llm.generate([text_of(65)], most(2), salt=salt)[0].usage.disk_tokens == found, (model, options, salt)


def test_wrong_options_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for options, words in [
        ({"kv_disk": tmp_path / "file"}, "kv_disk"),
        ({"kv_disk": 3}, "kv_disk must be a folder"),
        ({"kv_disk": ""}, "kv_disk must be a folder"),
        ({"kv_disk": tmp_path / "kv", "kv_disk_size": 9000}, "kv_disk_size is 9,000 bytes"),
        ({"kv_disk": tmp_path / "kv", "kv_disk_size": 0}, "kv_disk_size"),
        ({"kv_disk": tmp_path / "kv", "kv_disk_size": "many"}, "kv_disk_size"),
    ]:
        with pytest.raises(RequestError, match=words):
            LLM(folder, **options)  # type: ignore[arg-type]


def test_a_full_disk_is_told_once_and_nothing_else_happens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(folder, kv_disk=tmp_path) as llm:
        disk = disk_of(llm)

        def full(pages: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(disk.folder, "write", full)
        texts = [llm.generate([text_of(65, seed)], most(2))[0].token_ids for seed in range(3)]
        disk.writer.flush()
        told = [one for one in caplog.records if one.levelno == logging.WARNING]
        assert len(told) == 1 and "No space left" in told[0].getMessage()
        assert disk.writer.written == 0 and disk.writer.nbytes == 0 and not disk.writer.waiting
    with LLM(folder) as plain:
        assert texts == [plain.generate([text_of(65, seed)], most(2))[0].token_ids for seed in range(3)]


def test_a_disk_that_is_slower_than_the_model_is_not_read(folder: Path, tmp_path: Path) -> None:
    with LLM(folder, kv_disk=tmp_path) as llm:
        llm.generate([text_of(65)], most(2))
    with LLM(folder, kv_disk=tmp_path) as llm:
        disk = disk_of(llm)
        disk._disk.add(1, 1.0)  # a byte a second
        disk._model.add(1e6, 1.0)
        assert llm.generate([text_of(65)], most(2))[0].usage.disk_tokens == 0
        assert disk.wanted(0, [bytes(32)]) == [], "and nothing is written"
        disk._disk.at -= 100  # the measurement is old: it is tried again, and found to be faster
        assert llm.generate([text_of(66)], most(2))[0].usage.disk_tokens == 0, "it is in memory by now"


def test_random_texts_over_a_small_folder_give_the_same_ids(folder: Path, tmp_path: Path) -> None:
    """Engines come and go over one folder that is too small, with damage in between; all texts begin alike in pairs."""
    draw = random.Random(0)
    prompts = [
        [*text_of(draw.choice([20, 50, 90]), seed=n % 3), *text_of(draw.randint(1, 30), seed=n)] for n in range(12)
    ]
    with LLM(folder) as plain:
        expected = [(one.token_ids, one.logprobs) for one in plain.generate(prompts, most(6))]
    read, size = 0, 400_000
    for turn in range(6):
        with LLM(folder, kv_disk=tmp_path, kv_disk_size=size, pages=24) as llm:
            order = draw.sample(range(12), 12)
            for some in (order[:5], order[5:]):
                done = llm.generate([prompts[n] for n in some], most(6))
                assert [(one.token_ids, one.logprobs) for one in done] == [expected[n] for n in some]
                read += sum(one.usage.disk_tokens for one in done)
        files = [one for one in tmp_path.rglob("*") if one.is_file()]
        assert sum(one.stat().st_size for one in files) <= size
        if turn % 2:
            victim = draw.choice([one for one in files if one.name not in ("lock", "secret")])
            victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    assert read > 0


PROCESS = """
    import sys
    from tests.vocabulary import most, text_of
    from tokenwright import LLM
    from tokenwright.cache.disk_pages import DiskPages

    DiskPages._worth = lambda *_: True  # however fast the disk is
    with LLM(sys.argv[1], kv_disk=sys.argv[2], kv_disk_size=int(sys.argv[3]), pages=40) as llm:
        for turn in range(int(sys.argv[4])):
            for seed in range(4):
                [done] = llm.generate([text_of(121, seed)], most(6))
                print(seed, *done.token_ids, done.usage.disk_tokens, flush=True)
"""


def process(folder: Path, disk: Path, turns: int, size: int = 10**9) -> AbstractContextManager["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(folder), str(disk), str(size), str(turns)]
    return running(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ids_of(folder: Path) -> dict[int, list[int]]:
    with LLM(folder) as plain:
        return {seed: list(plain.generate([text_of(121, seed)], most(6))[0].token_ids) for seed in range(4)}


def test_two_processes_share_a_folder(folder: Path, tmp_path: Path) -> None:
    expected, size = ids_of(folder), 400_000
    with process(folder, tmp_path, 6, size) as first, process(folder, tmp_path, 6, size) as second:
        for one in (first, second):
            out, err = one.communicate()
            assert one.returncode == 0, err
            for line in out.splitlines():
                seed, *rest = map(int, line.split())
                assert rest[:-1] == expected[seed]
    assert sum(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file()) <= size


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.sweep)])
def test_a_killed_process_loses_nothing(
    folder: Path, tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is killed after some lines; the next one reads what those texts have left, and writes equal texts."""
    monkeypatch.setattr(DiskPages, "_worth", lambda *_: True)  # as in the processes
    expected, draw = ids_of(folder), random.Random(kills)
    known = 0
    for _ in range(kills):
        with process(folder, tmp_path, 1000) as one:
            assert one.stdout is not None
            for line in range(draw.randint(1, 9)):
                seed, *rest = map(int, one.stdout.readline().split())
                assert rest[:-1] == expected[seed]
                if line < known:
                    assert rest[-1] == 112, "all pages of a text that an earlier process has ended are there"
        with LLM(folder, kv_disk=tmp_path) as llm:
            found = [llm.generate([text_of(121, seed)], most(6))[0].usage.disk_tokens for seed in range(4)]
        assert all(tokens == 112 for tokens in found[:known])
        known = 4


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux tells of a process's files")
def test_a_killed_process_leaves_no_file_without_a_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path))
    with process(folder, Path("auto"), 1000) as one:
        assert one.stdout is not None
        for _ in range(5):
            one.stdout.readline()
        opened = [link for link in Path(f"/proc/{one.pid}/fd").iterdir() if str(tmp_path) in str(link.readlink())]
        assert opened and sum(link.stat().st_size for link in opened) > 0, "its pages are on the disk"
    assert not [found for found in tmp_path.rglob("*") if found.is_file()]


@pytest.mark.parametrize("fault", ["full", "slow"])
def test_a_full_or_slow_disk_under_files_without_a_name_is_harmless(
    folder: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path))
    with LLM(folder) as plain:
        expected = {seed: list(plain.generate([text_of(97, seed)], most(4))[0].token_ids) for seed in range(3)}
    preadv, calls = os.preadv, 0

    def slow(*given: Any) -> int:
        nonlocal calls
        calls += 1
        time.sleep(0.2)
        return preadv(*given)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "preadv", slow)
    if fault == "full":
        monkeypatch.setattr(os, "pwritev", full)
    with LLM(folder, kv_disk="auto", pages=8) as llm:
        disk = disk_of(llm)
        disk._model.add(1e4, 1.0)  # tokens a second
        for turn in range(3):
            for seed in range(3):
                found = list(llm.generate([text_of(97, seed)], most(4))[0].token_ids)
                assert found == expected[seed], (turn, seed)
                if not turn:
                    disk.writer.flush()
        assert calls == 0 if fault == "full" else 1 <= calls <= 2, "each helper reads a page, and then none"
        llm.inspect(lambda engine: check_invariants(engine.scheduler))
