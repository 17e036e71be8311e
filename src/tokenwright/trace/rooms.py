"""The replicas of a server, as the page shows them. `scripts/typescript.py` makes the page's types of this module."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tokenwright.trace.wire import COUNTED


@dataclass(frozen=True, slots=True)
class ReplicaRoom:
    """The place of a replica. When the replica dies, another takes its place. Its pages are as last reported."""

    name: str  # of the replica: its process; empty before there is one
    state: Literal["starting", "taking", "draining"]
    opened: Annotated[int, COUNTED("", "opened", "replicas that took this place: beyond 1, after others")]
    texts: Annotated[int, COUNTED("", "texts", "texts that it writes now")]
    pages: Annotated[int, COUNTED("", "pages", "pages of its KV cache")]
    used: Annotated[int, COUNTED("", "in use", "pages that its texts hold")]
    cached: Annotated[int, COUNTED("", "cached", "pages of ended texts, found by their prefix")]


@dataclass(frozen=True, slots=True)
class WayPart:
    room: int  # index of its place
    name: str
    since: Annotated[int, COUNTED("tokens", "written before", "tokens of the text that others had written")]
    left: Literal["", "died", "replaced"]  # why another replica went on


@dataclass(frozen=True, slots=True)
class TextRoute:
    number: int
    prompt: Annotated[int, COUNTED("tokens", "prompt", "tokens of the prompt")]
    written: Annotated[int, COUNTED("tokens", "written", "tokens delivered so far")]
    ended: bool
    way: tuple[WayPart, ...]


@dataclass(frozen=True, slots=True)
class ReplicasCard:
    """GET /replicas: at one moment of the router's thread."""

    page_size: int  # tokens
    waiting: Annotated[int, COUNTED("", "waiting", "texts that no replica has")]
    rooms: tuple[ReplicaRoom, ...]
    texts: tuple[TextRoute, ...]


MESSAGES = (ReplicaRoom, WayPart, TextRoute, ReplicasCard)
