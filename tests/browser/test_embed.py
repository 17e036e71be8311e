"""The explorer as a frame of another page: the stage, the text and the transport, and nothing else."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.browser.conftest import HANGS, Explored
from tests.browser.stage.test_figures import PROMPT

FRAME = "<!doctype html><iframe style='border: 0; width: 900px; height: 600px' src='{}'></iframe>"
LINK = "#embed=1&p=Once%20upon&seed=1&n=5&pace=engine&renderer=2d"


@contextmanager
def page_of(host, address):
    """The address of a page at `host` that shows another one in a frame."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(FRAME.format(address).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer((host, 0), Page) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://{host}:{serving.server_port}/"
        serving.shutdown()


@pytest.fixture
def framed(browser):
    """Shows an address in a frame of a page of this machine; returns the frame once the program is there."""
    context = browser.new_context(reduced_motion="reduce", viewport={"width": 1300, "height": 960})
    tab = context.new_page()

    def show(address):
        with page_of("127.0.0.1", address) as outer:
            tab.goto(outer)
        frame = tab.frames[1]
        live = "window.__explorer?.state.origin === 'live' && window.__explorer.state.steps > 0"
        frame.wait_for_function(f"() => {live}", timeout=HANGS)
        return frame

    yield show
    context.close()


def test_no_page_from_elsewhere_shows_it_in_a_frame(browser, server):
    """Such a page could lay its own over it, and have a visitor press the buttons."""
    context = browser.new_context()
    tab = context.new_page()
    with page_of("127.0.0.2", f"{server.address}/{LINK}") as outer:
        tab.goto(outer)
        tab.frames[1].wait_for_url("chrome-error://**", timeout=HANGS)
    context.close()


def test_a_frame_has_the_stage_and_not_the_rest(framed, server):
    frame = framed(f"{server.address}/{LINK}")
    frame.wait_for_function("() => document.documentElement.dataset.state === 'done'", timeout=HANGS)
    for gone in (".top", ".prompt-row", ".rail", ".tabs"):
        assert frame.locator(gone).count() == 0
    whole = frame.locator(".open-whole").get_attribute("href")
    assert "embed" not in whole and "seed=1" in whole, "the same run, in a page of its own"
    for size in ((1200, 900), (900, 600), (390, 560)):
        style = {"width": f"{size[0]}px", "height": f"{size[1]}px"}
        frame.frame_element().evaluate("(e, style) => Object.assign(e.style, style)", style)
        frame.wait_for_function(f"() => innerWidth === {size[0]} && innerHeight === {size[1]}", timeout=HANGS)
        check_frame(frame, size)


def check_frame(frame, size):
    boxes = frame.eval_on_selector_all(
        ".stage, .view, .text, .transport, .cache-switch, .buttons",
        "all => all.map(e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; })",
    )
    assert len(boxes) == 6
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]
    assert frame.evaluate("document.documentElement.scrollHeight") == size[1], "nothing scrolls"
    assert frame.locator(".view").evaluate("e => e.clientHeight") >= 90


def test_a_frame_follows_a_run_that_another_page_began_and_leaves_it_alone(explored, framed):
    explored.run(PROMPT, 9, renderer="2d", stop=3)
    name = explored.state["run"]
    frame = framed(f"{explored.address}/#embed=1&run={name}&renderer=2d")
    state = "() => window.__explorer.state"
    assert frame.evaluate(state)["run"] == name and frame.evaluate(state)["ids"] == explored.state["ids"]
    explored.step()
    frame.wait_for_function("() => window.__explorer.state.step === 4", timeout=HANGS)
    assert frame.evaluate(state)["ids"] == explored.state["ids"]
    frame.evaluate("location.hash = '#embed=1&p=Another&n=2&renderer=2d'")
    frame.wait_for_function(f"() => window.__explorer.state.run !== '{name}'", timeout=HANGS)
    explored.step()
    assert (explored.state["run"], explored.state["step"]) == (name, 5), "the other page's run was not ended"


def test_a_run_that_is_gone_is_told(browser, server):
    context = browser.new_context(reduced_motion="reduce")
    explored = Explored(context.new_page(), server.address).open("#embed=1&run=nobody")
    explored.until("document.body.innerText.includes('no such run')")
    context.close()
