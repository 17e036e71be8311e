"""A text's pages between an engine's pool and a file (`cache/snapshot.py`), by their names.

What is saved is found by name, so a text need not be running; what is loaded lies in the pool as pages that nobody
holds, and the next text that begins so finds them like any others.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenwright.cache import KVStore
from tokenwright.cache.snapshot import Snapshot, load, save
from tokenwright.driver import Driver
from tokenwright.errors import CapacityError


def save_pages(
    path: Path, driver: Driver, store: KVStore, tokens: Sequence[int], salt: bytes, about: Mapping[str, str]
) -> int:
    """Write the full pages that the pool has of a text; how many tokens they spare. 0: none, and no file."""
    with driver.between_turns() as engine:
        spared, held = engine.prefixes.find_pages(engine.prefixes.hashes(salt), tokens)
        contents = [store.read(group, list(table.values())) for group, table in enumerate(held)]
    if spared:
        save(path, Snapshot(tuple(tokens[:spared]), [list(table) for table in held], contents), about)
    return spared


def load_pages(
    path: Path, driver: Driver, store: KVStore, salt: Callable[[int], bytes], about: Mapping[str, str]
) -> int:
    """Put a file's pages into the pool; how many tokens they spare. `salt` is that of a text of so many tokens."""
    found = load(path, about, [store.read(group, [0]) for group in range(len(store.groups))])
    with driver.between_turns() as engine:
        hashes = engine.prefixes.hashes(salt(len(found.tokens)))
        fresh = engine.prefixes.missing_pages(hashes, found.tokens, found.pages)
        if fresh is None:
            raise CapacityError(
                f"{path} holds {len(found.tokens)} tokens, for which the KV cache has too few free pages; grant it "
                "more (pages or kv_memory), or a larger token_budget"
            )
        contents = [
            tuple(part[:, [list(pages).index(page) for page in chosen]] for part in parts)
            for parts, pages, chosen in zip(found.contents, found.pages, fresh, strict=True)
        ]
        engine.prefixes.insert_pages(hashes, found.tokens, fresh, contents)
        spared, _ = engine.prefixes.find_pages(hashes, found.tokens)
    return spared
