"""A run as a page: whole, playable, and unable to touch the notebook that shows it."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokenwright
from tokenwright import LLM, RequestError
from tokenwright.trace.frame_codec import as_json

PROMPT = 'Once </script><script>bad()</script> "quoted" & more'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("stories", trace=True, pages=64) as llm:
        yield llm


def inside(page: str) -> dict[str, object]:
    """The trace in a page, as a browser reads it: up to the first end of an element."""
    found = re.search(r'<script type="application/json" id="trace">(.*?)</script>', page, re.DOTALL)
    assert found
    values: dict[str, object] = json.loads(found[1])
    return values


def test_a_page_has_the_whole_run_and_a_notebook_frames_it(llm: LLM, tmp_path: Path) -> None:
    run = llm.run(PROMPT, max_tokens=4, seed=1, ignore_eos=True)
    run.step()
    assert inside(tokenwright.show(run).html)["state"]["state"] == "paused"  # type: ignore[index]
    while not run.ended:
        run.step()
    page = tokenwright.show(run, height=500)
    trace = inside(page.html)
    assert trace == json.loads(json.dumps(run.trace()))
    assert trace["steps"] == json.loads(json.dumps([as_json(frame) for frame in run.frames]))
    assert trace["run"]["prompt"].endswith(PROMPT)  # type: ignore[index]
    assert "default-src 'none'" in page.html, "it can fetch nothing"
    assert page.save(tmp_path / "run.html").read_text(encoding="utf-8") == page.html

    framed = page._repr_html_()
    source = re.fullmatch(r'<iframe sandbox="(.*?)" style="(.*?)" srcdoc="([^"]*)"></iframe>', framed)
    assert source, "nothing of the page ends the attribute"
    assert html.unescape(source[3]) == page.html
    assert "allow-same-origin" not in source[1], "it would see the notebook"
    assert "height: 500px" in source[2]
    assert html.unescape(run._repr_html_()).count(PROMPT.partition(" ")[0]) > 0


def test_what_cannot_be_shown_is_refused(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="show takes a run of"):
        tokenwright.show("Once")  # type: ignore[arg-type]
    run = llm.run("Once", max_tokens=2)
    with pytest.raises(RequestError, match="height"):
        tokenwright.show(run, height=10)
    page = tokenwright.show(run)
    with pytest.raises(RequestError, match="cannot be written to"):
        page.save(tmp_path / "none" / "run.html")
    monkeypatch.setattr("tokenwright.llm.web_page.page_folder", lambda: tmp_path)
    with pytest.raises(RequestError, match="no page that plays alone"):
        run._repr_html_()
    run.close()
