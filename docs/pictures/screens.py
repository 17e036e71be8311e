"""Screenshots of the explorer for the README and the docs: a live run of the model inside, in a headless browser.

    python docs/pictures/screens.py [FOLDER]     needs the test extra, and a browser (scripts/browser)

The runs are seeded, so the texts are the same each time; the times on them are those of the machine that drew them.
"""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import quote

import uvicorn
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tokenwright import LLM
from tokenwright.backends.device import leave_a_core
from tokenwright.llm.web_page import page_folder
from tokenwright.serve.app import make_app
from tokenwright.serve.service.model_host import ModelHost
from tokenwright.serve.transport.guard import Policy

ROOT = Path(__file__).resolve().parents[2]
PORT = 8329
PREVIEW = ROOT / "web" / "public" / "preview.png"
STORY = "Once upon a time, there was a little fox who"
CODE = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"
REPEATED = " moon river stone apple cloud seven garden horse winter music paper bridge" * 3
LOOKS = ("light", "dark")
STOPS = ("word", "position", "Q, K, V", "score", "softmax", "MLP", "logits", "draw")
TILE = (600, 270)  # of a sheet of stops
FLAGS = [
    "--no-sandbox",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--ignore-gpu-blocklist",
    "--disable-background-networking",
    "--no-first-run",
]


def held(page: Page, prompt: str, step: int, *, head: tuple[int, int], camera: str, renderer: str = "3d") -> None:
    """A run that is held after a step."""
    layer, number = head
    page.goto("about:blank")
    page.goto(
        f"http://127.0.0.1:{PORT}/#p={quote(prompt)}&seed=1&T=0.7&step={step}&layer={layer}&head={number}"
        f"&cam={camera}&renderer={renderer}"
    )
    page.wait_for_function(f"() => window.__explorer?.state.step === {step}")
    rest(page)


def rest(page: Page) -> None:
    """Until nothing moves."""
    frames = -1
    while frames != (frames := page.evaluate("window.__explorer.frames")):
        page.wait_for_timeout(600)


def without_cache(page: Page, steps: int) -> None:
    page.keyboard.press("n")
    for _ in range(steps):
        before = page.evaluate("window.__explorer.state.step")
        page.keyboard.press("ArrowRight")
        page.wait_for_function(f"() => window.__explorer.state.step === {before + 1}")
    rest(page)


def keep(page: Page, path: Path) -> None:
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    # A third of the bytes; no colour differs by more than some 12 of 255. The median cut would turn amber into orange.
    few = shot.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).convert("RGB")
    few.save(path, lossless=True, quality=100, method=6)
    print(f"{path.name}: {path.stat().st_size:,} B")


def preview(page: Page, path: Path) -> None:
    """The picture by which other programs announce a site of recorded runs: 1200 x 630, in few colours."""
    page.set_viewport_size({"width": 1200, "height": 630})
    held(page, STORY, 20, head=(4, 3), camera="side")
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shot.quantize(128, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path.name)


def shots(page: Page, folder: Path) -> None:
    def save(name: str) -> None:
        keep(page, folder / f"explorer-{name}.webp")

    held(page, STORY, 26, head=(4, 3), camera="side")
    save("story")
    without_cache(page, 4)
    save("no-cache")
    page.keyboard.press("n")
    speed = page.get_by_role("slider", name="speed")
    speed.focus()
    page.keyboard.press("End")
    speed.blur()
    page.keyboard.press(" ")
    page.wait_for_function("() => document.documentElement.dataset.state === 'done'")
    rest(page)
    save("result")
    held(page, STORY, 30, head=(3, 7), camera="top")
    save("top")
    held(page, CODE, 18, head=(2, 3), camera="side")
    save("code")
    held(page, STORY, 12, head=(4, 3), camera="side")
    panel(page, "Race")
    page.locator(".race-controls [type=submit]").click()
    page.locator("[data-narration=race]").wait_for()
    page.wait_for_timeout(5000)  # it takes twelve seconds; the upper lane is ahead
    save("race")
    held(page, STORY, 12, head=(4, 3), camera="side")
    panel(page, "Learn")
    page.locator(".learn-contents li:nth-child(3) button").click()
    rest(page)
    save("learn")
    held(page, REPEATED, 6, head=(5, 3), camera="side")
    panel(page, "Heads")
    page.locator(".matrix canvas[data-size]").wait_for()
    rest(page)
    save("heads")


def flight(page: Page, path: Path) -> None:
    """Eight stops of the flight on one sheet."""
    held(page, STORY, 26, head=(4, 3), camera="side")
    page.keyboard.press("i")
    sheet = Image.new("RGB", (2 * TILE[0], len(STOPS) // 2 * TILE[1]))
    for number, stop in enumerate(STOPS):
        page.locator(".way-path ol").get_by_role("button", name=stop, exact=True).click()
        page.wait_for_timeout(3000)  # the camera, then the engine's numbers
        rest(page)
        shot = Image.open(io.BytesIO(page.locator(".stage").screenshot())).convert("RGB")
        sheet.paste(shot.resize(TILE), (number % 2 * TILE[0], number // 2 * TILE[1]))
    sheet.save(path, quality=66, method=6)
    print(f"{path.name}: {path.stat().st_size:,} B")


def chat(page: Page, folder: Path) -> None:
    page.goto(f"http://127.0.0.1:{PORT}/chat")
    page.get_by_label("seed").fill("3")
    for asked, words in enumerate(("Tell me a story about a fox.", "What did the fox do then?"), 1):
        page.get_by_placeholder("Write a message").fill(words)
        page.get_by_role("button", name="Send").click()
        page.wait_for_function(f"() => document.querySelectorAll('.cost').length === {asked}")
    page.wait_for_timeout(600)
    keep(page, folder / "chat.webp")


def panel(page: Page, name: str) -> None:
    panels = page.get_by_role("navigation", name="Panels")
    page.get_by_role("navigation", name="Page").get_by_role("button", name="Look inside").click()
    group = {"Race": "Experiments", "Heads": "Look inside"}.get(name, name)
    panels.get_by_role("button", name=group, exact=True).click()
    if group != name:
        panels.get_by_role("button", name=name, exact=True).click()
    page.locator(".panel-lead").wait_for()
    page.wait_for_timeout(1500)  # what the panel asks of the engine


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    leave_a_core()
    host = ModelHost("stories", lambda report: LLM("stories", report=report, trace=True))
    app = make_app(host, Policy.of([f"127.0.0.1:{PORT}"], ()), page_folder())
    server = uvicorn.Server(uvicorn.Config(app, port=PORT, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while host.loading.phase == "loading":
        time.sleep(0.1)
    found = subprocess.run([sys.executable, ROOT / "scripts/browser"], capture_output=True, text=True, check=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found.stdout.strip(), args=FLAGS)
        light, page = (browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=look) for look in LOOKS)
        for one in (light, page):
            one.set_default_timeout(600_000)  # software draws, which takes long on a busy machine
        flight(light, folder / "explorer-flight-light.webp")
        flight(page, folder / "explorer-flight.webp")
        shots(page, folder)
        chat(page, folder)
        preview(page, folder / "preview.png" if sys.argv[1:] else PREVIEW)
        browser.close()
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    main()
