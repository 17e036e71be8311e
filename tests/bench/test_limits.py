"""A machine's limits: the kernels measure them, and the seconds of some work follow from them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.backends.native import needs_native
from tokenwright.backends.device import kernel_threads, threads_of
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.bench import limits
from tokenwright.bench.limits import FORMATS, Bound, Least, Multiplier, StepWork, cache_bytes, measure_limits
from tokenwright.planner.bandwidth import BandwidthProbe

KINDS = ("torch", pytest.param("native", marks=needs_native))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Who measures."""
    monkeypatch.setenv("TOKENWRIGHT_KERNELS", "reference" if request.param == "torch" else "native")
    find_kernels.cache_clear()
    yield request.param
    find_kernels.cache_clear()


@pytest.mark.usefixtures("quick")
def test_all_limits_are_measured_and_the_threads_are_as_before(kind: str) -> None:
    told: list[tuple[int, int]] = []
    before = kernel_threads.count
    found = measure_limits(0.0, lambda done, total: told.append((done, total)))
    assert kernel_threads.count == before == found.threads
    assert (found.kind, found.cache_bytes) == (kind, 1 << 14)
    assert found.cache is not None
    every = [found.memory, found.cache, *found.multiplications.values()]
    assert all(rate.all_threads > 0 and rate.one_thread > 0 for rate in every)
    assert tuple(found.multiplications) == FORMATS
    assert told == [(done, 6) for done in range(1, 7)]


@pytest.mark.usefixtures("quick")
def test_no_cache_is_told_where_the_system_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cache_sizes", list)
    found = measure_limits(0.0)
    assert (found.cache, found.cache_bytes) == (None, 0)


@pytest.mark.parametrize(
    ("sizes", "nbytes"),
    [([48 << 10, 2 << 20, 105 << 20], 8 << 20), ([32 << 10, 1 << 20, 4 << 20], 2 << 20), ([1 << 20], 0), ([], 0)],
)
def test_a_buffer_that_only_the_largest_cache_holds(
    sizes: list[int], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "cache_sizes", lambda: sizes)
    with threads_of(1):
        assert cache_bytes() == nbytes


@pytest.mark.parametrize(
    ("least", "seconds", "bound"), [(Least(2.0, 1.0), 2.0, "memory"), (Least(1.0, 3.0), 3.0, "matrix")]
)
def test_the_longer_of_the_two_bounds(least: Least, seconds: float, bound: str) -> None:
    assert (least.seconds, least.bound) == (seconds, bound)


@pytest.mark.usefixtures("quick")
def test_work_over_speed_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Bound(1 << 30, "int4")
    assert bound._reader.nbytes == 1 << 20  # no more than what no cache holds
    monkeypatch.setattr(BandwidthProbe, "bytes_per_second", lambda self, seconds: 10.0)
    monkeypatch.setattr(Multiplier, "per_second", lambda self, seconds: 4.0)
    assert bound(StepWork(nbytes=50, weights=8, attention=2)) == Least(5.0, 2.5)
    assert bound(replace(StepWork(), weights=8)) == Least(0.0, 2.0)
