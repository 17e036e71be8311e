"""From logits to a token, by a number that depends on seed and position only."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..cell import expect
from ..one_file import original
from ..steps import run, small

TITLE = "Sampling with seeds"
TEXT = """
Temperature divides the logits before they become probabilities; at 0 the largest logit wins. top_p keeps the most
probable ids until their sum reaches it: the id that reaches it is kept, those after it get 0. Then one random number
from 0 to 1 falls on an id: add up the probabilities in the order of ids, and take the first sum that is above the
number.

In an engine the number must not come from a generator that all texts share. Then a text would depend on its
neighbours in the batch, and a text that is preempted would go on in another way. So the number is a function of seed
and position, and of nothing else. NumPy's Philox is such a function: its key is the seed, its counter the position.
"""
PARTS = ("sample", "uniform")
START = '''\
def sample(logits, how, number):
    """The token of logits [V] on which a number from [0, 1) falls.

    how has the temperature and top_p.
    """
    # Temperature 0: return the id of the largest logit.
    # What else does the temperature do?
    chances = softmax(logits.astype(np.float64))
    if how.top_p < 1:
        ids = np.argsort(-chances, kind="stable")  # the most probable first
        # Set the chances of all ids behind the one that reaches top_p to 0.
    ends = chances.cumsum()
    # After a cut, the last of the ends is below 1.
    return int(np.searchsorted(ends, number, side="right"))

def uniform(seed, position):
    """A number from [0, 1) that depends on seed and position, and nothing else."""
    return int(np.random.Philox(key=seed).random_raw() >> 11) * 2.0**-53
'''
LOGITS = np.log(np.array([0.05, 0.4, 0.2, 0.1, 0.25]))
NUMBERS = [0.01, 0.2, 0.4, 0.45, 0.6, 0.7, 0.85, 0.999]


def check(file: Any) -> Iterator[None]:
    check_uniform(file)
    check_sample(file)
    yield
    for top_p in (1.0, 0.9):
        mine, right = (texts(one, top_p, together=True) for one in (file, original()))
        expect(mine == right, "The functions are right, and seeded texts are not the file's.")
        alone = texts(file, top_p, together=False)
        expect(
            mine == alone, "A text in a batch is not the text that is written alone: look at what uniform depends on."
        )
        yield
    print("three seeded texts, the same in one batch and one by one:", *mine, sep="\n  ")


def check_uniform(file: Any) -> None:
    first = [file.uniform(7, position) for position in range(4)]
    expect(all(0 <= float(number) < 1 for number in first), f"A number is not in [0, 1): {first}.")
    again = [file.uniform(7, position) for position in range(4)]
    expect(
        first == again, "The same seed and position give another number the second time: it depends on earlier calls."
    )
    expect(len(set(first)) == 4, "All positions of a text get the same number: look at Philox's counter.")
    other = [file.uniform(8, position) for position in range(4)]
    expect(set(first).isdisjoint(other), "Another seed gives the same numbers: look at Philox's key.")
    right = original().uniform
    wanted = [right(7, position) for position in range(4)]
    expect(first == wanted, "These are good numbers, but not the engine's: key=seed, counter=position, as in the text.")


def check_sample(file: Any) -> None:
    right, how = original().sample, file.Sampling
    greedy = file.sample(LOGITS, how(temperature=0.0), 0.99)
    expect(
        greedy == 1,
        f"At temperature 0 the token is that of the largest logit, 1, whatever the number is; yours: {greedy}.",
    )
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.6), (1.0, 0.9), (0.7, 0.5)):
        settings = how(temperature=temperature, top_p=top_p)
        mine = [file.sample(LOGITS, settings, number) for number in NUMBERS]
        wanted = [right(LOGITS, settings, number) for number in NUMBERS]
        shown = f"With temperature {temperature} and top_p {top_p} the numbers {NUMBERS} give {wanted}; yours: {mine}."
        if top_p == 1:
            what = "temperature: it divides the logits" if temperature != 1 else "cumsum and searchsorted"
            expect(mine == wanted, f"{shown} Look at {what}.")
        lost = {*mine} - {*wanted}
        expect(
            not any(token >= len(LOGITS) or token < 0 for token in mine),
            f"{shown} The kept chances sum to less than 1: multiply the number by the last end.",
        )
        expect(
            not lost,
            f"{shown} {sorted(lost)} should be cut: look at which ids are set to 0, and at the scale of the number.",
        )
        missing = "The id that reaches top_p is kept: compare the sum before each id with top_p"
        expect({*wanted} <= {*mine}, f"{shown} {missing}; or the number is not scaled to what is left.")
        expect(mine == wanted, f"{shown} After a cut the chances sum to less than 1: scale the number by the last end.")


def texts(file: Any, top_p: float, together: bool) -> list[list[int]]:
    """Three seeded texts, in one batch or each by itself."""
    done = []
    for group in [(1, 2, 3)] if together else [(1,), (2,), (3,)]:
        engine = file.Engine(small(file), pages=24, page_size=4, token_budget=64)
        done += [engine.add([seed, 9, 4], file.Sampling(1.0, top_p, seed, 8)) for seed in group]
        run(engine)
    return [text.tokens for text in done]
