"""The folder of page files: its quota at every moment, damage, other processes, and processes that are killed."""

import errno
import fcntl
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.processes import running
from tokenwright import regular_file
from tokenwright.cache import page_folder
from tokenwright.cache.page_folder import BLOCK, OVERHEAD, PageFolder, page_key, taken
from tokenwright.cache.page_writer import PageToWrite, PageWriter
from tokenwright.errors import RequestError

MODEL, OTHER = b"m" * 32, b"o" * 32
SIZE = 5000


def key(number, group=0):
    return page_key(number.to_bytes(32, "big"), group)


def contents(number, size=SIZE):
    return random.Random(number).randbytes(size)


def read(folder, one, size=SIZE):
    whole = memoryview(bytearray(OVERHEAD + size + 1))
    return bytes(whole[OVERHEAD:-1]) if folder.read(one, whole) else None


def files(path):
    return [one for one in path.rglob("*") if one.is_file()]


def total(path):
    """What the files of a folder take, counted anew."""
    return sum(taken(one.stat().st_size) if one.name != "lock" else BLOCK for one in files(path))


def page_files(path):
    return [one for one in files(path) if one.name not in ("secret", "lock")]


@pytest.fixture
def folder(tmp_path):
    found = PageFolder(tmp_path / "kv", 1 << 20, MODEL)
    yield found
    found.close()


def test_what_is_written_is_read_by_another_process_of_the_same_model(folder):
    assert folder.write([(key(n), contents(n)) for n in range(20)]) == 20
    again = PageFolder(folder.folder, 1 << 20, MODEL)
    assert again.seal.secret == folder.seal.secret and len(again.seal.secret) == 32
    assert again.held([key(0), key(19), key(20), key(0, 1)]) == [True, True, False, False]
    assert [read(again, key(n)) for n in range(20)] == [contents(n) for n in range(20)]
    strange = PageFolder(folder.folder, 1 << 20, OTHER)
    assert strange.held([key(0)]) == [False] and read(strange, key(0)) is None
    assert strange.used == again.used == folder.used == total(folder.folder), "it counts the files of all models"


def test_a_page_is_written_once(folder):
    assert [folder.write([(key(1), contents(1))]) for _ in range(2)] == [1, 0]
    again = PageFolder(folder.folder, 1 << 20, MODEL)
    assert folder.write([(key(2), contents(2))]) == 1
    assert again.held([key(2)]) == [True], "looked for in the folder"
    assert again.write([(key(2), contents(2)), (key(3), contents(3))]) == 1
    assert folder.held([key(3)]) == [True] and read(folder, key(3)) == contents(3)


def test_only_the_owner_may_read(folder):
    folder.write([(key(1), contents(1))])
    assert {one.stat().st_mode & 0o077 for one in folder.folder.rglob("*")} == {0}
    assert folder.folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("seed", range(10))
def test_the_quota_holds_at_every_call_of_the_system(tmp_path, monkeypatch, seed):
    """Two processes of two models write pages of many sizes; the sum is counted around every write and rename."""
    draw, quota = random.Random(seed), 30 * BLOCK + seed
    path = tmp_path / "kv"
    owners = [PageFolder(path, quota, model) for model in (MODEL, OTHER)]
    most = 0
    real = os.writev

    def watched(place, data):
        nonlocal most
        done = real(place, data)
        most = max(most, total(path))
        return done

    monkeypatch.setattr(page_folder.os, "writev", watched)
    for number in range(300):
        owner = draw.choice(owners)
        owner.write([(key(number, group), contents(number, draw.randint(1, 3 * BLOCK))) for group in range(2)])
        assert owner.used == total(path) <= quota
    assert quota - 4 * BLOCK < most <= quota


def test_a_page_larger_than_the_quota_is_not_written(tmp_path):
    folder = PageFolder(tmp_path, 10 * BLOCK, MODEL)
    folder.write([(key(1), contents(1))])
    assert folder.write([(key(2), contents(2, 8 * BLOCK + 1))]) == 0
    assert total(tmp_path) <= 10 * BLOCK


def test_the_page_used_longest_ago_goes_first(tmp_path):
    folder = PageFolder(tmp_path, (2 + 10 * 2) * BLOCK, MODEL)
    folder.write([(key(n), contents(n)) for n in range(10)])
    other = PageFolder(tmp_path, (2 + 10 * 2) * BLOCK, MODEL)
    other.touch([key(2), key(0)])
    folder.touch([key(5)])
    folder.write([(key(n), contents(n)) for n in range(10, 17)])
    assert folder.held([key(n) for n in range(10)]) == [n in (0, 2, 5) for n in range(10)]
    folder.write([(key(17), contents(17))])
    assert folder.held([key(0), key(2), key(5)]) == [False, True, True], "the first page of a text goes last"


def test_a_smaller_quota_is_kept_from_the_start(tmp_path):
    PageFolder(tmp_path, 1 << 20, MODEL).write([(key(n), contents(n)) for n in range(20)])
    assert PageFolder(tmp_path, 9 * BLOCK, OTHER).used == total(tmp_path) == 8 * BLOCK


def damaged(draw, data, other):
    """The bytes of a file after something has happened to it; `other`: those of another page's."""
    match draw.choice(["bit", "bytes", "cut", "longer", "swapped", "empty", "zeros", "lost", "moved"]):
        case "bit":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case "bytes":
            at = draw.randrange(len(data))
            length = draw.randint(1, len(data) - at)
            data[at : at + length] = bytes(255 - one for one in data[at : at + length])
        case "cut":
            del data[draw.randrange(len(data)) :]
        case "longer":
            data += draw.randbytes(draw.randint(1, 5000))
        case "swapped":
            return other
        case "empty":
            return b""
        case "zeros":
            return bytes(len(data))
        case "lost":  # a block of the disk; the only one of a small file
            at = draw.randrange(taken(len(data)) // BLOCK) * BLOCK
            data[at : at + BLOCK] = bytes(len(data[at : at + BLOCK]))
        case "moved":  # two parts of it change places
            half = len(data) // 2
            at, length = draw.randrange(half), draw.randint(8, min(512, half // 2))
            first, second = data[at : at + length], data[at + half - length : at + half]
            data[at : at + length], data[at + half - length : at + half] = second, first
    return data


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_file_is_never_read(tmp_path, caplog, seed):
    draw = random.Random(seed)
    for turn in range(100):
        size = draw.choice([700, 5 * BLOCK + 40])
        caplog.clear()
        path = tmp_path / str(turn)
        folder = PageFolder(path, 1 << 20, MODEL)
        folder.write([(key(n), contents(n, size)) for n in range(3)])
        victim, other = (path / folder._name(key(n)) for n in (1, 2))
        victim.write_bytes(damaged(draw, bytearray(victim.read_bytes()), other.read_bytes()))
        again = PageFolder(path, 1 << 20, MODEL)
        for reader in (folder, again):
            assert [read(reader, key(n), size) for n in range(3)] == [contents(0, size), None, contents(2, size)]
            assert not reader.held([key(1)])[0] and read(reader, key(1), size) is None
        warnings = [one for one in caplog.records if one.levelno == logging.WARNING]
        assert len(warnings) == 2, "a line in each process's log"
        assert folder.write([(key(1), contents(1, size))]) == 1 and read(folder, key(1), size) == contents(1, size)
        assert folder.used == total(path)
        for one in (folder, again):
            one.close()


def rectangle(data):
    """Four bits flipped at the corners of a rectangle of words, so that no sum of a row or a column changes."""
    at, half = OVERHEAD, BLOCK // 8
    words = np.frombuffer(data[at:], "<u8", 2 * half).reshape(2, half)
    bits = (words >> np.uint64(5)) & np.uint64(1)
    for first in (0, 1):  # a column where the bit goes up in the first row, and one where it goes down
        column = int(np.flatnonzero((bits[0] == first) & (bits[1] != first))[0])
        for row in range(2):
            data[at + row * BLOCK + 8 * column] ^= 1 << 5
    return data


def swapped(length):
    def change(data):
        at = OVERHEAD + length
        data[OVERHEAD:at], data[at : at + length] = data[at : at + length], data[OVERHEAD:at]
        return data

    return change


@pytest.mark.parametrize("change", [rectangle, swapped(4), swapped(8), swapped(BLOCK)])
def test_changes_that_keep_sums_are_seen(tmp_path, change):
    size = 4 * BLOCK + 40
    for number in range(20):
        folder = PageFolder(tmp_path / str(number), 1 << 20, MODEL)
        folder.write([(key(number), contents(number, size))])
        path = folder.folder / folder._name(key(number))
        path.write_bytes(change(bytearray(path.read_bytes())))
        assert read(folder, key(number), size) is None


def test_a_page_of_another_secret_is_not_read(tmp_path):
    """Who does not know the secret cannot make a page that is read, not even from a page of the same model."""
    one, other = (PageFolder(tmp_path / name, 1 << 20, MODEL) for name in "ab")
    one.write([(key(1), contents(1))])
    planted = other.folder / other._name(key(1))
    planted.write_bytes((one.folder / one._name(key(1))).read_bytes())
    assert read(one, key(1)) == contents(1) and read(other, key(1)) is None


@pytest.mark.parametrize("seed", range(10))
def test_hashes_of_rows_are_the_definition(seed):
    """In whole numbers, as RFC 4418 has it; and a changed byte changes both hashes of its row, and no other."""
    draw = random.Random(seed)
    data, at, flipped = draw.randbytes(draw.randint(BLOCK, 3 * BLOCK)), draw.randrange(BLOCK), draw.randint(1, 255)
    keys = page_folder.row_keys(b"s" * 32)
    found = page_folder.sums_of(data, keys)
    for row, sums in enumerate(found.tolist()):
        words = np.frombuffer(data, "<u4", BLOCK // 4, row * BLOCK).tolist()
        for one, total in zip(keys.tolist(), sums, strict=True):
            keyed = [(word + k) % 2**32 for word, k in zip(words, one, strict=True)]
            assert total == sum(a * b for a, b in zip(keyed[::2], keyed[1::2], strict=True)) % 2**64
    changed = bytearray(data)
    changed[at] ^= flipped
    differ = page_folder.sums_of(bytes(changed), keys) != found
    assert [list(one) for one in differ] == [[row == at // BLOCK] * 2 for row in range(len(found))]


def test_foreign_files_stay_and_are_told_once(tmp_path, caplog):
    folder = PageFolder(tmp_path, 12 * BLOCK, MODEL)
    folder.write([(key(1), contents(1))])
    own = (folder.folder / folder._name(key(1))).parent
    foreign = [tmp_path / "notes.txt", own / "notes.txt", own / f"{'a' * 64}.x", tmp_path / ("c" * 31)]
    for one in foreign:
        one.write_text("mine")
    (own / f"{'b' * 64}.0").mkdir()
    (own / f"{'d' * 64}.0").symlink_to(tmp_path / "notes.txt")
    os.mkfifo(own / f"{'e' * 64}.0")
    for _ in range(3):
        other = PageFolder(tmp_path, 12 * BLOCK, MODEL)
        other.write([(key(n), contents(n)) for n in range(2, 9)])
        assert other.used <= 12 * BLOCK
        for name in "bde":
            page = page_key(bytes.fromhex(64 * name), 0)
            assert read(other, page) is None
            assert other.write([(page, contents(1))]) == 0
        assert len(caplog.records) == len(foreign) + 3
        caplog.clear()
    assert all(one.read_text() == "mine" for one in foreign)


def test_a_full_disk_loses_nothing_and_leaves_no_draft(folder, monkeypatch):
    folder.write([(key(1), contents(1))])
    real = os.writev

    def full(place, data):
        return real(place, [b"".join(data)[:100]])  # as much as there is room for

    monkeypatch.setattr(page_folder.os, "writev", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        folder.write([(key(2), contents(2))])
    monkeypatch.undo()
    assert folder.held([key(1), key(2)]) == [True, False] and len(page_files(folder.folder)) == 1
    assert folder.used == total(folder.folder)
    assert folder.write([(key(2), contents(2))]) == 1 and read(folder, key(2)) == contents(2)


@pytest.mark.parametrize("failing", ["lstat", "unlink", "rename", "scandir"])
def test_a_disk_that_fails_for_a_while_keeps_its_quota_and_is_used_again(tmp_path, monkeypatch, failing):
    quota = 2 * BLOCK + 4 * taken(SIZE)
    folder = PageFolder(tmp_path, quota, MODEL)
    folder.write([(key(n), contents(n)) for n in range(4)])
    damaged = tmp_path / folder._name(key(0))
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    assert read(folder, key(0)) is None, "so it looks at all files again"

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(page_folder.os if failing == "scandir" else page_folder.Path, failing, fails)
    for n in range(4, 9):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            folder.write([(key(n), contents(n))])
    monkeypatch.undo()
    assert folder.write([(key(n), contents(n)) for n in range(9, 12)]) == 3
    assert folder.used == total(tmp_path) <= quota


@pytest.mark.parametrize("failing", [(page_folder.os, "pread"), (page_folder.Path, "exists")], ids=["pread", "exists"])
def test_a_disk_that_fails_has_the_pages_that_are_known(folder, monkeypatch, failing):
    """The engine asks in the middle of a step, which must not fail with the disk."""

    def fails(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    folder.write([(key(1), contents(1))])
    PageFolder(folder.folder, 1 << 20, MODEL).write([(key(2), contents(2))])
    monkeypatch.setattr(*failing, fails)
    assert folder.held([key(1), key(2)]) == [True, False]
    monkeypatch.undo()
    assert folder.held([key(1), key(2)]) == [True, True]


def test_a_folder_that_cannot_be_read_is_refused_and_left(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    PageFolder(tmp_path, 1 << 20, MODEL).close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with monkeypatch.context() as disk:
            disk.setattr(page_folder.os, "scandir", fails)
            with pytest.raises(RequestError, match=os.strerror(errno.EIO)):
                PageFolder(tmp_path, 1 << 20, MODEL)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_that_is_removed_is_a_page_that_is_not_there(folder, caplog):
    folder.write([(key(n), contents(n)) for n in range(3)])
    (folder.folder / folder._name(key(1))).unlink()
    assert read(folder, key(1)) is None and folder.held([key(1)]) == [False]
    assert not caplog.records, "another process needed the room"
    assert folder.write([(key(1), contents(1))]) == 1 and read(folder, key(1)) == contents(1)


@pytest.mark.parametrize("what", ["file", "secret", "readonly"])
def test_a_folder_that_cannot_be_used_is_refused(tmp_path, what):
    path = tmp_path / "kv"
    if what == "file":
        path.write_text("x")
    else:
        path.mkdir()
        (path / "secret").write_bytes(b"short") if what == "secret" else path.chmod(0o500)
    if what == "readonly" and os.access(path, os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(RequestError, match="kv_disk"):
        PageFolder(path, 1 << 20, MODEL)


OPENED = """
    import sys
    from pathlib import Path
    from tokenwright import regular_file
    from tokenwright.cache.page_folder import PageFolder
    from tokenwright.errors import RequestError

    regular_file.LOCK_S = 0.2
    for path in sys.argv[1:]:
        try:
            PageFolder(Path(path), 1 << 20, b"m" * 32).close()
            print()
        except RequestError as error:
            print(error)
"""


def opened(*paths):
    """What a process of its own says to each folder that it opens; nothing where it can."""
    command = [sys.executable, "-c", textwrap.dedent(OPENED), *map(str, paths)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert len(told) == len(paths)
    return told


def prepare(path, what, victim):
    """Do to a folder what another user may have done to it, or a process of this one."""
    (path / "m").mkdir(parents=True)
    match what:
        case "draft of a secret":
            (path / ".draft-secret").symlink_to(victim)
        case "secret is a link":
            (path / "secret").symlink_to(victim)
        case "secret is a pipe":
            os.mkfifo(path / "secret", 0o600)
        case "secret that others read":
            (path / "secret").write_bytes(bytes(32))
            (path / "secret").chmod(0o644)
        case "lock is a link":
            (path / "lock").symlink_to(victim)
        case "lock is a pipe":
            os.mkfifo(path / "lock")
        case "model is a link":
            (path / MODEL.hex()[:32]).symlink_to(path / "m")
        case "all may write":
            path.chmod(0o777)
        case "all may write to the model":
            (path / MODEL.hex()[:32]).mkdir()
            (path / MODEL.hex()[:32]).chmod(0o777)


REFUSED = {
    "draft of a secret": "", "secret is a link": "symbolic link", "secret is a pipe": "a device or a pipe",
    "secret that others read": "other users can read", "lock is a link": "symbolic link", "lock is a pipe": "its lock",
    "model is a link": "a symbolic link, not a folder", "all may write": "all users may write to it",
    "all may write to the model": "all users may write to it",
}  # fmt: skip


def test_a_folder_that_others_have_prepared_harms_nobody(tmp_path):
    """No link is followed, nothing waits for ever, and what cannot be trusted is refused with the reason.

    A lock that a process keeps which was stopped is told too: the start of an engine does not wait for it longer.
    """
    victims = [tmp_path / f"victim {n}" for n in range(len(REFUSED))]
    paths = [tmp_path / f"kv {n}" for n in range(len(REFUSED))]
    for what, victim, path in zip(REFUSED, victims, paths, strict=True):
        victim.write_bytes(b"x" * 32)
        victim.chmod(0o640)
        prepare(path, what, victim)
    PageFolder(tmp_path / "kept", 1 << 20, MODEL).close()
    with (tmp_path / "kept" / "lock").open("r+") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        *each, kept = opened(*paths, tmp_path / "kept")
    assert "another process has held the lock" in kept
    for (what, why), victim, told in zip(REFUSED.items(), victims, each, strict=True):
        assert victim.read_bytes() == b"x" * 32 and victim.stat().st_mode & 0o777 == 0o640, what
        assert (why.lower() in told.lower() and "kv_disk" in told) if why else told == "", what


def test_a_writer_ends_while_another_process_keeps_the_lock(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(regular_file, "LOCK_S", 0.2)
    monkeypatch.setattr(regular_file, "TOLD_S", 0.0)
    writer = PageWriter(PageFolder(tmp_path, 1 << 20, MODEL))
    holder = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    part = np.zeros((1, 40, 5000), np.uint8)
    writer.put([PageToWrite(key(n), [part], n, 5000) for n in range(40)])
    writer.close()
    assert writer.written == 0
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == 2 and "waiting for another process" in told[0] and "not written" in told[1]
    os.close(holder)


def test_a_planted_draft_of_a_page_is_replaced(folder, tmp_path):
    (victim := tmp_path / "victim").write_text("mine")
    (folder.folder / MODEL.hex()[:32] / ".draft").symlink_to(victim)
    assert folder.write([(key(1), contents(1))]) == 1 and read(folder, key(1)) == contents(1)
    assert victim.read_text() == "mine"


WORKER = """
    import random, sys
    from pathlib import Path
    from tests.cache.test_page_folder import MODEL, contents, key, read
    from tokenwright import regular_file
    from tokenwright.cache.page_folder import PageFolder

    regular_file.LOCK_S = regular_file.TOLD_S = 1e6  # the machine may be busy
    folder = PageFolder(Path(sys.argv[1]), int(sys.argv[2]), MODEL)
    draw = random.Random(int(sys.argv[3]))
    print("ready", flush=True)
    for _ in range(int(sys.argv[4])):
        numbers = [draw.randrange(60) for _ in range(3)]
        folder.write([(key(n), contents(n)) for n in numbers])
        number = draw.randrange(60)
        assert read(folder, key(number)) in (None, contents(number)), "a wrong bit"
        folder.touch([key(number)])
    assert folder.used <= folder.quota
    print("done", flush=True)
"""


def worker(path, quota, seed, turns):
    command = [sys.executable, "-c", textwrap.dedent(WORKER), *map(str, (path, quota, seed, turns))]
    return running(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(regular_file, "LOCK_S", 1e6)
    quota = 2 * BLOCK + 40 * taken(SIZE)
    path = tmp_path / "kv"
    with ExitStack() as ends:
        processes = [ends.enter_context(worker(path, quota, seed, 150)) for seed in range(3)]
        watcher = PageFolder(path, quota, OTHER)
        while any(one.poll() is None for one in processes):
            with watcher._locked():
                assert total(path) <= quota
        for one in processes:
            out, err = one.communicate()
            assert out.endswith("done\n") and not err, err
    last = PageFolder(path, quota, MODEL)
    assert last.used == total(path) <= quota
    assert all(read(last, key(n)) in (None, contents(n)) for n in range(60))


def write_and_die(path, quota, calls):
    """In a process of its own, which is killed in one of its calls of the system."""
    left = calls

    def dying(name, real):
        def call(*args, **named):
            nonlocal left
            left -= 1
            if not left:
                if name == "writev":
                    real(args[0], [b"".join(args[1])[:3000]])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **named)

        return call

    folder = PageFolder(path, quota, MODEL)
    for owner, names in (
        (page_folder.os, ("open", "writev", "close", "pwrite", "pread", "utime")),
        (page_folder.Path, ("lstat", "rename", "unlink")),
    ):
        for name in names:
            setattr(owner, name, dying(name, getattr(owner, name)))
    for n in range(100, 130):
        folder.write([(key(n), contents(n))])
        folder.touch([key(n), key(0)])


@pytest.mark.parametrize("calls", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 40, 77, 110, 150, 190])
def test_a_process_killed_at_any_call_leaves_a_whole_folder(tmp_path, calls):
    quota = 2 * BLOCK + 12 * taken(SIZE)
    running = PageFolder(tmp_path, quota, MODEL)  # another process, which knows the folder as it was
    running.write([(key(n), contents(n)) for n in range(10)])
    before = {one: one.read_bytes() for one in page_files(tmp_path)}
    process = multiprocessing.get_context("fork").Process(target=write_and_die, args=(tmp_path, quota, calls))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert total(tmp_path) <= quota, "with the draft"
    for folder in (running, PageFolder(tmp_path, quota, MODEL)):
        folder.write([(key(200), contents(200))])
        assert folder.used == total(tmp_path) <= quota
        assert not [one for one in page_files(tmp_path) if one.name == ".draft"]
        assert all(read(folder, key(n)) in (None, contents(n)) for n in range(300))
    assert all(one.read_bytes() == data for one, data in before.items() if one.exists()), "no file changes"
    assert len(page_files(tmp_path)) >= 10
