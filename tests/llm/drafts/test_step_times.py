"""The costs of a model's steps are measured once, kept, and read again; what cannot be read is measured anew."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tokenwright import LLM
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.decode.drafts.step_costs import FAR, measured
from tokenwright.llm.drafts import sources
from tokenwright.llm.drafts.sources import LONGEST, ROUNDS, ROWS, measure, read_times
from tokenwright.llm.model import LoadedModel


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    model = LoadedModel("stories", weights="int8")
    if not isinstance(model.decoder, NativeDecoder):
        pytest.skip("native kernels are measured")
    return model


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(sources, "SMALLEST", 1)
    for limit in ("APART", "FASTER"):
        monkeypatch.setattr(sources, limit, 1e9)  # tests share the machine
    return tmp_path / "steps"


def costs(llm: LLM) -> Any:
    return llm.llm_engine.inspect(lambda engine: engine.scheduler.proposer).costs


def test_a_model_is_measured_once_and_its_table_kept(
    loaded: LoadedModel, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(loaded) as llm:
        first = costs(llm)
    [file] = cached.iterdir()
    times = read_times(file)
    assert times is not None and first.of(8) == max(times[rows] / times[1] for rows in ROWS if rows <= 8)
    monkeypatch.setattr(sources, "measure", None)  # it is not called again
    with LLM(loaded) as llm:
        assert costs(llm) == first
    with pytest.raises(TypeError):
        LLM(loaded, kv="int8")  # another cache, and another table


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"1": 0.1}', json.dumps(dict.fromkeys(map(str, ROWS), -1.0))])
def test_a_damaged_table_is_measured_anew(loaded: LoadedModel, cached: Path, text: str) -> None:
    LLM(loaded).close()
    [file] = cached.iterdir()
    file.write_text(text)
    assert read_times(file) is None
    LLM(loaded).close()
    assert read_times(file) is not None


def test_small_models_have_no_table_of_their_own(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path))
    LLM(loaded).close()
    assert not list(tmp_path.iterdir())


def ticking(*seconds: float) -> Iterator[float]:
    """A clock whose readings are so far apart, one after another, and 1 ms each from then on."""
    now = 0.0
    for at in count():
        yield now
        now += seconds[at] if at < len(seconds) else 0.001


def test_the_least_of_several_times_is_kept(loaded: LoadedModel) -> None:
    """A disturbance of one round, such as another process, leaves no trace; one of nearly all rounds is noticed."""
    readings = 1 + ROUNDS * (2 * len(ROWS) + 1)
    with LLM(loaded) as llm:
        clock = ticking(0.001, 0.5)
        assert measure(loaded.decoder, llm.specs, 1, clock.__next__) == pytest.approx(dict.fromkeys(ROWS, 0.001))
        busy = ticking(*(0.001 * 1.2**at for at in range(readings)))
        assert measure(loaded.decoder, llm.specs, 1, busy.__next__) is None
        turn = 2 * len(ROWS) + 1  # readings; the second begins the step of one row
        first = ticking(*(0.0012 if at % turn == 1 else 0.001 for at in range(readings)))
        assert measure(loaded.decoder, llm.specs, 1, first.__next__) is None, "one row is slower than two"
        slow = iter([next(clock) for clock in [ticking(*[LONGEST] * 1000)] for _ in range(1 + 2 * (2 * len(ROWS) + 1))])
        assert measure(loaded.decoder, llm.specs, 1, slow.__next__) == dict.fromkeys(ROWS, LONGEST)
        assert next(slow, None) is None, "of slow steps two rounds are measured"


def test_costs_that_were_measured_never_fall() -> None:
    found = measured({1: 0.02, 2: 0.019, 4: 0.03, 8: 0.028}, 0.5)
    assert [found.of(rows) for rows in (1, 2, 4, 8)] == [1.0, 1.0, 1.5, 1.5]
    assert found.context == FAR * 0.5
