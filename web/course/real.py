"""The file with a reader's parts beside the real engine of this page, over the same weights in float32."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tokenwright import LLM, SamplingParams

from .cell import Hint, expect
from .steps import STORIES, steps, stories, tokenizer

PROMPTS = (  # the second page of some is equal, behind another first one
    "Once upon a time, there was a",
    "There was a little girl who was sad",
    "Tom saw a little girl who was sad",
    "There was a little girl who was sad",
)
SETTINGS = ((0.0, 1.0, 0), (0.8, 1.0, 3), (0.9, 0.9, 5), (0.8, 0.95, 4))  # temperature, top_p, seed
TOKENS = 12
SIZES = {"pages": 12, "page_size": 4, "token_budget": 16}
FAR = 1e-3  # difference of log-probabilities: the order of sums explains 1e-4
LOOK = "Each part was right by itself: look at what two of them share."
TIE = 1e-4  # difference of logits, or of a drawn number, that the order of sums explains


def compare(file: Any) -> Iterator[None]:
    """Raises Hint where a token is not the real engine's, and no rounding explains it. Prints what was written."""
    ids = [tokenizer().encode(prompt) for prompt in PROMPTS]
    engine = file.Engine(stories(file), **SIZES)
    samplings = [file.Sampling(*how, TOKENS) for how in SETTINGS]
    texts, rows, choose = [engine.add([*one], how) for one, how in zip(ids, samplings, strict=True)], {}, file.pick

    def noted(chunks: Any, logits: np.ndarray) -> Any:
        rows.update({(id(chunk[0]), chunk[2]): row for chunk, row in zip(chunks, logits, strict=True)})
        return choose(chunks, logits)

    file.pick = noted
    for _ in steps(engine):
        engine.scheduler.check()
        yield
    with LLM(STORIES, dtype="float32", threads=0, kv_memory=2**22) as real:
        params = [SamplingParams(temperature=t, top_p=p, seed=seed, max_tokens=TOKENS) for t, p, seed in SETTINGS]
        answers = real.generate(ids, params)
    for prompt, text, begun, how, answer in zip(PROMPTS, texts, ids, samplings, answers, strict=True):
        for at, token in enumerate(answer.token_ids, len(begun)):
            mine = text.tokens[at] if at < len(text.tokens) else None
            row = rows.get((id(text), at))
            if row is None:
                raise Hint(f"After “{prompt}” no logits were computed for token {at - len(begun) + 1}. {LOOK}")
            if mine != token:
                expect(tied(file, row, how, at), wrong(prompt, at - len(begun), mine, token))
                break
            off = abs(float(np.log(file.softmax(row.astype(np.float64))[token])) - answer.logprobs[at - len(begun)])
            expect(off < FAR, f"After “{prompt}” the logits of token {at - len(begun) + 1} are others. {LOOK}")
        print(tokenizer().decode(text.tokens))
    scheduler = engine.scheduler
    print(f"{scheduler.reused} tokens reused, {scheduler.preemptions} preemptions, {engine.pool.evictions} evictions")
    expect(
        scheduler.preemptions and scheduler.reused,
        "The texts are the real engine's, but nothing was preempted or reused.",
    )


def wrong(prompt: str, place: int, mine: int | None, token: int) -> str:
    own, real = (tokenizer().decode([one]) if one is not None else "nothing" for one in (mine, token))
    return f"After “{prompt}” token {place + 1} of your engine is “{own}”, and of the real one “{real}”. {LOOK}"


def tied(file: Any, row: np.ndarray, how: Any, position: int) -> bool:
    """Whether a slightly different number, or the two largest logits, would give another token."""
    if how.temperature == 0:
        last, first = np.sort(row)[-2:]
        return bool(first - last < TIE)
    number = file.uniform(how.seed, position)
    return len({file.sample(row, how, min(max(number + by, 0.0), 1 - TIE)) for by in (-TIE, 0.0, TIE)}) > 1
