"""Panel Conversations on an agent's session: the counts of the server, the place that differs, and one key only."""

import httpx

from tests.browser.conftest import SIZE, Explored
from tests.browser.looks import findings
from tests.browser.served import serving

KEYS = ("alpha-0123456789abcdef", "beta-0123456789abcdef")
STORY = "Tell me of the fox, who lived in the forest with his mother, and of the bear. "


def answer(server, key, talk, **more):
    """The model's answer, which joins the conversation, and the usage of the reply."""
    body = {"messages": talk, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    headers = {"Authorization": f"Bearer {key}"}
    reply = httpx.post(f"{server.address}/v1/chat/completions", json=body, headers=headers, timeout=100)
    assert reply.status_code == 200, reply.text
    reply = reply.json()
    talk.append(reply["choices"][0]["message"])
    return reply["usage"]


def session(server, key, secret):
    """A session with a system message that stays pinned, whose third turn edits the first message."""
    pinned = {"type": "text", "text": STORY * 3, "prompt_cache_breakpoint": {"mode": "explicit"}}
    talk, usages = [{"role": "system", "content": [pinned]}], []
    for turn in range(3):
        talk.append({"role": "user", "content": f"{secret} and the owl, number {turn}."})
        if turn == 2:
            talk[1] = {"role": "user", "content": f"{secret} and the hare, who is new."}
        usages.append(answer(server, key, talk, prompt_cache_key=f"session of {secret}"))
    return usages


def test_the_turns_of_a_session(browser, server):
    with serving(server.load, keys=KEYS) as own:
        usages = session(own, KEYS[0], "Rumpelstiltskin")
        session(own, KEYS[1], "Bluebeard")
        context = browser.new_context(
            viewport=SIZE,
            color_scheme="dark",
            reduced_motion="reduce",
            extra_http_headers={"authorization": f"Bearer {KEYS[0]}"},
        )
        page = Explored(context.new_page(), own.address).empty()
        page.drawer("Conversations")
        page.until("document.querySelectorAll('.talk-turns > li').length === 3")
        stats = page.stats()
        for turn, usage in enumerate(usages):
            found = {part: int(stats[f"talk_0_turn_{turn}_{part}"][0]) for part in ("reused", "new", "again")}
            assert sum(found.values()) == usage["prompt_tokens"]
            assert found["reused"] == usage["prompt_tokens_details"]["cached_tokens"]
            assert bool(found["again"]) is (turn == 2)
        assert int(stats["talks_reused"][0]) == sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages)
        assert 0 < int(stats["pin_0_tokens"][0]) <= usages[0]["prompt_tokens"] and float(stats["pin_0_left"][0]) > 1700
        assert int(stats["talk_0_in_memory"][0]) == int(stats["talk_0_tokens"][0]) - 1
        cause = page.tab.locator(".talk-turns > li[data-cause=message_changed]")
        assert "an earlier message changed (message 1 (user), edited)" in cause.locator("summary").inner_text()
        cause.locator("summary").click()
        assert "owl" in cause.locator(".was").inner_text() and "hare" in cause.locator(".is").inner_text()
        assert "came again: an earlier message changed" in page.tab.locator(".panel-result").inner_text()
        whole = page.tab.content()
        assert "Rumpel" in whole and "Blue" not in whole and page.tab.locator(".talk").count() == 1
        assert findings(page, ".talk") == {}

        talk = [{"role": "user", "content": "Now of the mole, while the page looks on."}]
        answer(own, KEYS[0], talk)  # an agent works meanwhile
        page.until("document.querySelectorAll('.talk').length === 2")
        page.tab.set_viewport_size({"width": 390, "height": 800})
        page.until("document.querySelector('.talk-bar').getBoundingClientRect().right <= innerWidth")
        assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off on a phone"
        assert page.errors == []
        context.close()
