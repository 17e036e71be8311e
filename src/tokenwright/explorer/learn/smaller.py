"""Challenges of the card on windows, sharing and fewer bits: window, bits."""

from collections.abc import Callable, Sequence

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.cache import layer_specs
from tokenwright.config import Learned
from tokenwright.decode.logits_processors import log_softmax
from tokenwright.explorer.learn.challenge import Challenge, ChallengeAnswer, Figures, choice, whole
from tokenwright.explorer.learn.challenge_texts import OPENING, STORY
from tokenwright.explorer.learn.work import CheckWork
from tokenwright.explorer.panels.learn import Checked
from tokenwright.formats import KVFormat

SMALL, SHARE, LAST = 4, 3, 32  # a third of what a window of four costs without sinks
SAME = 64
FORMATS = ("native", "fp8", "int8", "int4")


def text_of(work: CheckWork) -> list[int]:
    """A story, a second one that needs little of it, so that a small window can do, and what the model goes on with."""
    prompt = work.ids(f"{STORY} said yes.\n\n{OPENING}")
    return prompt + work.greedy(prompt, LAST)


def mean_kl(full: Floats, other: Floats) -> float:
    """The mean of KL(full || other) in nats over rows of logits [n, V]."""
    p, q = log_softmax(full), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def divergence(work: CheckWork, ids: Sequence[int]) -> Callable[[int, int], float]:
    """The mean KL, over the last rows of a text, between the full cache and one with a window and sinks."""
    rows = slice(-LAST - 1, -1)
    full = work.logits(ids)[rows]
    return lambda window, sinks: mean_kl(full, work.logits(ids, window=window, sinks=sinks)[rows])


def window(work: CheckWork, answer: ChallengeAnswer) -> Checked:
    figures, size, sinks = Figures(), answer.whole("window"), answer.whole("sinks")
    learned = isinstance(work.llm.config.positions, Learned)  # such a model has windows, but no sinks
    if learned and sinks:
        return figures.verdict(
            "window", "This model has learned positions: it has windows, but no sinks. Set them to 0.", ""
        )
    ids = text_of(work)
    kl = divergence(work, ids)
    own, most = kl(size, sinks), kl(SMALL, 0) / SHARE
    figures.counted("tokens", "tokens of the text", len(ids), "", f"of which the last {LAST} are compared")
    figures.read("kl", f"mean KL, W = {size}, s = {sinks}", own, "nat per token", "KL(full || yours), teacher-forced")
    figures.derived("most", "at most", most, "nat per token", f"a third of the mean KL of W = {SMALL}, s = 0")
    if own >= most:
        more = "Take a larger window" + ("." if learned else ", or other sinks.")
        return figures.verdict("window", f"The mean KL is {own:.3f}, above {most:.3f}. {more}", "")
    smaller = kl(size - 1, sinks) if size > 1 else float("inf")
    figures.read("smaller", f"mean KL, W = {size - 1}, s = {sinks}", smaller, "nat per token", "one token less")
    why, done = "", f"W = {size} is the smallest: one token less, and the mean KL is {smaller:.3f}."
    if smaller < most:
        why = f"It holds, but so does a window of {size - 1}. Find the smallest."
    elif sinks == 0 and not learned:
        why = "It holds without sinks. Now keep some first tokens, and make it smaller."
    elif not learned:
        without = kl(size, 0)
        figures.read("without", f"mean KL, W = {size}, s = 0", without, "nat per token", "without the sinks")
        if without < most:
            why = "The same window holds without sinks. With them a smaller one does: find it."
        done = (
            f"W = {size} with {sinks} sink{'s' * (sinks > 1)} holds; without, the mean KL is {without:.3f}, too much."
        )
    return figures.verdict("window", why, done)


def _per_token(work: CheckWork, k: str, v: str) -> int:
    specs = layer_specs(work.llm.graph, work.llm.dtype, KVFormat(k, v))
    return sum(spec.bytes_per_token for spec in specs)


def _holds(work: CheckWork, ids: Sequence[int], k: str, v: str) -> int:
    """Tokens of the text that greedy writes with such a cache before it writes another one."""
    rows = work.logits(ids, kv=f"k={k},v={v}")[-SAME - 1 : -1].argmax(-1).tolist()
    return next((n for n, (one, right) in enumerate(zip(rows, ids[-SAME:], strict=True)) if one != right), SAME)


def bits(work: CheckWork, answer: ChallengeAnswer) -> Checked:
    figures, k, v = Figures(), answer.text("k"), answer.text("v")
    prompt = work.ids(OPENING)
    ids = prompt + work.greedy(prompt, SAME)
    size, held = _per_token(work, k, v), _holds(work, ids, k, v)
    figures.derived("bytes", "cache per token", size, "B", "K and V of all layers, scales included")
    figures.derived("native", "native", _per_token(work, "native", "native"), "B", f"in {work.llm.dtype}")
    figures.counted("same", f"tokens the same, of {SAME}", held, "", "greedy, until the first that differs")
    if held < SAME:
        why = f"The text changes at its token {held + 1}. Give K or V more bits."
        return figures.verdict("bits", why, "")
    fewer = sorted((_per_token(work, one, other), one, other) for one in FORMATS for other in FORMATS)
    for less, one, other in fewer:
        if less < size and _holds(work, ids, one, other) == SAME:
            figures.counted("least", "a smaller one that holds", less, "B", "per token")
            return figures.verdict(
                "bits", f"It holds, but {less} bytes per token do as well. K and V need not be alike.", ""
            )
    return figures.verdict("bits", "", f"{size} bytes per token are the fewest that keep all {SAME} tokens.")


CHALLENGES = (
    Challenge(
        "window",
        11,
        "smaller",
        "Break and save the window",
        f"Let the model see only the last W tokens and the first s (sinks). A window of {SMALL} breaks what it "
        "predicts. Find the smallest one that a few sinks save; the check then takes the sinks away.",
        lambda _: f"mean KL over {LAST} tokens below a third of that of W = {SMALL}, s = 0, by the smallest W",
        (whole("window", "window W", SMALL, 1, 1024), whole("sinks", "sinks s", 0, 0, 64)),
        window,
    ),
    Challenge(
        "bits",
        12,
        "smaller",
        "Fewest bits",
        f"Store K and V in few bytes, so that greedy still writes the same {SAME} tokens after “{OPENING}”.",
        lambda _: f"the fewest bytes per token of {len(FORMATS)} formats for K and {len(FORMATS)} for V",
        (choice("k", "K in", *FORMATS, start=""), choice("v", "V in", *FORMATS, start="")),
        bits,
    ),
)
