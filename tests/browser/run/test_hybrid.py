"""A model with layers that keep a state: the page tells the state from the cache, and asks for none of their rows."""

import pytest

from tests.browser.conftest import SIZE, Explored
from tests.browser.served import serving
from tests.models.fixtures import make_checkpoint
from tokenwright import LLM

STATES, LAYER = (0, 1, 3), 2  # layers of the small lfm2 that keep a state, and the one that attends


@pytest.fixture
def hybrid(browser, tmp_path):
    folder, _ = make_checkpoint(tmp_path / "model", "lfm2")
    with serving(lambda report: LLM(folder, weights="float32", trace=True, report=report, pages=64)) as server:
        context = browser.new_context(viewport=SIZE, reduced_motion="reduce")
        explored = Explored(context.new_page(), server.address)
        explored.asked = []
        explored.tab.on("request", lambda request: explored.asked.append(request.url))
        yield explored
        context.close()
        assert explored.errors == []


def test_a_state_is_told_from_the_cache_and_nothing_is_asked_that_has_no_answer(hybrid):
    hybrid.run("Once upon a time", 8, renderer="2d", stop=3)
    model = hybrid.get("model")
    assert [layer for layer, window in enumerate(model["windows"]) if window == 0] == list(STATES)
    hybrid.drawer("Numbers")
    stats, step = hybrid.stats(), hybrid.steps(4)[-1]
    tokens = step["start"] + step["length"]
    assert stats["state_bytes"] == (str(model["state_bytes"]), "derived") and model["state_bytes"] > 0
    assert step["kv_resident"] == model["state_bytes"] + tokens * model["kv_bytes_per_token"], "what is kept is both"
    assert hybrid.state["layer"] == LAYER and hybrid.tab.evaluate("__explorer.row.layer") == LAYER
    hybrid.drawer("Next token")
    hybrid.press("[")
    hybrid.until(f"window.__explorer.state.layer === {LAYER - 1}")
    hybrid.tab.get_by_text("attends to no token").wait_for()
    assert hybrid.tab.locator(".attention .grid").count() == 0, "no grid of heads, which is replayed"
    for panel in ("Block", "Heads"):
        hybrid.drawer(panel)
        hybrid.tab.locator(".panel-note", has_text="rewrite a state at each token").wait_for()
    hybrid.press("Home")
    hybrid.until("window.__explorer.state.step === 0")
    hybrid.tab.wait_for_timeout(500)  # longer than the page lets a step rest before it asks
    paths = {url.split("?")[0].rpartition("/")[2] for url in hybrid.asked if "/runs/" in url}
    assert not paths & {"heads", "attention", "block", "atlas", "lens", "matrix", "way"}, paths
