"""What decoding the types of GGUF files costs: KL of the next token's distribution, in nats, on the model inside.

    python -m benchmarks.gguf_types [--texts 40] [--length 256]

The model's matrices are quantised in each type that the `gguf` package can write. The distributions of the type's own
numbers in fp32 are compared with those of the same numbers in bfloat16 (as types without a packed form are decoded) and
in int8 (`--weights int8`). The texts are written by the model at temperature 1 after the
same four words. All other arithmetic is in fp32.
"""

import argparse
import sys
from functools import partial

import gguf
import torch

from benchmarks.weights import Logprobs, model_of, rounded
from tokenwright import LLM
from tokenwright.backends.layout import format_of
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.formats import WeightFormat
from tokenwright.models.graph import Graph

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4")
BEGINNING = "Once upon a time"
FORMS = ("bfloat16", "int8")


def stories(count: int, length: int) -> list[list[int]]:
    """Ids of texts that the model writes, of one seed each."""
    with LLM("stories") as llm:
        found = []
        for seed in range(count):
            [text] = llm.generate(BEGINNING, max_tokens=length, temperature=1.0, seed=seed)
            found.append([*llm.tokenizer.encode(BEGINNING), *text.token_ids])
        return found


def as_type(graph: Graph, tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The numbers that a file of one type holds, in fp32; norms stay as they are."""
    form = gguf.GGMLQuantizationType[kind]
    parts = {f"{part}.weight" for matrix in graph.matrices.values() for part, _ in matrix.parts}
    return {
        name: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(one.numpy(), form), form).copy())
        if name in parts
        else one
        for name, one in tensors.items()
    }


def kl(exact: list[torch.Tensor], other: Logprobs, texts: list[list[int]]) -> tuple[float, float]:
    """Mean KL a token, and the share of tokens whose most probable successor differs."""
    divergences, flips = [], []
    for rows, ids in zip(exact, texts, strict=True):
        theirs = other(ids)
        divergences.append((rows.exp() * (rows - theirs)).sum(-1))
        flips.append((rows.argmax(-1) != theirs.argmax(-1)).double())
    return float(torch.cat(divergences).mean()), float(torch.cat(flips).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    checkpoint, texts = Checkpoint.open("stories"), stories(args.texts, args.length)
    graph, tensors = checkpoint.graph, checkpoint.tensors(torch.float32)
    native = model_of(checkpoint, tensors)
    original = [native(ids) for ids in texts]
    print(f"{sum(map(len, texts)):,} tokens in {len(texts)} texts; KL (flips)")
    for kind in TYPES:
        numbers = as_type(graph, tensors, kind)
        model = model_of(checkpoint, numbers)
        exact = [model(ids) for ids in texts]
        cells = [kl(original, model, texts)]
        for form in FORMS:
            kept, _ = rounded(graph, numbers, partial(format_of, form=WeightFormat.parse(form)))
            cells.append(kl(exact, model_of(checkpoint, kept), texts))
        print(f"| {kind} | " + " | ".join(f"{mean:.5f} ({share:.1%})" for mean, share in cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
