"""The page says what failed, and offers another attempt, when its server does not answer or refuses."""

import json
import time
from itertools import pairwise

import pytest

from tests.browser.run.test_branches import opened
from tests.browser.stage.test_figures import PROMPT
from tests.browser.test_embed import LINK


class Failing:
    """Answers requests of some paths as a server that is gone or that refuses them, and takes the browser's own lines
    about that out of the page's errors."""

    def __init__(self, explored):
        self.explored = explored

    def gone(self, paths):
        self.explored.tab.route(paths, lambda route: route.abort())

    def refused(self, paths, why, kind="bad_request", status=400):
        body = json.dumps({"error": {"kind": kind, "message": why}})
        self.explored.tab.route(paths, lambda route: route.fulfill(status=status, body=body))

    def mended(self, paths):
        self.explored.tab.unroute(paths)

    def forgive(self):
        self.explored.errors[:] = [line for line in self.explored.errors if "Failed to load resource" not in line]


@pytest.fixture
def failing(explored):
    failing = Failing(explored)
    yield failing
    failing.forgive()


def text(explored, selector):
    return explored.tab.locator(selector).inner_text()


def test_a_row_that_nobody_answered_is_asked_for_again_and_a_refusal_is_told(explored, failing):
    failing.refused("**/heads?*", "the heads are asleep")
    explored.run(PROMPT, 6, renderer="2d", stop=4)
    explored.drawer("Next token")
    explored.scrub(1)
    rows = "**/attention?*"
    failing.gone(rows)
    with explored.tab.expect_event("requestfailed"):
        explored.press("]")
    failing.mended(rows)
    layer = explored.state["layer"]
    explored.until(f"window.__explorer.row?.layer === {layer}")
    explored.tab.get_by_text("The heads are asleep.").wait_for()
    failing.refused(rows, "the row is asleep")
    explored.press("]")
    explored.tab.locator(".plot.missing", has_text="The row is asleep.").wait_for()


def test_figures_of_another_step_do_not_stand_under_an_error(explored, failing):
    explored.run(PROMPT, 6, renderer="2d", stop=4)
    opened(explored, "Sampler")
    explored.tab.locator(".sampler-list").wait_for()
    failing.refused("**/sampler?*", "the logits are gone")
    explored.scrub(1)
    explored.tab.get_by_text("The logits are gone.").wait_for()
    assert explored.tab.locator(".sampler-list").count() == 0
    opened(explored, "Block")
    explored.tab.locator(".block-stages").wait_for()
    failing.refused("**/block?*", "the cache is gone")
    explored.scrub(2)
    explored.tab.get_by_text("The cache is gone.").wait_for()
    assert explored.tab.locator(".block-stages").count() == 0


def test_another_attempt_is_offered_for_a_run_and_for_nothing_else(explored, failing):
    explored.run(PROMPT, 3, renderer="2d", stop=None)
    assert explored.api("")["reason"] == "length" and text(explored, ".activity") == "cut at max tokens"
    assert explored.tab.get_by_role("button", name="Run again").is_visible()
    explored.press("n")
    assert text(explored, ".next-mode") == "next run: no cache", "the switch of a run that is over"
    explored.press("n")
    again = explored.tab.get_by_role("alert").get_by_role("button", name="Try again")
    failing.gone("**/perfetto.json")
    explored.share("Perfetto")
    explored.tab.get_by_role("alert").wait_for()
    assert again.count() == 0, "it would end the run that is to be saved"
    first = explored.state["run"]
    failing.refused("**/runs", "no pages are free", kind="engine")
    explored.tab.get_by_role("button", name="Run", exact=True).click()
    again.wait_for()
    failing.mended("**/runs")
    again.click()
    explored.until(f"window.__explorer.state.run !== '{first}'")


def test_a_file_that_is_no_trace_leaves_the_empty_page_as_it_is(explored, tmp_path):
    explored.empty()
    (tmp_path / "notes.json").write_text("{}", encoding="utf-8")
    with explored.tab.expect_file_chooser() as chooser:
        explored.tab.get_by_role("button", name="Open a trace").click()
    chooser.value.set_files(tmp_path / "notes.json")
    explored.tab.get_by_role("button", name="Open another").wait_for()
    assert explored.state["state"] == "empty"
    assert explored.tab.locator(".choices button").count() == 4


def test_an_embedded_page_tells_of_a_failure_and_keeps_its_keys(explored, failing):
    asked = []
    explored.tab.on("request", lambda request: asked.append(request.url))
    explored.open(LINK)
    explored.until_state("done")
    explored.press("?")
    sheet = explored.tab.get_by_role("dialog")
    sheet.wait_for()
    assert "the lesson" not in sheet.inner_text(), "it has no panels"
    explored.press("Escape")
    explored.until("document.activeElement === document.body")  # the sheet is closed, and has given the focus back
    explored.press("Home")
    explored.until("window.__explorer.state.step === 0")
    explored.tab.wait_for_timeout(700)  # longer than a step must rest
    assert not [url for url in asked if "/heads" in url], "it has no grid of heads"
    failing.gone("**/runs")
    explored.press("End")
    explored.until("window.__explorer.state.step === 4")
    explored.press("Space")
    explored.tab.get_by_text("The engine does not answer.").wait_for()
    failing.mended("**/runs")
    first = explored.state["run"]
    explored.tab.get_by_role("button", name="Try again").click()
    explored.until(f"window.__explorer.state.run !== '{first}'")


def test_a_link_that_could_not_be_copied_is_given_to_copy_by_hand(explored):
    explored.run(PROMPT, 2, renderer="2d", stop=1)
    explored.tab.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # as over plain http
    explored.share("Copy link")
    field = explored.tab.get_by_label("Link, to copy by hand")
    explored.until("document.activeElement?.selectionEnd > 0")  # it is chosen a moment after it is shown
    chosen = field.evaluate("e => e.value.slice(e.selectionStart, e.selectionEnd)")
    assert "seed=1" in chosen and chosen.startswith(explored.address)
    explored.press("Escape")
    explored.tab.get_by_role("menuitem", name="Copy link").wait_for()


def test_a_program_that_was_not_fetched_is_no_missing_webgl(explored, failing):
    failing.gone("**/scene3d*")
    explored.open("#p=&renderer=3d")
    explored.tab.get_by_text("could not be fetched").wait_for()


def test_an_engine_that_answers_with_an_error_is_told_as_that_and_asked_less_and_less(unhurried):
    failing = Failing(unhurried)
    failing.refused("**/model", "the model is asleep", kind="engine", status=500)
    asked = []
    unhurried.tab.on("request", lambda request: request.url.endswith("/model") and asked.append(time.monotonic()))
    unhurried.open("#p=")
    unhurried.until_state("error")
    said = text(unhurried, ".stage")
    assert "The model is asleep." in said and "does not answer" not in said
    while len(asked) < 4:
        unhurried.tab.wait_for_timeout(200)
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses[-1] > 1.5 * pauses[0], "an error is not asked again several times a second"
    failing.mended("**/model")
    unhurried.until_state("empty")
    failing.forgive()


def test_escape_puts_the_end_of_a_run_away(explored):
    explored.run(PROMPT, 3, renderer="2d", stop=1)
    explored.press("Escape")  # there is none yet
    explored.step()
    explored.tab.locator(".result").wait_for()
    explored.press("Escape")
    explored.tab.locator(".result").wait_for(state="detached")
    assert explored.state["state"] == "done"


def test_a_title_of_the_lesson_has_its_size_after_another_panel(explored):
    """Style sheets of panels are loaded as they are opened: their order must not matter."""
    explored.run(PROMPT, 3, renderer="2d", stop=1)
    size = "e => getComputedStyle(e).fontSize"
    opened(explored, "Learn")
    before = explored.tab.locator("#learn-title").evaluate(size)
    opened(explored, "Block")
    opened(explored, "Learn")
    assert explored.tab.locator("#learn-title").evaluate(size) == before == "19px"
