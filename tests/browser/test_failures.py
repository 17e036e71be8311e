"""What the page says and offers when something that it asked for does not happen."""

import json

import pytest

from tests.browser.test_branches import opened
from tests.browser.test_figures import PROMPT


class Failing:
    """Answers requests of some paths as a server that is gone or that refuses them, and takes the browser's own lines
    about that out of the page's errors."""

    def __init__(self, explored):
        self.explored = explored

    def gone(self, paths):
        self.explored.tab.route(paths, lambda route: route.abort())

    def refused(self, paths, why, kind="bad_request"):
        body = json.dumps({"error": {"kind": kind, "message": why}})
        self.explored.tab.route(paths, lambda route: route.fulfill(status=400, body=body))

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
    explored.run(PROMPT, 6, renderer="2d", stop=4)
    explored.scrub(1)
    rows = "**/attention?*"
    failing.gone(rows)
    with explored.tab.expect_event("requestfailed"):
        explored.press("]")
    failing.mended(rows)
    layer = explored.state["layer"]
    explored.until(f"window.__explorer.row?.layer === {layer}")
    failing.refused("**/heads?*", "the heads are asleep")
    explored.scrub(2)
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
