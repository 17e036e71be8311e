"""A cache file is written whole or not at all, and believed only if it is whole and of the right kind."""

import errno
import fcntl
import io
import json
import multiprocessing
import os
import pickle
import random
import signal
import stat
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.profiles import share
from tokenwright import regular_file
from tokenwright.cache import snapshot
from tokenwright.cache.snapshot import Snapshot, load, save
from tokenwright.errors import CacheFileError
from tokenwright.regular_file import abandoned, open_regular

ABOUT = {"weights": "w" * 64, "kv format": "int8 #12345678"}
SHAPES = [
    [np.empty((2, 1, 4, 1, 8), np.int8), np.empty((2, 1, 4, 1, 1), np.float16)],
    [np.empty((1, 1, 4, 1, 8), np.float32)],
]


def made(seed: int = 0, pages: int = 3) -> Snapshot:
    draw = np.random.default_rng(seed)
    rows = [list(range(pages)), [pages - 1]]
    contents = [
        [
            draw.integers(-100, 100, (2, pages, 4, 1, 8), np.int8),
            draw.random((2, pages, 4, 1, 1)).astype(np.float16),
        ],
        [draw.random((1, 1, 4, 1, 8), np.float32)],
    ]
    return Snapshot(tuple(range(seed, seed + 4 * pages)), rows, contents)


def same(one: Snapshot, other: Snapshot) -> bool:
    pairs = zip(one.contents, other.contents, strict=True)
    equal = all(np.array_equal(a, b) for left, right in pairs for a, b in zip(left, right, strict=True))
    return equal and one.tokens == other.tokens and [list(row) for row in one.pages] == other.pages


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "chat.kv"
    save(path, made(), ABOUT)
    return path


def test_what_is_saved_is_loaded(file: Path) -> None:
    assert same(made(), load(file, ABOUT, SHAPES))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "it holds what somebody wrote"
    assert [one.name for one in file.parent.iterdir()] == ["chat.kv"], "no draft stays"


def test_the_newest_of_two_writers_stays_whole(file: Path) -> None:
    save(file, made(seed=5, pages=7), ABOUT)
    assert same(made(seed=5, pages=7), load(file, ABOUT, SHAPES))


def refused(path: Path, words: str, about: dict[str, str] = ABOUT) -> None:
    with pytest.raises(CacheFileError, match=words):
        load(path, about, SHAPES)


def test_every_flipped_bit_is_found(file: Path) -> None:
    data = file.read_bytes()
    rng = random.Random(0)
    length = 8 + int.from_bytes(data[:8], "little")
    places = [*range(8), *rng.sample(range(8, length), 300), *rng.sample(range(length, len(data)), 300)]
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        with pytest.raises(CacheFileError, match="delete it"):
            load(file, ABOUT, SHAPES)


def test_every_truncation_is_found(file: Path) -> None:
    data = file.read_bytes()
    for length in [*range(0, 60, 7), *range(60, len(data), 37), len(data) - 1]:
        file.write_bytes(data[:length])
        refused(file, "truncated|not a cache file")
    file.write_bytes(data[:-100])
    refused(file, "truncated: 100 bytes are missing")
    file.write_bytes(data + b"more")
    refused(file, "damaged")


def test_another_model_is_refused_by_name(file: Path) -> None:
    refused(file, "another weights", ABOUT | {"weights": "v" * 64})
    refused(file, r"another kv format \(int8 #12345678\).*its own \(native\)", ABOUT | {"kv format": "native"})
    refused(file, "not one that Tokenwright wrote", ABOUT | {"more": "1"})


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> object:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "chat.kv"
    path.write_bytes(pickle.dumps(Bomb()))
    refused(path, "not a cache file")
    assert not (tmp_path / "ran").exists()


def rewritten(file: Path, change: object, separators: tuple[str, str] = (",", ":"), name: str = "sha256") -> None:
    """The file with other metadata, its checksum made right again: what an enemy can write.

    `name` is how the checksum's key is spelled, which JSON can do in several ways.
    """
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)  # type: ignore[operator]
    header["__metadata__"]["sha256"] = "0" * 64
    text = json.dumps(header, separators=separators).replace('"sha256"', f'"{name}"').encode()
    blank = struct.pack("<Q", len(text)) + text + data[8 + length :]
    file.write_bytes(blank.replace(b"0" * 64, sha256(blank).hexdigest().encode(), 1))


def test_a_rewritten_file_with_a_right_checksum_is_read(file: Path) -> None:
    rewritten(file, lambda header: None)
    assert same(made(), load(file, ABOUT, SHAPES))


@pytest.mark.parametrize("separators", [(", ", ": "), (",\n", " :\t"), (",", ": ")])
def test_a_header_with_spaces_is_read_or_refused(file: Path, separators: tuple[str, str]) -> None:
    rewritten(file, lambda header: None, separators)
    assert same(made(), load(file, ABOUT, SHAPES))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused(file, "damaged")


def test_a_checksum_whose_name_is_spelled_otherwise_is_refused(file: Path) -> None:
    rewritten(file, lambda header: None, name="\\u0073ha256")
    refused(file, "not one that Tokenwright wrote")


def test_an_endless_offset_is_refused(file: Path) -> None:
    rewritten(file, lambda header: header["tokens"].update(data_offsets=[0, float("inf")]))
    refused(file, "not a cache file")


def test_tokens_that_are_no_ids_are_refused(file: Path) -> None:
    rewritten(file, lambda header: header["tokens"].update(dtype="F64"))
    refused(file, "not one that Tokenwright wrote")
    rewritten(file, lambda header: header["tokens"].update(dtype="I64", shape=[1, *header["tokens"]["shape"]]))
    refused(file, "not one that Tokenwright wrote")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("version", "0", "version '0' of the format, and this Tokenwright reads 2"),
        ("format", "other", "not a cache file"),
        ("pages", "[[0, 1, 9000], [2]]", "not one that Tokenwright wrote"),
        ("pages", "[[0, 1, 3], [2]]", "not one that Tokenwright wrote"),
        ("pages", "[[0, 1, 1], [2]]", "not one that Tokenwright wrote"),
        ("pages", "[[0, 1, -1], [2]]", "not one that Tokenwright wrote"),
        ("pages", "[[0, 1], [2]]", "not one that Tokenwright wrote"),
        ("pages", "[[0, 1, 2]]", "not one that Tokenwright wrote"),
        ("pages", "[[0, 1, 1e999], [2]]", "not one that Tokenwright wrote"),
        ("pages", "nothing", "not one that Tokenwright wrote"),
        ("pages", "[" * 100_000, "not one that Tokenwright wrote"),
        ("about", "[]", "not one that Tokenwright wrote"),
        ("about", "{", "not one that Tokenwright wrote"),
    ],
)
def test_a_forged_file_is_refused(file: Path, key: str, value: str, words: str) -> None:
    rewritten(file, lambda header: header["__metadata__"].update({key: value}))
    refused(file, words)


@pytest.mark.parametrize("key", ["sha256", "about", "pages", "version"])
def test_a_file_that_lacks_a_word_is_refused(file: Path, key: str) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"][key]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    refused(file, "not one that Tokenwright wrote|version None")


def test_tensors_of_another_kind_are_refused(file: Path) -> None:
    wider = [[SHAPES[0][0].astype(np.float32), SHAPES[0][1]], SHAPES[1]]
    with pytest.raises(CacheFileError, match="not one that Tokenwright wrote"):
        load(file, ABOUT, wider)
    with pytest.raises(CacheFileError, match="not one that Tokenwright wrote"):
        load(file, ABOUT, [*SHAPES, SHAPES[0]])


def test_other_safetensors_are_no_cache(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(3)}, path)
    refused(path, "not a cache file")
    refused(tmp_path / "absent.kv", "No such file")


def test_a_long_name_of_letters_that_take_three_bytes_is_saved(tmp_path: Path) -> None:
    path = tmp_path / ("話" * 80)
    save(path, made(), ABOUT)
    assert list(tmp_path.iterdir()) == [path]


def test_names_that_are_no_files_are_refused(tmp_path: Path, file: Path) -> None:
    link, pipe = tmp_path / "link.kv", tmp_path / "pipe.kv"
    link.symlink_to(file)
    os.mkfifo(pipe)
    before = file.read_bytes()
    for path, words in [
        (link, "symbolic link"),
        (pipe, "a device or a pipe"),
        (tmp_path, "folder"),
        (Path("/dev/zero"), "a device or a pipe"),
        (Path("a\0b"), "NUL"),
        (tmp_path / ("n" * 4096), "name too long"),
    ]:
        with pytest.raises(CacheFileError, match=f"(?i){words}"):
            load(path, ABOUT, SHAPES)
        with pytest.raises(CacheFileError, match=f"(?i){words}"):
            save(path, made(), ABOUT)
    with pytest.raises(CacheFileError, match="there is no folder"):
        save(tmp_path / "absent" / "chat.kv", made(), ABOUT)
    assert file.read_bytes() == before and link.is_symlink()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS], ids=os.strerror)
@pytest.mark.parametrize("name", ["draft_file", "_write", "_sync_folder"])
def test_a_failing_disk_leaves_the_old_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """A fault at each write. When the folder cannot be synced, the new file is already there, and whole."""

    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(snapshot, name, failing)
    with pytest.raises(CacheFileError, match=os.strerror(number)):
        save(file, made(seed=9), ABOUT)
    monkeypatch.undo()
    assert same(made(seed=9 if name == "_sync_folder" else 0), load(file, ABOUT, SHAPES))
    assert [one.name for one in file.parent.iterdir()] == ["chat.kv"], "no draft stays"


def test_a_disk_that_fails_while_the_file_is_read_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk(io.FileIO):
        def readinto(self, _: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(snapshot, "open_regular", lambda path, **_: Disk(path))
    refused(file, os.strerror(errno.EIO))


def test_a_file_that_is_deleted_while_it_is_read_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(path: Path, *, links: bool) -> io.BufferedReader:
        stream = open_regular(path, links=links)
        path.unlink()
        return stream

    monkeypatch.setattr(snapshot, "open_regular", opened)
    assert same(made(), load(file, ABOUT, SHAPES))
    assert not file.exists()


def _write_for_ever(path: Path, snapshots: list[Snapshot], ready: "multiprocessing.synchronize.Event") -> None:
    ready.set()
    while True:
        for one in snapshots:
            save(path, one, ABOUT)


def test_killed_while_saving_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    """Writers are killed at random moments; what is there is whole each time, and their drafts are cleared away."""
    path, rng = tmp_path / "chat.kv", random.Random(0)
    whole = [made(seed, pages=400) for seed in (1, 2)]
    save(path, whole[0], ABOUT)
    began = time.perf_counter()
    save(path, whole[0], ABOUT)
    usual = time.perf_counter() - began  # without what the first call imports
    context = multiprocessing.get_context("fork")
    seen = set()
    for _ in range(share(200)):
        ready = context.Event()
        writer = context.Process(target=_write_for_ever, args=(path, whole, ready))
        writer.start()
        ready.wait()
        time.sleep(rng.random() * 6 * usual)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        found = load(path, ABOUT, SHAPES)
        seen.add([same(one, found) for one in whole].index(True))
    assert seen == {0, 1}, "the kills came before and after renamings"
    save(path, whole[0], ABOUT)
    assert [one.name for one in tmp_path.iterdir()] == ["chat.kv"], "drafts of the killed are gone"


def test_the_draft_of_a_living_writer_is_left_alone(file: Path) -> None:
    draft = file.with_name(".chat.kv.draft-1-1")
    with draft.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        save(file, made(seed=3), ABOUT)
        assert draft.exists()


def test_threads_that_save_to_one_place_leave_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.kv"
    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(save, path, made(seed, pages=50), ABOUT) for seed in range(12)]:
            done.result()
    assert any(same(made(seed, pages=50), load(path, ABOUT, SHAPES)) for seed in range(12))
    assert [one.name for one in tmp_path.iterdir()] == ["chat.kv"]


def test_a_draft_that_is_begun_after_it_was_listed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that save to one place list each other's drafts between their making and their locking."""
    path, made_before = tmp_path / "chat.kv", tmp_path / ".chat.kv.draft-1-2"
    made_before.touch()
    assert abandoned(tmp_path) == [made_before]
    with made_before.open() as file:
        monkeypatch.setattr(regular_file, "abandoned", lambda *_: [made_before])
        fcntl.flock(file, fcntl.LOCK_EX)
        regular_file.sweep(tmp_path, path.name)
        assert made_before.exists()
    regular_file.sweep(tmp_path, path.name)
    assert not made_before.exists()
