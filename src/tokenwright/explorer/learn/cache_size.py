"""Challenges of the card on the notebook's size: balance, fit."""

import sys
from bisect import bisect_left

from tokenwright.cache import LayerSpec
from tokenwright.cache.codec import CODECS
from tokenwright.config import Heads
from tokenwright.engine.layer_group import AttentionWindow
from tokenwright.explorer.learn.challenge import Challenge, ChallengeAnswer, Figures, choice, whole, within
from tokenwright.explorer.learn.work import CheckWork
from tokenwright.explorer.panels.learn import Checked
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


def balance(work: CheckWork, answer: ChallengeAnswer) -> Checked:
    figures, llm = Figures(), work.llm
    figures.counted("weights", "weights", llm.weight_bytes, "B", "bytes of the weights in memory")
    figures.derived("per_token", "cache per token", llm.costs.bytes_per_token, "B", "c, over all layers")
    why = ""
    for name, batch in (("tokens", 1), ("tokens_batch", BATCH)):
        given, right = answer.whole(name), balanced(llm, batch)
        figures.derived(
            f"{name}_bytes", f"cache at yours, batch {batch}", batch * KVMemory(tuple(llm.specs)).at(max(1, given)),
            "B", "B x sum over the layers of c_l min(t, s + W)",
        )  # fmt: skip
        if not within(given, right, 0.01) and not why:
            off = "more" if given < right else "fewer"
            why = f"For a batch of {batch}, {given:,} tokens are not it: it takes {off}. Divide W by c and the batch."
    return figures.verdict(
        "balance", why, "Right: beyond that many tokens in flight the cache is larger than the model."
    )


def llama_cache(kv_heads: int, kv: str, full_layers: int, window: int) -> int:
    """Bytes of K and V of 131,072 tokens in the shape of Llama-3-8B."""
    layout, codec = Heads(kv_heads, HEAD_SIZE), CODECS[kv]
    windows = [AttentionWindow() if layer < full_layers else AttentionWindow(window) for layer in range(LAYERS)]
    specs = tuple(LayerSpec(layout, its, codec, codec, native=codec) for its in windows)
    return KVMemory(specs).most(CONTEXT)


def fit(work: CheckWork, answer: ChallengeAnswer) -> Checked:
    work.check()
    figures = Figures()
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


def _next(answer: ChallengeAnswer) -> str:
    if answer.text("kv_heads") == "32":
        return "Llama 3 has 8 KV heads for its 32 query heads: that alone is a quarter."
    if answer.text("kv") == "int8" and answer.whole("full_layers") == LAYERS:
        return "int8 with its scales takes 1.0625 bytes a number: fewer bits, or a window in most layers."
    return "Take fewer bits, or let fewer layers see the whole text."


def _balance_target(llm: LLM) -> str:
    return (
        f"within 1 %, for {llm.loaded.name}: W = {llm.weight_bytes:,} bytes of weights, c = "
        f"{llm.costs.bytes_per_token:,} bytes of K and V per token; 0 if the cache never gets there"
    )


CHALLENGES = (
    Challenge(
        "balance",
        3,
        "notebook",
        "KV = weights",
        f"At which context does the cache take as many bytes as the weights: for one text, and for {BATCH} at once?",
        _balance_target,
        (
            whole("tokens", "tokens, one text", 1000, 0, 10**12),
            whole("tokens_batch", f"tokens, {BATCH} texts", 1000, 0, 10**12),
        ),
        balance,
    ),
    Challenge(
        "fit",
        4,
        "notebook",
        "128K in 8 GB",
        "A model of the shape of Llama-3-8B (32 layers, heads of 128) at 131,072 tokens. It starts as multi-head "
        "attention in float16: 68.7 GB of cache. Make the cache fit; then cache and weights (4.5 bits) together.",
        lambda _: "at most 8,000,000,000 bytes, scales included; the same for every loaded model",
        (
            choice("level", "level", "cache alone", "cache and weights"),
            choice("kv_heads", "KV heads", "32", "8"),
            choice("kv", "K and V in", "float16", "int8", "int4"),
            whole("full_layers", "layers that see the whole text", 32, 0, LAYERS),
            whole("window", "window of the others", 4096, 1, CONTEXT),
        ),
        fit,
    ),
)
