"""The cost of adapters beside the base: one batch of 16 texts, without adapters, with one, and with four.

    python benchmarks/lora.py                    # the model inside
    python benchmarks/lora.py --model FOLDER --rank 16 --repeat 5

The adapters are random and update every linear layer of attention and MLPs. Prints the median, the fastest and the
slowest of the repeats: tokens a second of the whole batch, prompts of 16 tokens, 64 tokens written each.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tokenwright import LLM
from tokenwright.checkpoints.families.registry import family_of
from tokenwright.checkpoints.folder import Checkpoint

REQUESTS, PROMPT, WRITTEN = 16, 16, 64


def write_adapter(model: str, folder: Path, rank: int, seed: int) -> Path:
    """A random adapter of a model, as PEFT would write it."""
    random = torch.Generator().manual_seed(seed)
    checkpoint = Checkpoint.open(model)
    graph, tensors, names = checkpoint.graph, {}, set()
    sources = family_of(checkpoint.config.architecture).sources(graph)
    for matrix in (one for op in graph.blocks for one in op.matrices):
        for part, _ in matrix.parts:
            source = sources[f"{part}.weight"]
            out = graph.shapes[f"{part}.weight"][0] if source.rows is None else source.rows[2]
            name = source.name.removesuffix(".weight")
            names.add(name.rpartition(".")[2])
            tensors[f"base_model.model.model.{name}.lora_A.weight"] = torch.randn(rank, matrix.inner, generator=random)
            tensors[f"base_model.model.model.{name}.lora_B.weight"] = torch.randn(out, rank, generator=random) / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 1, "target_modules": sorted(names)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def rate(llm: LLM, adapters: list[str | None]) -> float:
    """Tokens written a second by one batch, in which the requests take the adapters in turn."""
    prompts = [[5 + (31 * i + j) % 200 for j in range(PROMPT)] for i in range(REQUESTS)]
    chosen = [adapters[i % len(adapters)] for i in range(REQUESTS)]
    start = time.perf_counter()
    llm.generate(prompts, adapter=chosen, max_tokens=WRITTEN, temperature=0, ignore_eos=True, cache=True)
    return REQUESTS * WRITTEN / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="stories")
    parser.add_argument("--weights", default="native")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        made = {f"a{i}": write_adapter(asked.model, Path(home) / f"a{i}", asked.rank, i) for i in range(4)}
        with (
            LLM(asked.model, weights=asked.weights, adapters=made) as llm,
            LLM(asked.model, weights=asked.weights, lora=[made["a0"]]) as merged,
        ):
            cases = {
                "no adapter": (llm, [None]),
                "one, merged": (merged, [None]),
                "one, beside": (llm, ["a0"]),
                "four, beside": (llm, [*made]),
                "four and none": (llm, [None, *made]),
            }
            found: dict[str, list[float]] = {name: [] for name in cases}
            for turn in range(asked.repeat + 1):  # the first warms up
                for name, (model, adapters) in cases.items():
                    figure = rate(model, adapters)
                    found[name] += [figure] if turn else []
    for name, rates in found.items():
        print(f"{name:14} {statistics.median(rates):8.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f})")


if __name__ == "__main__":
    main()
