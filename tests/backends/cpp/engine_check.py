"""What the engine computes, as lines: by this Python, and under Node by that of web pages (scripts/wasm compares)."""

import sys

from tokenwright import LLM, SamplingParams
from tokenwright.bench.published_bits import FORMATS, logits_hash, published

THREADS = 0 if sys.platform == "emscripten" else None


def texts(llm: LLM) -> None:
    greedy, sampled = SamplingParams(temperature=0.0, max_tokens=12), SamplingParams(seed=3, n=2, max_tokens=12)
    prompts = ["Once upon a time", "Zürich, 42 é  <|end|>\n"]
    for cache in (True, False):
        for done in llm.generate(prompts * 2, [greedy, greedy, sampled, sampled], cache=cache):
            for one in (done, *done.others):
                print(one.token_ids, [value.hex() for value in one.logprobs], repr(one.text))
    with llm.run(prompts[0], greedy) as run:
        for step in range(5):
            run.cache = step != 3
            run.step()
        with llm.fork(run, 2, token=300) as fork:
            fork.step()
            print(run.tokens, fork.tokens, run.attention(4, 2, 1).codes)


def main() -> None:
    for form in FORMATS:
        hashed = logits_hash(form, THREADS)
        print(form, hashed, "as published" if hashed == published()["fused"][form] else "IS NOT AS PUBLISHED")
    for weights, kv in (("native", "native"), ("int8", "int8"), ("int4", "int4")):
        with LLM("stories", threads=THREADS, trace=True, kv_memory=2**24, weights=weights, kv=kv) as llm:
            texts(llm)


if __name__ == "__main__":
    main()
