"""The explorer's page in a headless Chromium whose WebGL is drawn in software: what it fetches, draws, and how long.

    python -m benchmarks.serving.page [--tokens 1000] [--layers 24] [--pictures 30]

The figures, each with the mark that it is held to (docs/explorer.md):

    JavaScript, gzip    of all programs of both pages
    first paint         the browser's own entry, the median of five visits; the server runs in this process
    draw calls, triangles
                        of the 3-D scene of a text of that many tokens and layers
    the page's own time of a picture, without WebGL's: what is left of 16.7 ms is a graphics card's
    a picture in software
                        until its pixels are there, for 3-D at 1280 x 720, and for 2-D
    heap                of the page with that text, after a collection
    pictures at rest    in two seconds in which nothing changes

The text is a trace that is made from the recorded run, so no model computes meanwhile. Run nothing else beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median

from playwright.sync_api import Page, ViewportSize, sync_playwright

from tests.browser.conftest import FLAGS, Explored, executable
from tests.browser.served import load, serving
from tests.browser.stage.test_labels import long_trace
from tests.browser.test_size import packed
from tokenwright.llm.web_page import page_folder

VISITS = 5
SIZE: ViewportSize = {"width": 1280, "height": 720}
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
PICTURE = """() => {
  const began = performance.now();
  __explorer.renderOnce();
  const canvas = document.querySelector('.canvas canvas');
  const gl = canvas.getContext('webgl2');
  if (gl) gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(4));
  else canvas.getContext('2d').getImageData(0, 0, 1, 1);
  return [__explorer.drawTime, performance.now() - began];
}"""


def wider(trace: dict[str, object], layers: int) -> dict[str, object]:
    """The trace with `layers` layers in each step."""
    model, steps = trace["model"], trace["steps"]
    assert isinstance(model, dict) and isinstance(steps, list)
    model["layers"] = layers
    for step in steps:
        step["layers"] = (step["layers"] * layers)[:layers]
    return trace


def first_paint(page: Page, address: str) -> float:
    """ms until the browser has painted something."""
    page.goto(f"{address}/#p=", wait_until="commit")
    page.wait_for_function(f"() => {PAINT}")
    found: float = page.evaluate(PAINT)
    return found


def opened(page: Page, address: str, path: Path, renderer: str) -> Explored:
    """A page that shows the trace and rests."""
    explored = Explored(page, address).open(f"#p=&renderer={renderer}")
    explored.until_state("empty")
    with page.expect_file_chooser() as chooser:
        explored.share("Open a trace")
    chooser.value.set_files(path)
    explored.until_state("replay")
    explored.until(f"document.documentElement.dataset.renderer === '{renderer}'")
    explored.settle()
    return explored


def pictures(page: Page, count: int) -> tuple[float, float, float]:
    """ms of a picture: the page's own in the median, the whole in the median and at the 95th percentile."""
    both = [page.evaluate(PICTURE) for _ in range(count)]
    whole = sorted(time for _, time in both)
    return median(own for own, _ in both), median(whole), whole[round(0.95 * (count - 1))]


def heap(page: Page) -> float:
    """MB that the page's program holds."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    used: float = session.send("Runtime.getHeapUsage")["usedSize"]
    return used / 1e6


def say(name: str, value: str, mark: str = "") -> None:
    print(f"{name:<34} {value:<34} {mark}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--pictures", type=int, default=30)
    arguments = parser.parse_args()
    text = f"{arguments.tokens:,} tokens, {arguments.layers} layers"
    say("load average before", f"{os.getloadavg()[0]:.1f}")
    programs = packed(f"assets/{path.name}" for path in (page_folder() / "assets").glob("*.js"))
    say("JavaScript, gzip", f"{sum(programs.values()) / 1000:.0f} KB", "at most 150")
    with tempfile.TemporaryDirectory() as folder, serving(load) as server, sync_playwright() as playwright:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps(wider(long_trace(arguments.tokens), arguments.layers)), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=executable(), args=[*FLAGS, "--js-flags=--expose-gc"])
        paints = []
        for _ in range(VISITS):
            context = browser.new_context(viewport=SIZE)
            paints.append(first_paint(context.new_page(), server.address))
            context.close()
        say("first paint", f"{median(paints):.0f} ms ({min(paints):.0f} to {max(paints):.0f})", "at most 1,500")
        for renderer in ("3d", "2d"):
            context = browser.new_context(viewport=SIZE, reduced_motion="reduce")
            page = context.new_page()
            explored = opened(page, server.address, path, renderer)
            print(f"{renderer}, {text}")
            if renderer == "3d":
                stats = explored.renderer
                say("  draw calls", str(stats["calls"]), "at most 8")
                say("  triangles", f"{stats['triangles']:,}", "at most 40,000")
            own, whole, late = pictures(page, arguments.pictures)
            say("  the page's own time of a picture", f"{own:.1f} ms", "at most 4 (3-D)")
            marks = "at most 100 (3-D)" if renderer == "3d" else "at most 33"
            say("  a picture in software", f"{whole:.1f} ms, 95 % below {late:.1f}", marks)
            say("  heap", f"{heap(page):.0f} MB", "at most 150")
            before = page.evaluate("__explorer.frames")
            page.wait_for_timeout(2000)
            say("  pictures at rest in 2 s", str(page.evaluate("__explorer.frames") - before), "0")
            context.close()
        browser.close()
    say("load average after", f"{os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
