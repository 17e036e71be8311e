"""The challenge `agree`: a planted fault makes cached and uncached disagree; the evidence says which fault it is."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.config import Rope
from tokenwright.engine import SamplingParams
from tokenwright.explorer.learn import challenge
from tokenwright.explorer.learn.challenge import QUESTION
from tokenwright.explorer.learn.forward import ForwardPass
from tokenwright.explorer.learn.work import PAGE, CheckWork
from tokenwright.explorer.panels.learn import Checked
from tokenwright.llm.llm import LLM
from tokenwright.models.taps import Site, Tap

ROWS = 64
SHIFTED, TWICE, MASK, STALE, EOS = (
    "position off by one", "RoPE applied twice", "missing mask", "stale page", "EOS ignored",
)  # fmt: skip
LOOK = "not named yet: show the evidence"
NAMES = ("A", "B", "C", "D", "E")
DIFFERS = 1e-2  # of the largest number: a larger difference makes another key or value


def planted(llm: LLM) -> dict[str, str]:
    """Each case's fault, in an order by the model's name."""
    faults = [SHIFTED, MASK, STALE, EOS] + ([TWICE] if isinstance(llm.config.positions, Rope) else [])
    random.Random(sha256(llm.loaded.facts.name.encode()).digest()).shuffle(faults)
    return dict(zip(NAMES, faults, strict=False))


@dataclass
class ComputedLane:
    logits: list[Floats] = field(default_factory=list)  # [rows, V]
    keys: dict[int, Floats] = field(default_factory=dict)  # of the first layer, by position; so `values`
    values: dict[int, Floats] = field(default_factory=dict)

    def tap(self, start: int) -> Tap:
        def keep(site: Site, layer: int, value: Floats) -> None:
            if layer == 0 and site in (Site.KEY, Site.VALUE):
                found = self.keys if site is Site.KEY else self.values
                found.update(enumerate(value.astype(np.float32), start))

        return keep

    def rows(self) -> Floats:
        return np.concatenate(self.logits)


def uncached(work: CheckWork, ids: Sequence[int], start: int) -> ComputedLane:
    """One pass over the whole text; its rows from `start - 1` on."""
    lane, whole = ComputedLane(), ForwardPass(work, len(ids))
    lane.logits.append(whole.rows(ids, 0, lane.tap(0))[start - 1 : -1])
    return lane


def cached(work: CheckWork, ids: Sequence[int], start: int, fault: str = "") -> ComputedLane:
    """The prompt in one chunk, then token by token, with a fault planted."""
    lane, text = ComputedLane(), ForwardPass(work, len(ids), {TWICE: "twice", MASK: "unmasked"}.get(fault, ""))
    lane.logits.append(text.rows(ids[:start], 0, lane.tap(0))[-1:])
    if fault == STALE:  # a page that still holds another branch's K and V
        other = challenge.repeated(work.llm.tokenizer.encode(challenge.OPENING, add_special=False), PAGE)
        text.rows(other, PAGE, lane.tap(PAGE))
    for position in range(start, len(ids) - 1):
        lane.logits.append(
            text.rows(ids[position : position + 1], position, lane.tap(position), further=fault == SHIFTED)
        )
    return lane


def _texts(work: CheckWork, fault: str) -> tuple[list[int], int]:
    if fault != EOS:
        prompt = work.ids(challenge.STORY)
        return prompt + work.greedy(prompt, ROWS), len(prompt)
    prompt = challenge.asked(work.llm, f"{QUESTION} Answer in one word.")
    with work.engine(work.context) as llm:
        answer = work.text(llm, prompt, SamplingParams(temperature=0.0, max_tokens=256))
    ended = prompt + [token for token in answer.token_ids if token not in work.llm.eos_ids]
    return ended + work.greedy(ended, ROWS), len(ended)


def _written(llm: LLM, ids: Sequence[int], start: int, fault: str) -> tuple[int, int]:
    """Tokens that the uncached and the cached loop write."""
    stops = llm.eos_ids | ({ids[start]} if fault == EOS else set())
    ends = [n + 1 for n, token in enumerate(ids[start:]) if token in stops]
    right = ends[0] if ends else ROWS
    return right, (next((end for end in ends if end > 1), ROWS) if fault == EOS else right)


def _other(one: dict[int, Floats], other: dict[int, Floats]) -> str:
    there = sorted(one.keys() & other.keys())
    largest = max(float(np.abs(one[position]).max()) for position in there)
    found = [
        position + 1 for position in there if float(np.abs(one[position] - other[position]).max()) > DIFFERS * largest
    ]
    if not found:
        return "nowhere"
    whole = len(found) == found[-1] - found[0] + 1
    return f"{found[0]} to {found[-1]}" if whole else f"{len(found)} from {found[0]} to {found[-1]}"


def _evidence(figures: challenge.Figures, work: CheckWork, fault: str) -> None:
    ids, start = _texts(work, fault)
    right, wrong = uncached(work, ids, start), cached(work, ids, start, fault)
    rows, equal, apart = _compared(right, wrong)
    written = _written(work.llm, ids, start, fault)
    figures.counted("prompt", "prompt", start, "tokens", "tokens before the first written one")
    figures.counted("case_equal", f"argmax equal, of {rows}", equal, "", "rows whose largest logit is at the same id")
    figures.read("case_apart", "largest |Δ logit|", apart, "logit", "over all rows and the whole vocabulary")
    where = "in layer 0, whose input is the token alone"
    figures.counted("case_keys", "keys that differ", _other(right.keys, wrong.keys), "", f"of these tokens, {where}")
    figures.counted(
        "case_values", "values that differ", _other(right.values, wrong.values), "", f"of these tokens, {where}"
    )
    figures.counted("uncached_tokens", "uncached wrote", written[0], "tokens", "up to the first end token, or 64")
    figures.counted("cached_tokens", "cached wrote", written[1], "tokens", "up to where its loop ended")


def _compared(one: ComputedLane, other: ComputedLane) -> tuple[int, int, float]:
    """How many rows there are, how many have an equal argmax, and the largest distance of two logits."""
    logits, others = one.rows(), other.rows()
    equal = int((logits.argmax(-1) == others.argmax(-1)).sum())
    return len(logits), equal, float(np.abs(logits - others).max())


@challenge.challenge(
    "qkv",
    "Make cached and uncached agree",
    "Each case has one planted fault, computed in a reference forward pass beside the engine. See what it does to "
    "logits, keys and values, and name it.",
    lambda llm: f"the fault named; then {ROWS} of {ROWS} argmax equal, |Δ logit| at most {tolerance(llm):g}",
    challenge.choice("case", "case", *NAMES),
    challenge.choice("fault", "fault", LOOK, SHIFTED, TWICE, MASK, STALE, EOS),
)
def agree(work: CheckWork, answer: challenge.ChallengeAnswer) -> Checked:
    figures, cases = challenge.Figures(), planted(work.llm)
    case, named = answer.text("case"), answer.text("fault")
    if case not in cases:
        done = f"This model has no rotation of positions, so there are {len(cases)} cases; choose another."
        return figures.verdict("agree", done, "")
    _evidence(figures, work, cases[case])
    if named == LOOK:
        return figures.verdict("agree", "Here is the evidence. Which fault leaves this trace? Name it.", "")
    if named != cases[case]:
        return figures.verdict("agree", f"It is not {named}: {_HINTS[named]} Look at the evidence again.", "")
    ids, start = _texts(work, cases[case])
    rows, equal, apart = _compared(uncached(work, ids, start), cached(work, ids, start))
    most = tolerance(work.llm)
    figures.counted("equal", f"argmax equal without it, of {rows}", equal, "", "rows")
    figures.read("apart", "largest |Δ logit| without it", apart, "logit", f"at most {most:g} in {work.llm.dtype}")
    why = "" if equal == rows and apart <= most else "Without the fault they still disagree. That is ours: report it."
    return figures.verdict("agree", why, f"Named, and without it cached and uncached agree on {equal} of {rows} rows.")


_HINTS = {
    SHIFTED: "it would change the keys of the written tokens, and no values.",
    TWICE: "it would change all keys but the first, and no values.",
    MASK: "it would leave layer 0 as it is: there K and V follow from the token alone.",
    STALE: "it would change keys and values of one page.",
    EOS: "it would change no logit, but where the text ends.",
}


def tolerance(llm: LLM) -> float:
    """The largest distance of logits. AMX multiplies in bfloat16, so a last bit can change the third digit."""
    return 1e-3 if llm.kernels not in ("reference", "amx") or llm.dtype == "float32" else 0.25
