"""The lesson's challenges, each checked by the engine, and the figures of its cards."""

from collections.abc import Mapping

from tokenwright.explorer.learn import agreement, cache_size, claims, dial, find_heads, phases, savings
from tokenwright.explorer.learn.card_facts import facts
from tokenwright.explorer.learn.challenge import Challenge
from tokenwright.explorer.learn.work import CheckWork
from tokenwright.explorer.panels.learn import Lesson
from tokenwright.llm.llm import LLM

__all__ = ["CHALLENGES", "CheckWork", "lesson"]

_ORDERED = (
    *(phases.bound, agreement.agree, cache_size.balance, cache_size.fit, savings.predict, savings.win),
    *(phases.phases, dial.steer, dial.sampler, find_heads.heads, cache_size.window, cache_size.bits),
    *(phases.share, dial.beams, claims.claims),
)
CHALLENGES: Mapping[str, Challenge] = {one.id: one for one in _ORDERED}


def lesson(llm: LLM) -> Lesson:
    each = enumerate(CHALLENGES.values(), 1)
    return Lesson(tuple(one.describe(number, llm) for number, one in each), facts(llm))
