"""The challenge `heads`: find a previous-token head, a sink head and an induction head by their computed mass."""

import random

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.errors import RequestError
from tokenwright.explorer.learn.challenge import STORY, ChallengeAnswer, Figures, challenge, head
from tokenwright.explorer.learn.forward import ForwardPass
from tokenwright.explorer.learn.work import CheckWork
from tokenwright.explorer.panels.heads import START
from tokenwright.explorer.panels.learn import Checked
from tokenwright.models.taps import Site

SEGMENT, SEGMENTS = 100, 2  # random ids, each segment repeated once: only the repetition can be read
NEAR_BEST = 0.9
KINDS = {
    "previous": ("previous token", 0.5, "mean weight on the token before"),
    "sink": ("sink", 0.5, "mean weight on the first token of a story"),
    "induction": ("induction", 0.4, "mean weight on the token after the previous occurrence, in the second copy"),
}


def _segment(work: CheckWork, seed: int) -> list[int]:
    draw, special = random.Random(seed), work.llm.tokenizer.special_ids
    plain = [token for token in range(work.llm.config.vocab_size) if token not in special]
    return draw.choices(plain, k=min(SEGMENT, work.context // 2 - 2))


def masses(work: CheckWork) -> dict[str, Floats]:
    """Each kind's mean weights [layers, heads]."""
    begin = work.llm.tokenizer.encode("")
    each = [_of(work, begin, _segment(work, seed) * 2) for seed in range(SEGMENTS)]
    means = {name: np.stack([found[name] for found in each]).mean(0) for name in KINDS}
    return means | {"sink": _of(work, [], work.llm.tokenizer.encode(STORY)[: work.context - 1])["sink"]}


def _of(work: CheckWork, begin: list[int], text_ids: list[int]) -> dict[str, Floats]:
    ids, back = begin + text_ids, len(text_ids) // 2 - 1  # from a token to the one after its previous occurrence
    text = ForwardPass(work, len(ids))
    queries: dict[int, Floats] = {}
    found: dict[str, list[Floats]] = {name: [] for name in KINDS}

    def tap(site: Site, layer: int, value: Floats) -> None:
        work.check()
        if site is Site.QUERY:
            queries[layer] = value
        elif site is Site.MIXED:  # now the layer's keys are cached
            rows = text.weights(layer, queries.pop(layer))  # [H, t, t]
            found["previous"].append(rows.diagonal(-1, 1, 2).mean(-1))
            found["sink"].append(rows[:, min(START, len(ids) - 1) :, 0].mean(-1))
            found["induction"].append(rows.diagonal(-back, 1, 2)[:, len(begin) + 1 :].mean(-1))

    text.rows(ids, 0, tap)
    return {name: np.stack(each) for name, each in found.items()}


@challenge(
    "qkv",
    "Head hunter",
    "Find a head that looks at the token before, one that in a story rests on the first token (sink), and one "
    "that looks at what came after the last occurrence (induction). The first and the third are checked on "
    "random tokens that are repeated.",
    lambda _: "mean weights of 0.5, 0.5 and 0.4, or 0.9 of the model's best head where that is less",
    head("previous", "previous token head"),
    head("sink", "sink head"),
    head("induction", "induction head"),
)
def heads(work: CheckWork, answer: ChallengeAnswer) -> Checked:
    figures, config = Figures(), work.llm.config
    for name in KINDS:
        layer, index = answer.head(name)
        if layer >= config.layers or index >= config.heads:
            last = f"{config.layers - 1}.{config.heads - 1}"
            label = KINDS[name][0]
            raise RequestError(f"“{label} head” must be a layer and a head from 0.0 to {last}, not {layer}.{index}")
    found, why = masses(work), ""
    for name, (label, published, meaning) in KINDS.items():
        layer, index = answer.head(name)
        mass, best = float(found[name][layer, index]), float(found[name].max())
        target = min(published, NEAR_BEST * best)
        figures.read(name, f"{label}: layer {layer}, head {index}", mass, "share", meaning)
        figures.derived(f"{name}_target", "at least", target, "share", f"{published}, or 0.9 of this model's best head")
        if mass < target and not why:
            why = f"Layer {layer}, head {index} is no {label} head: {mass:.0%} of its weight is there. {_HINTS[name]}"
    return figures.verdict("heads", why, "All three are what you say, by the weights that the model computes.")


_HINTS = {
    "previous": "Look for a thin beam to the token just before, at every step.",
    "sink": "Run the ready prompt Story, and colour the grid of heads by “sink”.",
    "induction": "Run a text that repeats itself: which head looks behind the earlier copy?",
}
