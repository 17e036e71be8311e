"""Stores responses that later requests of their key may name, as JSON, which takes a tenth of the objects' memory.

The oldest responses of the key that holds most are evicted first, so a key keeps its equal share.
"""

import json
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from tokenwright.serve.http.api import RefusedRequest
from tokenwright.serve.http.reply_text import dumps
from tokenwright.serve.openai.responses.bodies import HostedItem, Item, ItemReference
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.types import Problem

KEPT_S = 86_400.0
MOST_BYTES = 64 * 2**20  # in all, by default
AROUND = 256  # bytes of the objects around a text, at most

Json = dict[str, Any]
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class StoredItem(NamedTuple):
    id: str
    text: bytes  # its JSON

    @classmethod
    def of(cls, item: Json) -> "StoredItem":
        return cls(item["id"], dumps(item).encode())


def read_items(stored: Iterable[StoredItem]) -> list[Item]:
    """Parse items as a request's, in linear time."""
    return _ITEMS.validate_python([json.loads(one.text) for one in stored])


@dataclass(frozen=True, slots=True)
class StoredResponse:
    id: str
    status: str
    text: bytes
    items: tuple[StoredItem, ...]  # of the conversation that it was asked with
    output: tuple[StoredItem, ...]
    size: int  # bytes of all, shared ones included
    at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, response: Json, items: Sequence[StoredItem]) -> "StoredResponse":
        """Create one; a conversation has neither status nor output."""
        text, output = dumps(response).encode(), tuple(map(StoredItem.of, response.get("output", ())))
        size = len(text) + AROUND + sum(len(one.text) + AROUND for one in (*items, *output))
        return cls(response["id"], response.get("status", ""), text, tuple(items), output, size)


class StoredResponses:
    """The responses of a server, by key and id, used by one event loop. most: bytes; 0: store nothing."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = most
        self.sizes: Counter[str] = Counter()  # bytes of each key
        self._found: defaultdict[str, OrderedDict[str, StoredResponse]] = defaultdict(OrderedDict)
        self.running: dict[tuple[str, str], Generation] = {}

    def get(self, key: str, identity: str, *, conversation: bool = False) -> StoredResponse | None:
        """A response or conversation of this key, or None."""
        self._expire()
        found = self._found[key].get(identity)
        return None if found is None or conversation == bool(found.status) else found

    def found(self, key: str, identity: str, param: str, *, conversation: bool = False) -> StoredResponse:
        """As `get`, but raises RefusedRequest if there is none. param: the field that names it."""
        if (found := self.get(key, identity, conversation=conversation)) is not None:
            return found
        what = "conversation" if conversation else "response"
        problem = Problem(404, "missing", f"{param}: no {what} {identity[:100]!r} is stored here", param)
        if param == "previous_response_id":
            problem = replace(problem, status=400, kind="invalid", code="previous_response_not_found")
        raise RefusedRequest(problem)

    def extend(self, key: str, found: StoredResponse, items: Sequence[StoredItem]) -> None:
        """Append items to a conversation."""
        size = found.size + sum(len(one.text) + AROUND for one in items)
        self.add(key, replace(found, items=(*found.items, *items), size=size, at=time.monotonic()))

    def add(self, key: str, stored: StoredResponse) -> None:
        self.remove(key, stored.id)
        if stored.size > self.most:
            return
        self._found[key][stored.id] = stored
        self.sizes[key] += stored.size
        self._expire()
        while self.sizes.total() > self.most:
            largest = self.sizes.most_common(1)[0][0]
            self.remove(largest, next(iter(self._found[largest])))

    def remove(self, key: str, identity: str) -> bool:
        stored = self._found[key].pop(identity, None)
        self.sizes[key] -= 0 if stored is None else stored.size
        return stored is not None

    def resolved(self, key: str, items: Sequence[Item]) -> Iterator[Item]:
        """Replace references to items by the stored items, if found."""
        wanted = {item.id for item in items if isinstance(item, ItemReference)}
        stored = list(self._found[key].values()) if wanted else []  # at once: this may be another thread
        found = {item.id: item for one in stored for item in (*one.items, *one.output) if item.id in wanted}
        read = zip(found, read_items(found.values()), strict=True)
        known = {identity: item for identity, item in read if not isinstance(item, HostedItem)}
        for item in items:
            yield known.get(item.id, item) if isinstance(item, ItemReference) else item

    def _expire(self) -> None:
        oldest = time.monotonic() - KEPT_S
        for key, own in self._found.items():
            while own and next(iter(own.values())).at < oldest:
                self.remove(key, next(iter(own)))
