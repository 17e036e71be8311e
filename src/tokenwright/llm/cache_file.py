"""Saves an engine's pages of one text (`cache/snapshot.py`), and opens its page tier (`cache/disk_pages.py`)."""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any

from tokenwright.arrays import populate
from tokenwright.backends.native.library import find, page_unpacker
from tokenwright.cache import HOST, KVStore
from tokenwright.cache.disk_pages import DiskPages
from tokenwright.cache.page_file import PageFile, disk_place
from tokenwright.cache.page_folder import PageFolder
from tokenwright.cache.snapshot import Snapshot, load, save
from tokenwright.config import AUTO_DISK, KV_DISK_SIZE, EngineConfig
from tokenwright.engine import Engine, Output, Runner, Step
from tokenwright.engine.loop import EndStep, EngineLoop
from tokenwright.errors import CapacityError

_POPULATED = 256 << 20  # bytes of a group


def save_pages(
    path: Path, loop: EngineLoop, store: KVStore, tokens: Sequence[int], salt: bytes, about: Mapping[str, str]
) -> int:
    """Save a text's cached pages; return how many tokens they cover, without a file if 0. Raises CacheFileError."""

    def read(engine: Engine) -> Snapshot:
        spared, held = engine.prefixes.find_pages(engine.prefixes.hashes(salt), tokens)
        contents = [store.read(group, list(table.values())) for group, table in enumerate(held)]
        return Snapshot(tuple(tokens[:spared]), [list(table) for table in held], contents)

    found = loop.call(read)
    if found.tokens:
        save(path, found, about)
    return len(found.tokens)


def load_pages(
    path: Path, loop: EngineLoop, store: KVStore, salt: Callable[[int], bytes], about: Mapping[str, str]
) -> int:
    """Load pages into the pool as cached; return how many tokens they cover. `salt(n)`: the salt of n tokens."""
    like = loop.call(lambda _: [store.read(group, [0]) for group in range(len(store.groups))])
    found = load(path, about, like, store.page_size)

    def write(engine: Engine) -> int | None:
        hashes = engine.prefixes.hashes(salt(len(found.tokens)))
        fresh = engine.prefixes.missing_pages(hashes, found.tokens, found.pages)
        if fresh is None:
            return None
        contents = [
            tuple(part[:, [list(pages).index(page) for page in chosen]] for part in parts)
            for parts, pages, chosen in zip(found.contents, found.pages, fresh, strict=True)
        ]
        engine.prefixes.insert_pages(hashes, found.tokens, fresh, contents)
        return engine.prefixes.find_pages(hashes, found.tokens)[0]

    spared = loop.call(write)
    if spared is None:
        raise CapacityError(
            f"{path} holds {len(found.tokens)} tokens, for which the KV cache has too few free pages; grant it "
            "more (pages or kv_memory), or a larger token_budget"
        )
    return spared


def open_disk(folder: str, options: EngineConfig, store: KVStore, about: Mapping[str, str]) -> DiskPages | None:
    """The tier of an engine; None if no disk has room for auto. Its pages depend on `about` and on their tokens."""
    like = [store.read(group, [0]) for group in range(len(store.groups))]
    model = sha256(json.dumps(dict(about) | _program(about["kernels"]), sort_keys=True).encode()).digest()
    host, unpack = store.memory is HOST, page_unpacker()
    files: PageFolder | PageFile
    if folder != AUTO_DISK:
        files = PageFolder(Path(folder).expanduser(), options.kv_disk_size or KV_DISK_SIZE, model)
    elif found := disk_place(options.kv_disk_size):
        files = PageFile(*found, model)
    else:
        return None
    disk = DiskPages(files, like, options.page_size, unpack if host else None)
    if unpack is not None:
        disk.hash_with(unpack)
    if host:
        Thread(target=_populate, args=(store, len(disk.folder.pages)), daemon=True).start()
    return disk


def _populate(store: KVStore, pages: int) -> None:
    """Touch the memory of the first pages to be read: mapping it takes the system longer than the copy."""
    for number, group in enumerate(store.groups):
        count = min(pages, store.pages[number], _POPULATED // group.page_bytes(store.page_size))
        for whole in store.arrays(number):
            for layer in whole:
                populate(layer[:count])


def _program(kernels: str) -> dict[str, str]:
    """The build that computes K and V: another one may round otherwise, so it must not read the pages."""
    if kernels == "reference":
        from importlib.metadata import version

        return {"torch": version("torch")}
    library = find()
    assert library is not None, "native kernels come from a library"
    return {"library": sha256(library.read_bytes()).hexdigest()}


class StepClock:
    """Reports each step's tokens and seconds to a tier and to `end_step`."""

    def __init__(self, runner: Runner[Any], disk: DiskPages, end_step: EndStep | None) -> None:
        self._runner = runner
        self._disk = disk
        self._next = end_step
        self._tokens = 0

    def forward(self, step: Step) -> Output[Any]:
        self._tokens = step.size
        return self._runner.forward(step)

    def end_step(self, began: float, ended: float) -> None:
        self._disk.computed(self._tokens, ended - began)
        self._tokens = 0
        if self._next is not None:
            self._next(began, ended)
