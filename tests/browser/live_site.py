"""The live page from a plain file server, the engine in its worker. `scripts/wasm` builds the site and runs this."""

import os
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.browser.conftest import SIZE, Explored
from tests.browser.test_site import hosted
from tokenwright import LLM

PROMPT, TOKENS = "The blue whale said", 16
LINK = f"#p={quote(PROMPT)}&seed=1&T={{temperature}}&n={TOKENS}&pace=engine"


@pytest.fixture(scope="module")
def live(browser):
    with hosted(Path(os.environ["TOKENWRIGHT_SITE"])) as address:
        context = browser.new_context(viewport=SIZE, color_scheme="dark", reduced_motion="reduce")
        tab, asked = context.new_page(), []
        tab.on("request", lambda request: asked.append(request.url))
        explored = Explored(tab, address)
        yield explored
        context.close()
        assert explored.errors == []
        strange = [url for url in asked if not url.startswith((address, "data:", "blob:"))]
        assert not strange, "the page asked another host"


def written(live, where):
    """The ids of a whole run, from a fresh page."""
    live.tab.goto("about:blank")
    live.open(where)
    live.until("__explorer.state.origin === 'live'")
    live.until_state("done")
    return live.state["ids"]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_texts_are_the_server_s_with_the_cache_and_without(live, temperature):
    with LLM("stories") as llm:
        [done] = llm.generate(PROMPT, temperature=temperature, seed=1, max_tokens=TOKENS)
        ids = [*llm.tokenizer.encode(PROMPT), *done.token_ids]
    assert written(live, LINK.format(temperature=temperature)) == ids
    if temperature:
        assert written(live, LINK.format(temperature=temperature) + "&cache=off") == ids
