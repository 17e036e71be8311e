"""The page's requests answered without a server: by the table, a turn at a time, as a worker of the page does."""

import json
from itertools import count

import pytest

from tokenwright import LLM
from tokenwright.explorer.explorer import Explorer, OpenedModel
from tokenwright.trace.frame_codec import unpack
from web.python.page_engine import PageEngine

RUN = {"prompt": "The blue whale said", "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}


class Page:
    """A page: what it was told, by the keys of its requests."""

    def __init__(self, llm):
        self.told = {}
        self.engine = PageEngine(Explorer(OpenedModel("stories", llm)), self.hear)
        self.keys = count(1)

    def hear(self, kind, key, *what):
        self.told.setdefault(key, []).append((kind, *what))

    def ask(self, method, path, body=None):
        """The status and the content of an answer, once it is whole."""
        key = next(self.keys)
        self.engine.ask(key, method, path, "" if body is None else json.dumps(body))
        for _ in range(2000):
            if self.told.get(key, [()])[-1][0:1] == ("end",):
                break
            self.engine.turn()
        (_, status, kind), *parts, _ = self.told[key]
        content = [one for _, one in parts]
        if kind == "application/json":
            return status, json.loads("".join(content)) if content else None
        return status, content

    def watch(self, run, since=0):
        key = next(self.keys)
        self.engine.open(key, f"runs/{run}/stream?since_step={since}")
        return key

    def messages(self, key):
        return [json.loads(one) for _, one in self.told[key] if isinstance(one, str)]

    def frames(self, key):
        return [unpack(one) for kind, one in self.told[key] if kind == "message" and isinstance(one, bytes)]


@pytest.fixture
def page():
    with LLM("stories", threads=0, trace=True, pages=200) as llm:
        yield Page(llm)


def play(page, key, switch=()):
    """Play a run to its end; the cache goes off and on before these steps."""
    page.engine.say(key, json.dumps({"op": "play", "pace": None}))
    for _ in range(200):
        page.engine.turn()
        shown = len(page.frames(key))
        page.engine.say(key, json.dumps({"op": "ack", "step": shown - 1}))
        if shown in switch:
            page.engine.say(key, json.dumps({"op": "cache", "on": shown == switch[-1]}))
        if any(one.get("state") == "done" for one in page.messages(key)):
            return
    raise AssertionError("the run did not end")


def test_a_run_is_played_and_looked_at(page):
    assert page.ask("GET", "status")[1]["phase"] == "ready"
    assert page.ask("GET", "model")[1]["layers"] == 6
    status, card = page.ask("POST", "runs", RUN)
    assert status == 201
    key = page.watch(card["run"])
    play(page, key, switch=(6, 10))
    frames = page.frames(key)
    with LLM("stories", trace=True, pages=200) as llm, llm.run(RUN["prompt"], temperature=0.0, max_tokens=16) as run:
        while not run.ended:
            run.step()
        assert [frame.token for frame in frames] == [frame.token for frame in run.frames]
    work = [frame.layer_tokens for frame in frames[1:]]
    assert min(work) == 6 < max(work), "without the cache each step computes all tokens"
    for path in (
        "attention?step=5&layer=2&head=1",
        "heads?step=5",
        "sampler?step=5",
        "branches",
        "trace.json",
        "times",
    ):
        assert page.ask("GET", f"runs/{card['run']}/{path}")[0] == 200, path
    assert page.ask("DELETE", f"runs/{card['run']}") == (204, None)
    assert page.ask("GET", f"runs/{card['run']}")[1]["error"]["kind"] == "gone"


def test_a_race_comes_as_a_stream_and_a_search_in_parts(page):
    status, lines = page.ask("POST", "race", {"prompt": "Once", "max_tokens": 4, "seed": 1, "every": 1, "budget_s": 20})
    assert status == 200
    assert [line[:6] for line in lines] == ["data: "] * len(lines)
    assert len(lines) == 6, "the card, four steps and the end"
    assert page.ask("POST", "beams", {"prompt": "Once", "max_tokens": 4})[1]["beams"] == 4
    assert page.ask("POST", "tokenize", {"text": "Once upon"})[1]["tokens"][1]["text"] == "Once"


def test_a_batch_goes_on_between_the_page_s_messages(page):
    _, batch = page.ask("POST", "batches", {"prompts": ["Once", "The"], "max_tokens": 5})
    page.ask("POST", f"batches/{batch['batch']}/write", {"tokens": 5})
    for _ in range(30):
        page.engine.turn()
    assert page.ask("GET", "pages")[0] == 200
    assert not page.engine._explorer.llm.llm_engine.loop.due


@pytest.mark.parametrize(
    ("method", "path", "body", "kind"),
    [
        ("GET", "nowhere", None, "bad_request"),
        ("POST", "runs", {"prompt": 1}, "bad_request"),
        ("POST", "runs", {"prompt": "a" * 9000}, "context_overflow"),
        ("GET", "runs/none/heads?step=1", None, "gone"),
        ("POST", "check/none", {"answer": {}}, "bad_request"),
    ],
)
def test_refusals_have_the_page_s_kinds(page, method, path, body, kind):
    status, content = page.ask(method, path, body)
    assert status >= 400
    assert content["error"]["kind"] == kind
    assert content["error"]["message"]


def test_what_the_page_leaves_ends(page):
    _, card = page.ask("POST", "runs", RUN)
    key = page.watch(card["run"])
    page.engine.say(key, json.dumps({"op": "play", "pace": None}))
    page.engine.turn()
    page.engine.leave(key)
    told = len(page.told[key])
    for _ in range(5):
        page.engine.turn()
    assert len(page.told[key]) == told
    assert page.ask("GET", f"runs/{card['run']}")[1]["state"] == "paused"
    race = next(page.keys)
    page.engine.ask(race, "POST", "race", json.dumps({"prompt": "Once", "max_tokens": 50, "every": 1, "budget_s": 20}))
    page.engine.turn()
    page.engine.leave(race)
    assert page.ask("POST", "race", {"prompt": "Once", "max_tokens": 1, "every": 1, "budget_s": 20})[0] == 200
    lost = page.watch("none")
    assert page.told[lost] == [("closed", 4404)]
    bad = page.watch(card["run"])
    page.engine.say(bad, "nonsense")
    assert page.told[bad][-1] == ("closed", 4400)
