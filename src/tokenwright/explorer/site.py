"""A site of recorded runs, for any file host: the page with real runs of a model in it, and no engine behind it.

index.html, assets/    the page; its element of id "site" lists the recordings
runs/ID.json           a trace with both ways of the switch
race.json, beams.json  the engine's answers to the panels of these names
drafts.json            the same for each run, by the costs of steps and as if a row cost nothing
batch.json             the page pool after each step of a batch that it is too small for
"""

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from tokenwright.cache import group_layers
from tokenwright.engine import Engine, SamplingParams
from tokenwright.errors import RequestError
from tokenwright.explorer.batches import Known
from tokenwright.explorer.explorer import Explorer
from tokenwright.explorer.panels import beams, race
from tokenwright.explorer.panels.drafting import drafts_of
from tokenwright.explorer.panels.pages import PoolCard, snapshot
from tokenwright.explorer.panels.times import run_halves
from tokenwright.explorer.table import values_of
from tokenwright.llm.llm import LLM
from tokenwright.llm.run_trace import run_card, trace_of_card

SLOT = "</body>"  # of index.html; the recordings go before it
TITLE = "Tokenwright: what a KV cache saves"
DESCRIPTION = (
    "A language model writes, one token at a time; you see what its KV cache saves. "
    "These are recorded runs: every number was executed."
)
PREVIEW = "preview.png"


class SiteRun(NamedTuple):
    identity: str  # of its file, and in links
    name: str
    prompt: str
    tokens: int


RUNS = (
    SiteRun("story", "Story", "Once upon a time, there was a little fox who", 60),
    SiteRun("fact", "Fact", "The capital of France is", 24),
    SiteRun("code", "Code", "def fibonacci(n):\n    if n < 2:\n        return n\n    return", 40),
)
SEED = 1
RACED = 160
BEGINNING = "Once upon a time, there was a little fox who lived in the forest with his mother and his father."
BATCH = tuple(f"{BEGINNING} {end}" for end in ("One day, the fox", "At night, the fox", "Then he saw a"))
BATCH_TOKENS = 40
BATCH_PAGES = 8  # too few for all of its texts to their ends
WATCHED = (4, 3)  # the recorded weights' layer and head, as far as the model has them


def write_site(
    explorer: Explorer, page: Path, folder: Path, progress: Callable[[str], object], url: str | None = None
) -> None:
    """Record the runs on the loaded model and write the site. progress: called with each part's name.

    url: of the site, for a link's picture. Raises RequestError for a folder that has other files or cannot be written.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "runs").is_dir():
        raise RequestError(f"{folder} has files that are not of a site; name a new or empty folder")
    try:
        for name in ("runs", "assets"):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(parents=True)
        for file in (page / "assets").iterdir():
            shutil.copyfile(file, folder / "assets" / file.name)
        for name in (PREVIEW, "licenses.md"):
            shutil.copyfile(page / name, folder / name)
        for wanted in RUNS:
            progress(wanted.name)
            _write(folder / "runs" / f"{wanted.identity}.json", recorded(explorer, wanted))
        for name, answer in PARTS:
            progress(name)
            _write(folder / f"{name}.json", answer(explorer))
        index = _index((page / "index.html").read_text(encoding="utf-8"), url)
        (folder / "index.html").write_text(index, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"the site cannot be written to {folder}: {error.strerror}") from error


def recorded(explorer: Explorer, wanted: SiteRun) -> dict[str, Any]:
    llm = explorer.llm
    config = llm.config
    layer, head = (min(at, most - 1) for at, most in zip(WATCHED, (config.layers, config.heads), strict=True))
    with llm.run(wanted.prompt, max_tokens=wanted.tokens, seed=SEED, layer=layer, head=head) as run:
        while not run.ended:
            run.step()
        *_, halves = run_halves(run)
        card = run_card(llm.llm_engine.local("run"), run, explorer.name, wanted.prompt)
        return trace_of_card(llm.llm_engine.local("run"), run, card, halves or ())


def recorded_race(explorer: Explorer) -> dict[str, Any]:
    first = RUNS[0]
    wanted = race.NewRace(prompt=first.prompt, max_tokens=RACED, seed=SEED)
    events = race.race(explorer, wanted)
    messages = [values_of(message) for message in events.messages]
    events.close()
    tokens = [asdict(card) for card in explorer.looks(explorer.llm.tokenizer.encode(first.prompt))]
    return {"prompt": first.prompt, "tokens": tokens, "messages": messages}


def recorded_beams(explorer: Explorer) -> dict[str, Any]:
    wanted = beams.Search(prompt=RUNS[0].prompt, max_tokens=14)
    *_, card = beams.beams(explorer, wanted, secrets.token_hex(8))
    return {**values_of(card)}


def recorded_batch(explorer: Explorer) -> dict[str, Any]:
    """A small engine's pool after each step of a batch: texts share pages, and the youngest loses its own."""
    params = SamplingParams(temperature=0.0, max_tokens=BATCH_TOKENS)
    with LLM(explorer.llm.loaded, pages=BATCH_PAGES) as llm:
        layers = group_layers(llm.specs)
        requests = [llm.prepare(prompt, params) for prompt in BATCH]

        def play(engine: Engine) -> list[PoolCard]:
            sequences = [engine.submit(request) for request in requests]
            read = [len(sequence.tokens) for sequence in sequences]

            def look() -> PoolCard:
                texts = [llm.tokenizer.decode(one.tokens[n:]) for one, n in zip(sequences, read, strict=True)]
                found = enumerate(zip(sequences, BATCH, texts, strict=True))
                return snapshot(engine, layers, [Known(one, "batch", n, *said) for n, (one, *said) in found])

            looks = [look()]
            while engine.busy:
                engine.step()
                looks.append(look())
            return looks

        return {"prompts": BATCH, "looks": [asdict(card) for card in llm.inspect(play)]}


def recorded_drafts(explorer: Explorer) -> dict[str, Any]:
    costs, found = explorer.costs, {}
    for wanted in RUNS:
        with explorer.llm.run(wanted.prompt, max_tokens=wanted.tokens, seed=SEED) as run:
            while not run.ended:
                run.step()
            found[wanted.identity] = [asdict(drafts_of(run, costs, free=free)) for free in (False, True)]
    return found


PARTS: tuple[tuple[str, Callable[[Explorer], Mapping[str, Any]]], ...] = (
    ("race", recorded_race),
    ("beams", recorded_beams),
    ("drafts", recorded_drafts),
    ("batch", recorded_batch),
)


def _index(page: str, url: str | None) -> str:
    runs = [{"id": run.identity, "name": run.name, "prompt": run.prompt} for run in RUNS]
    values = json.dumps({"runs": runs}).replace("<", "\\u003c")  # nothing in it ends the element
    meta = {"og:title": TITLE, "og:description": DESCRIPTION, "og:image": PREVIEW, "og:type": "website"}
    if url is not None:  # links need the picture's whole address
        meta |= {"og:url": url, "og:image": f"{url.rstrip('/')}/{PREVIEW}"}
    heads = "".join(f'<meta property="{name}" content="{escape(value)}" />' for name, value in meta.items())
    card = '<meta name="twitter:card" content="summary_large_image" />'
    page = page.replace("</head>", f"{heads}{card}</head>", 1)
    return page.replace(SLOT, f'<script type="application/json" id="site">{values}</script>{SLOT}', 1)


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
