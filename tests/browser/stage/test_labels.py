"""Words on the stage: none covers another, in any camera and at any length; and where things are on the page."""

import json
from base64 import b64encode
from itertools import pairwise

import pytest

from tests.browser.conftest import PLACES, ROOT, SELDOM, near
from tests.browser.stage.test_figures import PROMPT

PROMPT_TOKENS = 12


def long_trace(tokens, layers=6):
    """A trace of a text of so many tokens, from the recorded run's steps."""
    trace = json.loads((ROOT / "web" / "public" / "recorded.json").read_text(encoding="utf-8"))
    recorded = [step for step in trace["steps"] if step["cache"] and step["length"] == 1]
    steps = trace["steps"][:1]
    for number in range(1, tokens - PROMPT_TOKENS):
        step = dict(recorded[number % len(recorded)])
        start = PROMPT_TOKENS + number - 1
        codes = bytes([30 + 7 * (position % 5) for position in range(start)] + [140])
        row = {"layer": 4, "head": 3, "argmax": start, "codes": b64encode(codes).decode()}
        steps.append(step | {"step": number, "start": start, "seq_len": start + 2, "attention": row})
    trace["steps"] = steps
    trace["state"]["steps"] = len(steps)
    trace["model"]["context"] = 2048
    trace["model"] |= {"layers": layers, "windows": [None] * layers}
    return trace


@pytest.fixture
def replay(explored, tmp_path):
    """Opens a trace of so many tokens."""
    explored.tab.set_viewport_size({"width": 1440, "height": 900})

    def open_trace(tokens, renderer, layers=6):
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(long_trace(tokens, layers)))
        explored.open(f"#p=&renderer={renderer}")
        explored.until_state("empty")
        with explored.tab.expect_file_chooser() as chooser:
            explored.share("Open a trace")
        chooser.value.set_files(path)
        explored.until_state("replay")
        explored.until(f"document.documentElement.dataset.renderer === '{renderer}'")
        return explored

    return open_trace


def apart(a, b):
    """Whether a side of one of two rectangles separates them (with the tolerance of a rounding error)."""
    for one in (a, b):
        for (x0, y0), (x1, y1) in pairwise(one[:3]):
            normal = (x1 - x0, y1 - y0)
            spans = [[x * normal[0] + y * normal[1] for x, y in corners] for corners in (a, b)]
            if max(spans[0]) <= min(spans[1]) + 1e-6 or max(spans[1]) <= min(spans[0]) + 1e-6:
                return True
    return False


def check_words(explored, what):
    """No two words overlap, the head's token is named, and there are words at all."""
    explored.tab.evaluate("window.__explorer.renderOnce()")
    words = [
        (word["text"], [(point["x"], point["y"]) for point in word["corners"]])
        for word in explored.tab.evaluate("window.__explorer.words")
    ]
    assert len(words) >= 5, f"{what}: {words}"
    for index, (text, corners) in enumerate(words):
        for other, others in words[index + 1 :]:
            assert apart(corners, others), f"{what}: “{text}” and “{other}” overlap"
    return words


@pytest.mark.parametrize("renderer", PLACES)
def test_labels_never_overlap(replay, renderer):
    explored = replay(400, renderer)
    for tokens in (400, 85, 20):
        if tokens < 400:
            explored.tab.locator(f".token[data-position='{tokens - 1}']").evaluate("e => e.click()")
        explored.until(f"document.querySelector('[data-stat=seq_len]').dataset.value === '{tokens}'")
        for key, camera in enumerate(explored.tab.locator(".cameras button[title]").all()[:-2]):
            camera.evaluate("e => e.click()")
            check_words(explored, f"{tokens} tokens, {renderer}, camera {key}")
    if renderer == "2d":
        assert explored.tab.locator(".cameras button").count() == 4 + 2, "the head's camera needs depth"
        return
    explored.press("1")
    explored.tab.locator(".canvas canvas").focus()
    for turn in ["ArrowLeft"] * 2 + ["ArrowUp"] + ["ArrowRight"] * 4 + ["ArrowDown"] * 2:
        for _ in range(3):
            explored.press(turn)
        check_words(explored, f"turned by {turn}")


FULL = [("2d", 6), ("2d", 30), pytest.param("3d", 30, marks=pytest.mark.webgl(density=0.5))]


@pytest.mark.parametrize(("renderer", "layers"), FULL)
def test_every_word_of_a_page_full_of_tokens_is_there(replay, renderer, layers):
    """43 tokens, from each camera that shows the whole row; the names may be shortened."""
    explored = replay(43, renderer, layers)
    for camera in ("1", "2", "3"):  # iso, top, side
        explored.press(camera)
        explored.settle()
        found = [text for text, _ in check_words(explored, f"{renderer}, {camera}")]
        labels = explored.tab.eval_on_selector_all(".token", "all => all.map((e) => e.textContent.trim())")
        for one in filter(None, labels):  # each takes a word of its own: “the” stands there as often as it is written
            word = next((word for word in found if _names(word, one)), None)
            assert word is not None, f"{camera}: “{one}” is missing of {labels}"
            found.remove(word)


def _names(word, token):
    return word == token or (word.endswith("…") and token.startswith(word[:-1]))


def test_two_words_in_one_place_are_found():
    """The check itself can fail."""
    square = [(0, 0), (10, 0), (10, 10), (0, 10)]
    turned = [(5, -2), (12, 5), (5, 12), (-2, 5)]
    beside = [(11, 0), (20, 0), (20, 10), (11, 10)]
    assert not apart(square, turned) and apart(square, beside)


@pytest.mark.webgl
def test_a_long_text_is_drawn_in_a_few_calls(replay):
    explored = replay(1000, "3d")
    explored.press("Escape")  # a file is opened at its end, which stands over the wall
    check_words(explored, "1,000 tokens")
    renderer = explored.renderer
    assert 1 <= renderer["calls"] <= 8
    assert renderer["triangles"] <= 10_000, "the older tokens have one box together"
    print(
        f"1,000 tokens: {renderer['calls']} calls, {renderer['triangles']} triangles, "
        f"{explored.tab.evaluate('window.__explorer.drawTime'):.1f} ms of the page's own per picture"
    )
    wall = {side: round(at) for side, at in explored.tab.evaluate("window.__explorer.wall").items()}
    older = near(explored.picture(), explored.colour("kept"), 45)[:, wall["left"] + 20 : wall["left"] + 200]
    bands = [older[y : y + 20].mean() for y in range(wall["top"], wall["bottom"], 10)]
    assert max(bands) > 0.6, "and are seen as kept, where no beam crosses them"
    explored.press("3")
    explored.tab.locator(".canvas canvas").hover()
    for _ in range(12):
        explored.tab.mouse.wheel(0, 400)  # out, until all of it is in view
    explored.tab.evaluate("window.__explorer.renderOnce()")
    assert explored.renderer["calls"] <= 8 and explored.renderer["triangles"] <= 10_000


@pytest.mark.parametrize("renderer", SELDOM)
def test_the_minimap_frames_what_is_in_view_and_moves_it(replay, renderer):
    explored = replay(400, renderer)
    assert explored.tab.evaluate("[__explorer.window.first, __explorer.window.last]") == [0, 399], "the wall is whole"
    for _ in range(4):
        explored.press("+")
    explored.until("document.querySelector('.minimap').dataset.partShown === 'true'")
    explored.drawer("Numbers")
    explored.tab.locator(".minimap canvas").scroll_into_view_if_needed()
    box = explored.tab.locator(".minimap canvas").bounding_box()
    explored.tab.mouse.click(box["x"] + box["width"] * 100 / 2048, box["y"] + 5)
    explored.tab.evaluate("window.__explorer.renderOnce()")
    first, last = explored.tab.evaluate("[__explorer.window.first, __explorer.window.last]")
    assert first < 100 < last < 399


def test_the_wheel_zooms_also_where_the_page_scrolls(explored):
    explored.tab.set_viewport_size({"width": 1000, "height": 700})
    explored.run(PROMPT, 8, renderer="2d", stop=4)
    explored.settle()
    gap = lambda: explored.project(1)["x"] - explored.project(0)["x"]  # noqa: E731
    before = gap()
    explored.tab.locator(".canvas canvas").hover()
    scrolled = explored.tab.evaluate("scrollY")
    explored.tab.mouse.wheel(0, -300)
    explored.settle()
    assert gap() > before * 1.2
    assert explored.tab.evaluate("scrollY") == scrolled


def test_the_stage_has_its_room_and_a_phone_has_the_work_above_the_fold(explored):
    explored.open("#p=Once%20upon&seed=1&step=3&renderer=2d")
    explored.until("window.__explorer.state.step >= 3")
    for size in ((1440, 900), (1280, 720), (390, 844)):
        explored.tab.set_viewport_size({"width": size[0], "height": size[1]})
        explored.settle()
        check_room(explored, size)


def check_room(explored, size):
    boxes = {name: explored.tab.locator(name).bounding_box() for name in (".view", "#prompt", ".story-line")}
    assert boxes[".view"]["height"] >= 200
    ends = {name: box["y"] + box["height"] for name, box in boxes.items()}
    assert ends["#prompt"] <= boxes[".story-line"]["y"] and ends[".story-line"] <= boxes[".view"]["y"]
    shown = "e => e.checkVisibility() && e.getBoundingClientRect().bottom"
    work = [
        end for end in explored.tab.eval_on_selector_all("[data-stat=layer_tokens]", f"all => all.map({shown})") if end
    ]
    fold = size[1] - (explored.tab.locator(".transport").bounding_box()["height"] if size[0] < 700 else 0)
    assert work and min(work) <= fold and ends[".view"] <= fold
    inner, content = explored.tab.evaluate("[innerHeight, document.documentElement.scrollHeight]")
    assert content == inner if size[0] >= 1100 else content < 3 * inner
