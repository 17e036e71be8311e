"""Checkpoints with published shapes and random weights, to measure speed and memory without a download.

    python -m tokenwright.bench.shapes [tiny qwen05 granite350m ...] [--root ~/.cache/tokenwright/benchmarks]

Each is a folder ROOT/SHAPE as on the Hugging Face hub, with bfloat16 weights that depend only on the seed. The logits
spread as a trained model's, so that comparing number formats makes sense. The tokenizer is the built-in model's, with
a word for each further id.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenwright.checkpoints.files.known import KNOWN
from tokenwright.checkpoints.files.local import STORIES
from tokenwright.environment import Environment
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.regular_file import draft_folder, sweep

if TYPE_CHECKING:
    from tokenwright.arrays import Floats
    from tokenwright.checkpoints.folder import Report

SPREAD = 4.0
BIAS = 0.02
# A name is that of a known model. deepseek2 is DeepSeek-V2-Lite, cut to 4 of 27 layers and 8 of 64 experts.
_READ = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SHAPES: Mapping[str, Mapping[str, Any]] = {
    name: KNOWN[shape] if isinstance(shape, str) else shape for name, shape in _READ.items()
}


def default_root() -> Path:
    return Environment.read().cache_folder("benchmarks")


def ready(shape: str, root: Path, report: "Report | None" = None) -> Path:
    """The folder of a shape under `root`, written if missing. Calls `report` with (bytes written, total)."""
    if shape not in SHAPES:
        raise RequestError(f"shape {shape!r} is not known; use {', '.join(SHAPES)}", "shape")
    folder = root.expanduser() / shape
    try:
        return folder if folder.exists() else make(shape, folder, report=report)
    except OSError as error:
        hint = "make room there, or set TOKENWRIGHT_CACHE to another folder"
        raise CheckpointError(f"the model cannot be written to {folder} ({error.strerror}); {hint}") from error


def make(shape: str, folder: Path, seed: int = 0, report: "Report | None" = None) -> Path:
    from tokenwright.checkpoints.families.registry import parse_config

    family = parse_config(SHAPES[shape]).family
    kind = family.architectures[SHAPES[shape]["architectures"][0]]
    config = {**SHAPES[shape], "model_type": kind, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
    sweep(folder.parent, folder.name)
    with draft_folder(folder) as draft:
        (draft / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        write_tokenizer(draft, config["vocab_size"])
        write_weights(draft / "model.safetensors", config, seed, report)
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def write_weights(path: Path, config: Mapping[str, Any], seed: int, report: "Report | None" = None) -> None:
    """Write the weights, with one tensor at a time in memory."""
    from tokenwright.arrays import BFLOAT16, as_bytes, narrowed
    from tokenwright.checkpoints.families.registry import parse_config

    family, _, graph = parse_config(config)
    sources = {source.name: (ours, source) for ours, source in family.sources(graph).items()}
    shapes = {name: source.stored(graph.shapes[ours]) for name, (ours, source) in sources.items()}
    if family.stacks is not None:  # reading joins their first two dimensions
        shapes |= {name: (one[0], 1, *one[1:]) for name, one in shapes.items() if family.stacks.fullmatch(name)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[f"{family.prefix}{name}"] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    written = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for at, (name, shape) in enumerate(shapes.items()):
            values = weight(sources[name][0], shape, graph.shapes[sources[name][0]][-1], seed * len(shapes) + at)
            written += file.write(as_bytes(narrowed(values, BFLOAT16)).data)
            if report is not None:
                report(written, end)


def weight(name: str, shape: tuple[int, ...], inputs: int, seed: int) -> "Floats":
    """Random values [*shape] of tensor `name`; a linear one has unit gain over its `inputs`."""
    import numpy as np

    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    values = np.random.Generator(np.random.SFC64(seed)).standard_normal(shape, np.float32)
    if name.endswith(".bias"):
        return values * np.float32(BIAS)
    gain = SPREAD if name == "embed.weight" else 1.0  # the embedding is also the head
    return values * np.float32(gain / inputs**0.5)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """The built-in tokenizer, with a word for each further id; no text encodes to those."""
    tokenizer = json.loads((STORIES / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab.update({f"Ġword{at}": at for at in range(len(vocab), vocab_size)})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    shutil.copy(STORIES / "tokenizer_config.json", folder / "tokenizer_config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE")
    parser.add_argument("--root", type=Path, default=default_root())
    arguments = parser.parse_args()
    if unknown := set(arguments.shapes) - SHAPES.keys():
        parser.error(f"unknown shape {', '.join(sorted(unknown))}; choose from {', '.join(SHAPES)}")
    for shape in arguments.shapes or SHAPES:
        print(ready(shape, arguments.root))


if __name__ == "__main__":
    main()
