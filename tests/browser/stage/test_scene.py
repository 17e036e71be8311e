"""What is drawn: judged by pixels of screenshots, in both renderers, at the places the page says its tokens are."""

import numpy as np
import pytest

from tests.browser.conftest import RENDERERS, near
from tests.browser.stage.test_figures import PROMPT


def patch(picture, point, reach=2):
    x, y = round(point["x"]), round(point["y"])
    return picture[y - reach : y + reach + 1, x - reach : x + reach + 1]


def is_colour(picture, point, colour):
    """Whether the 5 x 5 pixels at a point mostly have a colour of the theme."""
    return near(patch(picture, point), colour, 24).mean() > 0.5


@pytest.mark.webgl
def test_webgl_is_live_its_cameras_are_what_they_say_and_at_rest_nothing_is_drawn(animated):
    """Else everything about the 3-D renderer would be green on nothing. The name of WebGL's hardware is printed."""
    animated.run(PROMPT, 8, renderer="3d", stop=6)
    renderer = animated.renderer
    print(f"WebGL on: {renderer['gpu']}")
    assert renderer["kind"] == "3d" and animated.tab.evaluate("document.documentElement.dataset.renderer") == "3d"
    context = "c => c.getContext('webgl2') !== null && !c.getContext('webgl2').isContextLost()"
    assert animated.tab.locator(".canvas canvas").evaluate(context)
    assert 1 <= renderer["calls"] <= 8
    assert 100 < renderer["triangles"] <= 40_000
    spreads = {}
    for key, name in zip("12345", ("iso", "top", "side", "head", "follow"), strict=True):
        animated.press(key)
        animated.settle()
        camera = animated.tab.evaluate("window.__explorer.camera")
        assert camera["name"] == name
        assert camera["orthographic"] is (name == "top")
        heights = [animated.project(position)["y"] for position in range(len(animated.state["ids"]))]
        spreads[name] = max(heights) - min(heights)
        assert animated.picture().std() > (10 if name == "iso" else 5), "the canvas is not of one colour"
    assert spreads["top"] <= 2
    assert spreads["iso"] > 20
    animated.settle()  # a busy machine may take longer than one wait for a picture
    frames = animated.tab.evaluate("window.__explorer.frames")
    animated.tab.wait_for_timeout(1000)
    assert animated.tab.evaluate("window.__explorer.frames") == frames


@pytest.mark.parametrize("kind", RENDERERS)
def test_the_picture_is_the_engines(explored, kind):
    explored.run(PROMPT, 30, renderer=kind, stop=5)
    explored.press("2")
    picture = explored.picture()
    check_tiles(explored, picture)
    check_beam(explored, picture)
    explored.press("3")  # the wall, from the front
    check_wall_without_the_cache(explored)


def check_tiles(explored, picture):
    """Each token has a tile of its role, and there is none too many."""
    count, prompt = len(explored.state["ids"]), int(explored.stats()["prompt_tokens"][0])
    assert str(count) == explored.stats()["seq_len"][0]
    roles = {role: explored.colour(role) for role in ("prompt", "generated")}
    for position in range(count):
        role = "prompt" if position < prompt else "generated"
        assert is_colour(picture, explored.project(position), roles[role]), f"token {position} is not a {role} tile"
    gap = explored.project(count - 1)["x"] - explored.project(count - 2)["x"]
    beyond = explored.project(count - 1) | {"x": explored.project(count - 1)["x"] + gap}
    assert not any(is_colour(picture, beyond, colour) for colour in roles.values())


def check_beam(explored, picture):
    """Of all earlier tokens, the one that was read most has the most of the beam's colour at its tile."""
    row, accent = explored.tab.evaluate("window.__explorer.row"), explored.colour("accent")
    points = [explored.project(position) for position in range(len(row["codes"]))]
    half = round((points[1]["x"] - points[0]["x"]) * 0.45)
    warm = [int(near(patch(picture, point, half), accent, 60).sum()) for point in points]
    assert int(np.argmax(warm)) == row["argmax"], warm


def vermillion(explored):
    """The share of the picture that has the hue of what was computed again, and the columns that show it."""
    picture = explored.picture()
    recomputed = np.array(explored.colour("recomputed"))
    marked = near(picture, recomputed, 40)
    count = len(explored.state["ids"])
    columns = []
    for position in range(count):
        x = round(explored.project(position)["x"])
        columns.append(bool(marked[:, max(0, x - 9) : x + 10].sum() >= 6))
    return marked.mean(), columns


def check_wall_without_the_cache(explored):
    """It is seen in every earlier column, and nowhere after."""
    share, columns = vermillion(explored)
    assert share < 0.001 and not any(columns)
    explored.press("n")
    explored.step()
    share, columns = vermillion(explored)
    assert share > 0.01
    assert columns == [True] * (len(columns) - 2) + [False, False], "all but the one first computed, and the newest"
    assert explored.stats()["kv_resident"] == ("0", "counted")
    explored.press("n")
    explored.step()  # all of it once more, and kept
    assert int(explored.stats()["kv_resident"][0]) > 0
    explored.step()
    share, columns = vermillion(explored)
    assert share < 0.001 and not any(columns)
    assert explored.stats()["length"][0] == "1"


@pytest.mark.webgl(density=0.5)
def test_the_scene_is_turned_by_keyboard_and_a_lost_context_gives_way_to_the_flat_picture(explored):
    explored.run(PROMPT, 12, renderer="3d", stop=3)
    check_turns(explored)
    check_replaced(explored)
    check_lost(explored)


def check_turns(explored):
    explored.settle()
    before = explored.project(0)
    explored.tab.locator(".canvas canvas").focus()
    for _ in range(4):
        explored.press("ArrowLeft")
    explored.settle()
    after = explored.project(0)
    assert abs(after["x"] - before["x"]) + abs(after["y"] - before["y"]) > 3
    explored.press("3")
    explored.settle()
    assert explored.project(0) == pytest.approx(before, abs=2)


def check_replaced(explored):
    """A picture that was replaced gives its context back, which is no loss of the picture that is shown."""
    explored.tab.evaluate("window.old = document.querySelector('.canvas canvas')")
    for kind in ("2d", "3d"):
        explored.press("v")
        explored.until(f"document.documentElement.dataset.renderer === '{kind}'")
    explored.settle()
    assert explored.tab.evaluate("window.old.getContext('webgl2').isContextLost()")
    assert explored.renderer["kind"] == "3d" and explored.tab.locator(".banner").count() == 0


def check_lost(explored):
    assert explored.renderer["kind"] == "3d"
    lose = "c => c.getContext('webgl2').getExtension('WEBGL_lose_context').loseContext()"
    explored.tab.locator(".canvas canvas").evaluate(lose)
    explored.until("document.documentElement.dataset.renderer === '2d'")
    before = explored.stats()["seq_len"]
    explored.step()
    assert int(explored.stats()["seq_len"][0]) == int(before[0]) + 1
    assert explored.picture().std() > 5
    explored.press("v")
    explored.until("document.documentElement.dataset.renderer === '3d'")
    assert explored.picture().std() > 5, "and can be had back"
