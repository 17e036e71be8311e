"""Texts on a GPU beside the CPU's, for families of models, formats of weights and formats of the cache.

Logits agree within `rounding`, and within the step of a code where inputs or keys and values are codes: one at the edge
of two may take the other. The greedy choice is the CPU's wherever its two highest logits are further apart.
"""

import os
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from tests.backends.gpu import REFUSED, checkpoint, chunk, needs_gpu, pair, rounding
from tests.equality.kinds import ALL_KINDS
from tests.oracle.harness import prompt_of
from tokenwright.arrays import Floats

pytestmark = needs_gpu

KINDS = [
    kind for kind, one in ALL_KINDS.items() if kind not in REFUSED and one.keeps != "states" and "latent" not in kind
]
TEN = (
    "MHA", "window + sinks", "hybrid", "scales", "norms after", "learned logits", "soft caps", "values from keys",
    "side by side", "experts",
)  # fmt: skip
WEIGHTS = {"float32": 0, "bfloat16": 2**-5, "float16": 0, "int8": 2 / 127, "int8:32": 2 / 127, "int4": 2 / 127,
           "int4:32": 2 / 127}  # fmt: skip
CACHES = {"native": 0, "bfloat16": 2**-7, "float16": 2**-10, "int8": 2 / 127, "int4": 1 / 4, "fp8": 1 / 8,
          "k=int8,v=int4": 1 / 4}  # fmt: skip
PROMPTS = int(os.environ.get("TESTS_PROMPTS", "200"))  # of a case of the sweep


def cases() -> Iterator[tuple[str, str, str, int]]:
    """Kind, weights, cache, prompts: in CI each kind and each format with few prompts, and in a sweep all of them."""
    yield from ((kind, "float32", "native", 2) for kind in KINDS)
    yield from (("two rotations + sinks", form, kv, 2) for form, kv in zip(WEIGHTS, CACHES, strict=True))
    yield "stories", "float32", "native", 8


def sweep() -> Iterator[tuple[str, str, str, int]]:
    """Each family and each format of weights meets each format of the cache."""
    for turn, kind in enumerate(("stories", *TEN)):
        for i, form in enumerate(WEIGHTS):
            yield kind, form, [*CACHES][(i + turn) % len(CACHES)], PROMPTS


def allowed(inner: int, layers: int, form: str, kv: str, rows: Floats) -> Floats:
    """Of the codes of each layer some may be the next."""
    found: Floats = rounding(inner, rows) + layers * (WEIGHTS[form] + CACHES[kv]) * np.abs(rows).max(1)
    return found


@pytest.mark.parametrize(
    ("kind", "form", "kv", "prompts"), [*cases(), *(pytest.param(*one, marks=pytest.mark.sweep) for one in sweep())]
)
def test_greedy_texts_are_the_cpus(kind: str, form: str, kv: str, prompts: int) -> None:
    ours, theirs = pair(kind, form, kv)
    graph, random, chosen, rows = checkpoint(kind).graph, Random(0), 0, 0
    inner, groups = max(matrix.inner for matrix in graph.matrices.values()), len(ours.store.groups)
    for _ in range(prompts):
        length = random.randint(3, 10 if kind == "stories" else 60)
        tokens = [random.randrange(5, graph.vocab_size) for _ in range(length)]
        for start in (0, *range(len(tokens), len(tokens) + 5)):  # the text goes on with the CPU's choices
            tokens.append(theirs(chunk(groups, tokens[start:], start)).best[-1])
        batch = chunk(groups, tokens)
        found, expected = ours(batch), theirs(batch)
        apart = np.abs(np.asarray(found.rows) - expected.rows).max(1)
        bound = allowed(inner, graph.layers, form, kv, expected.rows)
        assert (apart <= bound).all()
        assert (np.abs(np.subtract(found.log_totals, expected.log_totals)) <= bound).all()
        two = np.sort(expected.rows, 1)[:, -2:]
        sure = two[:, 1] - two[:, 0] > 2 * bound
        assert (np.array(found.best) == expected.best)[sure].all()
        assert found.best == tuple(np.asarray(found.rows).argmax(1).tolist())
        chosen, rows = chosen + int(sure.sum()), rows + len(tokens)
    assert chosen > 0.8 * rows or WEIGHTS[form] + CACHES[kv], "the choice is sure"


@pytest.mark.parametrize("kv", ["bfloat16", "float16", "int8", "int4", "fp8", "k=int8,v=int4"])
def test_each_cache_format_stores_the_bytes_of_the_cpu(kv: str) -> None:
    """In the first layer, whose inputs are equal but for rounding: a number at the edge of a code may take the next."""
    ours, theirs = pair("GQA", kv=kv)
    batch = chunk(1, prompt_of(32))
    ours(batch), theirs(batch)
    for mine, other in zip(ours.store.read(0, [7, 6]), theirs.store.read(0, [7, 6]), strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape and mine[0].tobytes().strip(b"\0")
        first, second = (np.frombuffer(one[0].tobytes(), np.uint8) for one in (mine, other))
        assert np.mean(first == second) > 0.995
