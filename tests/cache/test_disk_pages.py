"""The page tier on a disk: contents of many dtypes and shapes come back by their hashes, whatever is missing."""

import math
import random

import numpy as np
import pytest

from tokenwright.arrays import BFLOAT16, FLOAT8_E4M3, aligned_bytes, place_of
from tokenwright.backends.native.library import page_unpacker
from tokenwright.cache import disk_pages
from tokenwright.cache.disk_pages import DiskPages
from tokenwright.cache.page_folder import PageFolder, row_keys, sums_of
from tokenwright.cache.page_writer import QUEUE

PAGES = 50
SHAPES = [  # [layers, page_size, ...] and dtype of each array, by group
    [((3, 4, 2, 8), BFLOAT16), ((3, 4, 2, 8), BFLOAT16)],
    [((1, 4, 2, 8), np.dtype(np.int8)), ((1, 4, 2, 1), np.dtype(np.float16)), ((1, 4, 2, 8), FLOAT8_E4M3)],
    [((2, 4, 1, 7), np.dtype(np.float32))],
]


def group_of(shapes, pages):
    """Random contents of some pages: [layers, n, ...] each."""
    draw = np.random.default_rng(0)
    return [
        draw.integers(0, 256, (layers, pages, *rest, dtype.itemsize), np.uint8).view(dtype)[..., 0]
        for (layers, *rest), dtype in shapes
    ]


@pytest.fixture
def contents():
    return [group_of(shapes, PAGES) for shapes in SHAPES]


class Memory:
    """Zeros in place of contents, and some pages more; a page is written by NumPy or the library."""

    def __init__(self, contents):
        self.groups = [
            [np.zeros((len(part), 3 * PAGES, *part.shape[2:]), part.dtype) for part in parts] for parts in contents
        ]

    def arrays(self, group):
        return self.groups[group]

    def write(self, group, pages, contents):
        for whole, content in zip(self.groups[group], contents, strict=True):
            assert content.dtype == whole.dtype and content.shape == whole[:, pages].shape
            whole[:, pages] = content


@pytest.fixture(params=["by NumPy", "by the library"])
def disk(tmp_path, contents, request):
    unpack = page_unpacker() if request.param == "by the library" else None
    if unpack is None and request.param == "by the library":
        pytest.skip("this installation has none")
    like = [[part[:, :1] for part in parts] for parts in contents]
    found = DiskPages(PageFolder(tmp_path, 1 << 30, bytes(32)), like, 4, unpack)
    yield found
    found.close()


HASHES = [number.to_bytes(32, "big") for number in range(PAGES)]


def written(disk, contents):
    for group, parts in enumerate(contents):
        disk.write(group, HASHES, parts)
    disk.writer.flush()


def test_contents_come_back_to_the_byte_without_those_that_are_missing(disk, contents, monkeypatch):
    monkeypatch.setattr(disk_pages, "READ_S", math.inf)  # a busy machine reads on
    written(disk, contents)
    draw = random.Random(1)
    gone = set(draw.sample(range(PAGES), 7)) | {0, 16, PAGES - 1}
    for number in gone:
        (disk.folder.folder / disk.folder._name(disk_pages.page_key(HASHES[number], 1))).unlink()
    for group, parts in enumerate(contents):
        order = draw.sample(range(PAGES), PAGES)
        there = [number for number in order if group != 1 or number not in gone]
        memory, pages = Memory(contents), draw.sample(range(3 * PAGES), PAGES)
        good = disk.read(group, [HASHES[number] for number in order], memory, pages)
        assert [order[index] for index in good] == there
        pages = [pages[index] for index in good]
        for place, part in zip(memory.groups[group], parts, strict=True):
            assert place[:, pages].tobytes() == part[:, there].tobytes()
            place[:, pages] = np.zeros((), part.dtype)
            assert not place.view(np.uint8).any(), "no other page was written to"
        assert disk.held(group, HASHES) == [number in there for number in range(PAGES)]
        assert disk.wanted(group, HASHES) == [number for number in range(PAGES) if number not in there]


def test_a_step_reads_for_a_limited_time(disk, contents, monkeypatch):
    written(disk, contents)
    monkeypatch.setattr(disk_pages, "READ_S", 0.0)
    found = disk.read(0, HASHES, Memory(contents), range(PAGES))
    assert found in ([0], [0, 1]), "a page of each helper, so that it gets on"


@pytest.mark.parametrize("length", [0, 8, 4095, 4096, 4097, 3 * 4096, 9 * 4096 + 40])
def test_the_library_hashes_and_copies_as_numpy_does(length):
    """Pieces of many lengths, longer than a row of words and shorter, on the borders of cache lines and elsewhere."""
    if (unpack := page_unpacker()) is None:
        pytest.skip("this installation has none")
    draw = random.Random(length)
    contents = aligned_bytes(length + 64)[: length + 64]
    contents[:] = np.frombuffer(draw.randbytes(length + 64), np.uint8)
    for first in (0, 1):
        source, parts, left = contents[first : first + length], [], length
        while left:
            nbytes = min(draw.choice([7, 64, 256, 320, 4096, 9024]), left)
            parts.append((draw.randint(1, min(9, left // nbytes)), nbytes + draw.choice([0, 64]), nbytes))
            left -= parts[-1][0] * nbytes
        memory = aligned_bytes(2 * length + 64 * 9 * len(parts))
        memory[:] = 0
        places, wanted, start, at = [], memory.copy(), 0, 0
        for pieces, apart, nbytes in parts:
            places.append((place_of(memory) + start, pieces, apart, nbytes))
            for _ in range(pieces):
                wanted[start : start + nbytes] = source[at : at + nbytes]
                start, at = start + apart, at + nbytes
        keys = row_keys(bytes([length % 256]) * 32)
        sums = unpack(source.data, np.array(places, np.int64).reshape(-1, 4), keys)
        assert sums.tobytes() == sums_of(source.data, keys).tobytes()
        assert sums.tobytes() == unpack(source.data, np.empty((0, 4), np.int64), keys).tobytes()
        assert memory.tobytes() == wanted.tobytes()


def test_the_queue_is_bounded(disk, contents):
    disk.writer.stop()
    disk.writer._thread.join()  # nobody writes
    disk.writer.closing = False
    disk.writer.nbytes = QUEUE - 5 * disk._layouts[0].nbytes
    assert disk.wanted(0, HASHES) == list(range(5))
    disk.write(0, HASHES[:5], [part[:, :5] for part in contents[0]])
    assert disk.wanted(0, HASHES) == []


def test_a_page_that_waits_is_not_wanted_again(disk, contents, monkeypatch):
    monkeypatch.setattr(disk.writer, "put", lambda pages: disk.writer.waiting.update(page.key for page in pages))
    disk.write(0, HASHES[:5], [part[:, :5] for part in contents[0]])
    assert disk.wanted(0, HASHES[:7]) == [5, 6]


def test_pages_of_many_processes_are_found(tmp_path, disk, contents):
    """Another process writes after this one has looked at the folder."""
    like = [[part[:, :1] for part in parts] for parts in contents]
    other = DiskPages(PageFolder(tmp_path, 1 << 30, bytes(32)), like, 4)
    written(other, contents)
    other.close()
    assert all(disk.held(0, HASHES))
    disk.used(0, HASHES)
    disk.writer.flush()
    assert len(disk.folder.pages) == 3 * PAGES, "by the next change it knows them all"


def test_what_is_worth_its_bytes(disk):
    assert disk.worth_reading(1, 10**12), "nothing was measured yet"
    disk._disk.add(1e9, 1.0)
    assert disk.worth_reading(1, 10**12), "the model was not"
    disk.computed(8, 1.0)
    assert disk._model.value is None, "too few tokens to tell"
    disk.computed(1000, 1.0)
    assert disk.worth_reading(1, 999_000) and not disk.worth_reading(1, 1_001_000)
    disk._disk.at -= disk_pages.STALE_S + 1
    assert disk.worth_reading(1, 1_001_000), "measured again"
