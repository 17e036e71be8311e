"""The lesson's challenges, each checked by the engine, and the figures of its cards.

A `Challenge` (challenge.py) has its words, the fields of an answer and a function that checks one. The function gets a
`CheckWork` (work.py): engines of its own over the loaded model, limited and cancellable. Their modules are loop.py,
agreement.py, heads.py, memory.py, savings.py, dial.py, smaller.py and claims.py; forward.py is the reference forward
pass in which faults are planted.
"""

from collections.abc import Mapping

from tokenwright.learn import agreement, cache_size, claims, dial, find_heads, phases, savings, smaller
from tokenwright.learn.card_facts import facts
from tokenwright.learn.challenge import Challenge, Value
from tokenwright.learn.work import LIMIT_S, CheckWork, Stopped
from tokenwright.llm.llm import LLM
from tokenwright.trace.messages.learn import Lesson

__all__ = ["CHALLENGES", "LIMIT_S", "Challenge", "CheckWork", "Stopped", "Value", "lesson"]

_MODULES = (phases, agreement, find_heads, cache_size, savings, dial, smaller, claims)
CHALLENGES: Mapping[str, Challenge] = {one.id: one for module in _MODULES for one in module.CHALLENGES}


def lesson(llm: LLM) -> Lesson:
    """The facts of a model for the lesson's cards."""
    ordered = sorted(CHALLENGES.values(), key=lambda one: one.number)
    return Lesson(tuple(one.describe(llm) for one in ordered), facts(llm))
