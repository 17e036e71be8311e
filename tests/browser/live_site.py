"""The live page from a plain file server, the engine in its worker. `scripts/wasm` builds the site and runs this."""

import os
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.browser.conftest import SIZE, Explored
from tests.browser.hosted import hosted
from tokenwright import LLM

PROMPT, TOKENS = "The blue whale said", 16
LINK = f"#p={quote(PROMPT)}&seed=1&T={{temperature}}&n={TOKENS}&pace=engine"


@pytest.fixture(scope="module")
def live(browser):
    """A visit. `away` ends the host; `asked` are the addresses of all requests, also those of the service worker."""
    with ExitStack() as stack:
        address = stack.enter_context(hosted(Path(os.environ["TOKENWRIGHT_SITE"])))
        context = browser.new_context(viewport=SIZE, color_scheme="dark", reduced_motion="reduce")
        explored = Explored(context.new_page(), address)
        explored.away, asked = stack.close, []
        context.on("request", lambda request: asked.append(request.url))
        yield explored
        context.close()
        assert explored.errors == []
        assert any("/engine/" in url for url in asked), "the worker's requests are seen"
        strange = [url for url in asked if not url.startswith((address, "data:", "blob:"))]
        assert not strange, "the page asked another host"


def written(live, where):
    """The ids of a whole run, from a fresh page."""
    live.tab.goto("about:blank")
    live.open(where)
    live.until("__explorer.state.origin === 'live'")
    live.until_state("done")
    return live.state["ids"]


def expected(temperature):
    with LLM("stories") as llm:
        [done] = llm.generate(PROMPT, temperature=temperature, seed=1, max_tokens=TOKENS)
        return [*llm.tokenizer.encode(PROMPT), *done.token_ids]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_texts_are_the_server_s_with_the_cache_and_without(live, temperature):
    ids = expected(temperature)
    assert written(live, LINK.format(temperature=temperature)) == ids
    if temperature:
        assert written(live, LINK.format(temperature=temperature) + "&cache=off") == ids


def test_a_later_visit_needs_no_network(live):
    """The service worker and the worker's cache have all files."""
    live.until("navigator.serviceWorker.controller !== null")
    live.away()
    start = time.perf_counter()
    assert written(live, LINK.format(temperature=0)) == expected(0)
    print(f"live from the cache, and {TOKENS} tokens written, after {time.perf_counter() - start:.1f} s")
