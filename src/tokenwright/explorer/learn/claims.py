"""The closing challenge: claims about the cache, some wrong. A figure is shown only after the right verdict."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenwright.explorer.learn.challenge import ChallengeAnswer, Figures, challenge, choice, number, within
from tokenwright.explorer.learn.work import CheckWork
from tokenwright.explorer.panels.learn import Checked
from tokenwright.planner import plan

LLAMA, LARGE = "Meta-Llama-3-8B", "Llama-3.1-70B"
OPEN, RIGHT, WRONG = "open", "right", "wrong"
GIB = 2**30
PROMPT, WRITTEN, LAYERS = 8, 20, 6  # of the small example
CACHED = LAYERS * (PROMPT + WRITTEN - 1)  # layer-tokens
NAIVE = LAYERS * sum(range(PROMPT, PROMPT + WRITTEN))


@dataclass(frozen=True, slots=True)
class Claim:
    name: str
    sentence: str
    right: bool
    hint: str
    figure: Callable[[Figures], object]


def _kv(tokens: int, batch: int = 1, model: str = LLAMA) -> int:
    return plan(model, context=tokens, batch=batch).kv_bytes_total


def _weights(figures: Figures) -> None:
    figures.derived("cache", f"{LLAMA}, cache of 32,768 tokens", _kv(32_768), "B", "2 L G D e t")
    size = plan(LLAMA).graph.parameters * 2
    figures.derived("weights", f"{LLAMA}, weights", size, "B", "parameters times two bytes")


def _ratio(figures: Figures) -> None:
    figures.derived("cached", "layer-tokens with the cache", CACHED, "", "L (N + T - 1): the prompt goes through, too")
    figures.derived("naive", "layer-tokens without", NAIVE, "", "L times the sum of t for t = N .. N + T - 1")
    figures.derived("ratio", "times as many", NAIVE / CACHED, "times", "the second, divided by the first")


def _products(figures: Figures) -> None:
    costs = plan(LLAMA).costs
    size = 2 * (costs.block_weights + costs.head_weights)
    figures.derived("products", f"{LLAMA}, products of a cached step", size, "FLOP", "2 (P_b + P_lm), without t")


CLAIMS = (
    Claim(
        "heads",
        "“Llama 3 8B needs about 4 GiB of cache for 8,192 tokens in bf16.”",
        False,
        "Count KV heads, not query heads; the panel Calculator has both.",
        lambda of: of.derived("heads", f"{LLAMA}, 8,192 tokens", _kv(8192), "B", "2 L G D e t, with G = 8 KV heads"),
    ),
    Claim(
        "past",
        "“K and V of a past token never change: no later token reaches back, and its position is fixed.”",
        True,
        "Ask which later token could change them, under the causal mask.",
        lambda of: of.given(
            "past", "K and V of a past token", "fixed", "", "causal mask, and keys turned at their place"
        ),
    ),
    Claim(
        "megabyte",
        "“Large models keep about 1 MB for each token, so 128K tokens take about 128 GB.”",
        False,
        f"Calculate it for {LARGE}, in the panel Calculator.",
        lambda of: of.derived("megabyte", f"{LARGE}, 131,072 tokens", _kv(131_072, 1, LARGE), "B", "320 KiB a token"),
    ),
    Claim(
        "weights",
        "“The cache of one text of 32,768 tokens is larger than the weights of Llama 3 8B, both in bf16.”",
        False,
        "Calculate both; the challenge KV = weights finds where they are equal.",
        _weights,
    ),
    Claim(
        "ratio",
        f"“A prompt of {PROMPT} tokens and {WRITTEN} new ones in {LAYERS} layers: 120 layer-tokens with the cache, "
        "2,436 without, so 20 times as many.”",
        False,
        "120 leaves out the prompt, and the other number reads the prompt token by token.",
        _ratio,
    ),
    Claim(
        "batch",
        "“Eight texts at once need eight caches, and the weights only once.”",
        True,
        "K and V belong to one text; weights belong to the model.",
        lambda of: of.derived("batch", f"{LLAMA}, 8 texts of 8,192 tokens", _kv(8192, 8), "B", "8 caches, one model"),
    ),
    Claim(
        "linear",
        "“With the cache, the attention of a whole text takes work that is linear in its length.”",
        False,
        "Each step reads all earlier tokens: sum that over the steps.",
        lambda of: of.derived("linear", "reads of 2,000 tokens over 1,000's", 4002 / 1001, "times", "sums of 1 .. T"),
    ),
    Claim(
        "products",
        "“In a cached step the matrix products cost the same at every length; only attention grows with the text.”",
        True,
        "One token goes through the matrices, however many are in the cache.",
        _products,
    ),
    Claim(
        "limit",
        "“A smaller max tokens makes the model answer more briefly, without a loss.”",
        False,
        "See how an answer ends that meets the limit, in the challenge Bound the answer.",
        lambda of: of.given("limit", "an answer at its limit ends by", "length", "", "it is cut, not shorter"),
    ),
)


@challenge(
    "training",
    "Spot the error",
    "Nine sentences about the cache, as one reads them in articles. Which are right? Then give the right figures "
    "of two that are wrong. The panel Calculator helps.",
    lambda _: f"{len(CLAIMS)} verdicts, and two figures within 1 and 2 %; the same for every loaded model",
    *(choice(one.name, one.sentence, OPEN, RIGHT, WRONG) for one in CLAIMS),
    number("gib", "the cache of the first sentence, GiB", 4, 0, 1e6),
    number("times", "the ratio of the fifth sentence, times", 20, 0, 1e6),
)
def claims(work: CheckWork, answer: ChallengeAnswer) -> Checked:
    work.check()
    figures = Figures()
    mistaken = [one for one in CLAIMS if answer.text(one.name) != (RIGHT if one.right else WRONG)]
    for one in CLAIMS:
        if one not in mistaken:
            one.figure(figures)
    held = len(CLAIMS) - len(mistaken)
    figures.counted("verdicts", f"verdicts that hold, of {len(CLAIMS)}", held, "", "right or wrong, as they are")
    why = ""
    if mistaken:
        why = f"{held} of {len(CLAIMS)} verdicts hold. Look again at {mistaken[0].sentence} {mistaken[0].hint}"
    elif not within(answer.number("gib"), _kv(8192) / GIB, 0.01):
        why = "All verdicts hold. The right size of the first cache is another one: the panel Calculator has it in GiB."
    elif not within(answer.number("times"), NAIVE / CACHED, 0.02):
        why = f"All verdicts hold. The right ratio is {NAIVE:,} to {CACHED}: divide."
    return figures.verdict("claims", why, f"All {len(CLAIMS)} verdicts hold, and both figures are right.")
