"""Parts of requests that several APIs share: sampling, cache breakpoints, pictures, reasoning and tools.

Messages keep cache breakpoints under MARKS for `Exchange.wanted`. Another thread decodes pictures.
"""

import json
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tokenwright.checks import MAX_TOKENS, shown
from tokenwright.errors import RequestError
from tokenwright.pictures.opening import MOST_BYTES, ImageSource, Url
from tokenwright.sampling_params import SamplingParams
from tokenwright.serve.http import fields as bodies
from tokenwright.serve.http.api import About, wrong_field
from tokenwright.serve.service.types import PRIORITIES
from tokenwright.text.messages import PICTURE, PICTURES

MARKS = "cache_marks"
MOST_MARKS = 4
SECONDS = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0}
SESSION_HEADERS = (  # of agents, used if the body names no session; Dynamo's comes first
    "x-dynamo-session-id", "x-claude-code-session-id", "x-qwen-code-session-id", "x-opencode-session",
    "x-session-affinity", "x-session-id", "session-id", "session_id", "conversation_id",
)  # fmt: skip
LAST_HEADER = "x-dynamo-session-final"  # true: the session ends with this request


class CacheControl(bodies.Body):
    """Anthropic's breakpoint."""

    harmless: ClassVar = {"scope": "each key has a prefix cache of its own"}

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class PromptBreakpoint(bodies.Body):
    """OpenAI's breakpoint. ttl: by default the request's."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class CacheOptions(bodies.Body):
    """OpenAI's options of the prompt cache. mode explicit: nothing after the last breakpoint is cached.

    comparison_response_id: the answer whose prompt is compared with this one.
    """

    harmless: ClassVar = {"prewarm": "every prefix is cached as it is computed"}

    comparison_response_id: bodies.Text | None = None
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m", "12h"] = "30m"


class AgentHints(bodies.Body):
    """Dynamo's hints. priority: requests with higher ones go first."""

    harmless: ClassVar = {
        "osl": "lengths of answers are learnt",
        "latency_sensitivity": "priority orders requests",
        "speculative_prefill": "next turns are computed ahead as --warm says",
        "strict_priority": "priority orders requests",
    }

    priority: int = 0


class AgentContext(bodies.Body):
    """Dynamo's session. session_final: as LAST_HEADER."""

    session_id: bodies.Text = ""
    session_final: bool = False


class Extensions(bodies.Body):
    """Dynamo's extensions of OpenAI's API."""

    agent_hints: AgentHints = AgentHints()
    agent_context: AgentContext = AgentContext()


class BreakpointBody(bodies.Body):
    cache_control: CacheControl | None = None

    def kept_s(self) -> float | None:
        """Seconds for which the prompt up to here stays cached; 0: the request's ttl; None: no breakpoint."""
        return None if self.cache_control is None else SECONDS[self.cache_control.ttl]


class BreakpointPart(BreakpointBody):
    prompt_cache_breakpoint: PromptBreakpoint | None = None

    def kept_s(self) -> float | None:
        if (own := self.prompt_cache_breakpoint) is not None:
            return SECONDS[own.ttl] if own.ttl else 0.0
        return super().kept_s()


PictureText = Annotated[str, Field(max_length=MOST_BYTES * 4 // 3 + 100)]  # a data: URL, or base64
_DETAIL = {"detail": "pictures are resized as the model's files say"}
_STORED = bodies.Refused("no files are stored here; send the picture as a data: URL")


class PictureBody(BreakpointBody):
    @property
    @abstractmethod
    def encoded(self) -> str: ...


class ImageUrl(bodies.Body):
    harmless: ClassVar = _DETAIL

    url: PictureText


class ImageUrlPart(PictureBody, BreakpointPart):
    """OpenAI's picture in chats."""

    type: Literal["image_url"]
    image_url: ImageUrl | PictureText

    @property
    def encoded(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class InputImage(PictureBody, BreakpointPart):
    """OpenAI's picture in the Responses API."""

    refused: ClassVar = {"file_id": _STORED}
    harmless: ClassVar = _DETAIL

    type: Literal["input_image"]
    image_url: PictureText

    @property
    def encoded(self) -> str:
        return self.image_url


class Base64Source(bodies.Body):
    harmless: ClassVar = {"media_type": "the bytes say what they are"}

    type: Literal["base64"]
    data: PictureText


class UrlSource(bodies.Body):
    type: Literal["url"]
    url: bodies.Text


class ImageBlock(PictureBody):
    """Anthropic's picture in messages and tool results."""

    refused: ClassVar = {
        "file_id": _STORED,
        "transformations": bodies.Refused("pictures are resized", ({"oversized_image": "downsize"},)),
    }

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    @property
    def encoded(self) -> str:
        return self.source.data if isinstance(self.source, Base64Source) else self.source.url


def seen_in(parts: object) -> dict[str, Any]:
    each = parts if isinstance(parts, list) else ()
    return pictures_field(part.encoded for part in each if isinstance(part, PictureBody))


def pictures_field(encoded: Iterable[str]) -> dict[str, Any]:
    found = tuple(ImageSource(Url(one)) for one in encoded)
    return {PICTURES: found} if found else {}


def mark_of(part: object) -> str | None:
    """PICTURE, the placeholder in a message's text, for a picture; else None."""
    return PICTURE if isinstance(part, PictureBody) else None


_NO_OPTIONS, _NO_EXTENSIONS = CacheOptions(), Extensions()


@dataclass(frozen=True, slots=True)
class CacheTerms:
    """A request's options for cache and session."""

    session: str = ""
    shared: bool = False  # other conversations may have the same session name
    explicit: bool = False  # nothing after the last breakpoint is cached
    ttl_s: float = SECONDS["30m"]  # of breakpoints without their own
    whole_s: float | None = None  # of a breakpoint after all messages
    last: bool = False  # the session ends with this request
    priority: int = 0  # as in GenerationRequest

    @classmethod
    def of(cls, body: bodies.Body, headers: Mapping[str, str]) -> "CacheTerms":
        key, talk = getattr(body, "prompt_cache_key", None), getattr(body, "conversation_id", None)
        labels = getattr(body, "metadata", None)
        user = labels.get("user_id") if isinstance(labels, dict) else None
        named = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), "")
        options = getattr(body, "prompt_cache_options", None) or _NO_OPTIONS
        whole = body.kept_s() if isinstance(body, BreakpointBody) else None
        dynamo = getattr(body, "nvext", None) or _NO_EXTENSIONS
        own = dynamo.agent_context.session_id
        session = str(own or key or talk or named or user or "")[: bodies.MOST_NAME]
        last = dynamo.agent_context.session_final or headers.get(LAST_HEADER, "").lower() == "true"
        priority = max(PRIORITIES[0], min(-dynamo.agent_hints.priority, PRIORITIES[-1]))
        shared = not (own or talk or named)
        return cls(session, shared, options.mode == "explicit", SECONDS[options.ttl], whole, last, priority)


def marks_in(blocks: Iterable[object], texts: Iterable[str | None]) -> list[tuple[int, float]]:
    """Breakpoints (offset, seconds) in the parts' texts, joined by newlines. None: a part without text."""
    found, place, first = [], 0, True
    for block, text in zip(blocks, texts, strict=True):
        if text is not None:
            place, first = place + len(text) + (not first), False
        if isinstance(block, BreakpointBody) and (seconds := block.kept_s()) is not None:
            found.append((place, seconds))
    return found


def with_marks(message: dict[str, Any], marks: list[tuple[int, float]]) -> dict[str, Any]:
    return message | {MARKS: marks} if marks else message


def marked(message: dict[str, Any], content: object, text: Callable[[Any], str | None]) -> dict[str, Any]:
    """The message with the pictures and breakpoints of its content's parts. text: of a part; None: it has none."""
    parts = content if isinstance(content, list) else ()
    return with_marks(message | seen_in(content), marks_in(parts, map(text, parts)))


def take_marks(messages: Iterable[dict[str, Any]], terms: CacheTerms) -> Iterator[tuple[int, int | None, float]]:
    """Remove breakpoints from messages; yields message, offset in its text (None: its end), seconds."""
    last = -1
    for last, message in enumerate(messages):
        for place, seconds in message.pop(MARKS, ()):
            yield last, place, seconds or terms.ttl_s
    if terms.whole_s is not None and last >= 0:
        yield last, None, terms.whole_s


Bits = Annotated[float, Field(ge=0.0, le=100.0)]


class Samplers(bodies.Body):
    """Sampling and stop options that several APIs share.

    top_k 0, -1: all ids. dry_penalty_last_n: -1: the whole text; 0: DRY is off. dry_sequence_breakers: a list or its
    text. top_n_sigma: off at 0 and below.
    """

    aliases: ClassVar = {"mirostat_mode": "mirostat"}

    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    top_p: bodies.Nucleus | None = None
    min_p: bodies.Share | None = None
    typical_p: bodies.Positive = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    stop: Annotated[bodies.StopText | bodies.Stops | None, bodies.absent("")] = None
    top_n_sigma: Annotated[float, Field(ge=-1.0, le=1e6)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    dry_base: Annotated[float, Field(ge=1.0, le=100.0)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    dry_sequence_breakers: bodies.Text | Annotated[list[bodies.StopText], bodies.many(bodies.MOST_STOPS)] | None = None
    xtc_probability: bodies.Share | None = None
    xtc_threshold: bodies.Share | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Bits | None = None
    mirostat_eta: Bits | None = None


_SAME = frozenset(one.name for one in fields(SamplingParams)) - {"grammar", "logit_bias", "logprobs", "max_tokens"}


def sampling_of(body: Samplers) -> dict[str, Any]:
    """The fields of SamplingParams that `body` sets, None for others. Raises RequestError."""
    found: dict[str, Any] = {name: getattr(body, name) for name in _SAME & type(body).model_fields.keys()}
    found["top_k"] = None if body.top_k is None else max(0, body.top_k)
    found["stop"] = (body.stop,) if isinstance(body.stop, str) else body.stop or None
    if (seed := found.get("seed")) is not None:
        found["seed"] = None if seed == -1 else seed % 2**64
    found["top_n_sigma"] = None if body.top_n_sigma is None else max(0.0, body.top_n_sigma)
    if body.dry_penalty_last_n == 0:
        found["dry_multiplier"] = 0.0
    elif body.dry_penalty_last_n is not None:
        found["dry_window"] = max(0, body.dry_penalty_last_n)
    found["dry_breakers"] = _breakers(body.dry_sequence_breakers)
    return found


def _breakers(given: str | list[str] | None) -> tuple[str, ...] | None:
    if given is None or isinstance(given, list):
        return None if given is None else tuple(given)
    written = given.strip()
    try:
        listed = json.loads(written if written.startswith("[") else f"[{written}]")
    except (ValueError, RecursionError):
        listed = None
    if (
        not isinstance(listed, list)
        or len(listed) > bodies.MOST_STOPS
        or not all(isinstance(one, str) for one in listed)
    ):
        why = f'dry_sequence_breakers must be a list of strings, such as ["\\n", ":"], not {shown(given)}'
        raise RequestError(why, "dry_sequence_breakers")
    return tuple(listed)


_OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token")


def thinking_fields(
    on: bool | None, budget: int | None, effort: str | None, variables: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The fields of a GenerationRequest for reasoning. on: reason first; None: the template decides. budget: tokens.

    effort: for templates with levels. The template's `variables` may have enable_thinking. Raises RefusedRequest.
    """
    given = dict(variables or {})
    switch = given.pop("enable_thinking", None)
    if not isinstance(switch, bool | None):
        place = "chat_template_kwargs.enable_thinking"
        raise wrong_field(place, f"{place} must be true or false")
    if taken := next((name for name in _OWN if name in given), None):
        place = f"chat_template_kwargs.{taken}"
        raise wrong_field(place, f"{place} is a field of the request, not a variable")
    if effort not in (None, "none", "default", "auto"):
        given.setdefault("reasoning_effort", effort)
    budget = None if budget is None or budget < 0 else budget
    return {"thinking": on if switch is None else switch, "thinking_budget": budget, "variables": given}


def leave_out(about: About, types: Sequence[str], own: Collection[str]) -> None:
    """Report tools of types other than `own` as ignored. Raises RefusedRequest if none is left or one mistyped."""
    others = [one for one in types if one not in own]
    for at, one in enumerate(types):
        if one not in own and (near := next((name for name in own if bodies.one_edit(one, name)), "")):
            why = f"tools.{at}.type: there is no type {one[:100]!r}; did you mean {near}?"
            raise wrong_field(f"tools.{at}.type", why)
    if others and len(others) == len(types):
        named = ", ".join(sorted({one[:100] for one in others}))
        why = f"tools: all are hosted tools ({named}), which this server does not run; give functions, or no tools"
        raise wrong_field("tools", why)
    about.ignored += [f"tools.{one[:100]}" for one in others]


class OpenCalls:
    """The calls of a conversation that have no result yet, found in constant time."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, str]] = {}  # (id, name), by the number of the call
        self._numbers: dict[
            tuple[str | None, str | None], deque[int]
        ] = {}  # by a result's id and name; some are closed
        self._count = 0

    def add(self, identity: str, name: str, given: str | None = None) -> None:
        """Add a call. given: the client's id, if it differs."""
        self._count += 1
        self._open[self._count] = (identity, name)
        for key in product((identity if given is None else given, None), (name, None)):
            self._numbers.setdefault(key, deque()).append(self._count)

    def answer(self, identity: str | None, name: str | None) -> tuple[str, str] | None:
        """Close the first open call of this id and name, as far as given. Returns its id and name."""
        numbers = self._numbers.get((identity, name), deque())
        while numbers:
            if (call := self._open.pop(numbers.popleft(), None)) is not None:
                return call
        return None
