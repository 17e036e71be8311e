"""Pages in files without a name: their quota, the disk's last tenth, damage, a full disk, and that nothing is left."""

import errno
import os

import pytest

from tests.cache.test_page_folder import SIZE, contents, key
from tokenwright.cache import page_file
from tokenwright.cache.page_file import PageFile, disk_place
from tokenwright.cache.page_folder import OVERHEAD, taken
from tokenwright.errors import RequestError

SLOT = taken(OVERHEAD + SIZE)


def read(file, one, size=SIZE):
    whole = memoryview(bytearray(OVERHEAD + size + 1))
    return bytes(whole[OVERHEAD:-1]) if file.read(one, whole) else None


def write(file, *numbers):
    return file.write([(key(n), contents(n)) for n in numbers])


@pytest.fixture
def file(tmp_path):
    found = PageFile(tmp_path, 8 * SLOT, b"m" * 32)
    yield found
    found.close()


def test_pages_come_back_and_the_folder_stays_empty(file, tmp_path):
    assert write(file, 1, 2) == 2 and write(file, 2, 3) == 1
    small = [(key(9, 1), contents(9, 100))]  # of another group
    assert file.write(small) == 1 and read(file, *small[0][:1], size=100) == contents(9, 100)
    assert [read(file, key(n)) for n in (1, 2, 3, 4)] == [*map(contents, (1, 2, 3)), None]
    assert file.held([key(1), key(4)]) == [True, False]
    assert not list(tmp_path.iterdir()), "no file has a name at any moment"
    assert file.used == 3 * SLOT + taken(OVERHEAD + 100)


def test_the_page_used_longest_ago_leaves_at_the_quota(file):
    write(file, *range(8))
    file.touch([key(0), key(1)])
    assert write(file, 8) == 1 and file.used == 8 * SLOT
    assert file.held([key(0), key(1), key(2), key(3)]) == [True, True, False, True]
    write(file, *range(9, 14))
    assert file.held([key(0), key(1)]) == [True, True]
    write(file, 14)
    assert file.held([key(0), key(1)]) == [True, False], "the end of a text leaves first"
    assert read(file, key(14)) == contents(14) and read(file, key(2)) is None


def test_it_never_grows_into_the_last_tenth_of_the_disk(file, monkeypatch):
    status = os.statvfs(file.folder)
    assert page_file.free_of(status) == max(0, (status.f_bavail - status.f_blocks // 10) * status.f_frsize)
    monkeypatch.setattr(page_file, "free_of", lambda _: 0)
    assert write(file, 0) == 0 and file.used == 0
    monkeypatch.setattr(page_file, "free_of", lambda _: SLOT)
    assert write(file, 0) == 1
    monkeypatch.setattr(page_file, "free_of", lambda _: SLOT - 1)
    assert write(file, 1) == 1 and file.held([key(0), key(1)]) == [False, True], "in the place of an older page"


def test_damage_is_noticed_and_mended_by_the_next_write(file, caplog):
    write(file, 1, 2)
    place, _ = file._files[SLOT]
    for slot in range(2):
        os.pwrite(place, b"?", slot * SLOT + OVERHEAD + 77)
    assert read(file, key(1)) is None and read(file, key(2)) is None and not file.pages
    assert len(caplog.records) == 1
    assert write(file, 1) == 1 and read(file, key(1)) == contents(1)


@pytest.mark.parametrize("fault", ["full", "short"])
def test_a_full_disk_loses_no_slot(file, monkeypatch, fault):
    def pwritev(place, data, at):
        if fault == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data[0])

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", pwritev)
        for n in range(3):
            with pytest.raises(OSError, match="No space left"):
                write(file, n)
    assert not file.pages and file.used == SLOT, "the same slot is tried"
    assert write(file, *range(8)) == 8 and [read(file, key(n)) for n in range(8)] == [contents(n) for n in range(8)]


def test_a_place_is_on_a_disk_with_room(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path))
    folder, quota = disk_place(None)
    assert folder == tmp_path / "kv" and not list(folder.iterdir())
    assert abs(quota - page_file.free_of(os.statvfs(tmp_path)) // 2) < 1 << 30
    assert disk_place(64 << 20) == (folder, 64 << 20)
    with pytest.raises(RequestError, match="kv_disk_size"):
        disk_place(1000)
    device = tmp_path.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    (tmp_path / "mounts").write_text(f"31 23 {name} / /x rw - tmpfs t rw\n32 23 0:99 / /y rw shared:3 - ext4 d rw\n")
    assert page_file._devices_in_memory(tmp_path / "mounts") == {name}
    monkeypatch.setattr(page_file, "_folders", lambda: [tmp_path / "mounts" / "none", tmp_path])
    assert disk_place(None) is not None, "the first folder cannot be made"
    monkeypatch.setattr(page_file, "_devices_in_memory", lambda: {name})
    assert disk_place(None) is None
