"""The chart is a picture of the numbers it was given."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tokenwright.cli.reports.chart import TOP, Line, _apart, chart, smooth, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (10, [0, 2, 4, 6, 8, 10]),
        (9.1, [0, 2, 4, 6, 8, 10]),
        (301, [0, 100, 200, 300, 400]),
        (0.034, [0, 0.01, 0.02, 0.03, 0.04]),
        (1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_ticks_are_round_and_reach(most: float, expected: list[float]) -> None:
    assert ticks(most) == pytest.approx(expected)


@pytest.mark.parametrize("most", [0.0, 1e-12, 3e-7, 7.0, 12345.6])
def test_ticks_always_reach(most: float) -> None:
    found = ticks(most)
    assert found[0] == 0
    assert found[-1] >= most * 0.999
    assert len(found) <= 7


def test_smooth_drops_a_hiccup_and_keeps_a_slope() -> None:
    assert smooth([1.0, 1.0, 90.0, 1.0, 1.0]) == [1.0] * 5
    assert smooth([float(i) for i in range(20)])[4:-4] == [float(i) for i in range(4, 16)]


def drawn(*lanes: list[float]) -> ElementTree.Element:
    lines = [Line(f"lane {i} <&>", "1 s in all", "#0072B2", values) for i, values in enumerate(lanes)]
    return ElementTree.fromstring(chart('A "title" <&>', "below", lines))


def points(path: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path.attrib["d"])]


def test_a_flat_line_and_a_rising_one() -> None:
    root = drawn([5.0] * 100, [5.0 + i for i in range(100)])
    flat, rising = (points(path) for path in root.iter(f"{SVG}path") if path.get("class") == "line")
    assert len({y for _, y in flat}) == 1
    heights = [y for _, y in rising]
    assert heights == sorted(heights, reverse=True)  # y grows downwards
    assert heights[0] > heights[-1]
    assert [x for x, _ in flat] == [x for x, _ in rising] == sorted({x for x, _ in flat})


def test_words_are_escaped_and_there() -> None:
    texts = [text.text for text in drawn([1.0, 2.0], [2.0, 3.0]).iter(f"{SVG}text")]
    assert {'A "title" <&>', "below", "ms per step", "tokens written", "lane 0 <&>", "lane 1 <&>"} <= set(texts)


def test_names_do_not_overlap() -> None:
    root = drawn([5.0] * 10, [5.1] * 10)
    places = [float(text.attrib["y"]) for text in root.iter(f"{SVG}text") if text.get("class") == "name"]
    assert abs(places[0] - places[1]) == pytest.approx(40)


def test_a_spike_does_not_flatten_the_rest() -> None:
    values = [5.0] * 50
    values[25] = 5000.0
    root = drawn(values, values)
    dots = next(path for path in root.iter(f"{SVG}path") if path.get("class") == "dots")
    assert len(points(dots)) == 49  # the spike lies beyond the plot


def test_one_step_is_enough() -> None:
    assert drawn([3.0], [4.0]) is not None


def test_names_of_many_lanes_stay_in_the_picture_and_apart() -> None:
    """Five lanes that all end at the top of the plot."""
    places = _apart([TOP + 1.0] * 5, 40)
    assert sorted(places) == [TOP + 40 * n for n in range(5)]
    assert _apart([300.0, 290.0, 150.0], 40) == [300.0, 260.0, 150.0]
