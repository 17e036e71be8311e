"""The base of all declared replies, and the replies of operations, as the OpenAPI document declares them.

Replies are written as dicts and strings, because that is done for every token. Here and in the `reply_schema.py` of
each API they are declared, closed: an undeclared field is a mistake, and tests check the replies of all routes.
A field whose default is `absent` is left out where there is nothing to say.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Json = dict[str, Any]


class Reply(BaseModel):
    """A part of a reply: no other fields, and no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


def absent() -> Any:
    """For a field that may be left out, but is never null."""
    return Field(default_factory=lambda: None)


class TimingsReply(Reply):
    """Where the time went, if the server is set or asked to say so; times in milliseconds."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    prompt_tokens: int
    cached_tokens: int
    disk_tokens: int
    completion_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    moves: int


class TopLogprobReply(Reply):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprobReply):
    top_logprobs: list[TopLogprobReply]


class ModelState(Reply):
    """A model of a server of several. requests: in it now. reason: why it could not be read the last time."""

    name: str
    state: str
    requests: int
    bytes: int
    loaded_bytes: int = absent()
    total_bytes: int = absent()
    reason: str = absent()


class Health(Reply):
    """The reply of /health. reason: why it makes no tokens. progress: the share of the model that is read.

    models: of a server of several.
    """

    status: str
    version: str = absent()
    reason: str = absent()
    progress: float = absent()
    models: list[ModelState] = absent()


class Version(Reply):
    """The reply of /version."""

    version: str


class Ready(Reply):
    """The reply of /ready."""

    status: str
