"""The page in a headless Chromium on a live engine. A missing browser or page is a failure here, never a skip.

Software draws WebGL, which keeps a core busy, so there are two browsers: `browser` has no WebGL, and `webgl` does. A
test asserts that WebGL is drawn at all: a suite whose canvas stayed black would be green on nothing. For the same
reason the page of `explored` is asked for less motion: a step's animation is 50 pictures. `animated` has all of it.
A test of places, words or numbers draws WebGL at half the density, a quarter of the pixels: webgl(density=0.5).
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import quote

import matplotlib.image
import numpy as np
import pytest
from playwright.sync_api import sync_playwright

from tests.browser import over_worker
from tests.browser.served import load, serving

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--process-per-site",  # the tabs of a context share a process, and what it has compiled
)
# SwiftShader draws WebGL alone: the rest of the page is composed without it, which takes a fifth less CPU.
WEBGL = (
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--ignore-gpu-blocklist",
    "--disable-gpu-compositing",
)
HANGS = 300_000  # ms; on a busy machine a worker takes a minute to come
SIZE = {"width": 1280, "height": 800}
# Three of the browser's pictures in which the page drew none and expects none: a new size of the window has been told.
STILL = """(still = [__explorer.pending || still[1] !== __explorer.frames ? 0 : still[0] + 1,
  __explorer.frames])[0] > 3"""
NUMBERS = """() => Array.from(document.querySelectorAll('[data-stat]'),
  ({ dataset: { stat, value, src } }) => [stat, value, src])"""
# One call for all steps: a call for each key, each look and each number takes most of the time of such a walk.
WALK = f"""async (last) => {{
  const found = [], numbers = {NUMBERS};
  for (let step = window.__explorer.state.step; ; step++) {{
    while (document.querySelector('[data-stat=step]')?.dataset.value !== String(step))
      await new Promise((next) => setTimeout(next, 5));
    found.push(numbers());
    if (step === last) return found;
    document.body.dispatchEvent(new KeyboardEvent('keydown', {{ key: 'ArrowRight', bubbles: true }}));
  }}
}}"""
KEYS = """(keys) => keys.forEach(([key, shiftKey]) =>
  document.body.dispatchEvent(new KeyboardEvent('keydown', { key, shiftKey, bubbles: true })))"""
_OF_CLIENTS = () if over_worker.SITE else ("Conversations",)  # a worker has no clients
GROUPS = {
    "Look inside": ("Next token", "Block", "Heads", "Sampler", "Branches", "Beams"),
    "Experiments": ("Race", "Lab", "Drafts", "Pages", *_OF_CLIENTS, "Calculator"),
}


@pytest.fixture(scope="package")
def server():
    with over_worker.opened() if over_worker.SITE else serving(load) as server:
        yield server


def pytest_collection_modifyitems(items):
    if over_worker.SITE:
        over_worker.leave_out(items)


def executable():
    """The browser's path."""
    command = [sys.executable, ROOT / "scripts/browser", "find"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"no browser for the page's tests; run scripts/browser: {found.stderr}"
    return found.stdout.strip()


@pytest.fixture(scope="package")
def launch():
    """Starts a browser with these flags beside the usual ones."""
    with sync_playwright() as playwright:
        yield lambda *flags: playwright.chromium.launch(executable_path=executable(), args=[*FLAGS, *flags])


@pytest.fixture(scope="package")
def browser(launch):
    browser = launch("--disable-gpu", "--disable-3d-apis")
    yield browser
    browser.close()


@pytest.fixture(scope="package")
def webgl(launch):
    browser = launch(*WEBGL)
    yield browser
    browser.close()


@pytest.fixture(scope="package")
def contexts(server):
    """Those of `exploring`. In each a tab stays open, so that its process and the page's compiled program stay too."""

    @cache
    def context(browser, **look):
        made = browser.new_context(viewport=SIZE, color_scheme="dark", **look)
        made.new_page().goto(f"{server.address}/recorded.json")
        return made

    return context


class Explored:
    """A tab with the explorer in it, and the words for what one does there."""

    def __init__(self, tab, address):
        self.tab, self.address = tab, address
        self.errors = []
        self.unknown = []  # runs that the server did not know, such as one that the page was just freeing
        self.known = {}  # steps by run, so that each is asked for once
        self.words = {}  # the names of buttons, in a page that is not English
        tab.set_default_timeout(HANGS)
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on("console", self.note)

    def note(self, message):
        if message.type != "error":
            return
        found = re.search(r"/runs/(\w+)/", message.location.get("url", ""))
        if found and "404" in message.text:
            self.unknown.append(found[1])
        else:
            self.errors.append(message.text)

    def open(self, where=""):
        self.tab.goto(f"{self.address}/{where}")
        self.tab.wait_for_function("() => window.__explorer !== undefined")
        return self

    def empty(self):
        """The page with nothing running."""
        self.open("#p=")
        self.until_state("empty")
        return self

    def run(self, prompt, tokens, *, seed=1, temperature=0.7, renderer=None, stop=0):
        """Begin a run that is paused after its step `stop`, by a link; None: one that ends, by the form."""
        look = f"&renderer={renderer}" if renderer else ""
        if stop is not None:
            if self.tab.url != "about:blank":  # else another address of the same page would not load it again
                self.tab.goto("about:blank")
            self.open(f"#p={quote(prompt)}&seed={seed}&T={temperature}&n={tokens}&step={stop}&pace=0.25{look}")
            self.until(f"__explorer.state.origin === 'live' && __explorer.state.step === {stop}")
            self.until_state("paused", "done")
            return self
        self.open(f"#p={look}")
        self.until_state("empty")
        with self.settings():
            self.tab.get_by_label("max tokens").fill(str(tokens))
            self.tab.get_by_label("seed").fill(str(seed))
            self.tab.get_by_label("temperature").fill(str(temperature))
        self.tab.locator("#prompt").fill(prompt)
        self.tab.locator("#prompt").blur()
        self.pace(None)
        self.tab.get_by_role("button", name="Run", exact=True).click()
        self.until_state("done")
        return self

    @contextmanager
    def settings(self):
        """With what is behind the gear in view."""
        gear = self.tab.get_by_role("button", name=self.said("Settings"))
        gear.click()
        yield
        gear.click()

    def share(self, entry):
        """Choose from the Share menu."""
        self.tab.get_by_role("button", name="Share", exact=True).click()
        self.tab.locator("[role=menuitem]", has=self.tab.locator(f"b:text-is('{entry}')")).click()

    def drawer(self, name):
        """Open a panel in the drawer; None: close the drawer."""
        panels = self.tab.get_by_role("navigation", name=self.said("Panels"))
        if name is None:
            panels.get_by_role("button", name=self.said("Close the drawer")).click()
            return
        if not panels.is_visible():
            page = self.tab.get_by_role("navigation", name=self.said("Page"))
            page.get_by_role("button", name=self.said("Look inside")).click()
        group = next((group for group, names in GROUPS.items() if name in names), name)
        panels.get_by_role("button", name=self.said(group), exact=True).click()
        if group != name:
            panels.get_by_role("button", name=self.said(name), exact=True).click()

    def said(self, name):
        """A name in the language of the page."""
        return self.words.get(name, name)

    def pace(self, speed, keys=0):
        """Tokens per second by the slider, 0.25 or None: the engine's own speed. Then so many keys towards the other.

        A speed is 1.15 times that of the key before; 16 keys from 0.25 make 2.2, 8 from the other end 22.
        """
        slider = self.tab.get_by_role("slider", name=self.said("speed"), exact=True)
        slider.focus()
        self.press("End" if speed is None else "Home")
        for _ in range(keys):
            self.press("ArrowLeft" if speed is None else "ArrowRight")
        slider.blur()

    def step(self):
        """One step of the engine, at the end of what there is."""
        before = self.state["steps"]
        self.press("End")
        self.press("ArrowRight")
        self.until(f"window.__explorer.state.steps > {before} && window.__explorer.state.step === {before}")

    def press(self, key):
        self.tab.keyboard.press(key)

    def until(self, condition, polling=20):
        """Wait for it. The limit is no measure of speed: a page that hangs is to be told as that.

        It looks every 20 ms: at each picture, "raf", would make the browser draw 60 of them a second while it waits.
        """
        self.tab.wait_for_function(f"() => {condition}", timeout=HANGS, polling=polling)

    def until_state(self, *states):
        self.until(f"{json.dumps(states)}.includes(document.documentElement.dataset.state)")

    def scrub(self, step):
        """Show a step that was made, by the scrubber's keys, with no picture between them."""
        tens, ones = divmod(step, 10)
        self.tab.evaluate(KEYS, [("Home", False), *[("ArrowRight", True)] * tens, *[("ArrowRight", False)] * ones])
        self.until(f"window.__explorer.state.step === {step}")

    @property
    def state(self):
        return self.tab.evaluate("window.__explorer.state")

    @property
    def renderer(self):
        return self.tab.evaluate("window.__explorer.renderer")

    def get(self, path):
        return self.tab.evaluate("async (path) => (await __explorer.ask(path)).json()", path)

    def post(self, path, body):
        return self.tab.evaluate(
            "async ([path, body]) => (await __explorer.ask(path, {method: 'POST', body, "
            "headers: {'content-type': 'application/json'}})).json()",
            [path, json.dumps(body)],
        )

    def api(self, path):
        """What the server says of the run that is shown."""
        return self.get(f"runs/{self.state['run']}{path}")

    def steps(self, count):
        """The first `count` steps of the run that is shown, as the server tells them."""
        known = self.known.setdefault(self.state["run"], [])
        known += [self.api(f"/steps/{n}") for n in range(len(known), count)]
        return known[:count]

    def stats(self):
        """Every number in the document: name -> (exact value, source). The same name always has the same value."""
        return self.named(self.tab.evaluate(f"({NUMBERS})()"))

    def walk(self, last):
        """The numbers of the steps from the shown one to this, as of `stats`, by the key of one step on."""
        return [self.named(found) for found in self.tab.evaluate(WALK, last)]

    @staticmethod
    def named(found):
        stats = {}
        for name, value, source in found:
            assert value is not None and source in ("measured", "counted", "derived", "read", "given"), name
            assert stats.setdefault(name, (value, source)) == (value, source), f"{name} is shown with two values"
        return stats

    def settle(self):
        """Until nothing moves: then the picture is the shown step's."""
        self.tab.evaluate("window.still = [0, -1]")
        self.until(STILL, polling="raf")  # asked once for each of the browser's pictures

    def picture(self):
        """The canvas as it is on the screen: [height, width, 3], one pixel per CSS pixel."""
        self.settle()
        png = self.tab.locator(".canvas canvas").screenshot()
        return (matplotlib.image.imread(io.BytesIO(png))[:, :, :3] * 255).round().astype(int)

    def project(self, position):
        return self.tab.evaluate("p => window.__explorer.project(p)", position)

    def colour(self, name):
        """A colour of the page's theme as three numbers."""
        return self.tab.evaluate(
            """name => {
              const probe = document.createElement('i');
              probe.style.color = `var(--${name})`;
              document.body.append(probe);
              const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map(Number);
              probe.remove();
              return [r, g, b];
            }""",
            name,
        )


# A page whose own pauses, such as that before it asks about a step, take a fifth of their time: not its limits.
SWIFT = """
const { setTimeout: later } = window;
window.setTimeout = (what, ms, ...rest) => later(what, ms > 2000 ? ms : ms / 5, ...rest);
"""
# A page of which every wait, its own and the engine's between two steps, takes a fifth of its time.
HASTE = """
const { setTimeout: later, WebSocket: { prototype: socket } } = window, { send } = socket;
const now = performance.now.bind(performance);
performance.now = () => 5 * now();
window.setTimeout = (what, ms, ...rest) => later(what, ms / 5, ...rest);
socket.send = function (text) {
  const said = JSON.parse(text);
  if (said.op === "play" && said.pace !== null) said.pace *= 5;
  send.call(this, JSON.stringify(said));
};
"""


@contextmanager
def exploring(request, server, motion="reduce", script=SWIFT, **look):
    """A tab of its own, with nothing stored; in the browser with WebGL for a test (or a case of it) with that mark."""
    mark = request.node.get_closest_marker("webgl")
    browser = request.getfixturevalue("webgl" if mark else "browser")
    density = mark.kwargs.get("density", 1) if mark else 1
    context = request.getfixturevalue("contexts")(browser, reduced_motion=motion, device_scale_factor=density, **look)
    tab = context.new_page()
    if script:
        tab.add_init_script(script)
    stored = {"origin": server.address, "storageTypes": "local_storage"}
    context.new_cdp_session(tab).send("Storage.clearDataForOrigin", stored)
    explored = Explored(tab, server.address)
    yield explored
    state = tab.evaluate("window.__explorer?.state") or {}
    print(tab.url, state)  # pytest shows it where the test has failed
    tab.close()
    assert explored.errors == []
    assert state.get("run") not in explored.unknown


@pytest.fixture
def explored(request, server):
    with exploring(request, server) as explored:
        yield explored


@pytest.fixture
def unhurried(request, server):
    """As `explored`, with the pauses that a visitor meets."""
    with exploring(request, server, script="") as explored:
        yield explored


@pytest.fixture
def hasty(request, server):
    """For what comes in an order, whenever it comes."""
    with exploring(request, server, script=HASTE) as explored:
        yield explored


@pytest.fixture
def animated(request, server):
    with exploring(request, server, "no-preference", "") as explored:
        yield explored


# Cases of a test that is about what is drawn: PLACES of one that looks at no pixel; SELDOM where the page's own code,
# which both renderers share, does most of it.
RENDERERS = ["2d", pytest.param("3d", marks=pytest.mark.webgl)]
PLACES = ["2d", pytest.param("3d", marks=pytest.mark.webgl(density=0.5))]
SELDOM = ["2d", pytest.param("3d", marks=[pytest.mark.webgl(density=0.5), pytest.mark.sweep])]


def near(pixels, colour, tolerance=12):
    """Which of the pixels [..., 3] have about this colour."""
    return np.abs(pixels - np.array(colour)).max(-1) <= tolerance
