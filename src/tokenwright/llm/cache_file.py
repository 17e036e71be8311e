"""Saves a text's pages from an engine's pool to a file (`cache/snapshot.py`), and loads them, by their prefix hashes.

`save_pages` finds the pages by prefix hash, so the text need not be running. `load_pages` inserts them into the pool as
cached pages without references; a later text with the same prefix finds them like any others.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenwright.cache import KVStore
from tokenwright.cache.snapshot import Snapshot, load, save
from tokenwright.engine import Engine
from tokenwright.engine.loop import EngineLoop
from tokenwright.errors import CapacityError


def save_pages(
    path: Path, loop: EngineLoop, store: KVStore, tokens: Sequence[int], salt: bytes, about: Mapping[str, str]
) -> int:
    """Save the cached pages of a text; returns the number of tokens they cover. 0: none cached, and no file.

    Raises CacheFileError if the file cannot be written.
    """

    def read(engine: Engine[Any]) -> Snapshot:
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
    """Load a file's pages into the pool; returns the number of tokens they cover. `salt(n)`: of a text of n tokens.

    Raises CacheFileError for a damaged or unsuitable file, CapacityError if the pool has too few free pages.
    """
    like = loop.call(lambda _: [store.read(group, [0]) for group in range(len(store.groups))])
    found = load(path, about, like, store.page_size)

    def write(engine: Engine[Any]) -> int | None:
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
