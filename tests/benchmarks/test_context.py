"""What a token costs against its context: the arithmetic, and a run over the model inside."""

import pytest

from benchmarks.context import growth, measure
from tokenwright import LLM


def test_slopes_and_what_reading_takes() -> None:
    rounds = [{context: [1e-3 + cost * context] * 3 for context in (100, 200, 800)} for cost in (2e-6, 4e-6, 9e-6)]
    found = growth("int8", 1000, rounds, [[1e9, 5e8, 2e8], [5e8], [5e8, 5e8]])
    assert found.slopes == pytest.approx([2e-6, 4e-6, 9e-6])
    assert found.reading == pytest.approx([2e-6] * 3)
    assert (found.slope, found.ratio) == pytest.approx((4e-6, 2.0))
    assert found.steps == pytest.approx({context: 1e-3 + 4e-6 * context for context in (100, 200, 800)})


def test_a_run_takes_every_step_of_every_format() -> None:
    with LLM("stories", device="cpu", pages=4) as llm:
        config, found = llm.config, measure(llm, ["native", "int4"], [16, 40], 4, 2)
    numbers = 2 * config.layers * config.kv_heads * config.head_size
    native, int4 = (one.bytes_per_token for one in found)
    assert native == 2 * numbers
    assert int4 * 32 == numbers * 18
    assert [list(one.steps) for one in found] == [[16, 40]] * 2
    assert all(len(one.slopes) == len(one.reading) == 2 and min(one.steps.values()) > 0 for one in found)
