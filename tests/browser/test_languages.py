"""The page in another language: chosen by the browser and by a control, and no English is left in any panel."""

import json
import re

import pytest

from tests.browser.conftest import GROUPS, HANGS, ROOT, exploring

RUN = "#p=Once%20upon%20a%20time&seed=1&n=24&step=4&renderer=2d"
SAME = set(json.loads((ROOT / "web/languages.same.json").read_text(encoding="utf-8")))
GERMAN = json.loads((ROOT / "web/src/language/de.json").read_text(encoding="utf-8"))
# What is the same in all languages: names of formats, units, shapes; names of models have digits and no spaces.
NAMES = re.compile(
    r"([kMGT]?FLOP|[KMG]iB|[mµ]?s|tok/s|nat|bit|GB/s|stories|native|cpu|b?float(16|32)|bf16|fp(8|16|32)|int[48]|avx\w*|amx|"
    r"KL|KV|E2E|TTFT|TPOT|eos|id|[\W\d_]|\b\w\b)*"
)


PROMPTS = ("Once upon a time", "The capital of France is", "Is Python an interpreted language?")  # the model's words


def left(explored):
    """Texts that were shown and have no translation."""
    texts = (" ".join(text.split()) for text in explored.tab.evaluate("__explorer.untranslated"))
    texts = (one for one in texts if not any(prompt in one for prompt in PROMPTS))
    return [one for one in texts if one not in SAME and not NAMES.fullmatch(one) and not re.fullmatch(r"\S*\d\S*", one)]


def walk(explored):
    """Through the panels, the cards of the lesson, the flight and the guide."""
    tab = explored.tab
    with explored.settings():
        explored.settle()
    for name in ("Numbers", "Code", "Learn", *(name for names in GROUPS.values() for name in names)):
        explored.drawer(name)
        if name not in ("Numbers", "Next token"):
            tab.locator(".panel > *").first.wait_for()
        explored.settle()
    explored.drawer("Learn")
    for card, level in ((card, level) for card in range(1, 9) for level in range(1, 4)):
        tab.locator(f".learn-contents li:nth-child({card}) button").click()
        tab.locator(f".learn-levels button:nth-child({level})").click()
    explored.drawer(None)
    for key in ("?", "Escape", *"i" * 15, "Escape"):
        explored.press(key)
        explored.settle()
    tab.locator(".start-here").click()
    for scene in ("loop", "read", "kv", "prefill", "decode", "without", "newest"):
        tab.locator(f"[data-scene={scene}] form").wait_for(timeout=HANGS)
        tab.locator(f"[data-scene={scene}] [type=submit]").click()
        tab.locator(f"[data-scene={scene}] [data-ok]").wait_for(timeout=HANGS)
        tab.locator(f"[data-scene={scene}] .guide-next").click()
    explored.drawer(None)


def wide(explored):
    """What is wider than its pane: (pane, width that it needs, width that it has)."""
    panes = ".top, .prompt-row, .stage, .text, .transport, .rail"
    return explored.tab.evaluate(f"""() => [...document.querySelectorAll("{panes}")]
      .filter((pane) => pane.scrollWidth > pane.clientWidth + 1)
      .map((pane) => [pane.className, pane.scrollWidth, pane.clientWidth])""")


@pytest.fixture
def german(request, server):
    with exploring(request, server, locale="de-DE") as explored:
        explored.words = GERMAN
        yield explored


def test_longer_words_have_room_beside_and_under_every_panel(german):
    explored, found = german, []
    for width, height in ((1024, 768), (390, 844)):
        explored.tab.set_viewport_size({"width": width, "height": height})
        explored.open(RUN)
        explored.until("window.__explorer.state.step >= 4")
        for name in ("Numbers", "Code", "Learn", *(name for names in GROUPS.values() for name in names)):
            explored.drawer(name)
            if name == "Beams":
                explored.tab.locator(".beam-texts li").first.wait_for(timeout=HANGS)
            explored.settle()
            found += [(width, name, *one) for one in wide(explored)]
    assert not found


def test_a_german_browser_gets_a_german_page(german):
    """In all of it, with numbers as Germans write them; and English by the control, which the next visit remembers."""
    explored = german.open(RUN)
    explored.until("window.__explorer.state.step >= 4")
    tab = explored.tab
    assert tab.evaluate("document.documentElement.lang") == "de"
    assert tab.locator(".start-here").get_attribute("aria-label") == GERMAN["Start here"] == "Hier beginnen"
    assert "KV-Cache" in " ".join(word["text"] for word in tab.evaluate("__explorer.words")), "on the stage too"
    walk(explored)
    explored.press("End")
    explored.pace(None)
    explored.press(" ")
    explored.until_state("done")
    assert re.search(r"\d,\d", tab.locator(".result .huge").inner_text()), "1,5 and not 1.5"
    assert left(explored) == []
    tab.goto(f"{explored.address}/chat")
    tab.get_by_text(GERMAN["New conversation"]).first.wait_for()
    assert tab.get_by_text("New conversation").count() == 0
    tab.get_by_label("Language").select_option("en")  # named so in every language, for those who cannot read the page
    tab.get_by_text("New conversation").first.wait_for()
    explored.words = {}
    explored.open(RUN)
    explored.until("window.__explorer.state.step >= 4")
    assert (
        tab.evaluate("document.documentElement.lang") == "en" and tab.get_by_role("button", name="Start here").count()
    )
