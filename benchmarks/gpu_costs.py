"""Costs of steps on GPUs, for cluster.py, from tables that NVIDIA has published; nothing is measured here.

    pip install aiconfigurator-core
    python benchmarks/gpu_costs.py h100_sxm meta-llama/Meta-Llama-3.1-70B --tp 4 --save h100.json

The package estimates steps of serving engines from times of kernels on NVIDIA's machines. It is asked for chunks of
prompts, steps of sequences that write, and both in one step; least squares of relative errors find the five costs of
cluster.py, none of them negative, and the output says how far these miss the estimates.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from cluster_costs import Costs, Source, least_squares

CHUNKS = (128, 256, 512, 1024, 2048, 4096)  # tokens of a prompt in a step
BEHIND = (0, 2048, 8192, 32768)  # tokens that are cached before them
STREAMS = (1, 4, 16, 64, 128)  # sequences that write
LENGTHS = (128, 1024, 4096, 16384)  # of their texts
MEMORY = 0.9  # of a GPU's, which vLLM uses

Case = tuple[str, tuple[float, ...], float]  # a name, how often each cost is in it, and its seconds


def cases(engine: Any) -> Iterator[Case]:
    """Steps and what they are said to take."""
    for chunk in CHUNKS:
        for behind in BEHIND:
            read = chunk * (behind + (chunk + 1) / 2)
            took = engine.predict_prefill_latency(1, behind + chunk, behind)
            yield f"{chunk} behind {behind}", (1, chunk, 0, 0, read), took / 1000
    for streams in STREAMS:
        for length in LENGTHS:
            took = engine.decode_step_latency(streams, length, 2)
            yield f"{streams} streams of {length}", (1, 0, streams, streams * length, 0), took / 1000
            if length in CHUNKS:
                took = engine.mixed_step_latency(length, streams, length, 2)
                both = (1, length, streams, streams * length, length * (length + 1) / 2)
                yield f"{length}, and {streams} streams of {length}", both, took / 1000


def fitted(found: Sequence[Case]) -> tuple[Costs, list[tuple[str, float]]]:
    """The costs, and by how much they miss each case."""
    rows, seconds = np.array([row for _, row, _ in found], float), np.array([took for *_, took in found])
    solved = least_squares(rows, seconds, seconds)
    errors = rows @ solved / seconds - 1
    return Costs(*map(float, solved)), [(name, float(error)) for (name, *_), error in zip(found, errors, strict=True)]


def memory_of(options: argparse.Namespace, version: str) -> int:
    """Tokens that a replica's cache has memory for, as the package estimates."""
    from aiconfigurator_core.sdk.memory import estimate_kv_cache

    estimate = estimate_kv_cache(
        options.model,
        options.system,
        options.engine,
        version,
        tp_size=options.tp,
        max_num_tokens=CHUNKS[-1],
        max_batch_size=STREAMS[-1],
        memory_fraction_kind="of_total",
        memory_fraction_value=MEMORY,
    )
    return int(estimate["total_kv_size_tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Costs of steps on GPUs, from NVIDIA's tables.")
    parser.add_argument("system", help="as the package names it: h100_sxm, h200_sxm, b200_sxm, a100_sxm, l40s, ...")
    parser.add_argument("model", help="a name at Hugging Face, of those that the package knows")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of a replica, by tensor parallelism")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "sglang"))
    parser.add_argument("--save", type=Path, help="a file for cluster.py --costs")
    options = parser.parse_args()
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
        from aiconfigurator_core.sdk.perf_database import get_version_slots
    except ImportError as error:
        raise SystemExit(f"{error}: pip install aiconfigurator-core") from error
    engine_version = (get_version_slots(options.system, options.engine) or {}).get("current")
    if engine_version is None:
        raise SystemExit(f"aiconfigurator-core has no tables of {options.engine} on {options.system}")
    engine = EngineHandle.compile(
        options.model, options.system, options.engine, backend_version=engine_version, tp_size=options.tp
    )
    costs, errors = fitted(list(cases(engine)))
    source = Source(
        costs,
        f"NVIDIA's tables (aiconfigurator-core {version('aiconfigurator-core')}): {options.model}, "
        f"{options.tp} x {options.system}, {options.engine} {engine_version}",
        memory_of(options, engine_version),
    )
    print(
        f"{source.source}\n{1e3 * costs.base:.2f} ms a step, {1e6 * costs.token:.2f} us a token of a prompt "
        f"({1 / costs.token:,.0f} a second), {1e6 * costs.sequence:.1f} us a sequence, {1e9 * costs.key:.2f} ns a "
        f"cached token read by it, {1e9 * costs.prompt_key:.3f} ns by a prompt's; memory for {source.memory:,} tokens"
    )
    middle, worst = median(abs(error) for _, error in errors), sorted(errors, key=lambda one: -abs(one[1]))
    print(f"of {len(errors)} estimates these miss {middle:.1%} (median); most:")
    print(", ".join(f"{name} {error:+.0%}" for name, error in worst[:5]))
    if options.save is not None:
        source.save(options.save)


if __name__ == "__main__":
    main()
