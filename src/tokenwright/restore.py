"""A text's pages between an engine's pool and a file (`cache/snapshot.py`), by their names.

What is saved is found by name, so a text need not be running; what is loaded lies in the pool as pages that nobody
holds, and the next text that begins so finds them like any others.
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
    """Write the full pages that the pool has of a text; how many tokens they spare. 0: none, and no file."""

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
    """Put a file's pages into the pool; how many tokens they spare. `salt` is that of a text of so many tokens."""
    like = loop.call(lambda _: [store.read(group, [0]) for group in range(len(store.groups))])
    found = load(path, about, like)

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
