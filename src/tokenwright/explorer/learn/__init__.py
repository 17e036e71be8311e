"""The lesson's challenges, each checked by the engine, and the figures of its cards."""

from collections.abc import Mapping

from tokenwright.explorer.learn import agreement, cache_size, claims, dial, find_heads, phases, savings
from tokenwright.explorer.learn.card_facts import facts
from tokenwright.explorer.learn.challenge import Challenge, Value
from tokenwright.explorer.learn.work import LIMIT_S, CheckWork, Stopped
from tokenwright.explorer.panels.learn import Lesson
from tokenwright.llm.llm import LLM

__all__ = ["CHALLENGES", "LIMIT_S", "Challenge", "CheckWork", "Stopped", "Value", "lesson"]

_MODULES = (phases, agreement, find_heads, cache_size, savings, dial, claims)
CHALLENGES: Mapping[str, Challenge] = {one.id: one for module in _MODULES for one in module.CHALLENGES}


def lesson(llm: LLM) -> Lesson:
    ordered = sorted(CHALLENGES.values(), key=lambda one: one.number)
    return Lesson(tuple(one.describe(llm) for one in ordered), facts(llm))
