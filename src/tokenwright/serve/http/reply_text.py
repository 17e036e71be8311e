"""Replies as text: compact JSON, and where the time of a request went."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tokenwright.serve.service.types import Timings

Json = dict[str, Any]
LONG = 2048  # numbers or log-probabilities of a reply: those of a longer one are written by a thread
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode  # made once: it is slow


def dumps(value: object) -> str:
    """Compact JSON in one line, also for clients that end lines where Unicode does, as Python's splitlines."""
    text = _encode(value)
    return text if text.isascii() else text.translate(_LINE_ENDS)


_LINE_ENDS = {at: f"\\u{at:04x}" for at in (0x85, 0x2028, 0x2029)}


async def written(reply: Callable[[], object], numbers: int) -> str:
    """A reply as JSON. numbers: how many numbers or log-probabilities it has; many would keep others waiting."""
    return await asyncio.to_thread(lambda: dumps_in_parts(reply())) if numbers > LONG else dumps(reply())


def dumps_in_parts(value: object) -> str:
    """The same text as of `dumps`, by many short calls: one call of the encoder lets no other thread run."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{dumps(name)}:{dumps_in_parts(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list) and value and isinstance(value[-1], dict | list):  # the first of a prompt is null
        return "[" + ",".join(map(dumps_in_parts, value)) + "]"
    return dumps(value)


def timings_of(timings: Timings) -> Json:
    """Timings with times in milliseconds of three digits."""
    found = asdict(timings)
    return {name.removesuffix("_s") + "_ms" if name.endswith("_s") else name: _ms(name, v) for name, v in found.items()}


def llama_timings(timings: Timings) -> Json:
    """Timings in the words of llama.cpp's server. The first token of a text comes with its prompt's last step."""
    prompt, steps = timings.prompt_tokens - timings.cached_tokens, max(0, timings.completion_tokens - 1)
    found = {"cache_n": timings.cached_tokens, "prompt_n": prompt, "prompt_ms": 1e3 * timings.prefill_s}
    found |= _rates("prompt", prompt, timings.prefill_s)
    found |= {"predicted_n": timings.completion_tokens, "predicted_ms": 1e3 * timings.decode_s}
    found |= _rates("predicted", steps, timings.decode_s)
    drafted = {"draft_n": timings.drafted_tokens, "draft_n_accepted": timings.accepted_tokens}
    return found | (drafted if timings.drafted_tokens else {})


def _rates(name: str, tokens: int, seconds: float) -> Json:
    each, rate = (1e3 * seconds / tokens, tokens / seconds) if tokens and seconds > 0 else (0.0, 0.0)
    return {f"{name}_per_token_ms": each, f"{name}_per_second": rate}


def _ms(name: str, value: float) -> float:
    return round(1000 * value, 3) if name.endswith("_s") else value


def server_timing(timings: Timings) -> str:
    """The value of the header Server-Timing."""
    names = {"queue": timings.queue_s, "prefill": timings.prefill_s, "decode": timings.decode_s}
    parts = [f"{name};dur={1000 * seconds:.1f}" for name, seconds in names.items()]
    return ", ".join([*parts, f'cached;desc="{timings.cached_tokens}"', f'preemptions;desc="{timings.preemptions}"'])
