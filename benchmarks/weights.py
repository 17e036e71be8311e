"""The quality cost of quantised weights: the model's distributions with each format against the checkpoint's weights.

    python -m benchmarks.weights --text FILE... [--tokens 20000] [--json FILE]

Teacher-forced, like benchmarks/quality.py for the KV cache and on the same texts: KL(checkpoint || format) of every row
in nats, and whether the most probable token differs. Means have a 95 % interval (2,000 resamples of whole documents).
The cache and all sums are in float32, so that only the weights differ; "computed" are the formats in the arithmetic of
the native kernels, which also quantise activations to eight bits.

Besides the formats that an LLM takes there are mixtures, in which some matrices have more bits: their results decided
the int4 format.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quality import (
    RANDOM,
    RANDOM_LENGTH,
    SPECIAL,
    Rows,
    Text,
    beside,
    documents,
    in_turn,
    interval,
    join,
    ranged,
    shown,
    table,
    upto,
)
from tokenwright import LLM
from tokenwright.backends import ReferenceKernels
from tokenwright.backends.layout import format_of
from tokenwright.backends.native.kernels import find_kernels
from tokenwright.backends.packed import Packed, packed_sizes
from tokenwright.backends.runner import Model
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.cache import layer_specs
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.formats import WeightFormat
from tokenwright.models.graph import Graph

FORMATS = ("bfloat16", "float16", "int8:32", "int8", "int4", "int4:64")
INT8, INT4, COARSE = (WeightFormat.parse(text) for text in ("int8", "int4:32", "int4:64"))
Logprobs = Callable[[list[int]], torch.Tensor]  # ids [n] -> [n, vocabulary] in fp64
Choice = Callable[[str], WeightFormat]  # the format of each matrix

ENDS = ("embed", "head")
MIXTURES: Mapping[str, tuple[str, ...]] = {  # matrices in int8 while the rest is int4: ends of names
    "nothing": (),
    "embed": ENDS,
    "embed, qkv": (*ENDS, ".qkv"),
    "embed, o": (*ENDS, ".o"),
    "embed, gate_up": (*ENDS, ".gate_up", ".up"),
    "embed, down": (*ENDS, ".down"),
}


def choices(layers: int) -> dict[str, Choice]:
    """The compared formats: those that an LLM takes, and mixtures of int4 and int8."""
    found: dict[str, Choice] = {}
    for text in FORMATS:
        found[text] = partial(format_of, form=WeightFormat.parse(text))
    for coarse in (INT4, COARSE):
        for name, ends in MIXTURES.items():
            found[f"{coarse}, but int8: {name}"] = partial(_mixed, coarse=coarse, ends=ends)
    outer = ("layers.0.", f"layers.{layers - 1}.")
    found["int4, but int8: embed, first and last layer"] = partial(_mixed, coarse=INT4, ends=ENDS, begins=outer)
    return found


def _mixed(name: str, coarse: WeightFormat, ends: tuple[str, ...], begins: tuple[str, ...] = ()) -> WeightFormat:
    return INT8 if name.endswith(ends) or name.startswith(begins) else coarse


def rounded(graph: Graph, tensors: Mapping[str, torch.Tensor], choose: Choice) -> tuple[dict[str, torch.Tensor], int]:
    """The weights in fp32 after packing and unpacking each matrix in its format, and the bytes of all matrices."""
    found, nbytes = dict(tensors), 0
    for name, matrix in graph.matrices.items():
        form = choose(name)
        codes, scales = packed_sizes(matrix.out, matrix.inner, form)
        nbytes += codes + 2 * scales
        packed, first = Packed.empty(matrix.out, matrix.inner, form), 0
        kernels = find_kernels()
        for part, out in matrix.parts:
            rows = tensors[f"{part}.weight"]
            bad = packed.pack_rows(first, rows) if kernels is None else kernels.pack(packed, first, rows)
            assert not bad, f"{part} fits {form}"
            first += out
        names, sizes = [part for part, _ in matrix.parts], [out for _, out in matrix.parts]
        for part, back in zip(names, torch.split(packed.unpack(), sizes), strict=True):
            found[f"{part}.weight"] = back
    return found, nbytes


def model_of(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> Logprobs:
    """A model over dense weights, everything in fp32."""
    graph = checkpoint.graph
    decoder = Decoder(graph, ReferenceKernels(), {**tensors})
    return logprobs_of(Model(decoder, layer_specs(graph, "float32"), torch.device("cpu")))


def logprobs_of(model: Model) -> Logprobs:
    return lambda ids: model(ids)[0].double().log_softmax(-1)


@contextmanager
def computed(folder: str | Path, form: str) -> Iterator[Logprobs]:
    """A model with this machine's kernels."""
    with LLM(folder, dtype="float32", weights=form, pages=64) as llm:
        yield logprobs_of(llm.model)


def compare(name: str, exact: Sequence[torch.Tensor], texts: Sequence[Text], other: Logprobs) -> Rows:
    """Run one format on every text, against the log-probabilities of the checkpoint's own weights."""
    print(f"{name}: {len(texts)} texts", file=sys.stderr, flush=True)
    each = [beside(right, other(text.ids), text.ids) for right, text in zip(exact, texts, strict=True)]
    return Rows(
        name, [len(text.ids) for text in texts], *(np.concatenate(column) for column in zip(*each, strict=True))
    )


def run(folder: str | Path, texts: Sequence[Text]) -> tuple[list[Rows], dict[str, int]]:
    """Run every format and mixture on the texts of one model. Returns their rows, and the bytes of its matrices."""
    checkpoint = Checkpoint.open(folder)
    graph, tensors = checkpoint.graph, checkpoint.tensors(torch.float32)
    native = model_of(checkpoint, tensors)
    exact = [native(text.ids) for text in texts]
    found, sizes = [compare("checkpoint", exact, texts, native)], {"checkpoint": checkpoint.nbytes}
    for name, choose in choices(graph.layers).items():
        weights, sizes[name] = rounded(graph, tensors, choose)
        found.append(compare(name, exact, texts, model_of(checkpoint, weights)))
    if find_kernels() is not None:
        for form in ("native", "int8", "int4"):
            with computed(folder, form) as other:
                found.append(compare(f"{form}, computed", exact, texts, other))
            sizes[found[-1].kv] = sizes.get(form, checkpoint.nbytes)
    return found, sizes


def figures(rows: Rows, native: Rows) -> dict[str, Any]:
    """The reported figures of one format."""
    return {
        "weights": rows.kv,
        "kl": interval(rows.kl, rows.owners),
        "kl 99th percentile": float(np.quantile(rows.kl, 0.99)),
        "flips": interval(rows.flips, rows.owners),
        "loss change": interval(rows.losses - native.losses, rows.owners),
    }


def on_text(model: str, paths: Sequence[Path], tokens: int) -> dict[str, Any]:
    with LLM(model, pages=64) as llm:
        texts = upto(in_turn(documents(paths, llm), llm.config.context), tokens)
    found, sizes = run(model, texts)
    lengths = [len(text.ids) for text in texts]
    entries = [figures(rows, found[0]) | {"bytes": sizes[rows.kv]} for rows in found]
    return {"model": Path(model).name, "texts": len(texts), "tokens": sum(lengths), "formats": entries}


def on_random(tokens: int) -> dict[str, Any]:
    """The same on random models with `tokens` in all: pooled, and the KL of each family."""
    from tests.models.fixtures import make_checkpoint

    count = max(1, tokens // (len(RANDOM) * RANDOM_LENGTH))
    pooled = []
    with tempfile.TemporaryDirectory() as place:
        for kind in RANDOM:
            path = make_checkpoint(Path(place, kind), kind).path
            vocabulary = Checkpoint.open(path).config.vocab_size
            ids = np.random.default_rng(0).integers(SPECIAL, vocabulary, (count, RANDOM_LENGTH)).tolist()
            pooled.append(run(path, [Text(kind, one) for one in ids])[0])
    joined = [join(rows) for rows in zip(*pooled, strict=True)]
    entries = []
    for index, rows in enumerate(joined):
        each = {kind: float(own[index].kl.mean()) for kind, own in zip(RANDOM, pooled, strict=True)}
        entries.append(figures(rows, joined[0]) | {"kl by": each})
    return {"kinds": RANDOM, "tokens": sum(joined[0].lengths), "formats": entries}


def text_table(found: dict[str, Any]) -> str:
    about = f"`{found['model']}`, {found['tokens']:,} tokens in {found['texts']} texts. KL in nats a token.\n"
    head = ("weights", "MB", "KL", "99th percentile", "top-1 flips, %", "loss change, nats")
    rows = [
        (
            entry["weights"],
            f"{entry['bytes'] / 1e6:.2f}",
            ranged(entry["kl"]),
            shown(entry["kl 99th percentile"]),
            ranged(entry["flips"], 100),
            ranged(entry["loss change"], sign="+"),
        )
        for entry in found["formats"]
    ]
    return f"{about}\n{table(head, rows)}"


def random_table(found: dict[str, Any]) -> str:
    about = (
        f"Random models, {found['tokens']:,} random tokens in all, in texts of {RANDOM_LENGTH}. KL in nats a token.\n"
    )
    head = ("weights", "KL", "99th percentile", "top-1 flips, %", *(f"KL of {kind}" for kind in found["kinds"]))
    rows = [
        (
            entry["weights"],
            shown(entry["kl"][0]),
            shown(entry["kl 99th percentile"]),
            shown(100 * entry["flips"][0]),
            *(shown(entry["kl by"][kind]) for kind in found["kinds"]),
        )
        for entry in found["formats"]
    ]
    return f"{about}\n{table(head, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="stories")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    text = on_text(arguments.model, arguments.text, arguments.tokens)
    print(text_table(text), flush=True)
    drawn = on_random(arguments.tokens)
    print(random_table(drawn), end="")
    if arguments.json:
        arguments.json.write_text(json.dumps({"text": text, "random": drawn}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
