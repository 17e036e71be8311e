"""The texts of `interrupts.py`, and the signal that interrupts them. Uses the public API alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from tokenwright import LLM, SamplingParams

Ids = tuple[tuple[int, ...], ...]  # token ids of each text of a request

PARAMS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, seed=5, max_tokens=14, ignore_eos=True, logprobs=2),
    "several": SamplingParams(temperature=1.0, seed=9, n=3, max_tokens=8, ignore_eos=True),
    "beams": SamplingParams(beams=3, n=2, max_tokens=8),
    "stop": SamplingParams(temperature=0.0, max_tokens=14, stop=("was",), prompt_logprobs=1),
}
PROMPTS = ("Once upon a time", "Once upon a time there", "Tom and his dog went", "A cat")
Text = tuple[str, str]  # a name in PARAMS, and the prompt
NEIGHBOURS: tuple[Text, ...] = (("greedy", PROMPTS[1]), ("seeded", PROMPTS[2]), ("several", PROMPTS[0]))


def generate(llm: LLM, text: Text) -> Ids:
    [done] = llm.generate([text[1]], PARAMS[text[0]])
    return tuple(one.token_ids for one in done.choices)


def stream(llm: LLM, text: Text) -> Ids:
    with llm.stream(text[1], PARAMS[text[0]]) as pieces:
        for _ in pieces:
            pass
        return tuple(one.token_ids for one in pieces.completion.choices)


async def astream(llm: LLM, text: Text) -> Ids:
    pieces = [piece async for piece in llm.astream(text[1], PARAMS[text[0]])]
    return (tuple(piece.token_id for piece in pieces if piece.token_id is not None),)


def score(llm: LLM, text: Text) -> Ids:
    """Score a prompt. Returns no tokens: the trial only interrupts it."""
    llm.score(text[1] + " there was a cat")
    return ()


Operation = tuple[str, Callable[[LLM, Text], Ids], Text]
OPERATIONS: tuple[Operation, ...] = (
    ("generate", generate, ("greedy", PROMPTS[0])),
    ("stream", stream, ("seeded", PROMPTS[3])),
    ("stop", stream, ("stop", PROMPTS[2])),
    ("beams", generate, ("beams", PROMPTS[0])),
    ("several", stream, ("several", PROMPTS[1])),
    ("score", score, ("greedy", PROMPTS[3])),
)


def judged(found: Ids, right: Ids) -> str:
    """The verdict: right, short (each text is a prefix of the correct one) or wrong."""
    if found == right:
        return "right"
    pairs = zip(found, right, strict=False)
    begins = len(found) <= len(right) and all(one == other[: len(one)] for one, other in pairs)
    return "short" if begins else "wrong"


class Interrupter:
    """A timer whose signal raises KeyboardInterrupt in the main thread, once, and only while it is armed."""

    def __init__(self) -> None:
        self.armed = False
        signal.signal(signal.SIGALRM, self._raise)

    def _raise(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def met(self, seconds: float, run: Callable[[], Ids]) -> Ids | None:
        """The result of `run`, or None if the signal interrupted it."""
        try:
            self.armed = True
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
            found = run()
            self.armed = False
        except KeyboardInterrupt:
            return None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return found
