"""What is taken home of a run: a picture, a trace, a page that plays alone and fetches nothing, Perfetto's trace."""

import io
import json

import matplotlib.image
import pytest

from tests.browser import over_worker
from tests.browser.conftest import HASTE, RENDERERS, SIZE, Explored, near
from tests.browser.stage.test_figures import PROMPT

ABOVE, BELOW = 40, 96  # CSS px beside the stage in a picture; as in web/src/stage/picture.ts
SLOT = b'<script type="application/json" id="trace">'
HOSTILE = "</script><script>window.pwned=1</script><!-- a prompt"


@pytest.fixture
def export(explored, tmp_path):
    """Saves the run as one of the menu's entries; returns the bytes."""

    def save(entry):
        with explored.tab.expect_download() as download:
            explored.share(entry)
        download.value.save_as(tmp_path / "saved")
        return (tmp_path / "saved").read_bytes()

    return save


def kept(explored):
    """The figures that a trace has. Comparisons are asked of the engine, and come when they come."""
    return {name: told for name, told in explored.stats().items() if not name.startswith(("times_", "summary_other"))}


def test_a_trace_goes_out_and_comes_back_with_the_same_numbers(explored, export, tmp_path):
    explored.run(PROMPT, 6, renderer="2d", stop=5)
    live = kept(explored)
    trace = export("Trace")
    assert json.loads(trace)["format"] == "tokenwright-trace"
    (tmp_path / "trace.json").write_bytes(trace)
    with explored.tab.expect_file_chooser() as chooser:
        explored.share("Open a trace")
    chooser.value.set_files(tmp_path / "trace.json")
    explored.until_state("replay")
    explored.press("End")
    assert explored.stats() == live and "summary_times" in live


@pytest.mark.parametrize("kind", RENDERERS)
def test_a_picture_has_the_stage_and_its_figures(explored, export, kind):
    explored.run(PROMPT, 12, renderer=kind, stop=5)
    explored.settle()
    picture = (matplotlib.image.imread(io.BytesIO(export("Picture")))[:, :, :3] * 255).round().astype(int)
    width, height = explored.tab.locator(".canvas canvas").evaluate("c => [c.width, c.height]")
    assert picture.shape == (height + ABOVE + BELOW, width, 3)
    stage = picture[ABOVE : ABOVE + height]
    for role in ("kept", "fresh"):
        assert near(stage, explored.colour(role), 30).sum() > 100, f"the stage shows no cell that is {role}"
        assert near(picture[ABOVE + height :], explored.colour(role)).sum() > 50, f"the legend lacks {role}"
    assert near(picture[ABOVE + height + 60 :], explored.colour("ink"), 60).sum() > 100, "the figures are written"
    assert near(picture[:ABOVE], explored.colour("ink"), 60).sum() > 100, "and what it is"


def test_a_page_plays_alone_in_a_sandbox_and_asks_nobody(explored, export, browser, tmp_path):
    explored.run(HOSTILE, 8, renderer="2d", stop=7)
    live, ids = kept(explored), explored.state["ids"]
    page = export("Page")
    assert page.count(SLOT) == 2, "the slot, and the program's own mention of it"
    (tmp_path / "run.html").write_bytes(page)
    (tmp_path / "frame.html").write_text(
        "<iframe sandbox='allow-scripts' style='width: 1200px; height: 760px'></iframe>"
    )
    context = browser.new_context(viewport=SIZE, color_scheme="dark", reduced_motion="reduce", offline=True)
    context.add_init_script(HASTE)
    asked = []
    context.on("request", lambda request: asked.append(request.url))
    alone = Explored(context.new_page(), "")
    alone.tab.goto(f"file://{tmp_path}/run.html#renderer=2d")
    alone.until_state("replay")
    alone.until("window.__explorer.state.step >= 1")  # it plays by itself
    alone.press("End")
    alone.until(f"window.__explorer.state.ids.length === {len(ids)} && window.__explorer.state.step === 7")
    alone.settle()
    assert alone.stats() == live
    assert alone.state["ids"] == ids
    layers, tokens = explored.get("model")["layers"], len(ids) - 1
    for key, work in (("n", layers * tokens), ("n", layers)):  # the same step the other way, and back
        alone.press(key)
        alone.until(f"document.querySelector('[data-stat=layer_tokens]').dataset.value === '{work}'")
        assert alone.state["ids"] == ids
    alone.tab.get_by_role("button", name="No cache").click()
    naive = live["summary_naive"][0]
    alone.until(f"document.querySelector('[data-stat=summary_layer_tokens]').dataset.value === '{naive}'")
    alone.press("n")
    assert alone.tab.evaluate("window.pwned") is None
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked
    assert alone.tab.get_by_role("link", name="Chat").count() == 0
    for key in "lb":  # no panel, which would stand in place of the figures
        alone.press(key)
        assert alone.tab.locator(".page").get_attribute("data-panel") == "false"

    alone.tab.goto(f"file://{tmp_path}/frame.html")  # as a notebook shows it: without an origin, storage or address
    alone.tab.locator("iframe").evaluate("(frame, page) => (frame.srcdoc = page)", page.decode())
    inside = alone.tab.frame_locator("iframe")
    inside.locator("[data-stat=layer_tokens]").first.wait_for()
    replay = inside.get_by_role("region", name="Replay")  # where WebGL is not offered, a banner may say that as well
    assert replay.inner_text().startswith("Replay")
    assert alone.errors == []
    context.close()


def test_a_run_of_python_plays_in_a_notebook(browser, server):
    run = server.llm.run(PROMPT, seed=1, max_tokens=4, ignore_eos=True)
    while not run.ended:
        run.step()
    context = browser.new_context(viewport=SIZE, color_scheme="dark", reduced_motion="reduce", offline=True)
    context.add_init_script(HASTE)
    notebook = Explored(context.new_page(), "")
    notebook.tab.set_content(f"<p>Out:</p>{run._repr_html_()}")
    frame = notebook.tab.locator("iframe").element_handle().content_frame()
    frame.wait_for_function("() => window.__explorer?.state.step === 3")
    assert frame.evaluate("window.__explorer.state.ids") == list(run.tokens)
    value = frame.locator("[data-stat=kv_resident]").first.get_attribute("data-value")
    assert int(value) == run.frames[-1].kv_resident
    assert notebook.errors == []
    context.close()


def test_perfetto_gets_the_engines_time_and_the_menu_works_by_keys(explored, export):
    explored.run(PROMPT, 6, renderer="2d", stop=None)
    trace = json.loads(export("Perfetto"))
    steps = [event["dur"] for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == "step"]
    assert sum(steps) == pytest.approx(explored.api("")["summary"]["engine_us"], rel=0.01)
    explored.tab.get_by_role("button", name="Share", exact=True).focus()
    explored.press("Enter")
    explored.until("document.activeElement.getAttribute('role') === 'menuitem'")
    explored.press("ArrowDown")
    focused = "document.activeElement.textContent"
    assert explored.tab.evaluate(focused).startswith("Picture")
    explored.press("End")
    last = "model" if over_worker.SITE else "trace"  # a page with the engine in it reads models, too
    assert explored.tab.evaluate(focused).startswith(f"Open a {last}")
    explored.press("Escape")
    assert explored.tab.get_by_role("menu").count() == 0
    assert explored.tab.evaluate(focused) == "Share"


def test_a_long_prompt_is_in_the_trace_and_in_no_link(explored, export):
    prompt = "a long prompt " * 120
    explored.run(prompt, 2, renderer="2d", stop=1)
    explored.tab.wait_for_timeout(500)  # the address is written with a pause
    assert "prompt" not in explored.tab.evaluate("location.href")
    explored.tab.get_by_role("button", name="Share", exact=True).click()
    assert explored.tab.get_by_role("menuitem", name="Copy link").is_disabled()
    explored.press("Escape")
    assert json.loads(export("Trace"))["run"]["prompt"] == prompt
