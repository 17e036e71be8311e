"""What a stranger sees first: few words, few controls, the switch at hand, all in its place at every size."""

import pytest

from tests.browser.conftest import GROUPS, PLACES
from tests.browser.stage.test_labels import check_words
from tests.profiles import some

TELLING = ("Next token", "Block", "Heads", "Sampler", "Beams", "Pages", "Calculator")  # a result without a click
RUN = "#p=Once%20upon%20a%20time%2C%20there%20was%20a%20little%20fox%20who&seed=1&step=10&renderer=2d"
SIZES = [(1280, 720), (1366, 625), (1440, 900), (1920, 1080), (390, 844), (640, 400)]  # the last: 1280 x 800 at 200 %
MOST_WORDS, MOST_CONTROLS = 127, 23  # with the words at the dots, and the ways into code, flight and guide
# The document's words, the prompt's and the text's among them, without those that only a screen reader gets. The canvas
# has the tokens once more.
WORDS = """() => {
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const one = walk.currentNode.parentElement;
    if (one.closest('.sr, .skip, script') || !one.checkVisibility({visibilityProperty: true})) continue;
    found.push(...walk.currentNode.data.split(/\\s+/).filter((word) => /[\\p{L}\\p{N}]/u.test(word)));
  }
  return found;
}"""
CONTROLS = """() => [...document.querySelectorAll('button, a[href], input, select, textarea, summary, [tabindex="0"]')]
  .filter((one) => !one.matches('.skip') && one.checkVisibility({visibilityProperty: true}))
  .map((one) => one.getAttribute('aria-label') || one.textContent || one.id)"""


def first_view(explored):
    explored.tab.set_viewport_size({"width": 1440, "height": 900})
    explored.open(RUN)
    explored.until("window.__explorer.state.step >= 10")
    explored.settle()
    return explored


def test_the_first_view_at_every_size(explored):
    first_view(explored)
    check_words_and_controls(explored)
    check_tab_stops(explored)
    for size in SIZES:
        explored.tab.set_viewport_size({"width": size[0], "height": size[1]})
        explored.settle()
        check_parts(explored, size)
    check_transport(explored)
    explored.press("End")
    check_low_windows(explored)


def check_words_and_controls(explored):
    words, controls = explored.tab.evaluate(WORDS), explored.tab.evaluate(CONTROLS)
    print(f"{len(words)} words: {' '.join(words)}; {len(controls)} controls: {controls}")
    assert 20 < len(words) <= MOST_WORDS
    assert 10 < len(controls) <= MOST_CONTROLS
    layers, tokens = explored.get("model")["layers"], len(explored.state["ids"]) - 1
    told = f"This step: {layers} of {layers * tokens} cells, {tokens}× fewer"
    bare = """e => {
      const one = e.cloneNode(true);
      one.querySelectorAll('.badge').forEach((badge) => badge.remove());
      return one.textContent;
    }"""
    assert explored.tab.locator(".saving").evaluate(bare).replace(" ×", "×") == told


def check_tab_stops(explored):
    """The switch is among the first three, and the first is a link to play."""
    stops = []
    for _ in range(3):
        explored.press("Tab")
        stops.append(explored.tab.evaluate("document.activeElement.textContent"))
    assert stops[0] == "Skip to play" and any(stop.startswith("KV cache") for stop in stops)
    for key in ("Shift+Tab", "Shift+Tab", "Enter"):
        explored.press(key)
    assert explored.tab.evaluate("document.activeElement.className") == "play"
    assert "seed=1" in explored.tab.evaluate("location.hash"), "the link is no address"
    explored.tab.evaluate("document.activeElement.blur()")


def check_parts(explored, size):
    box = lambda name: explored.tab.locator(name).bounding_box()  # noqa: E731
    stage, switch, view = box(".stage"), box(".cache-switch"), box(".view")
    least = {1280: 370, 1366: 340, 1440: 520, 1920: 600}.get(size[0], 320)
    assert stage["width"] == size[0] and stage["height"] >= (least if size[1] >= 560 else 200), size
    assert view["height"] >= (180 if size[0] >= 700 else 240 if size[1] >= 560 else 140), size
    assert switch["height"] >= 48 and switch["width"] >= 280, size
    assert size[1] < 560 or abs(switch["x"] + switch["width"] / 2 - size[0] / 2) <= 1, "in the middle"
    assert switch["y"] >= view["y"] + view["height"], "under the picture"
    assert explored.tab.evaluate("document.documentElement.scrollWidth") == size[0]
    if size[0] >= 700:
        assert explored.tab.evaluate("document.documentElement.scrollHeight") == size[1], "all of it in view"
        size_of = "e => getComputedStyle(e).fontSize"
        assert explored.tab.locator(".story-line").evaluate(size_of) == "22px"
    assert box(".flow")["height"] >= 3 * 24, "three lines of text"
    play = box(".play")
    assert play["y"] + play["height"] <= size[1], "play is in view"
    for name in (".story", ".work", ".stage-foot", ".transport", ".top"):
        seen, whole = explored.tab.locator(name).evaluate("e => [e.clientWidth, e.scrollWidth]")
        assert whole <= seen, f"{name} is cut at {size}"


LOW = ((720, 450), (640, 360), (844, 390))  # 1440 x 900 and 1280 x 720 at 200 %, and a phone on its side
LONGEST = "To find the next token, “understandable” reads the cache in each layer: the keys and values of all earlier "
LONGEST += "tokens. The beams end at what head 12 of layer 29 reads, as wide as its share."


def check_low_windows(explored):
    """Each begins with the whole sentence, the wall and play."""
    box = lambda name: explored.tab.locator(name).bounding_box()  # noqa: E731
    for size in LOW:
        explored.tab.set_viewport_size({"width": size[0], "height": size[1]})
        explored.settle()
        explored.tab.locator("[data-narration]").evaluate("(e, text) => (e.textContent = text)", LONGEST)
        explored.settle()
        sentence, view, fold = box(".story-line"), box(".view"), box(".transport")["y"]
        words = box("[data-narration]")
        assert words["y"] + words["height"] <= sentence["y"] + sentence["height"] + 1, f"no line is lost at {size}"
        assert sentence["y"] + sentence["height"] <= view["y"] + 1, size
        seen = view["y"] + min(view["height"], 110)
        assert view["height"] >= 140 and seen <= fold, f"the picture is on the first screen at {size}"
        wall, play = explored.tab.evaluate("__explorer.wall"), box(".play")
        assert wall["bottom"] - wall["top"] >= 28, (size, wall)
        assert play["y"] + play["height"] <= size[1], size


def check_transport(explored):
    """Of a paused run, of an earlier step, of a run that was cut: no word ends in dots, none is on a hidden line."""
    activity = explored.tab.locator(".activity")
    cut = "e => [e, ...e.children].some((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 0)"
    for width in (1920, 1024, 390):
        explored.tab.set_viewport_size({"width": width, "height": 900})
        told = []
        for key in ("End", "ArrowLeft", "Home"):
            explored.press(key)
            explored.settle()
            told.append(activity.inner_text())
            assert not activity.evaluate(cut), (width, told)
            place, row = activity.bounding_box(), explored.tab.locator(".transport").bounding_box()
            lines = activity.evaluate("e => [e.scrollHeight, e.clientHeight]")
            assert lines[0] <= lines[1] + 1, (width, told)
            assert place["y"] + place["height"] <= row["y"] + row["height"], (width, told)
        assert told[0] == "paused" and told[1].startswith("looking back"), (width, told)


def test_first_words_the_drawer_and_a_ready_prompt(explored):
    first_view(explored)
    assert not explored.tab.locator(".rail").is_visible(), "closed at first"
    check_first_words(explored)
    explored.press("Escape")
    explored.press("End")
    explored.settle()
    check_drawer(explored)
    check_sources(explored)
    check_narrow_drawer(explored)
    check_ready_prompt(explored)


def check_first_words(explored):
    """K and V where they first appear, the token before the text, the column that comes next, the dots."""
    explored.scrub(0)
    told = explored.tab.locator("[data-narration=notes]").inner_text()
    assert "a key, by which later tokens find it" in told and "a value, which they take from it" in told
    assert explored.tab.locator(".token").first.evaluate("e => e.dataset.look") == "start"
    explored.tab.evaluate("__explorer.renderOnce()")
    words = explored.tab.evaluate("__explorer.words.map((word) => word.text)")
    assert {"start", "next"} <= set(words) and not any("<|" in word for word in words)
    dots = explored.tab.locator(".chapters li").all_inner_texts()
    assert dots == ["read", "save", "write", "without", "result"]
    explored.press("?")
    explored.tab.locator(".help-sheet").wait_for()
    sheet = explored.tab.locator(".help-sheet").inner_text()
    assert "COMPUTE" not in sheet and "Shift and drag" not in sheet, "a flat picture is not turned"
    named = [name.lower() for name in explored.tab.locator(".cameras button").all_inner_texts()[:-2]]
    [cameras] = [line for line in sheet.splitlines() if line.startswith("camera: ")]
    assert [part.split()[-1] for part in cameras.split(",")] == named


def check_drawer(explored):
    """It has one width, and covers nothing."""
    for name in ("Learn", "Numbers", *GROUPS["Look inside"], *GROUPS["Experiments"]):
        explored.drawer(name)
        drawer, stage = explored.tab.locator(".rail").bounding_box(), explored.tab.locator(".stage").bounding_box()
        assert drawer["width"] == 400 and stage["x"] + stage["width"] <= drawer["x"], name
        assert explored.tab.locator(".rail").evaluate("e => e.scrollWidth <= e.clientWidth"), name
        if name in TELLING:
            told = explored.tab.locator(".panel-result").filter(visible=True)
            told.wait_for()
            above = ".panel-lead, .pairs, .panel-figures, canvas, .bars, .atlas"
            tops = f"e => [...e.closest('.rail').querySelectorAll('{above}')].filter((one) => one.checkVisibility())"
            assert told.evaluate(f"e => ({tops})(e).every((one) => one.getBoundingClientRect().y > e.offsetTop)"), name
    explored.drawer(None)
    assert explored.tab.locator(".stage").bounding_box()["width"] == 1440


def check_narrow_drawer(explored):
    """In a window of 1,024, where the drawer leaves the stage 624, no words lie over others."""
    explored.tab.set_viewport_size({"width": 1024, "height": 768})
    explored.drawer("Learn")
    explored.settle()
    for one, other in (("[data-narration]", ".saving"), (".cache-switch", ".see-code")):
        a, b = (explored.tab.locator(name).bounding_box() for name in (one, other))
        apart = [
            a[at] + a[size] <= b[at] + 1 or b[at] + b[size] <= a[at] + 1
            for at, size in (("x", "width"), ("y", "height"))
        ]
        assert any(apart), (one, a, other, b)


def check_sources(explored):
    """One toggle says where all numbers come from."""
    shown = "all => all.filter((e) => e.checkVisibility({visibilityProperty: true})).length"
    explored.drawer("Numbers")
    badges = explored.tab.locator(".rail-numbers .figure .badge")
    assert badges.evaluate_all(shown) == 0
    explored.tab.locator(".rail-numbers .figure").first.hover()
    assert badges.evaluate_all(shown) == 1, "of the number under the pointer"
    explored.tab.get_by_role("button", name="Where do the numbers come from?").click()
    assert badges.evaluate_all(shown) == badges.count() > 10


def check_ready_prompt(explored):
    before = explored.state["run"]
    explored.tab.get_by_role("button", name="Fact", exact=True).click()
    explored.until(f"window.__explorer.state.run !== '{before}' && window.__explorer.state.steps > 0")
    assert explored.tab.locator("[data-part=prompt]").inner_text().endswith("The capital of France is")


WALLS = {
    (1440, 900): (950, 210),
    (1280, 720): (820, 150),
    (1366, 625): (560, 90),
    (1920, 1080): (1200, 250),
    (640, 400): (260, 60),
    (390, 844): (260, 120),
}


@pytest.mark.parametrize("kind", PLACES)
def test_the_wall_is_whole_and_large_and_no_new_word_is_dropped(explored, kind):
    """As long as the first view, and where tokens stand closer: on a phone, and at the profile's share of sizes."""
    phone = (390, 844)
    for step, sizes in ((10, {*some([*WALLS]), phone}), (60, some([phone, (1440, 900), (640, 400)]))):
        explored.tab.goto("about:blank")
        explored.open(RUN.replace("renderer=2d", f"renderer={kind}&n=90").replace("step=10", f"step={step}"))
        explored.until(
            f"window.__explorer.state.step >= {step} && document.documentElement.dataset.renderer === '{kind}'"
        )
        for size in sizes:
            explored.tab.set_viewport_size({"width": size[0], "height": size[1]})
            explored.settle()
            check_wall(explored, size, kind, f"{size}, {kind}, step {step}")


def check_wall(explored, size, kind, what):
    wall, view = explored.tab.evaluate("__explorer.wall"), explored.tab.locator(".view").bounding_box()
    wide, high = wall["right"] - wall["left"], wall["bottom"] - wall["top"]
    print(f"{what}: {wide:.0f} x {high:.0f}")
    assert wide >= WALLS[size][0] and high >= WALLS[size][1], f"{what}: {wide:.0f} x {high:.0f}"
    assert wall["left"] >= 0 and wall["top"] >= 0, f"{what}: whole"
    assert wall["right"] <= view["width"] and wall["bottom"] <= view["height"], f"{what}: whole"
    words = {text for text, _ in check_words(explored, what)}
    tokens = len(explored.state["ids"])
    named = 24 if size[0] > 700 else {"2d": 12, "3d": 9}[kind]
    for position in range(max(0, tokens - named), tokens):
        shown = explored.tab.locator(f".token[data-position='{position}']").inner_text().strip()
        if shown.isalpha():
            assert any(word in (shown, shown[: len(word) - 1] + "…") for word in words), f"{what}: {shown} is not named"


def test_the_first_seconds_play_themselves_and_end_in_an_invitation(hasty):
    explored = hasty.open()
    explored.until("document.querySelector('.hint-next')?.textContent.startsWith('Your turn')")
    kinds = [step["cache"] for step in explored.steps(explored.state["step"] + 1)]
    first, back = kinds.index(False), len(kinds) - kinds[::-1].index(False)
    assert (
        first >= 9
        and back - first >= 3
        and kinds == [True] * first + [False] * (back - first) + [True] * (len(kinds) - back)
    )
    assert explored.state["cache"]
    assert explored.state["playing"] or explored.state["state"] == "done"


def test_whoever_does_something_ends_the_tour(hasty):
    explored = hasty.open()
    explored.until("window.__explorer.state.step >= 1")
    explored.press("Space")
    explored.until_state("paused")
    explored.press("Space")
    explored.until("window.__explorer.state.step >= 14")
    assert all(step["cache"] for step in explored.steps(14))
