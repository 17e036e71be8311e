"""Wishes of clients about the prefix cache: breakpoints, up to which a prompt is to stay, and the session of a request.

A message keeps its breakpoints under MARKS until `Exchange.wanted` takes them: places in its text, and seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tokenwright.serve.http.fields import MOST_NAME, Body, Text

MARKS = "cache_marks"
MOST_MARKS = 4  # of a request: the last ones count
SECONDS = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0}
# The headers in which agents name their session, where the body does not.
SESSION_HEADERS = (
    "x-claude-code-session-id",
    "x-qwen-code-session-id",
    "x-opencode-session",
    "x-session-affinity",
    "x-session-id",
    "x-dynamo-session-id",
    "session-id",
    "session_id",
    "conversation_id",
)


class CacheControl(Body):
    """Anthropic's breakpoint."""

    harmless: ClassVar = {"scope": "each key has a prefix cache of its own"}

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class PromptBreakpoint(Body):
    """OpenAI's breakpoint. ttl: that of the request, where there is none."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class CacheOptions(Body):
    """OpenAI's options of the prompt cache. mode explicit: nothing behind the last breakpoint is cached.

    comparison_response_id: the answer with whose prompt this one is compared.
    """

    harmless: ClassVar = {"prewarm": "every prefix is cached as it is computed"}

    comparison_response_id: Text | None = None
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m", "12h"] = "30m"


class BreakpointBody(Body):
    """A part of a prompt that may be a breakpoint."""

    cache_control: CacheControl | None = None

    def kept_s(self) -> float | None:
        """The seconds for which the prompt up to here is to stay; 0: the request's own; None: it does not ask."""
        return None if self.cache_control is None else SECONDS[self.cache_control.ttl]


class BreakpointPart(BreakpointBody):
    prompt_cache_breakpoint: PromptBreakpoint | None = None

    def kept_s(self) -> float | None:
        if (own := self.prompt_cache_breakpoint) is not None:
            return SECONDS[own.ttl] if own.ttl else 0.0
        return super().kept_s()


@dataclass(frozen=True, slots=True)
class CacheAsked:
    """The wishes of a body and its headers. ttl_s: of breakpoints without their own. whole_s: of all messages."""

    session: str = ""
    explicit: bool = False
    ttl_s: float = SECONDS["30m"]
    whole_s: float | None = None

    @classmethod
    def of(cls, body: Body, headers: Mapping[str, str]) -> CacheAsked:
        key, labels = getattr(body, "prompt_cache_key", None), getattr(body, "metadata", None)
        user = labels.get("user_id") if isinstance(labels, dict) else None  # agents write their session into it
        named = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), "")
        options = getattr(body, "prompt_cache_options", None) or CacheOptions()
        whole = body.kept_s() if isinstance(body, BreakpointBody) else None
        session = str(key or user or named)[:MOST_NAME]
        return cls(session, options.mode == "explicit", SECONDS[options.ttl], whole)


def marks_in(blocks: Iterable[object], texts: Iterable[str | None]) -> list[tuple[int, float]]:
    """The breakpoints of parts whose texts are joined by lines: places in the text, and seconds. None: no text."""
    found, place, first = [], 0, True
    for block, text in zip(blocks, texts, strict=True):
        if text is not None:
            place, first = place + len(text) + (not first), False
        if isinstance(block, BreakpointBody) and (seconds := block.kept_s()) is not None:
            found.append((place, seconds))
    return found


def with_marks(message: dict[str, Any], marks: list[tuple[int, float]]) -> dict[str, Any]:
    """The message with breakpoints, if there are some."""
    return message | {MARKS: marks} if marks else message


def taken(messages: Iterable[dict[str, Any]], asked: CacheAsked) -> Iterator[tuple[int, int | None, float]]:
    """The breakpoints of messages, which lose them: message, place in its text (None: its end), seconds."""
    last = -1
    for last, message in enumerate(messages):
        for place, seconds in message.pop(MARKS, ()):
            yield last, place, seconds or asked.ttl_s
    if asked.whole_s is not None and last >= 0:
        yield last, None, asked.whole_s
