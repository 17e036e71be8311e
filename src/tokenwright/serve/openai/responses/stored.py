"""Responses that clients may refer to later, in memory: each key sees its own, and the oldest leave first."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenwright.serve.http.reply_text import dumps
from tokenwright.serve.openai.responses.bodies import HostedItem, Item, ItemReference, ResponsePrompted
from tokenwright.serve.service.generation import Generation

KEPT_S = 86_400.0  # seconds from a response to its end here
MOST_BYTES = 64 * 2**20  # of all, where the settings say nothing

Json = dict[str, Any]


@dataclass(slots=True)
class StoredResponse:
    """One response. items: of its conversation, those that it was asked with before `output`, with their ids.

    size: bytes of all of it, those that it shares with an earlier one included.
    """

    response: Json
    items: list[Json]
    read: tuple[Item, ...]
    size: int
    at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, response: Json, items: list[Json], read: Sequence[Item]) -> StoredResponse:
        """read: the items as they were read. It takes time in the length of the conversation."""
        own = ResponsePrompted.model_validate({"input": response["output"]}).input
        assert not isinstance(own, str), "an output is a list of items"
        return cls(response, items, (*read, *own), len(dumps(response)) + len(dumps(items)))


class StoredResponses:
    """The responses of one server, by key and id; belongs to one event loop. most: bytes; 0: nothing is stored."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = most
        self.size = 0
        self._found: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.running: dict[tuple[str, str], Generation] = {}  # those that are written now

    def get(self, key: str, identity: str) -> StoredResponse | None:
        """A response of this key; None: there is none, or its time is over."""
        self._expire()
        return self._found.get((key, identity))

    def add(self, key: str, stored: StoredResponse) -> None:
        """Keep a response. Others leave where there is no room, the oldest first."""
        if stored.size > self.most:
            return
        identity = stored.response["id"]
        self.remove(key, identity)
        self._found[key, identity] = stored
        self.size += stored.size
        self._expire()

    def remove(self, key: str, identity: str) -> bool:
        """Forget a response; returns whether there was one."""
        stored = self._found.pop((key, identity), None)
        self.size -= 0 if stored is None else stored.size
        return stored is not None

    def resolved(self, key: str, items: Sequence[Item]) -> Iterator[Item]:
        """Items, with stored ones in the places of references to them, where they are found."""
        known: dict[str, Item] | None = None
        for item in items:
            if isinstance(item, ItemReference):
                known = self._items(key) if known is None else known
                yield known.get(item.id, item)
            else:
                yield item

    def _items(self, key: str) -> dict[str, Item]:
        self._expire()
        stored = [one for (owner, _), one in self._found.items() if owner == key]
        items = [item for one in stored for item in one.read if not isinstance(item, HostedItem)]
        return {item.id: item for item in items if item.id}

    def _expire(self) -> None:
        oldest = time.monotonic() - KEPT_S
        while self._found:
            (key, identity), stored = next(iter(self._found.items()))
            if stored.at >= oldest and self.size <= self.most:
                return
            self.remove(key, identity)
