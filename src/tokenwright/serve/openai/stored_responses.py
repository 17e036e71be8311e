"""The responses of OpenAI's Responses API that are kept in memory, by API key, for previous_response_id and GET.

The oldest are forgotten when all together have more bytes than allowed, and each after a time.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenwright.serve.http.reply_text import Json, dumps

AGE_S = 24 * 3600.0  # after which a response is forgotten


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to it. messages: as the service reads them, its answer included."""

    response: Json
    items: list[Json]  # of the request's own input
    messages: list[Json]
    nbytes: int
    since: float


class StoredResponses:
    """Keeps at most `most` bytes of JSON. Belongs to one event loop."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()  # by key and id, the oldest first
        self.nbytes = 0

    def add(self, key: str, response: Json, items: list[Json], messages: list[Json]) -> None:
        """Keep a response that has ended. One that is larger than all that may be kept is not."""
        nbytes = len(dumps([response, items, messages]).encode())
        if nbytes > self._most:
            return
        self.remove(key, response["id"])
        self._kept[key, response["id"]] = StoredResponse(response, items, messages, nbytes, self._clock())
        self.nbytes += nbytes
        while self.nbytes > self._most:
            self._forget(next(iter(self._kept)))

    def get(self, key: str, identity: str) -> StoredResponse | None:
        """A response of this key; None if it was never kept, or is forgotten."""
        self._expire()
        return self._kept.get((key, identity))

    def remove(self, key: str, identity: str) -> bool:
        """Forget a response of this key; False if there is none."""
        there = (key, identity) in self._kept
        if there:
            self._forget((key, identity))
        return there

    def _expire(self) -> None:
        while self._kept and (oldest := next(iter(self._kept.items())))[1].since + AGE_S < self._clock():
            self._forget(oldest[0])

    def _forget(self, place: tuple[str, str]) -> None:
        self.nbytes -= self._kept.pop(place).nbytes


def answer_of(output: list[Json]) -> dict[str, Any]:
    """The message of the model that the items of a response are, for the conversation that goes on from it."""
    found: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in output:
        match item["type"]:
            case "reasoning":
                found["reasoning_content"] = "".join(part["text"] for part in item["content"])
            case "message":
                found["content"] = "".join(part.get("text", "") for part in item["content"])
            case "function_call" | "custom_tool_call":
                arguments = read_arguments(item["arguments"]) if "arguments" in item else {"input": item["input"]}
                function = {"name": item["name"], "arguments": arguments}
                call = {"id": item["call_id"], "type": "function", "function": function}
                found.setdefault("tool_calls", []).append(call)
    return found


def read_arguments(text: str) -> Json | str:
    """The arguments of a call as templates read them; text that is no JSON object stays as it is."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
