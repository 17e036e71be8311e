"""Replies as compact JSON, and the timings of a request."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired, TypedDict, cast

from tokenwright.llm.prompts.report import CacheReport, Cause
from tokenwright.serve.service.types import Timings

Json = dict[str, Any]
LONG = 2048  # log-probabilities; a thread writes longer replies
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def dumps(value: object) -> str:
    """Compact JSON without any line separator of Unicode, at which some clients split."""
    text = _encode(value)
    return text if text.isascii() else text.translate(_LINE_ENDS)


_LINE_ENDS = {at: f"\\u{at:04x}" for at in (0x85, 0x2028, 0x2029)}


async def written(reply: Callable[[], object], numbers: int) -> str:
    """A reply as JSON. numbers: its count of numbers; a thread writes many."""
    return await asyncio.to_thread(lambda: dumps_in_parts(reply())) if numbers > LONG else dumps(reply())


def dumps_in_parts(value: object) -> str:
    """The text of `dumps`, by many short calls, between which other threads can run."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{dumps(name)}:{dumps_in_parts(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list) and value and isinstance(value[-1], dict | list):  # the first of a prompt is null
        return "[" + ",".join(map(dumps_in_parts, value)) + "]"
    return dumps(value)


class TimingsReply(TypedDict):
    """The timings of a reply, in milliseconds, if the server or the request asks for them."""

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
    cache: "NotRequired[CacheReply]"
    experts: NotRequired[dict[str, int]]  # counts of the pool of experts in a file, for all texts meanwhile


class CacheReply(TypedDict):
    """How much of a prompt was reused, and why not more.

    at: the first token that differs or is missing. part, message, change: where that is in the request. before, now:
    the text from there on. compared: the id of the earlier answer.
    """

    cause: str | None
    reused: int
    computed: int
    recomputed: int
    recomputed_ms: float
    compared: str | None
    at: int | None
    part: str | None
    message: int | None
    change: str | None
    before: str | None
    now: str | None
    evicted_ms_ago: float | None
    computed_since_by_session: int
    computed_since_by_others: int


class LlamaTimings(TypedDict):
    """Timings as llama.cpp's server reports them, of the prompt without its cached part and of the text."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: NotRequired[int]
    draft_n_accepted: NotRequired[int]


class ReplyTimings(TimingsReply, LlamaTimings):
    """Both formats of timings."""


def timings_of(timings: Timings) -> TimingsReply:
    each = asdict(replace(timings, cache=None)).items()
    found: Json = {f"{name[:-2]}_ms" if name[-2:] == "_s" else name: _ms(name, value) for name, value in each}
    del found["cache"]
    if timings.experts is None:
        del found["experts"]
    if timings.cache is not None:
        found["cache"] = cache_of(timings.cache)
    return cast("TimingsReply", found)


def cache_of(report: CacheReport) -> CacheReply:
    found: Json = {name: getattr(report, name) for name in ("reused", "computed", "at", "message")}
    found |= {name: getattr(report, name) or None for name in ("compared", "part", "change", "before", "now")}
    cause, evicted = report.cause and report.cause.value, report.evicted_s
    found |= {"cause": cause, "evicted_ms_ago": None if evicted is None else _ms("_s", evicted)}
    found |= {"recomputed": report.again, "recomputed_ms": _ms("_s", report.seconds)}
    found |= {"computed_since_by_session": report.by_session, "computed_since_by_others": report.by_others}
    return cast("CacheReply", {name: found[name] for name in CacheReply.__annotations__})


MissReason = (
    Literal["model_changed", "prompt_cache_key_changed", "tools_changed", "reasoning_effort_changed"]
    | Literal["context_compacted", "input_changed"]
)


class CacheDiagnostics(TypedDict):
    """Why a prompt missed the cache, compared with an earlier response. cache_missed_tokens: after the miss."""

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    reason: NotRequired[MissReason]
    cache_missed_tokens: NotRequired[int]
    comparison_reusable_tokens: NotRequired[int]


_INPUT = (Cause.SYSTEM, Cause.MESSAGE, Cause.THOUGHTS, Cause.RETOKENISED)
_REASONS: Mapping[Cause, MissReason] = {
    Cause.MODEL: "model_changed",
    Cause.KEY: "prompt_cache_key_changed",
    Cause.TOOLS: "tools_changed",
    Cause.FORMAT: "reasoning_effort_changed",
    Cause.COMPACTED: "context_compacted",
    **dict.fromkeys(_INPUT, "input_changed"),
}


def diagnostics_of(report: CacheReport | None) -> CacheDiagnostics:
    if report is None:
        return {"type": "unavailable"}
    if report.missing:
        return {"type": "comparison_response_not_found"}
    if report.cause is None or report.cause is Cause.PLACE:
        return {"type": "cache_hit"}
    if report.cause not in _REASONS:
        return {"type": "unavailable"}
    return {
        "type": "cache_miss",
        "reason": _REASONS[report.cause],
        "cache_missed_tokens": report.prompt - (report.at or 0),
        "comparison_reusable_tokens": report.common,
    }


def cache_header(report: CacheReport) -> str:
    """The header X-Tokenwright-Cache, which contains no prompt text."""
    found = {"reused": report.reused, "computed": report.computed}
    found |= {"recomputed": report.again} if report.known else {}
    cause = f"; cause={report.cause.value}" if report.cause is not None else ""
    return "; ".join(f"{name}={value}" for name, value in found.items()) + cause


def when(seconds: float) -> str:
    """A Unix time in ISO 8601, as clients of Anthropic's and Ollama's APIs read it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _ms(name: str, value: float) -> float:
    return round(1000 * value, 3) if name.endswith("_s") else value


def llama_timings(timings: Timings) -> LlamaTimings:
    """llama.cpp's timings, where a text's first token counts to its prompt's last step."""
    prompt, written = timings.prompt_tokens - timings.cached_tokens, timings.completion_tokens
    prompt_ms, prompt_speed = _rates(prompt, timings.prefill_s)
    predicted_ms, predicted_speed = _rates(max(0, written - 1), timings.decode_s)
    found = LlamaTimings(
        cache_n=timings.cached_tokens,
        prompt_n=prompt,
        prompt_ms=1e3 * timings.prefill_s,
        prompt_per_token_ms=prompt_ms,
        prompt_per_second=prompt_speed,
        predicted_n=written,
        predicted_ms=1e3 * timings.decode_s,
        predicted_per_token_ms=predicted_ms,
        predicted_per_second=predicted_speed,
    )
    if timings.drafted_tokens:
        found["draft_n"], found["draft_n_accepted"] = timings.drafted_tokens, timings.accepted_tokens
    return found


def _rates(tokens: int, seconds: float) -> tuple[float, float]:
    return (1e3 * seconds / tokens, tokens / seconds) if tokens and seconds > 0 else (0.0, 0.0)


def server_timing(timings: Timings) -> str:
    names = {"queue": timings.queue_s, "prefill": timings.prefill_s, "decode": timings.decode_s}
    parts = [f"{name};dur={1000 * seconds:.1f}" for name, seconds in names.items()]
    return ", ".join([*parts, f'cached;desc="{timings.cached_tokens}"', f'preemptions;desc="{timings.preemptions}"'])
