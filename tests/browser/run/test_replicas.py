"""The page of a server of replicas: rooms and texts as the server has them, and a text whose replica is killed."""

import json
import os
import signal
import threading

import httpx2

from tests.browser.conftest import HANGS, Explored
from tests.browser.looks import findings
from tests.cluster.test_cluster import served

TOKENS, SEEN = 900, 20  # of the text; chunks after which the replicas are held
PARTS = """() => [...document.querySelectorAll('.ways tbody tr')].map((row) => ({
  text: row.dataset.text, ended: row.dataset.ended === 'true',
  parts: [...row.querySelectorAll('.way-parts li')].map(({ dataset: { room, name, since }, textContent, classList }) =>
    ({ room: +room, name, since: +since, said: textContent, died: classList.contains('died') })),
}))"""


def completion(url, replies, processes=(), held=None):
    """A streamed text of TOKENS tokens. processes: stopped when SEEN chunks of it are here; then `held` is set."""
    body = {"model": "stories", "prompt": "Once upon a time", "seed": 3, "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"stream": True, "return_timings": True}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=HANGS / 1000) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                replies.append(json.loads(line.removeprefix("data: ")))
                if processes and len(replies) == SEEN:
                    for process in processes:
                        os.kill(process, signal.SIGSTOP)
                    held.set()


def told(replies):
    """The whole text, and the timings."""
    text = "".join(choice["text"] for one in replies for choice in one["choices"])
    return text, next(one["timings"] for one in replies if one.get("timings"))


def test_a_killed_replica_and_the_room_that_goes_on(browser):
    with served(2, "--heartbeat", "3600") as server:
        context = browser.new_context(reduced_motion="reduce")
        page = Explored(context.new_page(), server.url).open()
        page.until_state("empty")
        page.until("document.querySelectorAll('.room.taking').length === 2")
        assert "2 of 2 replicas take texts" in page.tab.locator(".panel-result").inner_text()
        stats = page.stats()
        fixed = page.tab.locator(".run, .presets button, .cache-switch button, .play")
        assert fixed.count() == 7 and all(one.is_disabled() for one in fixed.all())
        pages = str(int(server.gauge("tokenwright_pages")) // 2)
        assert stats["replica_0_pages"] == stats["replica_1_pages"] == (pages, "counted")
        assert stats["replica_0_used"] == stats["replica_1_used"] == ("0", "counted")

        replies, held = [], threading.Event()
        processes = [int(one.get_attribute("data-name")) for one in page.tab.locator(".room").all()]
        writing = threading.Thread(target=completion, args=(server.url, replies, processes, held))
        writing.start()
        assert held.wait(HANGS / 1000)
        page.until(f"document.querySelector('[data-stat$=_written]')?.dataset.value >= {SEEN // 2}")
        [row] = page.tab.evaluate(PARTS)
        [first] = row["parts"]
        os.kill(int(first["name"]), signal.SIGKILL)
        for process in processes:
            if process != int(first["name"]):
                os.kill(process, signal.SIGCONT)
        writing.join()
        page.until("document.querySelector('.ways [data-ended=true]') !== null")
        page.until("document.querySelectorAll('.room.taking').length === 2")

        whole, timings = told(replies)
        assert timings["moves"] == 1
        [row] = page.tab.evaluate(PARTS)
        before, after = row["parts"]
        assert before["died"] and not after["died"] and before["room"] == 1 - after["room"]
        assert before["name"] == first["name"] != after["name"]
        assert before["since"] == 0 < SEEN // 2 <= after["since"] < TOKENS
        assert f"{after['since']} token" in before["said"] and f"{TOKENS - after['since']} token" in after["said"]
        result = page.tab.locator(".panel-result").inner_text()
        assert f"Replica {before['room'] + 1} died in text {row['text']}" in result
        assert f"went on after its token {after['since']}." in result
        stats = page.stats()
        assert stats[f"text_{row['text']}_written"][0] == str(TOKENS)
        assert (
            stats[f"replica_{before['room']}_opened"][0] == "2" and stats[f"replica_{after['room']}_opened"][0] == "1"
        )
        assert page.tab.locator(".room").nth(before["room"]).get_attribute("data-name") not in (first["name"], "")

        again = []
        completion(server.url, again)
        assert told(again)[0] == whole, "the same text without a kill"
        page.until("document.querySelectorAll('.ways [data-ended=true]').length === 2")
        assert len(page.tab.evaluate(PARTS)[0]["parts"]) == 1, "the newest text is the first row"
        assert findings(page) == {}
        assert page.errors == []
        context.close()


def test_a_server_without_replicas_has_no_such_panel(explored):
    explored.empty()
    explored.drawer("Calculator")
    names = explored.tab.get_by_role("navigation", name="Panels").get_by_role("button").all_inner_texts()
    assert "Calculator" in names and "Replicas" not in names
    assert explored.tab.evaluate("fetch('replicas').then((answer) => answer.status)") == 400
    explored.errors[:] = [error for error in explored.errors if "400" not in error]  # the browser's own line for it
