"""How much a browser fetches, and when it paints first. The sizes are held; the time is the machine's, and printed."""

import gzip

import pytest

from tests.browser.conftest import SIZE, Explored
from tokenwright.llm.web_page import page_folder

MOST = 180_000  # bytes of all programs of both pages, as gzip sends them
MOST_FIRST = 80_000  # of what either page fetches before it shows something


def packed(names):
    return {name: len(gzip.compress((page_folder() / name).read_bytes(), 9)) for name in names}


def test_all_programs_together_are_small():
    sizes = packed(f"assets/{path.name}" for path in (page_folder() / "assets").glob("*.js"))
    alone = (page_folder() / "alone.html").stat().st_size
    print(f"{sum(sizes.values()):,} B of JavaScript, gzip: {sizes}; alone.html: {alone:,} B")
    assert len(sizes) > 3
    assert sum(sizes.values()) <= MOST


@pytest.mark.parametrize("where", ["#p=", "chat"])
def test_the_first_picture_needs_few_bytes(browser, server, where):
    context = browser.new_context(viewport=SIZE)
    page = Explored(context.new_page(), server.address)
    fetched = []
    page.tab.on("request", lambda request: fetched.append(request.url))
    page.tab.goto(f"{server.address}/{where}", wait_until="commit")
    paint = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    page.tab.wait_for_function(paint)
    first = page.tab.evaluate(paint)
    page.tab.wait_for_selector(".top .tools")  # the bar of the program, not that of the document
    names = {url.rpartition("/")[2] for url in fetched if "/assets/" in url and "scene3d" not in url}
    sizes = packed(f"assets/{name}" for name in names if name.endswith(".js"))
    print(f"{where}: first paint after {first:.0f} ms; {sum(sizes.values()):,} B of JavaScript, gzip")
    assert 0 < sum(sizes.values()) <= MOST_FIRST
    context.close()
