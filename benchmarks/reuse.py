"""The gain from reused K and V: prompts with a common prefix, and a prompt whose cache was saved to a file.

    python benchmarks/reuse.py shared [MODEL] [--rounds 30] [--prefix 512] [--requests 64]
    python benchmarks/reuse.py saved MODEL [--rounds 5] [--tokens 4096]

shared: each round sends a new prompt and then one with the same prefix, and compares the times to first token; then the
script counts the pages of --requests such requests at once. saved: each round computes a long prompt, and loads it from
its cache file, in an engine that has none of its pages cached. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from look import interval

from tokenwright import LLM, SamplingParams

OWN = 16  # tokens of each request after the shared prefix
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
FEW = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def ids(llm: LLM, count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, min(4000, llm.config.vocab_size)) for _ in range(count)]


def ttft(llm: LLM, prompt: list[int], salt: str) -> float:
    [done] = llm.generate([prompt], FIRST, salt=salt)
    assert done.usage.ttft_s is not None
    return done.usage.ttft_s


def shared(model: str, rounds: int, length: int, requests: int) -> dict[str, Any]:
    with LLM(model, max_sequences=max(64, requests)) as llm:
        prefix, size = ids(llm, length, 0), llm.engine.pool.page_size
        ttft(llm, ids(llm, length, 1), "warm-up")
        pairs = []
        for turn in range(rounds):
            texts = [[*prefix, *ids(llm, OWN, 2 * turn + n)] for n in range(2)]
            pairs.append((ttft(llm, texts[0], str(turn)), ttft(llm, texts[1], str(turn))))
        many = [[*prefix, *ids(llm, OWN, 1000 + n)] for n in range(requests)]
        pages, together = physical(llm, many)
        alone = [llm.generate([one], FEW, salt=f"alone {n}")[0].token_ids for n, one in enumerate(many)]
    middle, low, high = interval([first / second for first, second in pairs])
    print(f"{model}: {length} tokens shared, {OWN} own, {rounds} pairs")
    print(f"time to first token: {median(one for one, _ in pairs) * 1000:.1f} ms for the first text, ", end="")
    print(
        f"{median(one for _, one in pairs) * 1000:.2f} ms for the second: {middle:.1f} times ({low:.1f} to {high:.1f})"
    )
    own = -(-(length + OWN + FEW.max_tokens - 1) // size) - length // size
    expected = length // size + requests * own
    without = requests * -(-(length + OWN + FEW.max_tokens - 1) // size)
    print(
        f"{requests} at once: {pages} pages at most, {expected} = {length // size} shared + {requests} x {own} own; ",
        end="",
    )
    print(f"without sharing {without}. Texts as without sharing: {together == alone}")
    return {"pairs": pairs, "ratio": [middle, low, high], "pages": pages, "without": without, "same": together == alone}


def physical(llm: LLM, prompts: list[list[int]]) -> tuple[int, list[tuple[int, ...]]]:
    """The most pages in use while all prompts ran at once, and their texts."""
    pool, most = llm.engine.pool, 0
    streams = [llm.stream(prompt, FEW, salt="together") for prompt in prompts]
    live = list(streams)
    while live:
        for stream in list(live):
            if next(stream, None) is None:
                live.remove(stream)
            most = max(most, pool.pages - pool.available)
    return most, [stream.completion.token_ids for stream in streams]


def saved(model: str, rounds: int, tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, LLM(model, dtype="float32") as llm:
        file = Path(folder) / "prompt.kv"
        prompt = ids(llm, tokens, 0)
        [done] = llm.generate([prompt], FEW)
        began = time.perf_counter()
        spared = llm.save_cache(file, [*prompt, *done.token_ids])
        write_s = time.perf_counter() - began
        times, pages = [], llm.engine.pool.pages
        for _ in range(rounds):
            with LLM(llm.loaded, pages=pages) as fresh:
                anew = ttft(fresh, prompt, "anew")
                began = time.perf_counter()
                fresh.load_cache(file)
                load_s = time.perf_counter() - began
                [again] = fresh.generate([prompt], FEW)
                assert again.usage.ttft_s is not None
                times.append((anew, load_s, again.usage.ttft_s))
        computed = again.usage.prompt_tokens - again.usage.reused_tokens
        size = file.stat().st_size
    middle, low, high = interval([anew / (load_s + first) for anew, load_s, first in times])
    print(
        f"{Path(model).name}: {tokens} tokens, {size / 1e6:.1f} MB in the file "
        f"({spared} tokens), written in {write_s:.2f} s"
    )
    print(
        f"read anew {median(one for one, _, _ in times):.2f} s; "
        f"file {median(one for _, one, _ in times):.3f} s and then ",
        end="",
    )
    print(
        f"{median(one for _, _, one in times) * 1000:.1f} ms: {middle:.0f} times ({low:.0f} to {high:.0f}) faster; ",
        end="",
    )
    print(f"{computed} tokens computed again; same text: {again.token_ids == done.token_ids}")
    return {"times": times, "ratio": [middle, low, high], "bytes": size, "write_s": write_s, "computed": computed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("shared", "saved"))
    parser.add_argument("model", nargs="?", default="stories")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    if arguments.what == "shared":
        record = shared(arguments.model, arguments.rounds, arguments.prefix, arguments.requests)
    else:
        record = saved(arguments.model, arguments.rounds, arguments.tokens)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"reuse-{arguments.what}-{Path(arguments.model).name}.json"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
