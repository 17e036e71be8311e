"""The smallest set of ids that holds a share of the probability, found without sorting the vocabulary.

A set of "the best until their mass reaches p" is known by its last member's key. Partitioning around the median key
tells which half that member lies in; the other half is done with. So the work is V + V/2 + V/4 + ..., not V log V.
All sums are in fp64.
"""

import math

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]
Kept = NDArray[np.bool_]

FEW = 1024  # keys that are sorted rather than parted


def last_key(keys: Row, weights: Row, need: float) -> float:
    """The highest key such that the weights of all keys from it upwards sum to `need`; the lowest if none do.

    keys and weights [n], n > 0, the weights not negative.
    """
    held = 0.0  # weight of keys above all that remain
    while len(keys) > FEW:
        middle = len(keys) // 2
        order = np.argpartition(keys, middle)
        lower, upper = order[:middle], order[middle:]
        heavier = weights[upper]
        mass = float(heavier.sum())
        if held + mass >= need:
            keys, weights = keys[upper], heavier
        else:
            held += mass
            keys, weights = keys[lower], weights[lower]
    order = np.argsort(-keys)
    place = np.searchsorted(held + weights[order].cumsum(), need)
    return float(keys[order[min(int(place), len(keys) - 1)]])


def nucleus(logits: Row, p: float) -> Kept:
    """Which of logits [V] are the most probable whose mass reaches p < 1, as few as can be (arXiv 1904.09751).

    Of equal ones the lower ids. -inf is never among them; one logit at least is finite.
    """
    weights = np.exp(logits - logits.max())
    total = float(weights.sum())
    need = p * total
    # What is lighter than this comes to less than 1 - p of the mass, all together: it cannot be in the nucleus.
    heavy = weights >= (1 - p) * total / len(weights)
    if np.count_nonzero(heavy) < len(weights) // 4:  # picking them out is only then quicker than parting all
        least = last_key(logits[heavy], weights[heavy], need)
    else:
        least = last_key(logits, weights, need)
    kept: Kept = heavy & (logits >= least)
    ties = np.flatnonzero(logits == least)
    if len(ties) > 1 and kept[ties[0]]:
        above = float(weights[logits > least].sum())
        kept[ties[max(1, math.ceil((need - above) / float(weights[ties[0]]))) :]] = False
    return kept


def typical(logits: Row, p: float) -> Kept:
    """Which of logits [V] have the surprise nearest to the expected one, until their mass reaches p (arXiv 2202.00666).

    With them those as near as the last one. -inf is never among them; one logit at least is finite.
    """
    finite = logits > -math.inf
    logp = logits - logits.max()
    logp -= math.log(float(np.exp(logp).sum()))
    chances = np.exp(logp)
    entropy = -float(np.multiply(chances, logp, where=finite, out=np.zeros_like(logp)).sum())  # 0 log 0 is 0
    nearness = -np.abs(-logp - entropy)
    kept: Kept = finite & (nearness >= last_key(nearness, chances, p))
    return kept
