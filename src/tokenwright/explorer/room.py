"""A class: pupils follow the teacher through the guide, and send their answers. A server has one room, in memory."""

import hmac
import time
from dataclasses import dataclass, field
from typing import Annotated

from tokenwright.explorer.dataclass_reader import Between, Length
from tokenwright.explorer.explorer import Explorer, PanelError

MOST_PUPILS = 64
IDLE_S = 3600  # after which another teacher may open a room
Name = Annotated[str, Length(1, 64)]


@dataclass(frozen=True, slots=True)
class RoomAnswer:
    scene: Name
    text: Annotated[str, Length(0, 40)]
    right: bool


@dataclass(frozen=True, slots=True)
class Pupil:
    identity: Name  # a random one, of the browser
    name: Annotated[str, Length(1, 24)]
    solved: Annotated[int, Between(0, 99)]  # challenges
    answers: Annotated[list[RoomAnswer], Length(0, 32)]


@dataclass(frozen=True, slots=True)
class Teacher:
    secret: Annotated[str, Length(16, 64)]
    scene: Name
    fresh: bool = False  # without the pupils of before


MESSAGES = (RoomAnswer, Pupil, Teacher)


@dataclass(slots=True)
class Room:
    teacher: Teacher
    pupils: dict[str, Pupil] = field(default_factory=dict)
    seen: float = field(default_factory=time.monotonic)


def teach(explorer: Explorer, body: Teacher) -> list[Pupil]:
    """Open the room, or go to another scene; return its pupils."""
    room = explorer.room
    own = room is not None and hmac.compare_digest(room.teacher.secret.encode(), body.secret.encode())
    if room is not None and not own and time.monotonic() < room.seen + IDLE_S:
        raise PanelError("busy", "another teacher has the room of this server; it is free an hour after the last look")
    explorer.room = Room(body, room.pupils if room is not None and own and not body.fresh else {})
    return list(explorer.room.pupils.values())


def join(explorer: Explorer, body: Pupil) -> dict[str, str]:
    """Record a pupil and all answers so far; return the scene to follow."""
    if (room := explorer.room) is None:
        raise PanelError("missing", "no room is open on this server")
    if body.identity not in room.pupils and len(room.pupils) >= MOST_PUPILS:
        raise PanelError("busy", f"{MOST_PUPILS} pupils are in the room; the teacher can empty it")
    room.pupils[body.identity] = body
    return {"scene": room.teacher.scene}
