"""A still of any moment agrees with itself: what one part of the page shows, no other part denies or covers."""

from itertools import pairwise, product

import pytest

from tests.browser.conftest import GROUPS, RENDERERS, near

# Of each picture of a run: what the stage, the text, the legend, the candidates and the sentence show.
SAMPLE = """window.samples = [];
const sample = () => {
  const explorer = window.__explorer, page = document.querySelector('.page');
  const newest = document.querySelector('[data-part=generated] .token:last-child');
  if (explorer?.state.origin !== 'live' || !explorer.words.length || !newest) return;
  const seen = [...document.querySelectorAll('[data-part] .token')].filter((e) => e.checkVisibility());
  samples.push({
    moment: page.dataset.moment,
    words: explorer.words.map((word) => word.text),
    tokens: seen.length,
    hidden: !newest.checkVisibility(),
    text: document.querySelector('.flow').textContent,
    chosen: document.querySelector('.bar.chosen')?.dataset.candidate ?? null,
    told: document.querySelector('[data-narration]').textContent,
    legend: document.querySelector('.legend').innerText.split('\\n'),
    over: document.querySelector('.result') !== null,
  });
};
const every = () => { setTimeout(sample); requestAnimationFrame(every); };
every();"""


def legend(explored):
    explored.settle()
    explored.tab.evaluate("window.__explorer.renderOnce()")
    explored.tab.wait_for_timeout(0)  # the words are written after the picture is drawn
    return explored.tab.locator(".legend").inner_text().split("\n")


@pytest.mark.parametrize("pace", ["slow", "quick"])
def test_a_token_is_shown_everywhere_at_the_same_moment(animated, pace):
    """The first steps of a visit take seconds and are told in parts; those that someone asks for one by one do not."""
    animated.tab.add_init_script(SAMPLE)
    animated.open("#p=The%20little%20dog&seed=3&n=3&renderer=2d" + ("" if pace == "slow" else "&step=0"))
    for step in range(3) if pace == "quick" else ():
        animated.until(f"window.__explorer.state.step === {step}")
        animated.press("ArrowRight")
    animated.until("document.querySelector('.result') !== null")
    samples = animated.tab.evaluate("window.samples")
    ids = animated.state["ids"]
    prompt = len(ids) - 3
    assert {one["hidden"] for one in samples} == {True, False}, "both were seen"
    for one in samples:
        assert ("?" in one["words"]) == one["hidden"], f"the stage and the text disagree: {one}"
        written = ids[one["tokens"] - 1] if one["tokens"] > prompt else None
        assert one["chosen"] == (None if written is None else str(written)), f"candidates of another token: {one}"
        if one["hidden"]:
            assert "was written" not in one["told"] and "is written" not in one["told"] and not one["over"]
        if any(word.endswith(("L4 H3", "layer 4, head 3")) for word in one["words"]) and not one["over"]:
            assert "attention" in one["legend"], f"beams are drawn: {one}"
        if one["moment"] == "work":
            assert "attention" not in one["legend"], f"no beams are drawn yet: {one}"
        if "generated" in one["legend"]:
            assert one["tokens"] > prompt, f"nothing is written yet: {one}"
    moments = {one["moment"] for one in samples}
    assert "work" in moments and "pass" not in moments if pace == "slow" else moments == {"pass", "rest"}


@pytest.mark.parametrize("kind", RENDERERS)
def test_the_legend_has_what_is_drawn_and_nothing_else(explored, kind):
    explored.open(f"#p=Once%20upon%20a%20time&seed=1&n=8&step=0&renderer={kind}")
    explored.until("window.__explorer.state.step === 0")
    assert legend(explored) == ["prompt", "generated", "computed now", "attention"]
    kept = near(explored.picture(), explored.colour("kept"), 24).sum()  # of the wall's name
    explored.step()
    cached = ["prompt", "generated", "in the cache", "computed now", "attention"]
    assert legend(explored) == cached
    assert near(explored.picture(), explored.colour("kept"), 24).sum() > 10 * kept
    explored.press("2")
    assert legend(explored) == ["prompt", "generated", "attention"], "TOP leaves the wall out"
    explored.press("1")
    explored.press("n")
    explored.step()
    thrown = ["computed again, thrown away", "new, thrown away"]
    assert legend(explored) == ["prompt", "generated", *thrown, "attention"]
    explored.press("n")
    explored.step()
    assert legend(explored) == ["prompt", "generated", "computed again, now kept", "computed now", "attention"]
    explored.step()
    assert legend(explored) == cached


def test_nothing_stands_on_the_picture_and_the_work_explains_its_unit(explored):
    explored.open("#p=Once%20upon%20a%20time&seed=1&step=4&cache=off&renderer=2d")
    explored.until("window.__explorer.state.step === 4")
    for size in ((1440, 900), (1280, 800), (390, 844)):
        explored.tab.set_viewport_size({"width": size[0], "height": size[1]})
        explored.settle()
        check_still(explored, size)


def check_still(explored, size):
    covered = explored.tab.locator(".canvas canvas").evaluate(
        """canvas => {
          const box = canvas.getBoundingClientRect(), found = [];
          for (let i = 0.5; i < 20; i++) for (let j = 0.5; j < 20; j++) {
            const top = document.elementFromPoint(box.x + box.width * i / 20, box.y + box.height * j / 20);
            if (top !== canvas) found.push(top?.className ?? 'outside the window');
          }
          return found;
        }"""
    )
    assert covered == [], "beams are seen whole"
    step = explored.api("/steps/4")
    layers = explored.get("model")["layers"]
    again, once = step["length"], step["length"] - step["recomputed"]
    said = explored.tab.locator(".versus dd:not([aria-hidden])")
    for text, tokens in zip(said.evaluate_all("all => all.map(e => e.textContent)"), (once, again), strict=True):
        one = f"{tokens} token{'s' if tokens > 1 else ''} × {layers} layers"
        assert text.startswith(str(tokens * layers)) and f"= {one}" in text
    ends = explored.tab.locator(".versus").evaluate("e => [e.scrollWidth, e.clientWidth]")
    assert ends[0] <= ends[1]
    if size[0] > 700:
        assert (
            f"layer-tokens = {again} tokens × {layers} layers"
            in explored.tab.locator(".instrument.compute").inner_text()
        )


def test_the_sums_explain_their_unit_before_they_use_it(explored):
    explored.run("Once", 3, renderer="2d", stop=None)
    explored.drawer("Numbers")
    card = explored.tab.locator(".sums-of-run").inner_text()
    assert card.index("one token through one layer") < card.index("layer-token")


def test_the_names_of_panels_fit_their_buttons(explored):
    explored.empty()
    for width, name in product([1280, 1440, 1920, 390], ["Next token", "Race"]):
        explored.tab.set_viewport_size({"width": width, "height": 900})
        explored.drawer(name)
        explored.settle()
        boxes = explored.tab.eval_on_selector_all(
            ".panel-buttons button:not(.drawer-close)",
            """all => all.map(e => {
              const box = e.getBoundingClientRect(), words = document.createRange();
              words.selectNodeContents(e);
              const text = words.getBoundingClientRect();
              return [e.textContent, box.top, box.left, box.right, box.height,
                      box.left <= text.left && text.right <= box.right];
            })""",
        )
        assert len(boxes) == 5 + len(GROUPS["Look inside" if name == "Next token" else "Experiments"])
        assert all(fits for *_, fits in boxes), f"a name is wider than its button: {boxes}"
        assert width > 700 or all(height >= 44 for *_, height, _ in boxes)
        for top in {box[1] for box in boxes}:
            row = [box for box in boxes if box[1] == top]
            assert all(before[3] < after[2] for before, after in pairwise(row)) and row[-1][3] <= width


def test_the_minimap_is_as_fine_as_the_screen_at_every_size(explored):
    explored.open("#p=Once&seed=1&step=2&renderer=2d&panel=numbers")
    explored.until("window.__explorer.state.step === 2")
    canvas = "document.querySelector('.minimap canvas')"
    fine = f"{canvas}.width === Math.round({canvas}.clientWidth * devicePixelRatio)"
    seen = set()
    for width in (1440, 800, 390):
        explored.tab.set_viewport_size({"width": width, "height": 900})
        explored.until(f"innerWidth === {width} && {fine}")
        seen.add(explored.tab.evaluate(f"{canvas}.width"))
    assert len(seen) == 3
