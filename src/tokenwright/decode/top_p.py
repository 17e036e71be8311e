"""Top-p and typical-p: the smallest set of ids with probability mass p, found without sorting the vocabulary.

Partitioning around the median key decides which half contains the lowest key of the set; the other half needs no
further work. So the work is V + V/2 + V/4 + ..., not V log V. All sums are in fp64.
"""

import math

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]
Kept = NDArray[np.bool_]

FEW = 1024  # at most so many keys are sorted rather than partitioned


def last_key(keys: Row, weights: Row, need: float) -> float:
    """The highest key such that the weights [n], n > 0, of all keys >= it sum to at least `need`; else the lowest."""
    held = 0.0  # weight of the keys above all that remain
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


def top_p_mask(logits: Row, p: float) -> Kept:
    """bool [V]: the smallest set of most probable ids of logits [V] whose mass reaches p < 1 (arXiv 1904.09751).

    On ties the lower ids. An id with -inf is never in it; at least one logit must be finite.
    """
    weights = np.exp(logits - logits.max())
    total = float(weights.sum())
    need = p * total
    # All weights below this sum to less than 1 - p of the mass: none of them can be in the set.
    heavy = weights >= (1 - p) * total / len(weights)
    if np.count_nonzero(heavy) < len(weights) // 4:  # only then is selecting them quicker than partitioning all
        least = last_key(logits[heavy], weights[heavy], need)
    else:
        least = last_key(logits, weights, need)
    kept: Kept = heavy & (logits >= least)
    ties = np.flatnonzero(logits == least)
    if len(ties) > 1 and kept[ties[0]]:
        above = float(weights[logits > least].sum())
        kept[ties[max(1, math.ceil((need - above) / float(weights[ties[0]]))) :]] = False
    return kept


def typical_mask(logits: Row, p: float) -> Kept:
    """bool [V]: the ids of logits [V] whose surprisal is nearest to the entropy, up to mass p (arXiv 2202.00666).

    Ids tied with the last one are in it. An id with -inf is never in it; at least one logit must be finite.
    """
    finite = logits > -math.inf
    logp = logits - logits.max()
    logp -= math.log(float(np.exp(logp).sum()))
    chances = np.exp(logp)
    entropy = -float(np.multiply(chances, logp, where=finite, out=np.zeros_like(logp)).sum())  # 0 log 0 is 0
    nearness = -np.abs(-logp - entropy)
    kept: Kept = finite & (nearness >= last_key(nearness, chances, p))
    return kept
