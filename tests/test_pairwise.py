"""Covering arrays hold every pair, in few rows, and always the same ones."""

from itertools import combinations, product

import pytest

from tests.pairwise import pairwise


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3, 3), (2, 5, 3), (6, 5, 12, 2), (6, 5, 12, 4, 2), (2,) * 10])
def test_every_two_values_meet(sizes: tuple[int, ...]) -> None:
    factors = [[f"{name}{value}" for value in range(size)] for name, size in zip("abcdefghij", sizes, strict=False)]
    rows = pairwise(*factors)
    for i, j in combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(factors[i], factors[j]))
    assert rows == pairwise(*factors)
    largest, second = sorted(sizes)[:-3:-1]
    assert len(rows) <= 1.5 * largest * second + 4
