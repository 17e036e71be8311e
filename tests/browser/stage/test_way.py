"""The flight through the model: each number is the engine's, by pointer and by keys, and Escape leads back."""

import math

import pytest

from tests.browser.conftest import GROUPS, SELDOM
from tests.browser.looks import LOOKS, findings
from tests.profiles import some

RUN = "#p=Once%20upon%20a%20time%2C%20there%20was%20a%20little%20fox%20who&seed=1&T=0.7&step=14&renderer="
STOPS = [
    *("word", "embedding", "norm", "qkv", "position", "score", "mask"),
    *("softmax", "value", "mlp", "residual", "next", "logits", "draw"),
]
POSITION, LAYER = 16, 4
READER = 25


def held(explored, kind):
    explored.open(RUN + kind)
    explored.until("window.__explorer.state.step === 14")
    explored.settle()
    return explored


def point(explored):
    """A point of the cell of POSITION in LAYER."""
    canvas = explored.tab.locator(".canvas canvas").bounding_box()
    wall = explored.tab.evaluate("window.__explorer.wall")
    x = explored.project(POSITION)["x"]
    layers = explored.get("model")["layers"]
    for step in range(40):  # in perspective the wall is not level
        y = wall["top"] + (wall["bottom"] - wall["top"]) * (LAYER + 0.5) / layers + (step // 2) * (-1) ** step
        explored.tab.mouse.move(canvas["x"] + x, canvas["y"] + y)
        hint = explored.tab.locator(".cell-hint")
        if hint.count() and f"layer {LAYER}" in hint.inner_text():
            return canvas["x"] + x, canvas["y"] + y
    raise AssertionError("no cell of the layer is under the pointer")


def until_stop(explored, stop):
    explored.until(f"document.querySelector('.way')?.dataset.stop === '{stop}'")


def said(explored):
    """The sentence of a stop, once the engine's numbers are in it."""
    explored.until("!document.querySelector('.way-words').textContent.startsWith('The engine computes')")
    return explored.tab.locator(".way-words").inner_text()


def numbers(explored, what):
    """The numbers of the picture, once the engine's answer is in it."""
    explored.until(f"document.querySelector('.way [data-{what}]')")
    all_of = f"all => all.flatMap(e => e.dataset.{what}.split(',').map(Number))"
    return explored.tab.locator(f".way [data-{what}]").evaluate_all(all_of)


def stages(explored, position, layer):
    block = explored.api(f"/block?step=14&layer={layer}&position={position}")
    return {stage["name"]: stage for stage in block["stages"]}


def way(explored):
    head = explored.state["head"]
    return explored.api(f"/way?step=14&layer={LAYER}&head={head}&position={POSITION}")


@pytest.mark.parametrize("kind", SELDOM)
def test_a_click_flies_to_the_cell_under_the_pointer(explored, kind):
    """The camera goes near, the wall stays in sight, and its words move with it."""
    held(explored, kind)
    x, y = point(explored)
    before, apart = explored.tab.evaluate("window.__explorer.wall"), pitch(explored)
    model, word = explored.get("model"), explored.tab.locator(".token").nth(POSITION).inner_text().strip()
    hint = explored.tab.locator(".cell-hint").inner_text()
    size = f"{model['kv_heads']} × {model['head_size']}"
    written = POSITION - 12 + 2  # the first step wrote the prompt's
    history = f"written and read in step {written}, read again in {15 - written} later steps"
    assert hint.startswith(f"“{word}”, layer {LAYER}: K {size}, V {size}, {history}")
    explored.tab.mouse.click(x, y)
    until_stop(explored, "qkv")
    explored.settle()
    assert history in said(explored)
    assert pitch(explored) > 1.5 * apart
    calls = explored.renderer["calls"]
    assert calls == (6 if kind == "3d" else 0)
    canvas = explored.tab.locator(".canvas canvas").bounding_box()
    assert 0.1 < explored.project(POSITION)["x"] / canvas["width"] < 0.3
    explored.press("Escape")
    until_stop(explored, "norm")
    explored.tab.get_by_role("button", name="Back to the wall").click()
    explored.tab.locator(".way").wait_for(state="detached")
    explored.settle()
    assert explored.tab.evaluate("window.__explorer.wall") == pytest.approx(before, abs=1)


def pitch(explored):
    one, other = (explored.project(position)["x"] for position in (POSITION, POSITION + 1))
    return abs(one - other)


def check_word(explored, seen):
    assert numbers(explored, "token") == [explored.state["ids"][POSITION]]


def check_embedding(explored, seen):
    ids = explored.state["ids"]
    rows = {at: stages(explored, at, 0)["input"]["numbers"] for at in (3, 8, POSITION)}
    assert numbers(explored, "number") == rows[POSITION]
    first = explored.tab.locator(".way-vector small").inner_text().partition(": ")[2].split(", …")[0]
    assert [float(one) for one in first.split(", ")] == pytest.approx(rows[POSITION][:4], rel=0.05), "without a pointer"
    assert ids[3] == ids[8] != ids[POSITION]
    assert rows[3] == rows[8] != rows[POSITION], "a token's row is the same wherever it stands"


def check_position(explored, seen):
    half = len(seen["angles"])
    (angle,) = numbers(explored, "angle")
    at = seen["angles"].index(angle)
    assert angle == pytest.approx(POSITION * 10000 ** (-at / half), rel=1e-5)
    x, y = numbers(explored, "plain")
    turned = [x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)]
    assert numbers(explored, "turned") == [seen["key"][at], seen["key"][at + half]]
    assert turned == pytest.approx([seen["key"][at], seen["key"][at + half]], abs=1e-3)


def check_norm(explored, seen):
    found = stages(explored, POSITION, LAYER)
    assert numbers(explored, "norm") == [found["input"]["norm"], found["norm"]["norm"]]
    assert numbers(explored, "number") == [*found["input"]["numbers"], *found["norm"]["numbers"]]


def check_qkv(explored, seen):
    assert numbers(explored, "number") == [*seen["plain"], *seen["value"]]


def check_score(explored, seen):
    assert numbers(explored, "number") == [*seen["query"], *seen["key"], *seen["products"]]
    assert numbers(explored, "product") == [max(seen["products"], key=abs)]
    shown = explored.stats()
    for name in ("dot", "scale", "score"):
        assert float(shown[f"way_{name}"][0]) == seen[name]
    assert shown["way_dot"][1] == "read"
    assert seen["dot"] == pytest.approx(sum(q * k for q, k in zip(seen["query"], seen["key"], strict=True)), abs=1e-3)


def check_mask(explored, seen):
    assert numbers(explored, "score") == [read["score"] for read in seen["reads"]]
    assert numbers(explored, "others") == [READER + 1 - len(seen["reads"])]
    assert f"each of the {READER + 1} tokens" in said(explored)
    assert all(read["position"] <= READER for read in seen["reads"])


def check_softmax(explored, seen):
    scores, weights = numbers(explored, "score"), numbers(explored, "weight")
    assert weights == [read["weight"] for read in seen["reads"]]
    best = scores.index(max(scores))  # the softmax keeps the differences of scores
    for score, weight in zip(scores, weights, strict=True):
        assert weight == pytest.approx(weights[best] * math.exp(score - scores[best]), rel=1e-3)
    foot = explored.tab.locator(".way tfoot").inner_text()
    others = READER + 1 - len(scores)
    shown = f"{len(scores)} of {READER + 1} are shown: the highest, and this token"
    assert f"{shown}; the other {others} hold together" in foot
    row = explored.tab.evaluate("window.__explorer.row")
    assert row["head"] == seen["head"]
    assert row["codes"][POSITION] == pytest.approx(255 * math.sqrt(seen["weight"]), abs=1)


def check_value(explored, seen):
    assert numbers(explored, "number") == [*seen["value"], *seen["mixed"]]
    assert float(explored.stats()["way_weight"][0]) == seen["weight"]


def check_mlp(explored, seen):
    found = stages(explored, READER, LAYER)
    names = ("mlp_norm", "hidden", "mlp_output")
    assert numbers(explored, "number") == [number for name in names for number in found[name]["numbers"]]


def check_residual(explored, seen):
    shown = numbers(explored, "number")
    size = len(shown) // 4
    stream, attention, mlp, result = (shown[at : at + size] for at in range(0, len(shown), size))
    assert result == pytest.approx([sum(parts) for parts in zip(stream, attention, mlp, strict=True)], abs=1e-3)
    assert result == stages(explored, READER, LAYER + 1)["input"]["numbers"]


def check_next(explored, seen):
    layers = explored.get("model")["layers"]
    rows = explored.tab.locator(".way-rows button")
    assert rows.count() == layers
    assert rows.nth(LAYER + 1).get_attribute("aria-current") == "true"


def check_logits(explored, seen):
    frame = explored.api("/steps/14")
    logprobs = numbers(explored, "logprob")
    assert logprobs == pytest.approx([one["logprob"] for one in frame["candidates"][:10]], abs=1e-6)
    assert numbers(explored, "p") == pytest.approx([math.exp(one) for one in logprobs])


def check_draw(explored, seen):
    sampler = explored.api("/sampler?step=14")
    assert numbers(explored, "u") == [sampler["uniform"]]
    low, wide = numbers(explored, "low"), numbers(explored, "sampled")
    drawn = explored.tab.locator(".way-line .now")
    at, part = (float(drawn.get_attribute(f"data-{name}")) for name in ("low", "sampled"))
    assert at <= sampler["uniform"] < at + part and at in low and part in wide
    assert explored.api("/steps/14")["text"].strip() in drawn.get_attribute("title")


def test_every_number_of_the_flight_is_the_engines(explored):
    """And in the looks by turns nothing is serious for axe."""
    held(explored, "2d")
    explored.tab.mouse.click(*point(explored))
    until_stop(explored, "qkv")
    seen = way(explored)
    explored.tab.get_by_role("button", name="word", exact=True).click()
    for number, stop in enumerate(STOPS):
        until_stop(explored, stop)
        globals()[f"check_{stop}"](explored, seen)
        turned = number % len(LOOKS)
        assert findings(explored, ".way", some((*LOOKS[turned:], *LOOKS[:turned]))) == {}, stop
        if stop != STOPS[-1]:
            explored.tab.get_by_role("button", name="Next", exact=True).click()
    explored.tab.get_by_role("button", name="Back to the wall", exact=True).click()
    explored.tab.locator(".way").wait_for(state="detached")


@pytest.mark.sweep
def test_a_wrong_number_of_the_engine_is_seen(explored):
    """The page draws what it is told: a planted wrong sum is shown, and fails the closed form."""

    def wrong(route):
        answer = route.fetch()
        block = answer.json()
        for stage in block["stages"]:
            if stage["name"] == "output":
                stage["numbers"][3] += 1
        route.fulfill(response=answer, json=block)

    held(explored, "2d")
    explored.tab.route("**/block?*", wrong)
    explored.press("i")
    explored.tab.get_by_role("button", name="residual", exact=True).click()
    with pytest.raises(AssertionError):
        check_residual(explored, None)


def test_keys_go_the_same_way_and_the_wall_stays_at_hand(explored):
    held(explored, "2d")
    for stop in STOPS:
        explored.press("i")
        until_stop(explored, stop)
        assert explored.tab.locator(".story").count() == 1, "one sentence at a time"
    assert "with it all of this begins again" in said(explored)
    for stop in reversed(STOPS[:-1]):
        explored.press("Escape")
        until_stop(explored, stop)
    explored.press("Escape")
    explored.tab.locator(".way").wait_for(state="detached")
    explored.tab.get_by_role("button", name="Fly in").click()
    until_stop(explored, "word")
    assert "Block" in GROUPS["Look inside"]
    explored.tab.get_by_role("button", name="Back to the wall").click()
    explored.drawer("Block")  # there a click chooses for the panel
    explored.tab.mouse.click(*point(explored))
    assert explored.tab.locator(".way").count() == 0
