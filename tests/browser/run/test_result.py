"""The card at the end of a run: what its buttons run, what a branch's card is about, whose times it shows."""

import json
import threading
import time

from tests.browser.run.test_branches import opened
from tests.browser.stage.test_figures import PROMPT
from tests.engines import settled
from tokenwright.explorer import player as player_module
from tokenwright.explorer.panels import times as times_module


def compare(explored):
    """Run the shown text the other way, to its end."""
    before = explored.state["run"]
    explored.tab.get_by_role("button", name="Run it without the cache").click()
    explored.until(f"window.__explorer.state.run !== '{before}'")
    explored.until_state("done")
    return [step["cache"] for step in explored.steps(explored.state["steps"])]


def test_the_comparison_runs_the_same_text(explored):
    """With the seed that the engine drew, whatever the form says by now."""
    explored.run(PROMPT, 10, seed="", temperature=1.2, renderer="2d", stop=None)
    ids = explored.state["ids"]
    explored.tab.locator("#prompt").fill("Another prompt")
    with explored.settings():
        explored.tab.get_by_label("temperature").fill("0.1")
    assert compare(explored) == [False] * 10
    assert explored.state["ids"] == ids


def test_a_branch_is_compared_and_exported_from_its_fork_on(explored, server):
    explored.run(PROMPT, 12, seed="", temperature=1.2, renderer="2d", stop=None)
    parent = explored.state["run"]
    opened(explored, "Branches")
    explored.scrub(5)
    explored.pace(None)
    explored.tab.locator("[data-fork]").first.click()
    explored.until(f"window.__explorer.state.run !== '{parent}'")
    explored.press("End")
    explored.press("Space")
    explored.until_state("done")
    ids, written = explored.state["ids"], explored.state["steps"]
    card = explored.tab.locator(".result")
    assert card.locator(".result-name").inner_text().endswith(f"{written} tokens since the fork")
    for entry in ("Trace", "Perfetto"):
        with explored.tab.expect_download() as download:
            explored.share(entry)
        saved = json.loads(download.value.path().read_text(encoding="utf-8"))
        if entry == "Trace":
            assert [step["step"] for step in saved["steps"]] == list(range(6, 6 + written))
        else:
            names = [event["name"] for event in saved["traceEvents"] if event.get("cat") == "step"]
            assert names[0].startswith("step 7: "), "counted from 1, as on the page"
    before = explored.state["run"]
    explored.tab.get_by_role("button", name="Run it without the cache").click()
    explored.until(f"window.__explorer.state.run !== '{before}'")
    explored.until_state("done")
    assert explored.state["ids"] == ids
    assert explored.api("/steps/6")["cache"] is False


def test_each_card_shows_the_times_of_its_own_run(explored, monkeypatch):
    """The first run is being measured when the second begins: its measurement ends, and the second's is told."""
    ended, real = threading.Event(), times_module.run_times

    def endless(llm, run):
        monkeypatch.setattr(times_module, "run_times", real)
        try:
            while True:
                time.sleep(0.01)
                yield None
        finally:
            ended.set()

    monkeypatch.setattr(times_module, "run_times", endless)
    explored.run(PROMPT, 6, renderer="2d", stop=None)
    explored.until("document.querySelector('.result-bars')?.ariaBusy === 'true'")
    before = explored.state["run"]
    explored.tab.get_by_role("button", name="Run it again").click()
    explored.until(f"window.__explorer.state.run !== '{before}'")
    explored.until_state("done")
    explored.until("document.querySelector('.result-bars')?.ariaBusy === 'false'")
    assert ended.is_set() and float(explored.stats()["times_slower"][0]) > 0


def test_a_run_of_this_page_gives_way_to_its_next_one(explored, server, monkeypatch):
    """Where there is room for one run alone, an unfinished one must not refuse the next of the same page.

    Once it is freed, the page asks nothing more about it, also where somebody looks at another head meanwhile.
    """
    settled(server.llm)
    monkeypatch.setattr(player_module, "MOST_LIVE", 1)
    explored.run(PROMPT, 200, renderer="2d", stop=1)
    freed, looked, real = threading.Event(), threading.Event(), server.llm.run

    def slow(*given, **options):
        if not server.explorer.runs.get(before):
            freed.set()
            looked.wait()
        return real(*given, **options)

    monkeypatch.setattr(server.llm, "run", slow)
    before = explored.state["run"]
    explored.tab.get_by_role("button", name="Run", exact=True).click()
    freed.wait()
    explored.press("}")
    explored.settle()
    looked.set()
    explored.until(f"window.__explorer.state.run !== '{before}' && window.__explorer.state.steps > 0")
    assert explored.tab.get_by_role("alert").count() == 0
    # The browser's own line for the refusal that freed the first.
    explored.errors[:] = [error for error in explored.errors if "503" not in error]


END = "#p=Once%20upon%20a%20time&seed=1&T=0.7&n=12&step=11&renderer=2d"
SIZES = ((1440, 900), (1024, 768), (390, 844), (720, 450))  # the last: 1440 x 900 at 200 %


def test_the_end_stands_on_the_stage_without_scrolling(explored):
    """Two areas as large as the work of each step, the ratio, what to do next, and the text, at every size."""
    explored.open(END)
    explored.until_state("done")
    layers, stats = explored.get("model")["layers"], explored.stats()
    steps = explored.steps(12)
    without = layers * sum(step["start"] + step["length"] for step in steps)
    done = sum(step["layer_tokens"] for step in steps)
    assert float(stats["summary_times"][0]) == without / done
    told = explored.tab.locator("[data-narration=result]").inner_text()
    assert f"{done:,} cells" in told and f"{without:,} cells" in told
    heights = explored.tab.eval_on_selector_all(
        ".result-areas path", "all => all.map(e => [e.getBBox().height, e.getTotalLength()])"
    )
    (ramp, _), (flat, _) = heights
    assert abs(flat / ramp - max(step["length"] for step in steps) / (steps[-1]["start"] + 1)) < 0.01
    for width, height in SIZES:
        explored.tab.set_viewport_size({"width": width, "height": height})
        explored.settle()
        fold = explored.tab.locator(".transport").bounding_box()["y"]
        view = explored.tab.locator(".view").bounding_box()
        for part in (".result-name", ".result .huge", ".result .bright", ".result-areas svg"):
            box = explored.tab.locator(part).bounding_box()
            assert box["y"] >= view["y"] - 1 and box["y"] + box["height"] <= view["y"] + view["height"] + 1, (
                part,
                width,
            )
            assert box["y"] + box["height"] <= fold, f"{part} is under the transport at {width}"
            assert box["x"] + box["width"] <= width, (part, width)
        assert explored.tab.locator(".result .huge").evaluate("e => parseFloat(getComputedStyle(e).fontSize)") >= 40
        areas, actions = (explored.tab.locator(one).bounding_box() for one in (".result-areas svg", ".bright"))
        beside = areas["x"] + areas["width"] <= actions["x"]
        assert beside or actions["y"] + actions["height"] <= areas["y"], f"they overlap at {width}"
        if height > 500:
            text = explored.tab.locator(".flow").bounding_box()
            assert text["y"] + text["height"] <= max(fold, text["y"]) or fold < text["y"], width
            assert text["y"] < height - 24, f"the text begins in view at {width}"


def test_no_time_is_estimated_that_was_measured(explored):
    """The run's own time is its own; the other way's follows from it by the measured ratio."""
    for without in (False, True):
        explored.tab.goto("about:blank")
        explored.open(END + ("&cache=off" if without else ""))
        explored.until_state("done")
        explored.drawer("Numbers")
        explored.until("document.querySelector('.result-bars')?.ariaBusy === 'false'")
        stats, took = explored.stats(), explored.api("")["summary"]["engine_us"]
        slower = float(stats["times_slower"][0])
        assert float(stats["summary_engine_us"][0]) == took and stats["summary_engine_us"][1] == "measured"
        right = took / slower if without else took * slower
        assert abs(float(stats["summary_other_us"][0]) / right - 1) < 1e-9
        assert not {"times_cached_us", "times_naive_us"} & set(stats), "two times of one thing"


def test_what_is_computed_again_is_no_work_with_the_cache(explored):
    """The flat area of a run that was without the cache for a while: the prompt's cells, then one token's a step."""
    explored.run(PROMPT, 7, renderer="2d", stop=2)
    for key in ("n", "", "n", "", ""):
        if key:
            explored.press(key)
        else:
            explored.step()
    explored.step()
    explored.until_state("done")
    steps = explored.steps(7)
    assert [step["recomputed"] > 0 for step in steps].count(True) >= 2, "steps without the cache, and its filling"
    drawn = explored.tab.locator(".result-areas path.with").get_attribute("d")
    tops = [100 - float(point.split()[1]) for point in drawn.removesuffix("Z").split("L")[1:-1]]
    most = steps[-1]["start"] + steps[-1]["length"]
    cells = [round(top * most / 100, 1) for top in tops[::2]]
    assert cells == [steps[0]["length"]] + [1] * 6
