"""Time to first token of a long prompt whose K and V are in memory, in the folder of --kv-disk, or in neither.

    python -m benchmarks.cache.kv_disk [MODEL] [--weights int8] [--tokens 8000] [--rounds 15] [--folder build/kv-disk]

MODEL is a folder, a name, or a shape of `tokenwright bench`; by default qwen05. Where two engines share one folder, the
first computes the prompt. The second, which stands for the process after a restart, answers it in turn from memory and,
once all pages are evicted, from the folder. Each round has one of both, so that a busy machine slows both. The files
are in the system's page cache. The output gives medians, and the part of the time that passes before the first step.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenwright import LLM, SamplingParams
from tokenwright.bench.shapes import SHAPES, default_root, ready

if TYPE_CHECKING:
    from tokenwright.cache.disk_pages import DiskPages
    from tokenwright.engine import Engine
    from tokenwright.llm.outputs import Usage


def evict(engine: Engine) -> None:
    """Forget all cached pages."""
    for pool in engine.pool.group_pools:
        while pool.cached:
            page, _ = pool.cached.popitem(last=False)
            pool.evict(page)
            pool.free.append(page)


def first_token(llm: LLM, prompt: list[int]) -> Usage:
    """The usage of a text of one token, once the folder is at rest."""
    disk: DiskPages = llm.engine.prefixes.tier  # type: ignore[assignment]
    disk.writer.flush()
    return llm.generate([prompt], SamplingParams(max_tokens=1))[0].usage


def shown(name: str, usages: list[Usage]) -> str:
    whole = statistics.median(one.token_s[0] for one in usages)
    before = statistics.median(one.queue_s for one in usages)
    least = min(one.disk_tokens for one in usages)
    times = f"{1e3 * whole:9,.1f} ms to the first token, {1e3 * before:6,.1f} before its step"
    return f"{name:9}{times}; {least:,} tokens read"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="qwen05")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, default=Path("build/kv-disk"))
    asked = parser.parse_args()
    model = ready(asked.model, default_root()) if asked.model in SHAPES else asked.model
    draw = random.Random(7)
    warm, prompt = ([draw.randrange(1000, 4000) for _ in range(length)] for length in (40, asked.tokens))
    options: dict[str, Any] = {"weights": asked.weights, "pages": asked.tokens // 8, "kv_disk": asked.folder}
    with LLM(model, **options) as llm:
        print(shown("computed", [first_token(llm, prompt)]))
    memory: list[Usage] = []
    disk: list[Usage] = []
    with LLM(model, **options) as llm:
        first_token(llm, warm)
        print(shown("restarted", [first_token(llm, prompt)]))
        for _ in range(asked.rounds):
            memory.append(first_token(llm, prompt))
            llm.llm_engine.local("engine").loop.call(evict)
            disk.append(first_token(llm, prompt))
    print(shown("memory", memory))
    print(shown("disk", disk))
    ratio = statistics.median(two.token_s[0] / one.token_s[0] for one, two in zip(memory, disk, strict=True))
    print(f"ratio    {ratio:9.2f}, the median of {asked.rounds} rounds; at most 1.3 is wanted")


if __name__ == "__main__":
    main()
