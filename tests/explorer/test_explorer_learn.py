"""The lesson's routes: what they answer and refuse, some checks at once, and a client that goes away."""

import asyncio
import math
import threading
import time
from dataclasses import replace

import httpx2
import pytest

from tests.engines import settled
from tests.serve.live import HANGS, live
from tokenwright.decode.logits_processors import log_softmax
from tokenwright.errors import CapacityError
from tokenwright.explorer.learn import CHALLENGES
from tokenwright.explorer.learn.work import CheckWork, Stopped
from tokenwright.serve.explorer.routes import AT_ONCE, MOST_WAITING, Desk

FIT = {"level": "cache alone", "kv_heads": "8", "kv": "int4", "full_layers": 32, "window": 1}


def test_the_lesson_is_described_for_the_loaded_model(door):
    client, explorer = door
    found = client.get("/learn").json()
    assert [one["number"] for one in found["challenges"]] == list(range(1, 16))
    assert {one["id"] for one in found["challenges"]} == CHALLENGES.keys()
    target = next(one["target"] for one in found["challenges"] if one["id"] == "balance")
    assert f"{explorer.llm.weight_bytes:,}" in target
    facts = {fact["name"]: fact for one in found["facts"] for fact in one["facts"]}
    config = explorer.llm.config
    assert facts["q_numbers"]["value"] == config.layers * config.heads * config.head_size
    assert facts["Meta-Llama-3-8B 8192 1"]["value"] == 2**30 and facts["q_numbers"]["source"] == "derived"


def test_an_answer_is_checked(door):
    client, _ = door
    right = client.post("/check/fit", json={"answer": FIT}).json()
    assert right["passed"] and {fact["name"] for fact in right["facts"]} >= {"cache", "limit"}
    wrong = client.post("/check/fit", json={"answer": FIT | {"kv": "float16"}}).json()
    assert not wrong["passed"] and "fewer bits" in wrong["message"]


def test_a_text_is_scored_in_one_pass(door):
    client, explorer = door
    ids = [7, 3, 11, 5, 2]
    found = client.post("/learn/score", json={"ids": ids}).json()
    logits, _ = explorer.llm.model(ids)
    right = -log_softmax(logits)[range(4), ids[1:]]
    assert found["losses"][0] is None and len(found["tokens"]) == 5
    assert found["losses"][1:] == pytest.approx(right.tolist(), abs=1e-4)
    facts = {fact["name"]: fact["value"] for fact in found["facts"]}
    assert facts["loss"] == pytest.approx(float(right.mean()), abs=1e-4)
    assert facts["perplexity"] == pytest.approx(math.exp(facts["loss"]))
    assert facts["pass_us"] > 0 and facts["rows"] == 5


def test_a_few_checks_go_at_once_and_too_many_are_refused(door):
    """A long one holds up nobody: the others go beside it, however many they are."""
    _, explorer = door
    desk, running, most, others = Desk(explorer), [], [], threading.Event()

    def work(long):
        running.append(1)
        most.append(len(running))
        assert not long or others.wait(HANGS), "the short ones wait for the long one"
        time.sleep(0.02)
        running.pop()

    async def many():
        long = asyncio.create_task(desk.do(lambda _: work(long=True)))
        tasks = [asyncio.create_task(desk.do(lambda _: work(long=False))) for _ in range(MOST_WAITING + 2)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        others.set()
        await long
        return found

    found = asyncio.run(many())
    assert max(most) == AT_ONCE
    assert [type(one) for one in found if one is not None] == [CapacityError, CapacityError]
    assert desk.working == set()
    desk.close()


def test_a_check_whose_client_goes_away_ends_and_frees_the_next(tiny, monkeypatch):
    """Over a socket: the connection is closed in the middle, and the work is cancelled, not awaited."""
    begun, ended, works = threading.Event(), threading.Event(), []

    def endless(work: CheckWork, answer):
        works.append(work)
        begun.set()
        try:
            while True:
                work.check()
                time.sleep(0.005)
        finally:
            ended.set()

    monkeypatch.setitem(CHALLENGES, "slow", replace(CHALLENGES["fit"], check=endless))
    with live(tiny, pages=64) as server:
        with httpx2.Client(base_url=server.url, timeout=0.5) as client, pytest.raises(httpx2.TimeoutException):
            client.post("/check/slow", json={"answer": FIT})
        assert begun.wait(HANGS) and ended.wait(HANGS)
        answer = httpx2.post(f"{server.url}/check/fit", json={"answer": FIT}, timeout=HANGS)
        assert answer.json()["passed"]
        assert works[0]._cancelled
        engine = settled(server.llm)
        assert engine.pool.available == engine.pool.pages


def test_a_server_that_closes_ends_the_check(door):
    _, explorer = door
    begun, desk, found = threading.Event(), Desk(explorer), []

    def endless(work: CheckWork):
        begun.set()
        while True:
            work.check()
            time.sleep(0.005)

    def served_one():
        try:
            asyncio.run(desk.do(endless))
        except Stopped as stopped:
            found.append(stopped)

    thread = threading.Thread(target=served_one)
    thread.start()
    assert begun.wait(HANGS)
    desk.close()
    thread.join(HANGS)
    assert found and "cancelled" in str(found[0])
