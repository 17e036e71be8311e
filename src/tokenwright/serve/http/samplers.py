"""The samplers beyond OpenAI's API, under the names of llama.cpp and text-generation-webui."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tokenwright.checks import MAX_TOKENS, shown
from tokenwright.errors import RequestError
from tokenwright.serve.http.fields import MOST_STOPS, Body, Share, StopText, Text, many

Bits = Annotated[float, Field(ge=0.0, le=100.0)]


class Samplers(Body):
    """DRY, XTC, top-n-sigma and Mirostat.

    dry_penalty_last_n: -1 looks at the whole text, 0 switches DRY off. dry_sequence_breakers: a list, or the text of
    one. top_n_sigma: off at 0 and below.
    """

    aliases: ClassVar = {"mirostat_mode": "mirostat"}

    top_n_sigma: Annotated[float, Field(ge=-1.0, le=1e6)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    dry_base: Annotated[float, Field(ge=1.0, le=100.0)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    dry_sequence_breakers: Text | Annotated[list[StopText], many(MOST_STOPS)] | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Bits | None = None
    mirostat_eta: Bits | None = None


_SAME = (
    "dry_multiplier", "dry_base", "dry_allowed_length", "xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau",
    "mirostat_eta",
)  # fmt: skip


def samplers_of(body: Samplers) -> dict[str, Any]:
    """The fields of SamplingParams that `body` sets; None where it says nothing. Raises RequestError."""
    found: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    found["top_n_sigma"] = None if body.top_n_sigma is None else max(0.0, body.top_n_sigma)
    if body.dry_penalty_last_n == 0:
        found["dry_multiplier"] = 0.0
    elif body.dry_penalty_last_n is not None:
        found["dry_window"] = max(0, body.dry_penalty_last_n)
    found["dry_breakers"] = _breakers(body.dry_sequence_breakers)
    return found


def _breakers(given: str | list[str] | None) -> tuple[str, ...] | None:
    """The sequence breakers as a list, or as the text of one with or without its brackets."""
    if given is None or isinstance(given, list):
        return None if given is None else tuple(given)
    written = given.strip()
    try:
        listed = json.loads(written if written.startswith("[") else f"[{written}]")
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or len(listed) > MOST_STOPS or not all(isinstance(one, str) for one in listed):
        why = f'dry_sequence_breakers must be a list of strings, such as ["\\n", ":"], not {shown(given)}'
        raise RequestError(why, "dry_sequence_breakers")
    return tuple(listed)
