"""Finds the built page and its build notes, in `web` and `_build.json` of `tokenwright.__path__`; makes a run's page.

An editable installation has them (CMakeLists.txt, scripts/page.py) in another folder than the sources.
"""

import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenwright
from tokenwright.errors import RequestError

SLOT = '<script type="application/json" id="trace">'  # in alone.html, right before the trace
HEIGHT = 760  # CSS px of a page in a notebook


def build_notes(folders: Iterable[str] = tokenwright.__path__) -> dict[str, str]:
    """The build's notes: `cxx`, `web` and, where `web` is empty, `web_missing`. Empty without an installation."""
    files = (Path(folder, "_build.json") for folder in folders)
    notes: dict[str, str] = next((json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()), {})
    return notes


def why_no_page(notes: dict[str, str]) -> str:
    return notes.get("web_missing") or (
        "it was not built, or was taken away; install Tokenwright again, or run `npm ci && npm run build` in web/"
    )


def page_folder(folders: Iterable[str] = tokenwright.__path__) -> Path:
    """The folder of the page's index.html: the installation's, or a newer web/dist. Raises RequestError without one."""
    roots = [Path(folder) for folder in folders]
    places = [*(root / "web" for root in roots), *(root.parents[1] / "web" / "dist" for root in roots)]
    built = [index for place in places if (index := place / "index.html").exists()]
    if not built:
        raise RequestError(f"there is no web page in this installation: {why_no_page(build_notes(map(str, roots)))}")
    return max(built, key=lambda index: index.stat().st_mtime).parent


def alone(trace: Mapping[str, Any]) -> str:
    """An HTML page that plays a trace without a server. Raises RequestError where the page was not built."""
    page = page_folder() / "alone.html"
    if not page.exists():
        raise RequestError(f"there is no page that plays alone in this installation: {why_no_page(build_notes())}")
    values = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")  # nothing in it ends the element
    return page.read_text(encoding="utf-8").replace(SLOT, SLOT + values, 1)


def framed(page: str, height: int = HEIGHT) -> str:
    """A page as an element of another page, such as a notebook, in a sandbox that hides the other page from it."""
    style = f"width: 100%; height: {height}px; border: 0"
    source = html.escape(page)
    return f'<iframe sandbox="allow-scripts allow-downloads" style="{style}" srcdoc="{source}"></iframe>'
