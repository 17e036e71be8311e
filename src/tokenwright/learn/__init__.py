"""The lesson's challenges, each checked by the engine, and the figures of its cards.

A `Challenge` (challenge.py) has its words, the fields of an answer and a function that checks one. The function gets a
`Work` (work.py): engines of its own over the loaded model, limited and cancellable. Their modules are loop.py,
agreement.py, heads.py, memory.py, savings.py, dial.py, smaller.py and claims.py; forward.py is the reference forward
pass in which faults are planted.
"""

from collections.abc import Mapping

from tokenwright.learn import agreement, claims, dial, heads, loop, memory, savings, smaller
from tokenwright.learn.challenge import Challenge, Value
from tokenwright.learn.facts import facts
from tokenwright.learn.work import LIMIT_S, Stopped, Work
from tokenwright.llm import LLM
from tokenwright.trace.learn import Lesson

__all__ = ["CHALLENGES", "LIMIT_S", "Challenge", "Stopped", "Value", "Work", "lesson"]

_MODULES = (loop, agreement, heads, memory, savings, dial, smaller, claims)
CHALLENGES: Mapping[str, Challenge] = {one.id: one for module in _MODULES for one in module.CHALLENGES}


def lesson(llm: LLM) -> Lesson:
    """What the lesson's cards need to know of a model."""
    ordered = sorted(CHALLENGES.values(), key=lambda one: one.number)
    return Lesson(tuple(one.describe(llm) for one in ordered), facts(llm))
