"""Challenges of the card on what the cache saves: predict, win."""

from tokenwright.engine import SamplingParams
from tokenwright.explorer.learn import challenge
from tokenwright.explorer.learn.work import CheckWork
from tokenwright.explorer.panels.learn import Checked
from tokenwright.llm.llm import LLM
from tokenwright.trace.schema import StepFrame

IN_A_ROW = 5
BUDGET = 1e11  # FLOP of a check's race


def contexts(llm: LLM) -> list[int]:
    most = min(1024, llm.context)
    return [max(2, most * share // 100) for share in (4, 10, 20, 35, 50)]


def _steps(work: CheckWork, tokens: int) -> tuple[StepFrame, StepFrame]:
    """Two real steps whose newest row has a context of `tokens`: with the cache and without."""
    ids = challenge.repeated(work.ids(challenge.STORY), tokens)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with work.engine(tokens + 2, trace=True) as llm:
        with llm.run(ids[:-1], params) as run:
            run.step()
            [cached] = run.step()
        with llm.run(ids, params, cache=False) as run:
            *_, uncached = run.step()
    return cached, uncached


def _symbols(llm: LLM) -> str:
    config, costs = llm.config, llm.costs
    return (
        f"P_b = {costs.block_weights:,}, P_lm = {costs.head_weights:,}, L = {config.layers}, H = {config.heads}, "
        f"D = {config.head_size}, c = {costs.bytes_per_token:,} bytes"
    )


def _predict_target(llm: LLM) -> str:
    steps = ", ".join(map(str, contexts(llm)))
    return f"within 1 %, five in a row, at t = {steps}; {_symbols(llm)}"


@challenge.challenge(
    "savings",
    "Predict before you press",
    "What does the next step cost, with the cache and without? The engine then makes that step.",
    _predict_target,
    challenge.number("flops", "FLOP, cached", 0, 0, 1e18),
    challenge.whole("kv_bytes", "cache after it, bytes", 0, 0, 10**15),
    challenge.whole("forward", "forward tokens, cached", 0, 0, 10**9),
    challenge.number("uncached_flops", "FLOP, uncached", 0, 0, 1e18),
    challenge.whole("uncached_forward", "forward tokens, uncached", 0, 0, 10**9),
    challenge.streak(IN_A_ROW - 1),
)
def predict(work: CheckWork, answer: challenge.ChallengeAnswer) -> Checked:
    figures, done = challenge.Figures(), answer.whole("streak")
    tokens = contexts(work.llm)[done]
    cached, uncached = _steps(work, tokens)
    forward = sum(frame.length for frame in (uncached,))
    figures.given("context", "context t", tokens, "tokens", "of the newest row, itself included")
    pairs = (
        ("flops", "FLOP, cached", cached.flops_derived, "FLOP"),
        ("kv_bytes", "cache after the step", cached.kv_resident, "B"),
        ("forward", "forward tokens, cached", cached.length, "tokens"),
        ("uncached_flops", "FLOP, uncached", uncached.flops_derived, "FLOP"),
        ("uncached_forward", "forward tokens, uncached", forward, "tokens"),
    )
    why = ""
    for name, label, right, unit in pairs:
        note = figures.derived if unit == "FLOP" else figures.counted
        note(
            f"right_{name}", label, right, unit, "2 (P_b n + P_lm) + A" if unit == "FLOP" else "counted in a real step"
        )
        if not challenge.within(answer.number(name), right, 0.01) and not why:
            side = "more" if answer.number(name) < right else "less"
            why = f"{label} at t = {tokens}: it is {side} than yours. The row starts again. {_RULES[name]}"
    right_so_far = 0 if why else done + 1
    if not why and right_so_far < IN_A_ROW:
        following = contexts(work.llm)[right_so_far]
        ahead = f"Right, {right_so_far} of {IN_A_ROW} in a row. Now the step at t = {following}."
        return figures.verdict("predict", ahead, "", streak=right_so_far)
    done_words = f"Right, {IN_A_ROW} in a row, each against a step that the engine made."
    return figures.verdict("predict", why, done_words, streak=right_so_far)


_RULES = {
    "flops": "One row: 2 (P_b + P_lm) + 4 H D L t.",
    "kv_bytes": "t tokens times c.",
    "forward": "With the cache only the newest token goes through the layers.",
    "uncached_flops": "t rows: 2 P_b t + 2 P_lm + 4 H D L t (t + 1) / 2.",
    "uncached_forward": "Without the cache all t tokens go through the layers.",
}


def _lengths(llm: LLM) -> int:
    return min(500, llm.context // 2 - 1)


@challenge.challenge(
    "savings",
    "How big is the win?",
    "How many times more FLOP does the same text take without the cache? A smaller race is then run.",
    lambda llm: f"within 10 %, for N = {_lengths(llm)} prompt tokens and as many new ones; {_symbols(llm)}",
    challenge.number("ratio", "FLOP uncached / cached", 2, 1, 1e9),
)
def win(work: CheckWork, answer: challenge.ChallengeAnswer) -> Checked:
    figures, llm = challenge.Figures(), work.llm
    n, given = _lengths(llm), answer.number("ratio")
    costs = [llm.costs.run(n, n, cache=cache).flops for cache in (True, False)]
    right = costs[1] / costs[0]
    figures.derived(
        "cached", f"FLOP, cached, N = T = {n}", costs[0], "FLOP", "2 (P_b n + P_lm) + A, summed over the steps"
    )
    figures.derived("uncached", f"FLOP, uncached, N = T = {n}", costs[1], "FLOP", "the whole text at every step")
    if not challenge.within(given, right, 0.1):
        side = "larger" if given < right else "smaller"
        hint = "Uncached, step by step, all of N .. N + T - 1 tokens go through; cached, N + T - 1 in all."
        return figures.verdict("win", f"The ratio is {side} than {given:g}. {hint}", "")
    size = max(4, min(n, int((BUDGET / (1.5 * llm.costs.chunk(0, 1).flops)) ** 0.5)))
    ids = challenge.repeated(work.ids(challenge.STORY), size)
    params = SamplingParams(temperature=0.0, max_tokens=size, ignore_eos=True)
    with work.engine(2 * size) as own:
        texts = [work.text(own, ids, params, cache=cache, salt=str(cache)) for cache in (True, False)]
    small = [llm.costs.run(size, size, cache=cache).flops for cache in (True, False)]
    times = texts[1].usage.total_s / texts[0].usage.total_s
    figures.derived("ratio", "FLOP ratio", right, "times", "uncached / cached")
    figures.derived("small", f"FLOP ratio, N = T = {size}", small[1] / small[0], "times", "of the race that was run")
    figures.measured("cached_s", "its time, cached", texts[0].usage.total_s * 1e6, "us", "whole text")
    figures.measured("uncached_s", "its time, uncached", texts[1].usage.total_s * 1e6, "us", "whole text")
    figures.measured("times", "time ratio", times, "times", "uncached / cached, really run")
    why = "" if texts[0].token_ids == texts[1].token_ids else "The texts differ. That must never happen: report it."
    return figures.verdict(
        "win", why,
        f"Right: {right:.0f} times the FLOP. The clock says {times:.1f} times for a short race: one row at a time "
        "reads all weights for little work, and a chunk reads them once for many rows.",
    )  # fmt: skip
