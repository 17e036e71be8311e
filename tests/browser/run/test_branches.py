"""Race, branches and sampler on the page: each figure is the server's, and the engine does only what it must."""

import re

import numpy as np
import pytest

from tests.browser.conftest import near
from tests.browser.looks import findings
from tests.engines import settled, until
from tests.trace.test_recorder import Wrong, shifted

PROMPT = "Once upon a time, there was a little fox who"
# Collects what is said of a race, from now on.
TOLD = """() => {
  window.told = '';
  const note = () => (window.told += document.querySelector('[data-narration=race]')?.textContent ?? '');
  new MutationObserver(note).observe(document.body, {subtree: true, childList: true, characterData: true});
}"""
PANELS = ["race", "branches", "sampler"]


def opened(explored, panel):
    explored.drawer(panel)
    explored.tab.locator(f"[data-panel={panel.lower()}] .panel-lead").wait_for()


def figures(explored, prefix):
    """The panel's numbers by name, as they are exactly."""
    return {name: value for name, (value, _) in explored.stats().items() if name.startswith(prefix)}


def softmax(logits):
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def logits_of(explored, step):
    codes = explored.tab.evaluate(
        "async path => [...new Float32Array(await (await fetch(path)).arrayBuffer())]",
        f"runs/{explored.state['run']}/logits?step={step}",
    )
    return np.array(codes, dtype=np.float64)


def dots(explored, position):
    """Pixels of a dot's colour in the column of the cache under a token."""
    place, picture = explored.project(position), explored.picture()
    x, y = round(place["x"]), round(place["y"])
    return int(near(picture[y + 60 : y + 150, x - 5 : x + 6], explored.colour("ink"), 30).sum())


def test_dials_move_the_bars_and_candidates_become_branches(explored, server, monkeypatch):
    explored.run(PROMPT, 40, stop=9, temperature=0.8, renderer="2d")
    engine, steps = settled(server.llm), []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: [steps.append(1), step()][1])
    sent = []
    explored.tab.on("request", lambda request: request.method != "GET" and sent.append(request.url))

    opened(explored, "Sampler")
    dial = explored.tab.get_by_role("slider", name="temperature")
    dial.focus()
    for _ in range(8):
        explored.press("ArrowRight")
    explored.tab.get_by_role("slider", name="top-p").focus()
    explored.press("End")  # no cut: then it is softmax(z / T)
    explored.until("document.querySelector('.sampler-dial output').textContent === '1.2'")
    logits = logits_of(explored, 9)
    expected = softmax(logits / 1.2)
    token = int(np.argmax(expected))
    bar = f"[data-token='{token}'] [data-sampled]"
    explored.until(f"Math.abs(document.querySelector(`{bar}`)?.dataset.sampled - {expected[token]}) < 1e-9")
    found = {
        int(row.get_attribute("data-token")): [
            float(row.locator(f"[data-{name}]").get_attribute(f"data-{name}")) for name in ("p", "sampled")
        ]
        for row in explored.tab.locator(".sampler-list tbody tr").all()
    }
    assert len(found) == 12
    for one, values in found.items():
        assert np.allclose(values, [softmax(logits)[one], expected[one]], atol=1e-9)
    assert float(figures(explored, "sampler_")["sampler_uniform"]) == explored.api("/steps/9")["uniform"]
    explored.tab.get_by_role("slider", name="repetition penalty").focus()
    for _ in range(10):
        explored.press("ArrowRight")
    first = explored.api("/sampler?step=9&temperature=1.2&top_p=1&repetition_penalty=1.5")["top"][0]
    row = f".sampler-list tbody tr:first-child[data-token='{first['token']['id']}'] [data-sampled]"
    explored.until(f"Math.abs(document.querySelector(`{row}`)?.dataset.sampled - {first['sampled']}) < 1e-9")
    assert steps == [] and sent == [], "the model computes nothing"
    assert findings(explored, ".panel") == {}

    opened(explored, "Branches")
    ids, parent = explored.state["ids"], explored.state["run"]
    explored.scrub(5)
    choice = explored.tab.locator("[data-fork]").first
    other = int(choice.get_attribute("data-fork"))
    choice.click()
    explored.until(f"window.__explorer.state.run !== '{parent}' && window.__explorer.state.step === 6")
    n = len(ids) - 10
    assert explored.state["ids"][: n + 6] == [*ids[: n + 5], other], "the same text, then the token"
    explored.until("document.querySelectorAll('[data-branch]').length === 2")
    explored.until(f"document.querySelector('[data-stat=\"branch_{parent}_shared\"]')?.dataset.value === '1'")
    for branch in explored.api("/branches")["branches"]:
        shown = figures(explored, f"branch_{branch['run']}_")
        told = {name: str(branch[name]) for name in ("pages", "shared", "saved_bytes", "reused")}
        assert shown == {f"branch_{branch['run']}_{name}": value for name, value in told.items()}
        assert branch["shared"] == (n + 5) // 16 > 0
    explored.tab.get_by_text("pages shared with a branch").wait_for()
    assert findings(explored, ".panel") == {}
    shared, own = dots(explored, 2), dots(explored, n + 5)
    explored.tab.locator(f"[data-branch='{parent}'] .tree-choose").click()
    explored.until(f"window.__explorer.state.run === '{parent}'")
    assert explored.state["ids"] == ids, "the run that it forked from is unchanged"
    explored.step()
    assert explored.state["ids"][: len(ids)] == ids

    before = settled(server.llm).pool.available
    explored.tab.get_by_role("button", name="Close").last.click()
    explored.until("document.querySelectorAll('[data-branch]').length === 1")
    until(lambda: settled(server.llm).pool.available != before)
    explored.until("!document.querySelector('.legend').textContent.includes('shared')")
    assert shared > 2 * own, "the shared columns were dotted, and its own were not"
    assert dots(explored, 2) <= own + 5, "no more"

    explored.tab.set_viewport_size({"width": 390, "height": 844})
    for panel in PANELS:
        opened(explored, panel.capitalize())
        explored.tab.wait_for_timeout(200)
        assert explored.tab.evaluate("document.documentElement.scrollWidth") <= 390
        small = explored.tab.eval_on_selector_all(
            ".panel :is(button, select, input)",
            "all => all.filter(e => e.getBoundingClientRect().height < 43.5).map(e => e.outerHTML.slice(0, 90))",
        )
        assert small == [], panel


@pytest.fixture
def planted(server):
    """Steps of the cached lane at a position too far."""
    recorder = server.llm.engine.runner
    recorder.runner = Wrong(recorder.runner, lambda chunk: shifted(chunk) if chunk.sequence.cache else chunk)
    yield
    recorder.runner = recorder.runner.runner


def race(explored, tokens):
    explored.tab.get_by_label("tokens", exact=True).fill(str(tokens))
    explored.tab.locator(".race-controls [type=submit]").click()


def check_lanes(explored, tokens):
    """The stage has two walls under the text: above, one column computed; below, all of them, and all but one again."""
    words = [word["text"] for word in explored.tab.evaluate("window.__explorer.words")]
    assert any("below without" in word or "Lower wall: without" in word for word in words), words
    assert words.count("L0") == 2, "each wall names its layers"
    point, picture = explored.project(tokens - 4), explored.picture()
    column = picture[round(point["y"]) :, round(point["x"]) - 4]  # of the left half, the keys
    kept, again = (near(column, explored.colour(name), 40).nonzero()[0] for name in ("kept", "recomputed"))
    assert kept.size and again.size and kept.max() < again.min()


def test_the_race_is_run_and_its_lanes_agree(explored, server, request):
    explored.open("#p=Once+upon+a+time&seed=7&T=0.7&n=1&panel=race")
    explored.until_state("done", "paused")
    explored.tab.evaluate(TOLD)
    race(explored, 64)
    explored.until("document.querySelector('[data-race=length]') !== null")
    [completion] = server.llm.generate("Once upon a time", seed=7, temperature=0.7, max_tokens=64, top_k=0, top_p=1.0)
    n, steps = len(server.llm.tokenizer.encode("Once upon a time")), len(completion.token_ids)
    found = figures(explored, "race_")
    costs = server.llm.costs
    assert steps == 64 and int(found["race_sum_compared"]) == 64
    assert int(found["race_sum_uncached_tokens"]) == sum(range(n, n + 64))
    assert int(found["race_sum_cached_tokens"]) == n + 63
    assert int(found["race_sum_cached_flops"]) >= costs.run(n, 64, cache=True).flops
    assert int(found["race_sum_uncached_flops"]) >= costs.run(n, 64, cache=False).flops
    assert int(found["race_sum_uncached_us"]) > int(found["race_sum_cached_us"])
    assert found["race_equal"] == "64" and float(found["race_max_delta"]) <= 1e-3 and found["race_divergent"] == ""
    assert float(found["race_recomputed"]) == (n + 62) / (n + 63)
    assert explored.tab.locator(".chart polyline").count() == 4
    told = explored.tab.locator("[data-narration=race]")
    assert "started together" in explored.tab.evaluate("window.told"), "at first: by now it may say something else"
    explored.tab.get_by_role("button", name="Show its end").click()
    explored.until("document.querySelector('[data-narration=race]').textContent.startsWith('The same 64 tokens')")
    clocks, layers = figures(explored, "lane_"), server.llm.config.layers
    for lane in ("cached", "uncached"):
        assert clocks[f"lane_{lane}_us"] == found[f"race_sum_{lane}_us"]
        assert int(clocks[f"lane_{lane}_work"]) == layers * int(found[f"race_sum_{lane}_tokens"])
    texts = explored.tab.locator(".race-text dd").all_inner_texts()
    assert len(texts[0]) > 64 and texts[0] == texts[1]
    check_lanes(explored, n + 64)
    assert findings(explored, ".panel") == {}
    explored.press("Home")
    told.wait_for(state="detached")  # whoever moves in the run sees the run

    race(explored, 900)
    explored.tab.locator("[data-race=running]").wait_for()
    explored.tab.get_by_role("button", name="Stop", exact=True).click()
    until(lambda: not server.explorer.runs._guests)
    explored.tab.locator("[data-race=stopped]").wait_for()
    request.getfixturevalue("planted")
    race(explored, 6)
    explored.until("document.querySelector('[data-race=length]') !== null")
    assert float(figures(explored, "race_")["race_max_delta"]) > 1e-3, "a fault in the cached lane is seen"


def test_a_planted_slow_lane_falls_behind(explored):
    explored.open("#p=Once+upon+a+time&seed=7&T=0.7&n=1&panel=race&renderer=2d")
    explored.until_state("done", "paused")
    measured = {"cached": [], "uncached": []}

    def slower(route):
        body = route.fetch().text()
        planted = re.sub(r'("uncached_us": )(\d+)(?=.*"sums")', lambda m: f"{m[1]}{50 * int(m[2]) + 50_000}", body)
        for lane, times in measured.items():
            times += map(int, re.findall(rf'"{lane}_us": (\d+)(?=.*"sums")', planted))
        route.fulfill(body=planted, content_type="text/event-stream")

    explored.tab.route("**/race", slower)
    race(explored, 24)
    explored.until("document.querySelector('[data-narration=race]')?.textContent.startsWith('With the cache all 24')")
    explored.until("/: [2-9]/.test(document.querySelector('.transport .activity').textContent)")
    texts = explored.tab.locator(".race-text dd").all_inner_texts()
    assert len(texts[1]) < len(texts[0]) and texts[0].startswith(texts[1])
    assert explored.tab.locator(".cache-switch").count() == 0, "a race has both"
    clocks, told = explored.tab.evaluate(
        """() => [Object.fromEntries(['cached', 'uncached'].map((lane) =>
             [lane, Number(document.querySelector(`[data-stat=lane_${lane}_us]`).dataset.value)])),
           document.querySelector('.scrubber [role=slider]').getAttribute('aria-valuetext')]"""
    )
    done = dict(zip(measured, map(int, re.findall(r"\d+", told)), strict=True))
    assert done["cached"] == 24 > done["uncached"] > 0
    assert clocks == {lane: sum(measured[lane][:steps]) for lane, steps in done.items()}, "the engine's measured steps"
    explored.tab.get_by_role("button", name="Show its end").click()
    explored.until("document.querySelector('.transport .activity').textContent === 'without: 24 steps'")
    assert explored.tab.locator(".counter").inner_text() == "race: step 24", "the transport shows the race's steps"


def test_a_race_ends_with_its_panel_and_where_somebody_moves_in_the_run(explored, server):
    explored.open("#p=Once+upon+a+time&seed=7&T=0.7&n=3&pace=engine&renderer=2d")
    explored.until_state("done")
    for move in (lambda: explored.drawer(None), lambda: explored.press("Space")):
        opened(explored, "Race")
        race(explored, 900)
        explored.tab.locator("[data-race=running]").wait_for()
        move()
        until(lambda: not server.explorer.runs._guests)
        explored.until_state("done")
        assert explored.tab.locator("[data-narration=race]").count() == 0, "the stage is the run's"
        assert explored.tab.locator(".result").count() == 1
        explored.drawer("Numbers")


def test_the_bars_of_a_race_are_as_long_as_what_they_count(explored):
    """One token and a whole text: in one scale."""
    explored.open("#p=Once+upon+a+time&seed=7&T=0.7&n=3&pace=engine&renderer=2d")
    explored.until_state("done")
    opened(explored, "Race")
    race(explored, 24)
    explored.until("!['running', 'stopped'].includes(document.querySelector('[data-race]')?.dataset.race ?? 'running')")
    stats = explored.stats()
    wide = explored.tab.locator(".race-cells").evaluate_all(
        "all => all.map((e) => [...e.children].reduce((sum, one) => sum + one.getBoundingClientRect().width, 0))"
    )
    tokens = [int(stats[name][0]) for name in ("race_cached_tokens", "race_uncached_tokens")]
    assert tokens[0] == 1 < tokens[1]
    assert abs(wide[0] / wide[1] - tokens[0] / tokens[1]) < 0.03
