"""How much of remembered texts the KV cache has now, in memory and on the disk, and a client's pins."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenwright.engine.pictures import Spans
from tokenwright.engine.prefix_index import PrefixHashes

if TYPE_CHECKING:
    from tokenwright.engine import Engine


class KeptText(NamedTuple):
    """A remembered text. ids: as uint32. root: of its hashes."""

    ids: bytes
    root: bytes
    page_size: int
    pictures: Spans = ()


class KeptTokens(NamedTuple):
    """texts: tokens of each in memory, and further ones on the disk. pins: session, tokens, seconds left."""

    texts: tuple[tuple[int, int], ...]
    pins: tuple[tuple[str, int, int], ...]


def kept_in(texts: Sequence[KeptText], owner: str) -> "Callable[[Engine[Any]], KeptTokens]":
    """Looks for texts, and for the pins of an owner, in an engine. Hashes the texts at once."""
    hashed = []
    for ids, root, page_size, pictures in texts:
        tokens, hashes = memoryview(ids).cast("I").tolist(), PrefixHashes(root, page_size, pictures=pictures)
        hashed.append((tokens, hashes, len(hashes.extend(tokens)) * page_size))

    def look(engine: "Engine[Any]") -> KeptTokens:
        prefixes, pins = engine.prefixes, engine.scheduler.kv.pins
        each = []
        for tokens, hashes, full in hashed:
            memory = both = prefixes.match_prefix(hashes, tokens, max(0, len(tokens) - 1))
            if prefixes.tier is not None:
                both = prefixes.match_prefix(hashes, tokens, full, tier=prefixes.tier)
            each.append((memory, max(0, both - memory)))
        its = ((one.session, one.tokens, max(0, round(one.until - pins.clock()))) for one in pins if one.owner == owner)
        return KeptTokens(tuple(each), tuple(its))

    return look


def all_kept(found: Sequence[KeptTokens], texts: int) -> KeptTokens:
    """As the router of replicas finds it: it sends a text where most of it is, and pins may be with several."""
    each = tuple(max((one.texts[at] for one in found), default=(0, 0)) for at in range(texts))
    left: dict[tuple[str, int], int] = {}
    for session, tokens, left_s in (pin for one in found for pin in one.pins):
        left[session, tokens] = max(left_s, left.get((session, tokens), 0))
    return KeptTokens(each, tuple((*key, left_s) for key, left_s in left.items()))
