"""The way into a cell: each number is the engine's, by pointer and by keys, and Escape leads out again."""

import pytest

from tests.browser.conftest import GROUPS, PLACES
from tests.browser.looks import findings

RUN = "#p=Once%20upon%20a%20time%2C%20there%20was%20a%20little%20fox%20who&seed=1&T=0.7&step=14&renderer="
STOPS = ["cell", "head", "product", "softmax", "value", "mlp", "logits"]
POSITION, LAYER = 16, 4


def held(explored, kind):
    explored.open(RUN + kind)
    explored.until("window.__explorer.state.step === 14")
    explored.settle()
    return explored


def point(explored, kind):
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


def numbers(explored, what):
    return [
        float(value)
        for value in explored.tab.locator(f"[data-{what}]").evaluate_all(f"all => all.map(e => e.dataset.{what})")
    ]


@pytest.mark.parametrize("kind", PLACES)
def test_a_click_goes_into_the_cell_under_the_pointer(explored, kind):
    held(explored, kind)
    x, y = point(explored, kind)
    model, word = explored.get("model"), explored.tab.locator(".token").nth(POSITION).inner_text().strip()
    said = explored.tab.locator(".cell-hint").inner_text()
    size = f"{model['kv_heads']} × {model['head_size']}"
    written = POSITION - 12 + 2  # the first step wrote the prompt's
    history = f"written in step {written}, read {15 - written} times"
    assert said.startswith(f"“{word}”, layer {LAYER}: K {size}, V {size}, {history}")
    explored.tab.mouse.click(x, y)
    until_stop(explored, "cell")
    assert f"“{word}” in layer {LAYER}" in explored.tab.locator(".way-words").inner_text()
    explored.press("Escape")
    until_stop(explored, "column")
    explored.press("Escape")
    explored.tab.locator(".way").wait_for(state="detached")


def test_every_number_on_the_way_is_the_engines(explored):
    held(explored, "2d")
    explored.tab.mouse.click(*point(explored, "2d"))
    state = explored.state
    seen = explored.api(f"/way?step=14&layer={LAYER}&head={state['head']}&position={POSITION}")
    for stop, following in zip(STOPS, [*STOPS[1:], None], strict=True):
        until_stop(explored, stop)
        if stop == "head":
            explored.until(f"document.querySelectorAll('[data-number]').length === {3 * len(seen['query'])}")
            assert numbers(explored, "number") == [*seen["query"], *seen["key"], *seen["products"]]
        if stop == "product":
            largest = max(seen["products"], key=abs)
            assert numbers(explored, "number") == [largest]
            shown = explored.stats()
            for name in ("dot", "scale", "score"):
                assert float(shown[f"way_{name}"][0]) == seen[name]
            assert shown["way_dot"][1] == "read"
        if stop == "softmax":
            assert numbers(explored, "score") == [read["score"] for read in seen["reads"]]
            assert numbers(explored, "weight") == [read["weight"] for read in seen["reads"]]
            row = explored.tab.evaluate("window.__explorer.row")
            assert row["head"] == seen["head"] and seen["weight"] == (row["codes"][POSITION] / 255) ** 2
        if stop == "value":
            assert numbers(explored, "number") == [*seen["value"], *seen["mixed"]]
        if stop == "mlp":
            explored.until("document.querySelectorAll('[data-norm]').length === 7")
            block = explored.api(f"/block?step=14&layer={LAYER}")
            norms = {stage["name"]: stage["norm"] for stage in block["stages"]}
            order = ("input", "attention", "output", "residual", "hidden", "mlp_output", "result")
            assert numbers(explored, "norm") == [norms[name] for name in order]
        if stop == "logits":
            frame = explored.api("/steps/14")
            drawn = explored.tab.locator(".way-reads .now th").inner_text()
            assert drawn.strip("“”") == frame["text"].strip()
            assert explored.tab.get_by_role("button", name="Next", exact=True).is_disabled()
        assert findings(explored, ".way") == {}
        if following:
            explored.tab.get_by_role("button", name="Next", exact=True).click()


def test_keys_go_the_same_way_and_a_moved_run_leaves_it(explored):
    held(explored, "2d")
    for stop in STOPS:
        explored.press("i")
        until_stop(explored, stop)
    assert "one of them is drawn" in explored.tab.locator(".way-words").inner_text().lower()
    for stop in reversed(["column", *STOPS[:-1]]):
        explored.press("Escape")
        until_stop(explored, stop)
    explored.press("i")
    explored.tab.get_by_role("button", name="Back to the wall").click()
    explored.tab.locator(".way").wait_for(state="detached")
    assert "Block" in GROUPS["Look inside"]
    explored.drawer("Block")  # there a click chooses for the panel
    explored.tab.mouse.click(*point(explored, "2d"))
    assert explored.tab.locator(".way").count() == 0
