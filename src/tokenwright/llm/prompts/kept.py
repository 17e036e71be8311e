"""Finds how much of remembered texts the KV cache has now, in memory and on the disk, and a client's pins."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from tokenwright.engine.pictures import Spans
from tokenwright.engine.prefix_index import PrefixHashes

if TYPE_CHECKING:
    from tokenwright.engine import Engine

MOST_HASHED = 32  # texts whose hashes are remembered
Hashed = tuple[Sequence[int], PrefixHashes]


class KeptText(NamedTuple):
    """A remembered text, by the name of its answer. ids: uint32, or None if the hashes are known. root: of these."""

    name: str
    ids: bytes | None
    root: bytes
    page_size: int
    pictures: Spans = ()


class KeptTokens(NamedTuple):
    """For each text its tokens in memory, and further ones on the disk. pins: session, tokens, seconds left."""

    texts: tuple[tuple[int, int], ...]
    pins: tuple[tuple[str, int, int], ...]


class KeptHashes:
    """The hashes of the last texts: a page asks for the same ones each second. Thread-safe."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, Hashed] = OrderedDict()
        self._lock = Lock()

    def of(self, text: KeptText) -> Hashed | None:
        """The hashes of a text; None for one without ids that is not remembered."""
        with self._lock:
            if text.name in self._texts:
                self._texts.move_to_end(text.name)
                return self._texts[text.name]
        if text.ids is None:
            return None
        tokens, hashes = array("I", text.ids), PrefixHashes(text.root, text.page_size, pictures=text.pictures)
        hashes.extend(tokens)
        with self._lock:
            self._texts[text.name] = tokens, hashes
            if len(self._texts) > MOST_HASHED:
                self._texts.popitem(last=False)
        return tokens, hashes


def kept_in(texts: Sequence[Hashed], owner: str) -> "Callable[[Engine], KeptTokens]":
    """A function that looks in an engine for texts, and for the pins of an owner."""

    def look(engine: "Engine") -> KeptTokens:
        prefixes, pins = engine.prefixes, engine.scheduler.kv.pins
        each = []
        for tokens, hashes in texts:
            full = len(hashes.hashes) * hashes.page_size
            memory = both = prefixes.match_prefix(hashes, tokens, max(0, len(tokens) - 1))
            if prefixes.tier is not None:
                both = prefixes.match_prefix(hashes, tokens, full, tier=prefixes.tier)
            each.append((memory, max(0, both - memory)))
        its = ((one.session, one.tokens, max(0, round(one.until - pins.clock()))) for one in pins if one.owner == owner)
        return KeptTokens(tuple(each), tuple(its))

    return look


def all_kept(found: Sequence[KeptTokens], texts: int) -> KeptTokens:
    """The result over replicas: for each text the most that one has, as the router sends it there; all pins."""
    each = tuple(max((one.texts[at] for one in found), default=(0, 0)) for at in range(texts))
    left: dict[tuple[str, int], int] = {}
    for session, tokens, left_s in (pin for one in found for pin in one.pins):
        left[session, tokens] = max(left_s, left.get((session, tokens), 0))
    return KeptTokens(each, tuple((*key, left_s) for key, left_s in left.items()))
