"""Greedy decoding without a cache."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..cell import expect
from ..steps import stories, tokenizer

TITLE = "The naive loop"
TEXT = """
A language model is one function. Tokens go in, and a number for each id of the vocabulary comes out: the logits. The
larger the number, the likelier this token comes next.

A text is a loop around this function. Write it: compute all tokens, take the id with the largest logit, append it,
and compute all of them again. End after count tokens, or after an end token.

The check runs your loop on a fake model and then on the small one, and counts the tokens that went through it.
Everything after this lesson is about this number.
"""
PARTS = ("generate",)
START = '''\
def generate(forward, tokens, count, end_ids):
    """Append up to `count` tokens to a list of ids.

    forward(tokens) computes all tokens, and has the logits after the last one: [V].
    """
    for _ in range(count):
        logits = forward(tokens)
        # Append the id with the largest logit.
        # End the loop if it is one of end_ids.
    return tokens
'''
ANSWER = '''\
def generate(forward, tokens, count, end_ids):
    """Append up to `count` tokens to a list of ids. forward(tokens) has the logits after the last one, [V]."""
    for _ in range(count):
        logits = forward(tokens)
        tokens.append(int(logits.argmax()))
        if tokens[-1] in end_ids:
            break
    return tokens
'''
END, COUNT = 9, 5


class Scripted:
    """A model of ten ids whose next token depends on all tokens: their sum modulo 7, or 9, the end, at 40 and above."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, tokens: list[int]) -> np.ndarray:
        self.seen.append([*tokens])
        logits = np.linspace(0.3, -0.3, 10)
        logits[self.next(tokens)] = 2.5
        logits[8] = -9.0
        return logits

    @staticmethod
    def next(tokens: list[int]) -> int:
        return END if sum(tokens) >= 40 else sum(tokens) % 7


def expected(tokens: list[int], count: int) -> list[int]:
    for _ in range(count):
        tokens = [*tokens, Scripted.next(tokens)]
        if tokens[-1] == END:
            break
    return tokens


def check(file: Any) -> Iterator[None]:
    for prompt in ([3, 1, 4], [5, 6, 6, 6, 6, 5]):
        model = Scripted()
        answer = file.generate(model, [*prompt], COUNT, [END])
        expect(answer is not None, "generate returns nothing: its last line must return the list of tokens.")
        answer, right = [int(token) for token in answer], expected(prompt, COUNT)
        shown = f"After {prompt} the text must be {right}; yours is {answer}."
        lengths = [len(tokens) for tokens in model.seen]
        expect(lengths, "forward was never called: each token needs its logits.")
        few = f"forward saw {min(lengths)} of the tokens only. Without a cache it needs the whole text each time."
        expect(min(lengths) >= len(prompt), few)
        still = lengths[1:] and len(set(lengths)) == 1
        expect(not still, f"forward saw the same {lengths[0]} tokens each time: append the chosen token to tokens.")
        expect(8 not in answer, f"8 is the id with the smallest logit, and you took it: look at argmax. {shown}")
        after = answer[answer.index(END) + 1 :] if END in answer else []
        expect(not after, f"The loop went on after the end token {END}: look at end_ids. {shown}")
        expect(answer == right, f"{shown} Look at how the token is chosen, and at what is left of it.")
        expect(
            lengths == [*range(len(prompt), len(right))], f"forward saw {lengths} tokens, which is not one more each."
        )
    yield
    counted: list[int] = []
    model, ids = stories(file), tokenizer().encode("Once upon a time")

    def forward(tokens: list[int]) -> np.ndarray:
        counted.append(len(tokens))
        return naive(file, model, tokens)

    text = file.generate(forward, [*ids], 6, model.end_ids)
    print(tokenizer().decode(text))
    print(f"{' + '.join(map(str, counted))} = {sum(counted)} tokens through the model, for {len(counted)} new ones")


def naive(file: Any, model: Any, tokens: list[int]) -> np.ndarray:
    """The logits after the last token, of a model that keeps nothing."""
    sequence = file.Sequence([*tokens], file.Sampling(), 0, pages=[0])
    cache = np.zeros((len(model.layers), 2, len(tokens), model.kv_heads, model.head_size), "f4")
    return np.asarray(model(file.Batch([file.Chunk(sequence, 0, len(tokens))], len(tokens)), cache)[0])
