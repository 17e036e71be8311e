"""The browser's tests over the other port: TOKENWRIGHT_SITE names a site of scripts/site, whose worker has the engine.

    TOKENWRIGHT_SITE=/tmp/site python -m pytest tests/browser

A test whose means are a server's is left out, with its reason. `scripts/wasm page` runs them.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.browser.hosted import hosted
from tokenwright import LLM

SITE = os.environ.get("TOKENWRIGHT_SITE", "")
MOST_LEFT_OUT = 0.1

LEFT_OUT: dict[str, str] = {}  # by a part of the test's id


@dataclass
class Worker:
    """What tests know of whoever answers: the address of the page, and an engine that computes the same here."""

    address: str
    llm: LLM


@contextmanager
def opened():
    with hosted(SITE) as address, LLM("stories", trace=True, pages=512) as llm:
        yield Worker(address, llm)


def leave_out(items):
    ours = [item for item in items if item.nodeid.startswith("tests/browser/")]
    for item in ours:
        if reason := next((reason for part, reason in LEFT_OUT.items() if part in item.nodeid), ""):
            item.add_marker(pytest.mark.skip(reason=reason))
