"""The browser's tests over the other port: TOKENWRIGHT_SITE names a site of scripts/site, whose worker has the engine.

    TOKENWRIGHT_SITE=FOLDER python -m pytest tests/browser

A test whose means are a server's is left out, with its reason. `scripts/wasm page` runs them: many minutes.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.browser.hosted import hosted
from tokenwright import LLM

SITE = os.environ.get("TOKENWRIGHT_SITE", "")

_INSIDE = "it changes, or looks into, the engine of the server, which is in this process"
_NETWORK = "it changes what comes over the network, and a worker's answers do not"
LEFT_OUT = {  # by a part of the test's id
    "test_dials_move_the_bars": _INSIDE,
    "test_the_race_is_run_and_its_lanes_agree": _INSIDE,
    "test_a_planted_slow_lane_falls_behind": _NETWORK,
    "test_a_race_ends_with_its_panel": _INSIDE,
    "test_each_card_shows_the_times_of_its_own_run": _INSIDE,
    "test_a_run_of_this_page_gives_way": _INSIDE,
    "test_work_done_twice": _INSIDE,
    "test_a_frame_that_lies": _INSIDE,
    "test_repeated_candidates": _INSIDE,
    "test_what_a_model_writes_stays_text": _NETWORK,
    "test_a_row_that_nobody_answered": _NETWORK,
    "test_figures_of_another_step": _NETWORK,
    "test_another_attempt_is_offered": _NETWORK,
    "test_an_embedded_page_tells_of_a_failure": _NETWORK,
    "test_an_engine_that_answers_with_an_error": _NETWORK,
    "test_a_class_follows_its_teacher": "a class meets on a server; a page by itself has no room",
    "test_the_turns_of_a_session": "clients with keys talk to a server's API, which a worker does not have",
    "test_a_server_without_replicas": "a worker has no replicas, and no address to ask for them",
}


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
    for item in items:
        if reason := next((reason for part, reason in LEFT_OUT.items() if part in item.nodeid), ""):
            item.add_marker(pytest.mark.skip(reason=reason))
