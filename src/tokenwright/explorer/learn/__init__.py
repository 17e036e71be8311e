"""The lesson's challenges, each checked by the engine, and the figures of its cards.

A `Challenge` (challenge.py) has its words, the fields of an answer and a function that checks one. The function gets a
`CheckWork` (work.py): engines of its own over the loaded model, limited and cancellable. Their modules are phases.py,
agreement.py, find_heads.py, cache_size.py, savings.py, dial.py, smaller.py and claims.py; forward.py is the reference
forward pass in which faults are planted.
"""

from collections.abc import Mapping

from tokenwright.explorer.learn import agreement, cache_size, claims, dial, find_heads, phases, savings, smaller
from tokenwright.explorer.learn.card_facts import facts
from tokenwright.explorer.learn.challenge import Challenge, Value
from tokenwright.explorer.learn.work import LIMIT_S, CheckWork, Stopped
from tokenwright.explorer.panels.learn import Lesson
from tokenwright.llm.llm import LLM

__all__ = ["CHALLENGES", "LIMIT_S", "Challenge", "CheckWork", "Stopped", "Value", "lesson"]

_MODULES = (phases, agreement, find_heads, cache_size, savings, dial, smaller, claims)
CHALLENGES: Mapping[str, Challenge] = {one.id: one for module in _MODULES for one in module.CHALLENGES}


def lesson(llm: LLM) -> Lesson:
    """The facts of a model for the lesson's cards."""
    ordered = sorted(CHALLENGES.values(), key=lambda one: one.number)
    return Lesson(tuple(one.describe(llm) for one in ordered), facts(llm))
