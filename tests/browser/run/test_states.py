"""The page through a run's life: pause, step, scrub; and what it says when something is missing, wrong or gone."""

import json
import re
import threading
import time

import pytest

from tests.browser.conftest import SIZE, Explored
from tests.browser.served import Server, load
from tests.browser.stage.test_figures import PROMPT
from tokenwright import CheckpointError


def snapshot(explored):
    """All that is shown, by element, but for what the clock of the page itself says."""
    explored.until("document.querySelectorAll('.grid [data-mass*=\".\"]').length > 0")  # asked for when a step rests
    explored.settle()
    html = explored.tab.locator("body").evaluate("e => e.innerHTML")
    return re.sub(r"pages kept for [^<]*|\d+ frames", "", html).split("<")


def slow_down(explored):
    """To 7 tokens a second: on a busy machine the engine must not be done before the next key."""
    explored.pace(None, keys=16)


def test_a_pause_is_a_pause(animated):
    animated.run(PROMPT, 300, stop=0)
    slow_down(animated)
    animated.press("Space")
    animated.until("window.__explorer.state.steps > 5")
    animated.press("Space")
    animated.until_state("paused")
    animated.tab.wait_for_timeout(300)
    steps = animated.api("")["steps"]
    animated.tab.wait_for_timeout(700)  # in which it would write 5 tokens
    assert animated.api("")["steps"] == steps
    assert animated.state["steps"] == steps
    assert animated.api("")["state"] == "paused"
    animated.step()
    assert animated.api("")["steps"] == steps + 1, "a step is one step"


def test_to_a_step_and_back_shows_the_same(animated):
    animated.run(PROMPT, 20, renderer="2d", stop=12)
    run = animated.state["run"]
    animated.tab.goto("about:blank")
    animated.open(f"#run={run}&renderer=2d")  # as on a busy machine, no step before this one is shown
    animated.until("window.__explorer.state.step === 12")
    animated.press("Escape")
    before = snapshot(animated)
    calls = []
    animated.tab.on("request", lambda request: calls.append(request.url))
    animated.scrub(7)
    assert animated.stats()["step"][0] == "7"
    animated.press("End")
    animated.until("window.__explorer.state.step === 12")
    assert snapshot(animated) == before
    asked = [url for url in calls if not any(path in url for path in ("/attention", "/heads", "/status"))]
    assert asked == [], "history is at hand"


def test_the_switch_works_while_it_plays(animated):
    animated.run(PROMPT, 600, stop=0)
    slow_down(animated)
    animated.press("Space")
    animated.until("window.__explorer.state.steps > 4")
    animated.press("n")
    animated.until("document.querySelector('[data-stat=cache]').dataset.value === 'false'")
    steps = animated.state["steps"]
    animated.until(f"window.__explorer.state.steps > {steps + 10}")  # more than the frames on their way
    animated.press("n")
    animated.until("document.querySelector('[data-stat=cache]').dataset.value === 'true'")
    steps = animated.state["steps"]
    animated.until(f"window.__explorer.state.steps > {steps + 10}")
    animated.press("Space")
    animated.until_state("paused", "done")
    kinds = [step["cache"] for step in animated.steps(animated.state["steps"])]
    assert kinds[0] and kinds[-1] and False in kinds


def test_a_page_that_is_behind_says_so_and_misses_no_number(explored):
    explored.run(PROMPT, 60, renderer="2d", stop=0)
    explored.tab.evaluate("window.__explorer.delayAcks(750)")
    explored.pace(None)
    explored.press("Space")
    explored.until_state("throttled")
    explored.tab.evaluate("window.__explorer.delayAcks(null)")
    explored.until_state("done")
    assert explored.state["steps"] == 60
    for step in (3, 30, 59):
        explored.scrub(step)
        assert explored.stats()["flops"][0] == str(explored.api(f"/steps/{step}")["flops"])


@pytest.fixture
def own(browser):
    """A server of its own, which may be killed."""
    server = Server(load)
    context = browser.new_context(viewport=SIZE, reduced_motion="reduce")
    yield Explored(context.new_page(), server.address), server
    context.close()
    server.stop()


def test_a_server_that_goes_and_comes_back_costs_no_step(own):
    explored, server = own
    explored.run(PROMPT, 20, renderer="2d", stop=4)
    explored.press("Space")
    before = explored.state["ids"]
    server.stop()
    began = time.monotonic()
    explored.until_state("disconnected")
    # Told and not asserted: no test has a time limit.
    print(f"disconnected was shown after {time.monotonic() - began:.2f} s")
    server.start()
    explored.pace(None)
    explored.until_state("done")
    state = explored.state
    assert state["ids"][: len(before)] == before
    prompt = int(explored.stats()["prompt_tokens"][0])
    [whole] = server.llm.generate(PROMPT, server.llm.sampling(temperature=0.7, seed=1, max_tokens=20))
    assert state["ids"][prompt:] == list(whole.token_ids), "no token twice, none missing"
    assert state["steps"] == len(whole.token_ids)
    explored.scrub(0)
    numbers = [int(stats["seq_len"][0]) for stats in explored.walk(state["steps"] - 1)]
    assert numbers == list(range(prompt + 1, prompt + 1 + state["steps"]))
    assert "Stopped at 20 tokens" in explored.tab.locator(".result").inner_text(), "the card is about the whole run"
    assert int(explored.stats()["summary_layer_tokens"][0]) == int(explored.stats()["total_layer_tokens"][0])
    explored.tab.get_by_role("button", name="Share", exact=True).click()
    assert "the engine has this run from step" in explored.tab.get_by_role("menuitem", name="Perfetto").inner_text()
    explored.press("Escape")
    with explored.tab.expect_download() as download:
        explored.share("Trace")
    trace = json.loads(download.value.path().read_text(encoding="utf-8"))
    assert [step["step"] for step in trace["steps"]] == list(range(20)), "with the steps before the server went"
    assert trace["state"]["summary"]["written"] == 20
    explored.drawer("Next token")
    explored.until("document.querySelectorAll('.grid [data-mass*=\".\"]').length > 0")
    asked = []
    explored.tab.on("request", lambda request: asked.append(request.url))
    explored.scrub(1)
    explored.press("]")
    explored.tab.locator(".plot.missing", has_text="built this run again after this step").wait_for()
    explored.tab.wait_for_timeout(700)  # longer than a step must rest
    assert asked == [], "the server's run begins later"


def test_while_the_model_loads_the_recording_plays_and_a_failure_is_told(browser):
    going = threading.Event()

    def slow(report):
        report(3 * 2**20, 11 * 2**20)
        going.wait()
        raise CheckpointError("the folder has no weights; give another")

    server = Server(slow)
    context = browser.new_context(viewport=SIZE)
    explored = Explored(context.new_page(), server.address).open()
    try:
        explored.until_state("loading-model")
        explored.until("window.__explorer.state.origin === 'recorded' && window.__explorer.state.step >= 2")
        assert "recorded" in explored.tab.locator(".stage").inner_text().lower()
        recorded = explored.get("recorded.json")["steps"][explored.state["step"]]
        assert explored.stats()["weight_bytes"][0] == str(recorded["weight_bytes"])
        for width in (390, 360, 320):  # the top bar has a dot for its state now
            explored.tab.set_viewport_size({"width": width, "height": 800})
            assert explored.tab.evaluate("document.documentElement.scrollWidth") == width
        going.set()
        explored.until_state("error")
        assert "the folder has no weights; give another" in explored.tab.locator(".stage").inner_text().lower()
    finally:
        going.set()
        context.close()
        server.stop()


SMALL = """() => [...document.querySelectorAll('button, select, input, textarea, a, summary, .minimap canvas')]
  .filter((one) => one.checkVisibility() && one.getBoundingClientRect().width > 1)
  .filter((one) => one.getBoundingClientRect().height < 43.5)
  .map((one) => one.outerHTML.slice(0, 90))"""


def test_every_target_of_the_first_page_is_large_enough_for_a_finger(unhurried):
    """On a phone: the page with nothing running, a run that is paused, and its end."""
    unhurried.tab.set_viewport_size({"width": 390, "height": 844})
    unhurried.empty()
    assert unhurried.tab.evaluate(SMALL) == []
    unhurried.open("#p=Once%20upon&n=4&seed=1&step=2&renderer=2d")
    unhurried.tab.reload()
    unhurried.until("window.__explorer?.state.step === 2 && document.documentElement.dataset.state === 'paused'")
    assert unhurried.tab.evaluate(SMALL) == []
    unhurried.step()
    unhurried.until_state("done")
    unhurried.settle()
    assert unhurried.tab.locator(".result").is_visible()
    assert unhurried.tab.evaluate(SMALL) == []


def test_the_body_never_scrolls_behind_the_panes(explored):
    """While a run writes, a wide window scrolls in its panes alone, a small one to the end of the last pane."""
    explored.run(PROMPT, 600, renderer="2d", stop=0)
    explored.pace(0.25, keys=16)  # 2.2 tokens a second: the run outlasts the test
    explored.press("Space")
    for width, height in [(1440, 900), (1920, 1080), (1280, 720), (1100, 600), (1440, 500), (1000, 800), (390, 844)]:
        explored.tab.set_viewport_size({"width": width, "height": height})
        steps = explored.state["steps"]
        explored.until(f"window.__explorer.state.steps > {steps} || window.__explorer.state.state === 'done'")
        assert explored.state["state"] in ("running", "throttled")
        scrolled, seen, content = explored.tab.evaluate(
            """() => {
              const page = document.querySelector('.page');
              const panes = [...page.children].filter((pane) => getComputedStyle(pane).position !== 'absolute');
              const ends = panes.map((pane) => pane.getBoundingClientRect().bottom + window.scrollY);
              const { scrollHeight, clientHeight } = document.scrollingElement;
              return [scrollHeight, clientHeight, Math.ceil(Math.max(page.offsetHeight, ...ends))];
            }"""
        )
        assert seen == height
        assert content == height or width < 1100 or height < 720, "all panes fit into a usual window"
        assert abs(scrolled - max(height, content)) <= 1, f"{width} x {height}: {scrolled} px"
        assert explored.tab.evaluate("document.documentElement.scrollWidth") <= width
    explored.tab.set_viewport_size({"width": 1440, "height": 900})
    explored.tab.mouse.move(200, 300)
    explored.tab.mouse.wheel(0, 2000)
    explored.tab.wait_for_timeout(300)
    assert explored.tab.evaluate("[window.scrollX, window.scrollY]") == [0, 0]
    for scheme in ("light", "dark"):
        explored.tab.emulate_media(color_scheme=scheme)
        explored.until(f"getComputedStyle(document.documentElement).colorScheme.includes('{scheme}')")
        assert (sum(explored.colour("bg")) > 3 * 128) is (scheme == "light")


@pytest.mark.webgl
def test_reduced_motion_draws_no_frames_between(explored):
    explored.run(PROMPT, 20, stop=2)
    assert explored.renderer["kind"] == "2d"
    explored.settle()
    before = explored.tab.evaluate("window.__explorer.frames")
    explored.step()
    explored.tab.wait_for_timeout(700)
    assert explored.tab.evaluate("window.__explorer.frames") - before <= 4


def test_a_copied_link_writes_the_same_text_elsewhere(browser, server):
    """The seed was drawn by the engine: the link has it."""
    context = browser.new_context(viewport=SIZE, reduced_motion="reduce")
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    first = Explored(context.new_page(), server.address)
    first.run(PROMPT, 12, seed="", temperature=1.2, renderer="2d", stop=None)
    ids = first.state["ids"]
    first.share("Copy link")
    first.tab.get_by_role("menuitem", name="Copied").wait_for()
    link = first.tab.evaluate("navigator.clipboard.readText()")
    context.close()
    context = browser.new_context(viewport=SIZE, reduced_motion="reduce")
    second = Explored(context.new_page(), server.address)
    second.tab.goto(link)
    second.until("window.__explorer?.state.state === 'done'")
    assert second.state["ids"] == ids
    context.close()


def test_the_address_keeps_up_while_something_changes(explored):
    """It is not put off to the end of it, such as that of a run."""
    seen = explored.empty().tab.evaluate("""async () => {
      const area = document.querySelector('#prompt'), seen = new Set();
      for (let number = 0; number < 20; number++) {
        area.value = `dog ${number}`;
        area.dispatchEvent(new Event('input', { bubbles: true }));
        await new Promise((done) => setTimeout(done, 80));
        seen.add(location.hash);
      }
      return [...seen];
    }""")
    assert len(seen) >= 3, seen
    explored.until("location.hash === '#p=dog+19' || location.hash === '#p=dog%2019'")


def test_a_prompt_that_is_too_long_is_shortened_so_that_something_can_be_written(explored):
    """One of exactly the context writes nothing, and the page says that, and not that it is about to."""
    context = explored.empty().get("model")["context"]
    explored.tab.locator("#prompt").fill("dog" + " dog" * (context + 40))
    explored.tab.get_by_role("button", name="Run", exact=True).click()
    explored.until_state("error")
    assert "shorten it by" in explored.tab.get_by_role("alert").inner_text()
    explored.tab.get_by_role("button", name="Drop the first").click()
    explored.pace(None)
    explored.tab.get_by_role("button", name="Run", exact=True).click()
    explored.until("window.__explorer.state.step >= 9")
    assert explored.state["steps"] > 1 and explored.tab.get_by_role("alert").count() == 0
    explored.errors[:] = [error for error in explored.errors if "400" not in error]
    explored.until("location.hash !== '#p='")  # else the address of an empty page is no other one
    explored.empty()
    begins = len(explored.post("tokenize", {"text": "dog"})["tokens"])
    text = "dog" + " dog" * (context - begins)
    explored.tab.locator("#prompt").fill(text)
    explored.tab.get_by_role("button", name="Run", exact=True).click()
    explored.until_state("done")
    told = explored.tab.locator(".story-line").inner_text()
    assert "nothing was written" in told and "about to" not in told


def test_a_line_break_is_a_token_that_is_seen_and_no_line_waits_empty(explored):
    """After a paragraph there is one empty line, in which its token stands; an unwritten word takes no line."""
    explored.run("Once upon a time", 60, stop=45)
    breaks = explored.tab.locator(".token", has_text=re.compile(r"^\n$"))
    assert breaks.count() >= 2
    seen = breaks.evaluate_all("all => all.map((e) => getComputedStyle(e, '::before').content)")
    assert seen == ['"⏎"'] * len(seen)
    after = int(breaks.last.get_attribute("data-position")) + 1
    explored.tab.locator(f".token[data-position='{after}']").evaluate("e => e.click()")
    explored.settle()
    lines = """written => {
      const page = document.querySelector('.page'), flow = document.querySelector('.flow');
      page.dataset.written = written;
      const tops = [...flow.querySelectorAll('.token')].filter((e) => e.checkVisibility())
        .flatMap((e) => [...e.getClientRects()].map((box) => Math.round(box.top)));
      return [new Set(tops).size, Math.round(flow.scrollHeight / 24)];
    }"""
    [shown, height], [hidden, lower] = (explored.tab.evaluate(lines, written) for written in ("true", "false"))
    assert hidden == shown - 1 and lower <= height and lower <= max(3, hidden + 1), "the next word keeps no line free"
