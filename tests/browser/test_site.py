"""The static site from a plain file server: no engine, every figure as it was recorded, both ways of the switch."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.browser.conftest import SIZE, Explored
from tests.browser.hosted import hosted
from tokenwright.explorer import site
from tokenwright.llm.web_page import page_folder

MOST_BYTES = 4_000_000
PAINT_MS = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


@pytest.fixture(scope="module")
def folder(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    with ThreadPoolExecutor(1) as worker:  # this thread has the browser's event loop
        worker.submit(site.write_site, server.explorer, page_folder(), folder, print).result()
    return folder


@pytest.fixture
def visited(folder, browser):
    with hosted(folder) as address:
        context = browser.new_context(viewport=SIZE, color_scheme="dark", reduced_motion="reduce")
        explored = Explored(context.new_page(), address)
        yield explored
        context.close()
        assert explored.errors == []


def work(explored):
    return int(explored.stats()["layer_tokens"][0])


def test_each_recorded_figure_is_shown_both_ways(visited, folder):
    visited.open()
    visited.until("window.__explorer.state.step >= 1")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"the site has {size:,} B; first paint after {visited.tab.evaluate(PAINT_MS):.0f} ms")
    assert size <= MOST_BYTES
    for wanted in site.RUNS:
        trace = json.loads((folder / "runs" / f"{wanted.identity}.json").read_text())
        visited.tab.get_by_role("button", name=wanted.name, exact=True).click()
        visited.until(f"window.__explorer.state.steps === {len(trace['steps'])} && window.__explorer.state.step >= 0")
        [half] = trace["halves"]
        for on, steps in ((True, trace["steps"]), (False, half["steps"])):
            visited.tab.get_by_role("button", name="KV cache" if on else "No cache").click()
            for step in (0, len(steps) // 2, len(steps) - 1):
                visited.scrub(step)
                shown = visited.stats()
                for name in ("layer_tokens", "flops", "kv_resident", "kv_read", "step_us", "seq_len"):
                    assert shown[name][0] == str(steps[step][name]), (wanted.name, on, step, name)
        assert shown["summary_layer_tokens"][0] == str(half["summary"]["naive"])


def test_a_link_opens_in_the_middle_and_the_address_keeps_up(visited):
    visited.open("#run=code&step=12&cache=off")
    visited.until("window.__explorer.state.step === 12")
    assert visited.tab.locator(".cache-switch .off").get_attribute("aria-pressed") == "true"
    assert "def fibonacci" in visited.tab.locator(".flow").inner_text()
    visited.press("n")
    visited.press("ArrowRight")
    visited.until("['run=code', 'step=13'].every((part) => location.hash.includes(part))")
    assert "cache" not in visited.tab.evaluate("location.hash")
    visited.tab.evaluate("location.hash = '#run=fact&step=3'")
    visited.until("window.__explorer.state.step === 3")
    assert "The capital" in visited.tab.locator(".flow").inner_text()
    visited.press("n")
    visited.tab.get_by_role("button", name="Story", exact=True).click()
    visited.until("location.hash.includes('run=story')")
    assert "cache=off" in visited.tab.evaluate("location.hash"), "another run keeps the way"
    assert visited.tab.locator(".cache-switch .off").get_attribute("aria-pressed") == "true"


def test_race_beams_batch_and_lesson_are_recorded_and_nothing_else_is_offered(visited, folder):
    asked = []
    visited.tab.on("request", lambda request: asked.append((request.method, request.url)))
    visited.open("#run=story&step=3")
    visited.until("window.__explorer.state.step === 3")
    visited.drawer("Race")
    visited.tab.locator("section.panel").get_by_role("button", name="Race", exact=True).click()
    visited.tab.get_by_role("button", name="Show its end").click()
    steps = [one for one in json.loads((folder / "race.json").read_text())["messages"] if one["kind"] == "step"]
    visited.until("document.querySelector('[data-stat=lane_uncached_us]') !== null")
    shown = visited.stats()
    assert int(shown["lane_cached_us"][0]) == sum(step["cached_us"] for step in steps)
    assert int(shown["lane_uncached_us"][0]) == sum(step["uncached_us"] for step in steps)
    visited.drawer("Beams")
    best = json.loads((folder / "beams.json").read_text())["best_sum"]
    visited.until("document.querySelector('[data-stat=beams_best_sum]') !== null")
    assert float(visited.stats()["beams_best_sum"][0]) == best
    visited.drawer("Drafts")
    visited.until("document.querySelector('[data-stat=drafts_steps]') !== null")
    for card in json.loads((folder / "drafts.json").read_text())["story"]:
        visited.until(f"document.querySelector('[data-stat=drafts_cost]').dataset.value === '{card['cost']}'")
        for name in ("steps", "tokens", "drafted", "kept"):
            assert visited.stats()[f"drafts_{name}"][0] == str(card[name]), name
        visited.tab.get_by_label("draft as if each row cost nothing").check()
    visited.drawer("Pages")
    looks = json.loads((folder / "batch.json").read_text())["looks"]
    taken = next(n for n, look in enumerate(looks) if any(one["preemptions"] for one in look["sequences"]))
    steps = visited.tab.get_by_role("slider", name="step of the batch")
    for step in (0, taken, len(looks) - 1):
        steps.fill(str(step))
        [group] = looks[step]["groups"]
        for name in ("used", "shared", "cached", "free", "saved_bytes"):
            assert visited.stats()[f"pool_{name}"][0] == str(group[name]), (step, name)
        told = visited.tab.locator(".panel .panel-result").inner_text()
        assert ("taken for older texts" in told) == (step == taken)
    for name in ("Sampler", "Branches", "Heads"):  # by an address: the site offers none of them
        visited.tab.goto("about:blank")
        visited.open(f"#run=story&step=3&panel={name.lower()}")
        visited.until("window.__explorer.state.step === 3 && document.querySelector('.rail p') !== null")
        assert "Press Run" not in visited.tab.locator("body").inner_text()
    visited.drawer("Learn")
    assert "runs once for each token" in visited.tab.locator("#learn-title").inner_text()
    names = visited.tab.locator(".panel-buttons button").all_inner_texts()
    assert "Sampler" not in names and "Lab" not in names
    visited.tab.get_by_role("button", name="Share", exact=True).click()
    assert visited.tab.get_by_role("menuitem", name="Copy link").is_enabled()
    assert {method for method, _ in asked} == {"GET"}
    assert all("/runs/" not in url or url.endswith(".json") for _, url in asked), asked
