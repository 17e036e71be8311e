"""Attention over kept keys and values."""

from collections.abc import Iterator
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from ..cell import expect
from ..one_file import original
from ..steps import small, stories, tokenizer
from .loop import naive

TITLE = "The cache"
TEXT = """
In each layer a token makes a query, a key and a value. Its query meets the keys of all tokens up to it, and the
result weighs their values. Later tokens need its key and its value again, never its query, and no later token changes
them. So they are computed once and kept: this is the KV cache.

Then only the new tokens go through the layers. Your cell is the attention of one layer. x has the new tokens only.
Write their keys and values to the cache, and let each query read those of its whole text.

batch.slots has the places in the cache of the new tokens. batch.contexts has, for each text of the batch, the places
of all of its tokens so far.
"""
PARTS = ("Llama.attention",)
START = '''\
def attention(self, name, x, angles, batch, kv):
    """Of the new tokens x [T, width], over the cache kv [2, places, G, D].

    kv[0] has the keys of all tokens so far, and kv[1] the values.
    """
    q, k, v = (
        self.linear(f"{name}.{part}_proj", x).reshape(len(x), -1, self.head_size)
        for part in "qkv"
    )
    q, k = rotate(q, angles), rotate(k, angles)
    # Write k and v to the cache.
    out = []
    for queries, places in zip(np.split(q, batch.ends[:-1]), batch.contexts):
        # One text after another: k and v are those of the new tokens only.
        # Read the keys and values of the whole text instead.
        out.append(attend(queries, k, v))
    return self.linear(f"{name}.o_proj", np.concatenate(out))
'''
PROMPT = [5, 9, 14, 2, 7, 21]
WHOLE = "Look at what attend gets: the keys and values of the whole text are kv[0, places] and kv[1, places]."


def check(file: Any) -> Iterator[None]:
    mine, right = Steps(file), Steps(original())
    logits, wanted = mine.step([(PROMPT, 0)]), right.step([(PROMPT, 0)])
    expect(mine.cache.any(), "After a step the cache is still zero: write k and v to kv at batch.slots.")
    for half, name in enumerate(("keys (kv[0])", "values (kv[1])")):
        kept, other = mine.cache[0, half, : len(PROMPT)], right.cache[0, half, : len(PROMPT)]
        expect(kept.any(), f"The cache has no {name}: both k and v must be kept.")
        expect(
            np.allclose(kept, other, atol=1e-3), f"The cache has other {name} than the layer made: look at batch.slots."
        )
    expect(not mine.cache[:, :, len(PROMPT) :].any(), "Places of other tokens were written to: look at batch.slots.")
    own = "A token reads its own key and value as well: write them before attend reads."
    expect(close(logits, wanted), f"The logits of a whole prompt are wrong. {own} {WHOLE}")
    for token in (3, 17):
        text = [*mine.tokens, token]
        start = len(mine.tokens)
        logits, wanted = mine.step([(text, start)]), right.step([(text, start)])
        expect(close(logits, wanted), f"The first step is right, and the next one, of a single token, is not. {WHOLE}")
    mine, right = Steps(file), Steps(original())
    both: list[tuple[list[int], int]] = [(PROMPT, 0), ([8, 30, 4], 0)]
    expect(close(mine.step(both), right.step(both)), f"One text is right; two texts in a batch are not. {WHOLE}")
    yield
    yield from show(file)


def close(logits: np.ndarray, wanted: np.ndarray) -> bool:
    return logits.shape == wanted.shape and np.allclose(logits, wanted, atol=1e-3)


class Steps:
    """Steps of the small model over a cache; each text has a page of 16 places."""

    def __init__(self, file: Any) -> None:
        self.file, self.model, self.tokens = file, small(file), list[int]()
        self.cache = np.zeros((2, 2, 48, 2, 4), "f4")

    def step(self, texts: list[tuple[list[int], int]]) -> np.ndarray:
        """The logits of texts, each computed from a position on: [texts, V]."""
        file, self.tokens = self.file, texts[0][0]
        sequences = [file.Sequence([*ids], file.Sampling(), 0, pages=[n]) for n, (ids, _) in enumerate(texts)]
        chunks = [file.Chunk(one, at, len(one.tokens)) for one, (_, at) in zip(sequences, texts, strict=True)]
        return np.asarray(self.model(file.Batch(chunks, 16), self.cache))


def show(file: Any) -> Iterator[None]:
    """The same story with the cache and without, its tokens through the model and the time."""
    model, ids, count = stories(file), tokenizer().encode("Once upon a time"), 6
    for cached in (True, False):
        tokens, through, start = [*ids], 0, perf_counter()
        cache = np.zeros((len(model.layers), 2, 32, model.kv_heads, model.head_size), "f4")
        ends = [0, *range(len(ids), len(ids) + count)]
        for before, now in pairwise(ends):
            if cached:
                sequence = file.Sequence([*tokens], file.Sampling(), 0, pages=[0])
                logits = model(file.Batch([file.Chunk(sequence, before, now)], 32), cache)[0]
            else:
                logits = naive(file, model, tokens)
            through += now - before if cached else now
            tokens.append(int(logits.argmax()))
            yield
        way = "with the cache:   " if cached else "without the cache:"
        print(
            f"{way} {through:3} tokens through the model, {perf_counter() - start:.2f} s: {tokenizer().decode(tokens)}"
        )
