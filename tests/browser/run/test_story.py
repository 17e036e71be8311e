"""What the page says of a run: the sentence about each step, the card at the end, and what belongs to which step."""

import json
import math

import pytest

from tests.browser.conftest import HASTE, SIZE, Explored
from tests.browser.stage.test_figures import PROMPT


def narration(explored):
    """The part of the story that is on, and its sentence."""
    line = explored.tab.locator("[data-narration]")
    return line.get_attribute("data-narration"), line.inner_text()


def test_each_step_is_told_in_words_with_its_own_figures(explored):
    explored.run(PROMPT, 8, renderer="2d", stop=0)
    explored.settle()
    assert narration(explored)[0] == "notes"
    assert "For each of the prompt’s 12 tokens" in narration(explored)[1]
    explored.step()
    explored.settle()
    part, told = narration(explored)
    step = explored.api("/steps/1")
    assert part == "stroke"
    assert "6 layers" in told and f"The work on the {step['start']} before it was saved: that is the KV cache" in told
    assert step["text"].strip() in told
    written = "\n".join(word["text"] for word in explored.tab.evaluate("window.__explorer.words"))
    assert "KV cache: each cell is one layer’s saved key" in written and "computed in this step" in written, (
        "the wall is named in the scene"
    )
    assert explored.tab.locator(".headline").inner_text() == "1 of 13 tokens went through the layers, to write the 14th"
    assert f"{step['seq_len'] - 1} in the cache" in explored.tab.locator(".minimap-name").inner_text()
    kept = explored.tab.locator(".instrument.kv .main-unit").inner_text()
    assert kept == f"of {step['seq_len'] - 1} tokens, for the next step", "the cache is a token behind the text"
    assert explored.tab.locator(".counter").inner_text() == "step 2", "a run that goes on has no last step"
    parts = explored.tab.locator(".chapters")
    assert parts.locator("li").count() == 5 and parts.locator(".now").inner_text() == "write"
    explored.press("n")
    explored.step()
    explored.settle()
    part, told = narration(explored)
    step = explored.api("/steps/2")
    assert part == "without"
    assert f"all {step['length']} tokens" in told and f"{step['recomputed']} of them again" in told
    stats = explored.stats()
    assert stats["with_cache"] == (str(6 * (step["length"] - step["recomputed"])), "derived")
    assert stats["with_cache_us"] == (str(explored.api("/steps/1")["step_us"]), "measured"), "of the last such step"
    written = "\n".join(word["text"] for word in explored.tab.evaluate("window.__explorer.words"))
    assert "throws them away" in written and "saved" not in written
    legend = explored.tab.locator(".legend")
    assert "computed again, thrown away" in legend.inner_text() and "in the cache" not in legend.inner_text()
    assert "slack" not in explored.tab.locator(".instrument.kv").inner_text(), "where nothing is kept nothing is spare"
    assert float(stats["step_times"][0]) == step["length"] / (step["length"] - step["recomputed"])
    assert explored.tab.locator(".hint-next").inner_text().startswith("Cache back on")
    explored.press("n")
    explored.step()
    explored.settle()
    assert narration(explored)[0] == "notes" and "The cache is back" in narration(explored)[1]
    said = explored.tab.locator("body").inner_text()
    assert " notes" not in said and "K/V" not in said, "the cache has one name"
    assert "with_cache" not in explored.stats() and "now kept" in legend.inner_text()
    explored.press("ArrowLeft")
    explored.settle()
    assert narration(explored) == (part, told), "the sentence belongs to the step that is shown"
    explored.press("End")
    explored.pace(None)
    explored.press("Space")
    explored.until_state("done")
    explored.settle()
    part, told = narration(explored)
    assert part == "result" and told.startswith("With the cache, 8 tokens take 114 cells.") and "744 cells" in told


@pytest.mark.parametrize("without", [(), range(6), (3,)], ids=["with the cache", "without", "mixed"])
def test_a_run_ends_in_its_sums(explored, without):
    """On the card are the engine's figures; the formulas are computed here."""
    begin(explored, cache=0 not in without)
    while explored.state["steps"] < 6:
        wanted = explored.state["steps"] not in without
        if explored.state["cache"] is not wanted:
            explored.press("n")
        explored.step()
    explored.until_state("done")
    stats, n = explored.stats(), int(explored.stats()["prompt_tokens"][0])
    layers = explored.get("model")["layers"]
    naive, cached = layers * sum(range(n, n + 6)), layers * (n + 5)
    done = int(stats["total_layer_tokens"][0])
    assert (done == cached) is (not without) and (done == naive) is (len(without) == 6)
    assert float(stats["summary_times"][0]) == naive / cached
    if done != naive:
        assert stats["summary_naive"] == (str(naive), "derived")
    if done != cached:
        assert stats["summary_cached"] == (str(cached), "derived")
    assert stats["summary_layer_tokens"] == (str(done), "counted")
    assert "summary_reused" not in stats, "the card says it in words"
    card = explored.tab.locator(".result").inner_text()
    assert "Stopped at 6 tokens" in card and "finished" not in card
    assert ("the cells, without" if done == naive else "fewer cells, with") in card
    bright = explored.tab.locator(".bright, .run:not(.calm)")
    assert bright.all_inner_texts() == [f"Run it {'with' if done == naive else 'without'} the cache"]
    explored.until("document.querySelector('.result-bars').ariaBusy !== 'true'")
    stats = explored.stats()
    assert float(stats["summary_engine_us"][0]) == explored.api("")["summary"]["engine_us"]
    assert stats["times_slower"][1] == "derived" and float(stats["times_slower"][0]) > 0
    assert stats["summary_tokens_per_s"][1] == stats["summary_ttft_us"][1] == "measured"
    summary = explored.api("")["summary"]
    assert summary["written"] == 6
    for name in ("ttft_us", "tokens_per_s"):
        assert float(stats[f"summary_{name}"][0]) == summary[name]
    explored.press("ArrowLeft")
    assert explored.tab.locator(".result").count() == 0, "the card belongs to the end"
    explored.press("End")
    explored.tab.get_by_role("button", name="Close the result").click()
    assert explored.tab.locator(".result").count() == 0


def begin(explored, cache):
    """A run of six tokens that is held after its first step."""
    explored.open(f"#p=&renderer=2d&n=6&seed=1&pace=0.25&cache={'on' if cache else 'off'}")
    explored.until_state("empty")
    explored.tab.locator("#prompt").fill(PROMPT)
    explored.tab.locator("#prompt").blur()
    explored.tab.get_by_role("button", name="Run", exact=True).click()
    explored.until("window.__explorer.state.steps >= 1")
    explored.tab.get_by_role("button", name="Pause").click()
    explored.until_state("paused")


def test_the_switch_shows_how_the_shown_step_was_made(explored):
    explored.run(PROMPT, 12, renderer="2d", stop=2)
    pressed = "button => button.getAttribute('aria-pressed')"
    on = explored.tab.get_by_role("button", name="KV cache")
    assert on.evaluate(pressed) == "true" and explored.tab.locator(".next-mode").count() == 0
    explored.press("n")
    assert on.evaluate(pressed) == "true", "the shown step used the cache"
    assert explored.tab.locator(".next-mode").inner_text() == "next: no cache"
    explored.step()
    assert on.evaluate(pressed) == "false" and explored.tab.locator(".next-mode").count() == 0
    explored.press("Home")
    assert on.evaluate(pressed) == "true" and explored.tab.locator(".next-mode").count() == 1
    assert "looking back; 3 steps after it" in explored.tab.locator(".activity").inner_text()


@pytest.mark.webgl
def test_the_first_minute_is_told_in_order_and_the_picture_keeps_its_kind(animated):
    """A visit without a link: the parts of the story come in order; the renderer is chosen before it draws."""
    animated.tab.add_init_script(HASTE)
    animated.tab.add_init_script(
        """window.seen = {renderer: [], story: [], early: []};
        const note = (list, value) => value && list.at(-1) !== value && list.push(value);
        new MutationObserver(() => {
          note(seen.renderer, document.documentElement.dataset.renderer);
          note(seen.story, document.querySelector('[data-narration]')?.dataset.narration);
          const newest = document.querySelector('[data-part=generated] .token:last-child');
          const busy = ['work', 'look'].includes(document.querySelector('.page')?.dataset.moment);
          if (busy && newest?.checkVisibility()) seen.early.push(newest.textContent);
        }).observe(document, {subtree: true, childList: true, attributes: true, characterData: true});"""
    )
    animated.open()
    animated.until("window.__explorer.state.origin === 'live' && window.__explorer.state.step >= 3")
    seen = animated.tab.evaluate("window.seen")
    assert seen["early"] == [], "what a slow step will write is not shown before it is"
    assert len(seen["renderer"]) == 1
    assert seen["story"][-3:] == ["reading", "notes", "stroke"], "the recording is told before an engine that is late"


def test_the_bars_tell_what_steps_of_the_shown_kind_take(explored):
    explored.run(PROMPT, 12, renderer="2d", stop=4)
    explored.press("n")
    for _ in range(2):
        explored.step()
    times = [step["step_us"] for step in explored.steps(7)]
    for step, alike in ((6, times[5:7]), (3, times[1:5])):
        explored.scrub(step)
        for name, share in (("p50", 0.5), ("p95", 0.95)):
            rank = math.ceil(share * len(alike))
            assert explored.stats()[f"step_us_{name}"] == (str(sorted(alike)[rank - 1]), "derived")
    explored.scrub(0)
    assert "step_us_p50" not in explored.stats(), "the step that read the prompt is like no other"


def test_a_link_that_is_pasted_into_the_open_page_is_followed(explored):
    explored.run(PROMPT, 6, renderer="2d", stop=1)
    before = explored.state["run"]
    link = (
        "#p=The%20capital&seed=5&T=0.5&k=40&rp=1.2&n=7&pace=engine&cache=off&step=2&layer=1&head=2&cam=iso&renderer=2d"
    )
    explored.tab.evaluate("link => (location.hash = link)", link)
    explored.until(f"window.__explorer.state.run !== {json.dumps(before)} && window.__explorer.state.step === 2")
    state = explored.state
    assert (state["layer"], state["head"], state["pace"], state["cache"]) == (1, 2, None, False)
    assert explored.tab.locator("#prompt").input_value() == "The capital"
    assert explored.tab.get_by_label("max tokens").input_value() == "7"
    explored.tab.get_by_role("button", name="Settings").click()
    assert explored.tab.evaluate("window.__explorer.camera.name") == "iso"
    assert explored.api("/steps/2")["cache"] is False
    made = explored.api("/trace.json")["run"]
    assert (made["top_k"], made["repetition_penalty"]) == (40, 1.2)
    assert explored.tab.get_by_role("button", name="top-k 40, repetition penalty 1.2").is_visible()
    explored.until("decodeURIComponent(location.hash).includes('The+capital')")
    kept = explored.tab.evaluate("location.hash")
    for setting in (
        "seed=5",
        "T=0.5",
        "k=40",
        "rp=1.2",
        "n=7",
        "pace=engine",
        "cache=off",
        "layer=1",
        "head=2",
        "cam=iso",
    ):
        assert setting in kept


def test_a_cut_character_is_one_glyph_with_its_bytes(explored):
    explored.run("A café", 3, renderer="2d", stop=1)
    chip = explored.tab.locator(".chip.cut")
    assert chip.evaluate("e => [e.firstChild.textContent, e.lastChild.textContent]") == ["é", "C3 A9"]
    assert "A café" in explored.tab.locator("[data-part=prompt]").inner_text()


def test_the_grid_of_heads_has_the_engines_masses(explored):
    explored.run(PROMPT, 6, renderer="2d", stop=4)
    for measure in ("sink", "local", "entropy"):
        explored.drawer("Next token")
        explored.tab.get_by_role("button", name=measure).click()
        explored.until("document.querySelectorAll('.grid [data-mass*=\".\"]').length > 0")
        shown = explored.tab.eval_on_selector_all(".grid [data-mass]", "all => all.map(e => +e.dataset.mass)")
        assert shown == explored.api("/heads?step=4")[measure]
    codes = explored.tab.evaluate("window.__explorer.row.codes")
    explored.press("s")
    legend = explored.tab.locator(".legend").inner_text()
    assert f"attention, without {percent(codes[0])} on the first token" in legend, "what is hidden is told"
    explored.settle()
    words = [word["text"] for word in explored.tab.evaluate("window.__explorer.words")]
    assert any(percent(max(codes[1:])) in word for word in words), "the strongest of the others is named"


def percent(code):
    """The weight of a code, as the page writes it."""
    weight = 100 * (code / 255) ** 2
    return f"{weight:.1f} %" if weight < 10 or 99 < weight < 100 else f"{int(weight + 0.5)} %"


def test_forced_colours_keep_prompt_generated_and_attention_apart(browser, server):
    context = browser.new_context(viewport=SIZE, forced_colors="active", reduced_motion="reduce")
    explored = Explored(context.new_page(), server.address).run(PROMPT, 8, renderer="2d", stop=5)
    style = "(e, name) => getComputedStyle(e)[name]"
    token = lambda position: explored.tab.locator(f".token[data-position='{position}']")  # noqa: E731
    row = explored.tab.evaluate("window.__explorer.row")
    weights = {
        token(2).evaluate(style, "fontWeight"),
        token(len(explored.state["ids"]) - 2).evaluate(style, "fontWeight"),
    }
    assert len(weights) == 2
    least = min(range(len(row["codes"])), key=lambda position: row["codes"][position])
    grounds = [token(position).evaluate(style, "backgroundColor") for position in (row["argmax"], least)]
    assert grounds[0] != grounds[1]
    context.close()
