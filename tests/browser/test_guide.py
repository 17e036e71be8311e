"""The guide: typed through to its end, its answers the engine's; by scrolling; on a phone; nothing serious for axe."""

import json

from tests.browser.conftest import HANGS, Explored
from tests.browser.looks import findings
from tests.browser.test_learn import focus, write

SCENES = (
    "loop", "read", "kv", "prefill", "decode", "without", "newest",
    "whole", "price", "training", "tight", "know", "stop",
)  # fmt: skip
NOWHERE = 987_654  # no scene's answer
STEP, WITHOUT = 6, 6  # the step that is made without the cache, and its number in the text's steps
TOKENS = 60  # of the whole text


def begin(explored):
    explored.open("#p=&renderer=2d")
    explored.until_state("empty")
    focus(explored, ".start-here")
    explored.press("Enter")
    asked(explored, SCENES[0])
    return explored


def asked(explored, scene):
    explored.tab.locator(f"[data-scene={scene}] form").wait_for(timeout=HANGS)


def guess(explored, scene, text):
    """By keyboard: what the guide says of it."""
    field = f"#guide-{scene}-guess"
    if explored.tab.locator(field).evaluate("e => e.tagName") == "SELECT":
        focus(explored, field)
        explored.tab.locator(field).select_option(text)
    else:
        write(explored, field, text)
    focus(explored, f"[data-scene={scene}] [type=submit]")
    explored.press("Enter")
    said = explored.tab.locator(f"[data-scene={scene}] [data-given='{text}']")
    said.wait_for(timeout=HANGS)
    return said.get_attribute("data-ok") == "true", said.get_attribute("data-right"), said.inner_text()


def answers(explored):
    """The answers of the scenes, by formulas over the shapes of the model and the tokens of the prompts."""
    model = explored.get("model")
    layers = model["layers"]
    day, once = (
        len(explored.post("tokenize", {"text": text})["tokens"])
        for text in ("The next day is bright", "Once upon a time")
    )
    naive, cached = sum(range(once, once + TOKENS)), once + TOKENS - 1
    return {
        "loop": day + 1 + 3,
        "read": day + 3,
        "kv": layers * (day + 3),
        "prefill": layers * day,
        "decode": layers,
        "without": layers * (day + STEP),
        "newest": layers,
        "whole": naive / cached,
        "price": model["kv_bytes_per_token"] * cached / 1024,
        "training": 1,
        "know": "the same text",
    }


def test_the_guide_by_keyboard(explored):
    """All scenes to the end: wrong guesses are told what is right, as formulas have it, and right ones pass."""
    begin(explored)
    right = answers(explored)
    held = 0  # scenes whose last guess is right
    for number, scene in enumerate(SCENES):
        asked(explored, scene)
        choices = explored.tab.locator(f"#guide-{scene}-guess option:not([value=''])").all_inner_texts()
        tried = [guess(explored, scene, one) for one in choices or [NOWHERE]]
        engine = tried[-1][1]
        assert [ok for ok, *_ in tried] == [one == engine for one in choices or [None]], (scene, tried)
        if scene in right:
            told = right[scene]
            assert engine == told if choices else abs(float(engine) - told) < 1e-3 * told, (scene, engine, told)
        if not choices:
            assert "Not 987,654: it is " in tried[-1][2], scene
            tried.append(guess(explored, scene, engine))
            assert tried[-1][0], scene
        held += tried[-1][0]
        if scene == "without":
            step = explored.api(f"/steps/{WITHOUT}")
            assert (step["cache"], step["layer_tokens"]) == (False, int(engine)), "the engine made that step"
        if scene == "tight":
            few = [head["few"] for head in explored.api(f"/atlas?step={explored.state['step']}")["heads"]]
            assert f"now on the stage, {100 * sum(few) / len(few):.0f} %" in tried[-1][2]
        if scene in ("tight", "know"):
            assert explored.state["engine"]["reason"] == "eos", "nothing after the end token"
        if scene == "whole":
            assert explored.tab.locator(".result .huge").inner_text().startswith(f"{right[scene]:.1f}")
        explored.press("PageDown" if number % 2 else "Tab")
        if number % 2 == 0:
            focus(explored, f"[data-scene={scene}] .guide-next")
            explored.press("Enter")
    explored.tab.locator(".guide-takeaways li").first.wait_for(timeout=HANGS)
    assert explored.tab.locator(".guide-takeaways li").count() == 7
    explored.tab.locator(".guide-takeaways summary").click()
    assert f"{held} of your 13 guesses" in explored.tab.locator(".guide-score").inner_text()
    said = explored.tab.locator(".guide-takeaways").inner_text()
    summary = explored.state["engine"]["summary"]
    share = 100 * summary["ttft_us"] / summary["engine_us"]
    assert f"{TOKENS} tokens here: {TOKENS} steps" in said and f"{share:.{1 if share < 10 else 0}f} %" in said
    assert "8,192 tokens: 1 GiB" in said and "131,072 tokens: 40 GiB" in said
    assert findings(explored) == {}


def test_scrolling_moves_the_stage(explored):
    """A scene in the middle of the view is on: the engine goes to its step, and back."""
    begin(explored)
    scroll = "i => { const g = document.querySelector('.guide'); g.scrollTop = g.children[i].offsetTop }"
    for scene, step in (("kv", 3), ("without", STEP - 1), ("prefill", 0), ("newest", STEP)):
        explored.tab.evaluate(scroll, SCENES.index(scene))
        asked(explored, scene)
        explored.until(f"window.__explorer.state.step === {step}")
        assert explored.tab.locator(".way").count() == (scene == "kv"), "the flight ends with its scene"
        assert not explored.tab.locator(".way-path").is_visible(), "only the guide's Next goes on"
    assert explored.state["cache"] is False and explored.api(f"/steps/{STEP}")["cache"] is False
    explored.drawer(None)
    assert explored.state["cache"] is True, "the visitor's next step has the cache"


def test_on_a_phone_the_stage_and_the_question_are_in_view(explored):
    for width, height in ((390, 844), (720, 450)):
        explored.tab.goto("about:blank")
        explored.tab.set_viewport_size({"width": width, "height": height})
        begin(explored)
        assert explored.tab.evaluate("document.documentElement.scrollWidth") == width
        assert explored.tab.evaluate("document.documentElement.scrollHeight") == height, "only the words move"
        guess(explored, "loop", NOWHERE)
        for name in (".canvas canvas", "[data-scene=loop] [data-ok]", "[data-scene=loop] .guide-next"):
            box = explored.tab.locator(name).bounding_box()
            assert box["y"] >= 0 and box["y"] + min(box["height"], 60) <= height, (width, name, box)
        small = explored.tab.eval_on_selector_all(
            "[data-scene=loop] :is(button, input)",
            "all => all.filter(e => e.getBoundingClientRect().height < 39.5).map(e => e.outerHTML)",
        )
        assert small == []


def test_a_class_follows_its_teacher(explored):
    """Two tabs: the pupil's goes to the teacher's scene, and the teacher's shows the pupil's answer, as text."""
    begin(explored)
    explored.tab.get_by_role("button", name="Teach a class").click()
    address = explored.tab.locator(".guide-room-address").inner_text()
    assert address == f"{explored.address}/#room"
    pupil = Explored(explored.tab.context.new_page(), explored.address)
    pupil.tab.goto(address)
    write(pupil, "#guide-name", "<b>Ada</b>")
    pupil.press("Enter")
    explored.tab.get_by_text("1 pupil").wait_for()
    explored.tab.locator(".guide-next").first.click()
    asked(pupil, "read")
    guess(pupil, "read", str(NOWHERE))
    explored.tab.locator(".guide-tally", has_text=f"{NOWHERE}: 1 pupil").wait_for()
    explored.tab.get_by_text("Who has solved what").click()
    assert "<b>Ada</b> 0 of 1 guesses right, 0 challenges solved" in explored.tab.locator(".guide-pupils").inner_text()
    with pupil.tab.expect_download() as download:
        pupil.tab.locator("[data-scene=end] button", has_text="Save my answers").evaluate("e => e.click()")
    saved = json.loads(download.value.path().read_text(encoding="utf-8"))
    assert (saved["name"], saved["answers"][0]["text"]) == ("<b>Ada</b>", str(NOWHERE))
    assert pupil.errors == []
    pupil.tab.close()
