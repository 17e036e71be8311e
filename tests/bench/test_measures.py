"""What the figures of a model mean, and that its texts are new."""

import pytest

from tokenwright.bench import measures
from tokenwright.bench.measures import MEASURES, Measure, prompts, repeated


@pytest.mark.parametrize(
    ("measure", "seconds", "figure"),
    [
        (Measure(1, 512, 1), [[0.25]], 2048.0),
        (Measure(1, 32, 1, "ms"), [[0.25]], 250.0),
        (Measure(1, 512, 3), [[9.0, 9.5, 10.0]], 2.0),
        (Measure(2, 32, 3), [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], 2.0),
        (Measure(2, 32, 3), [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]], 1.5),  # from when both run: 3, 3 and 4 in 2 s
    ],
)
def test_figures(measure: Measure, seconds: list[list[float]], figure: float) -> None:
    assert measure.figure(seconds) == pytest.approx(figure)


def test_prompts_are_new_in_every_repetition_and_the_same_for_every_engine() -> None:
    measure = Measure(2, 16, 1)
    first = prompts(measure, 4096, "tiny", 0, "decode", 0)
    assert first == prompts(measure, 4096, "tiny", 0, "decode", 0)
    assert first[0] != first[1]
    assert first[0] not in prompts(measure, 4096, "tiny", 0, "decode", 1)


@pytest.mark.parametrize(
    ("measure", "figure"),
    [
        (Measure(1, 512, 1), 2048.0),
        (Measure(2, 512, 1), 4096.0),
        (Measure(1, 512, 65), 4.0),
        (Measure(8, 32, 128), 32.0),
        (Measure(1, 32, 1, "ms"), 250.0),
    ],
)
def test_the_figure_of_a_step_of_a_quarter_of_a_second(measure: Measure, figure: float) -> None:
    assert measure.of_step(0.25) == figure


def test_a_prompt_leaves_room_for_what_is_written() -> None:
    assert MEASURES["decode"].within(512) == Measure(1, 447, 65)
    assert MEASURES["decode"].within(1024) == MEASURES["decode"]


def test_a_measure_is_repeated_until_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[list[int]]] = []

    def write(texts: list[list[int]], tokens: int) -> list[list[float]]:
        asked.append(texts)
        return [[0.5] for _ in texts]

    def figures() -> list[float]:
        return list(repeated(Measure(1, 8, 1), write, 4096, "a seed"))

    assert figures() == [16.0] * measures.MOST
    assert len({str(texts) for texts in asked}) == measures.MOST
    monkeypatch.setattr(measures, "ENOUGH_S", 0.0)
    assert figures() == [16.0]
