"""Challenges of the card on the notebook's size: balance, fit."""

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.cache import LayerSpec, layer_specs
from tokenwright.cache.codec import CODECS
from tokenwright.config import Heads, Learned
from tokenwright.decode.logits_processors import log_softmax
from tokenwright.engine.layer_group import AttentionWindow
from tokenwright.explorer.learn import challenge
from tokenwright.explorer.learn.challenge import OPENING, STORY
from tokenwright.explorer.learn.work import CheckWork
from tokenwright.explorer.panels.learn import Checked
from tokenwright.formats import KVFormat
from tokenwright.llm.llm import LLM
from tokenwright.planner import plan
from tokenwright.planner.figures import KVMemory

BATCH = 8
FAR = min(1 << 40, sys.maxsize)  # tokens
LLAMA, LAYERS, HEAD_SIZE, CONTEXT, LIMIT = "meta-llama/Meta-Llama-3-8B", 32, 128, 131_072, 8 * 10**9
BITS = 4.5  # of a weight in groups of 32 with a float16 scale


def balanced(llm: LLM, batch: int) -> int:
    """The least context at which the caches of `batch` texts take at least the weights' bytes; 0: they never do."""
    memory = KVMemory(tuple(llm.specs))
    most = memory.knots[-1]
    if memory.bounded and batch * memory.at(most) < llm.weight_bytes:
        return 0
    return bisect_left(range(FAR), llm.weight_bytes, lo=1, key=lambda tokens: batch * memory.at(tokens))


@challenge.challenge(
    "notebook",
    "KV = weights",
    f"At which context does the cache take as many bytes as the weights: for one text, and for {BATCH} at once?",
    lambda of: (
        f"within 1 %, or 0 if never: weights {of.weight_bytes:,} B, K and V {of.costs.bytes_per_token:,} B a token"
    ),
    challenge.whole("tokens", "tokens, one text", 1000, 0, 10**12),
    challenge.whole("tokens_batch", f"tokens, {BATCH} texts", 1000, 0, 10**12),
)
def balance(work: CheckWork, answer: challenge.ChallengeAnswer) -> Checked:
    figures, llm = challenge.Figures(), work.llm
    figures.counted("weights", "weights", llm.weight_bytes, "B", "bytes of the weights in memory")
    figures.derived("per_token", "cache per token", llm.costs.bytes_per_token, "B", "c, over all layers")
    why = ""
    for name, batch in (("tokens", 1), ("tokens_batch", BATCH)):
        given, right = answer.whole(name), balanced(llm, batch)
        figures.derived(
            f"{name}_bytes", f"cache at yours, batch {batch}", batch * KVMemory(tuple(llm.specs)).at(max(1, given)),
            "B", "B x sum over the layers of c_l min(t, s + W)",
        )  # fmt: skip
        if not challenge.within(given, right, 0.01) and not why:
            off = "more" if given < right else "fewer"
            why = f"For a batch of {batch}, {given:,} tokens are not it: it takes {off}. Divide W by c and the batch."
    return figures.verdict(
        "balance", why, "Right: beyond that many tokens in flight the cache is larger than the model."
    )


def llama_cache(kv_heads: int, kv: str, full_layers: int, window: int) -> int:
    """Bytes of K and V of 131,072 tokens in the shape of Llama-3-8B."""
    layout, codec = Heads(kv_heads, HEAD_SIZE), CODECS[kv]
    windows = [AttentionWindow() if layer < full_layers else AttentionWindow(window) for layer in range(LAYERS)]
    specs = tuple(LayerSpec(layout, one, codec, codec, native=codec) for one in windows)
    return KVMemory(specs).most(CONTEXT)


@challenge.challenge(
    "notebook",
    "128K in 8 GB",
    "A model of the shape of Llama-3-8B (32 layers, heads of 128) at 131,072 tokens. It starts as multi-head "
    "attention in float16: 68.7 GB of cache. Make the cache fit; then cache and weights (4.5 bits) together.",
    lambda _: "at most 8,000,000,000 bytes, scales included; the same for every loaded model",
    challenge.choice("level", "level", "cache alone", "cache and weights"),
    challenge.choice("kv_heads", "KV heads", "32", "8"),
    challenge.choice("kv", "K and V in", "float16", "int8", "int4"),
    challenge.whole("full_layers", "layers that see the whole text", 32, 0, LAYERS),
    challenge.whole("window", "window of the others", 4096, 1, CONTEXT),
)
def fit(work: CheckWork, answer: challenge.ChallengeAnswer) -> Checked:
    work.check()
    figures = challenge.Figures()
    level = answer.text("level")
    size = llama_cache(
        int(answer.text("kv_heads")), answer.text("kv"), answer.whole("full_layers"), answer.whole("window")
    )
    weights = round(plan(LLAMA).graph.parameters * BITS / 8) if level == "cache and weights" else 0
    figures.derived("start", "MHA, float16", llama_cache(32, "float16", LAYERS, 1), "B", "32 heads, all layers full")
    figures.derived("cache", "your cache", size, "B", "sum over the layers of 2 G D e min(t, W), scales included")
    if weights:
        figures.derived("weights", "weights", weights, "B", f"parameters x {BITS} bits")
    figures.given("limit", "at most", LIMIT, "B", "8 GB = 8 x 10^9 bytes")
    over = size + weights - LIMIT
    why = "" if over <= 0 else f"Too large by {over / 1e9:.2f} GB. {_next(answer)}"
    done = f"{(size + weights) / 1e9:.2f} GB."
    return figures.verdict("fit", why, f"It fits: {done}" + ("" if weights else " Level 2: cache and weights."))


def _next(answer: challenge.ChallengeAnswer) -> str:
    if answer.text("kv_heads") == "32":
        return "Llama 3 has 8 KV heads for its 32 query heads: that alone is a quarter."
    if answer.text("kv") == "int8" and answer.whole("full_layers") == LAYERS:
        return "int8 with its scales takes 1.0625 bytes a number: fewer bits, or a window in most layers."
    return "Take fewer bits, or let fewer layers see the whole text."


SMALL, SHARE, LAST = 4, 3, 32  # a third of what a window of four costs without sinks
SAME = 64
FORMATS = ("native", "fp8", "int8", "int4")


def text_of(work: CheckWork) -> list[int]:
    """A story, an unrelated one, and the model's continuation."""
    prompt = work.ids(f"{STORY} said yes.\n\n{OPENING}")
    return prompt + work.greedy(prompt, LAST)


def mean_kl(full: Floats, other: Floats) -> float:
    """The mean of KL(full || other) in nats over rows of logits [n, V]."""
    p, q = log_softmax(full), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def divergence(work: CheckWork, ids: Sequence[int]) -> Callable[[int, int], float]:
    """The mean KL, over a text's last rows, between the full cache and one with a window and sinks."""
    rows = slice(-LAST - 1, -1)
    full = work.logits(ids)[rows]
    return lambda window, sinks: mean_kl(full, work.logits(ids, window=window, sinks=sinks)[rows])


@challenge.challenge(
    "smaller",
    "Break and save the window",
    f"Let the model see only the last W tokens and the first s (sinks). A window of {SMALL} breaks what it "
    "predicts. Find the smallest one that a few sinks save; the check then takes the sinks away.",
    lambda _: f"mean KL over {LAST} tokens below a third of that of W = {SMALL}, s = 0, by the smallest W",
    challenge.whole("window", "window W", SMALL, 1, 1024),
    challenge.whole("sinks", "sinks s", 0, 0, 64),
)
def window(work: CheckWork, answer: challenge.ChallengeAnswer) -> Checked:
    figures, size, sinks = challenge.Figures(), answer.whole("window"), answer.whole("sinks")
    learned = isinstance(work.llm.config.positions, Learned)  # such a model has no sinks
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
    """Tokens that greedy decoding writes alike with such a cache."""
    rows = work.logits(ids, kv=f"k={k},v={v}")[-SAME - 1 : -1].argmax(-1).tolist()
    return next((n for n, (one, right) in enumerate(zip(rows, ids[-SAME:], strict=True)) if one != right), SAME)


@challenge.challenge(
    "smaller",
    "Fewest bits",
    f"Store K and V in few bytes, so that greedy still writes the same {SAME} tokens after “{OPENING}”.",
    lambda _: f"the fewest bytes per token of {len(FORMATS)} formats for K and {len(FORMATS)} for V",
    challenge.choice("k", "K in", *FORMATS, start=""),
    challenge.choice("v", "V in", *FORMATS, start=""),
)
def bits(work: CheckWork, answer: challenge.ChallengeAnswer) -> Checked:
    figures, k, v = challenge.Figures(), answer.text("k"), answer.text("v")
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
