"""A server that is killed in the middle of a run: the page says so, and goes on when the server is back."""

import socket
import subprocess
import sys
import time
from contextlib import contextmanager

from tests.browser.conftest import SIZE, Explored
from tests.browser.served import Server, load
from tests.browser.stage.test_figures import PROMPT
from tests.processes import running

TOKENS = 24


@contextmanager
def explorer(port):
    """`tokenwright explore` as a process of its own, which is listening."""
    command = [sys.executable, "-m", "tokenwright", "explore", "--no-browser", "--port", str(port)]
    with running(command, stderr=subprocess.PIPE, text=True) as process:
        assert "http://127.0.0.1" in process.stderr.readline()
        yield process


def test_a_killed_server_is_told_and_costs_no_step(browser):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = browser.new_context(viewport=SIZE, reduced_motion="reduce")
    page = Explored(context.new_page(), f"http://127.0.0.1:{port}")
    with explorer(port) as process:
        page.run(PROMPT, TOKENS, renderer="2d", stop=1)
        page.pace(0.25, keys=16)
        page.press("Space")
        page.until("window.__explorer.state.steps > 2")
        before = page.state["ids"]
        process.kill()
        began = time.monotonic()
        page.until_state("disconnected")
        # Told and not asserted: no test has a time limit.
        print(f"disconnected was shown {time.monotonic() - began:.2f} s after the server was killed")
        assert "what was written stays" in page.tab.locator(".banner").inner_text().lower()
    back = Server(load, port=port)
    try:
        page.pace(None)
        page.until_state("done")
        state = page.state
        [whole] = back.llm.generate(PROMPT, back.llm.sampling(temperature=0.7, seed=1, max_tokens=TOKENS))
    finally:
        back.stop()
    page.settle()
    assert f"Stopped at {TOKENS} tokens" in page.tab.locator(".result").inner_text(), "the card is about the whole run"
    prompt = len(state["ids"]) - state["steps"]
    assert state["ids"][: len(before)] == before
    assert state["ids"][prompt:] == list(whole.token_ids), "no token twice, none missing"
    context.close()
