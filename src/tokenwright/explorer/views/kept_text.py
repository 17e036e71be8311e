"""How much of a remembered text the KV cache has now, in memory and on the disk, and a client's pins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenwright.engine.prefix_index import PrefixHashes

if TYPE_CHECKING:
    from tokenwright.engine import Engine
    from tokenwright.llm.llm import LLM
    from tokenwright.llm.prompts.memory import PromptRecord


def kept_of(llm: LLM, record: PromptRecord) -> tuple[int, int]:
    """Tokens of a text in memory, and the further ones whose pages are on the disk."""
    ids, hashes = record.ids.tolist(), PrefixHashes(record.root, record.page_size, pictures=record.pictures)
    found = hashes.extend(ids)

    def look(engine: Engine[Any]) -> tuple[int, int]:
        prefixes, size = engine.prefixes, record.page_size
        memory = prefixes.match_prefix(hashes, ids, max(0, len(ids) - 1))
        both = (
            memory
            if prefixes.tier is None
            else prefixes.match_prefix(hashes, ids, len(found) * size, tier=prefixes.tier)
        )
        return memory, max(0, both - memory)

    return llm.inspect(look)


def pins_of(llm: LLM, owner: str) -> list[tuple[str, int, int]]:
    """A client's pins: session, tokens, seconds left."""

    def look(engine: Engine[Any]) -> list[tuple[str, int, int]]:
        pins = engine.scheduler.kv.pins
        now = pins.clock()
        return [(pin.session, pin.tokens, max(0, round(pin.until - now))) for pin in pins if pin.owner == owner]

    return llm.inspect(look)
