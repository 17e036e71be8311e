"""The static site: what it records is what the engine does again, and the page finds it."""

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.trace.frames import from_json
from tokenwright import LLM, RequestError
from tokenwright.explorer import site
from tokenwright.explorer.explorer import Explorer, OpenedModel
from tokenwright.trace.frame_codec import NUMBERS, as_json
from tokenwright.trace.wire import Source


@pytest.fixture(scope="module")
def explorer() -> Iterator[Explorer]:
    with LLM("stories", trace=True) as llm:
        explorer = Explorer(OpenedModel("stories", llm))
        yield explorer
        explorer.close()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page as the build makes it, in small."""
    folder = tmp_path / "page"
    (folder / "assets").mkdir(parents=True)
    (folder / "assets" / "index.js").write_text("page()")
    (folder / "index.html").write_text("<html><head><title>x</title></head><body><div></div></body></html>")
    for name in (site.PREVIEW, "licenses.md"):
        (folder / name).write_text(name)
    return folder


def test_every_recorded_count_is_the_engines(
    explorer: Explorer, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "RUNS", [run._replace(tokens=6) for run in site.RUNS])
    monkeypatch.setattr(site, "RACED", 6)
    folder, told = tmp_path / "site", list[str]()
    site.write_site(explorer, page, folder, told.append)
    assert told == ["Story", "Fact", "Code", "race", "beams", "drafts", "batch"]
    counted = [name for name, wire in NUMBERS.items() if wire.source is not Source.MEASURED]
    for wanted in site.RUNS:
        values = json.loads((folder / "runs" / f"{wanted.identity}.json").read_text())
        [half] = values["halves"]
        assert values["run"]["prompt"] == wanted.prompt and not half["cache"]
        for cache, steps in ((True, values["steps"]), (False, half["steps"])):
            run = explorer.llm.run(wanted.prompt, max_tokens=6, seed=site.SEED, layer=4, head=3, cache=cache)
            for step in steps:
                [again] = run.step()
                kept, fresh = from_json(step), from_json(as_json(again))
                assert {name: getattr(kept, name) for name in counted} == {
                    name: getattr(fresh, name) for name in counted
                }
            run.close()
    race = json.loads((folder / "race.json").read_text())
    steps = [message for message in race["messages"] if message["kind"] == "step"]
    assert steps[-1]["sums"]["equal"] == len(steps) == 6
    beams = json.loads((folder / "beams.json").read_text())
    assert beams["best_sum"] >= beams["greedy_sum"]

    drafts = json.loads((folder / "drafts.json").read_text())
    for wanted in site.RUNS:
        trace = json.loads((folder / "runs" / f"{wanted.identity}.json").read_text())
        for card, free in zip(drafts[wanted.identity], (False, True), strict=True):
            ids = [token["id"] for step in card["each"] for token in step["written"]]
            assert ids == [step["token"] for step in trace["steps"]] and card["free"] == free

    check_batch(explorer, json.loads((folder / "batch.json").read_text()))

    index = (folder / "index.html").read_text()
    found = re.search(r'<script type="application/json" id="site">(.*?)</script>', index)
    assert found and [run["id"] for run in json.loads(found[1])["runs"]] == ["story", "fact", "code"]
    assert f'<meta property="og:image" content="{site.PREVIEW}" />' in unescape(index)
    assert (folder / site.PREVIEW).exists() and (folder / "assets" / "index.js").exists()
    url = "https://example.org/fox"
    site.write_site(explorer, page, folder, told.append, f"{url}/")  # again, over the old one
    index = unescape((folder / "index.html").read_text())
    assert f'<meta property="og:image" content="{url}/{site.PREVIEW}" />' in index and f'content="{url}/"' in index


def check_batch(explorer: Explorer, batch: dict[str, Any]) -> None:
    """Its pool is too small for it: a text gives its pages away, and all write what they write alone."""
    first, *_, last = batch["looks"]
    assert [one["prompt"] for one in first["sequences"]] == list(site.BATCH) == batch["prompts"]
    most = max(sum(one["preemptions"] for one in look["sequences"]) for look in batch["looks"])
    assert most == sum(one["preemptions"] for one in last["sequences"]) > 0
    assert any(look["groups"][0]["shared"] > 0 for look in batch["looks"])
    for look in batch["looks"]:
        [group] = look["groups"]
        assert group["pages"] == site.BATCH_PAGES == group["used"] + group["cached"] + group["free"]
        assert sum(one["pages"] for one in look["sequences"]) - group["used"] <= group["shared"] * len(site.BATCH)
    for prompt, one in zip(site.BATCH, last["sequences"], strict=True):
        params = explorer.llm.sampling(temperature=0.0, max_tokens=site.BATCH_TOKENS)
        [alone] = explorer.llm.generate([prompt], params)
        assert (one["state"], one["text"]) == ("finished", alone.text)
        assert one["forwarded"] >= one["tokens"] - one["reused"] - 1


def test_a_folder_of_something_else_is_left_alone(explorer: Explorer, page: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(RequestError, match="not of a site"):
        site.write_site(explorer, page, tmp_path / "mine", print)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be written"):
        site.write_site(explorer, page, tmp_path / "file", print)
