"""A class over HTTP: a teacher's scene, pupils' answers, and clients that mean harm."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import httpx2
import pytest
from websockets.sync.client import connect

from tests.serve.conftest import served
from tests.serve.live import HANGS, live
from tokenwright.explorer import room
from tokenwright.explorer.player import MOST_LIVE
from tokenwright.serve.explorer.routes import MOST_WAITING
from tokenwright.trace.frame_codec import unpack

TEACHER = {"secret": "0123456789abcdef", "scene": "loop"}


@pytest.fixture
def client(tiny):
    with served(tiny, pages=16) as (client, _):
        yield client


def pupil(number, *answers, solved=0):
    told = [{"scene": scene, "text": text, "right": right} for scene, text, right in answers]
    return {"identity": f"{number:032x}", "name": f"pupil {number}", "solved": solved, "answers": told}


def test_a_class_of_thirty(client):
    """Pupils follow the scene, none sees another's answers, and what is said twice counts once."""
    assert "no room is open" in client.post("/room/pupil", json=pupil(1)).json()["error"]["message"]
    client.post("/room/teacher", json=TEACHER)
    with ThreadPoolExecutor(8) as threads:
        said = [pupil(n, ("loop", str(n % 3), n % 3 == 1), solved=n % 5) for n in range(30)] * 3
        replies = list(threads.map(lambda body: client.post("/room/pupil", json=body).json(), said))
    assert replies == [{"scene": "loop"}] * 90
    seen = client.post("/room/teacher", json=TEACHER | {"scene": "kv"}).json()
    assert sorted(seen, key=lambda one: one["identity"]) == said[:30]
    assert client.post("/room/pupil", json=said[0]).json()["scene"] == "kv"
    assert client.post("/room/teacher", json=TEACHER | {"fresh": True}).json() == []


def test_who_means_harm_gets_little(client, monkeypatch):
    """No other teacher takes the room, it has a size, and so has what a pupil says."""
    client.post("/room/teacher", json=TEACHER)
    other = TEACHER | {"secret": "f" * 16}
    refused = client.post("/room/teacher", json=other | {"fresh": True})
    assert refused.status_code == 429 and "another teacher" in refused.json()["error"]["message"]
    answers = [client.post("/room/pupil", json=pupil(n)).status_code for n in range(room.MOST_PUPILS + 3)]
    assert answers == [200] * room.MOST_PUPILS + [429] * 3
    assert client.post("/room/pupil", json=pupil(0, solved=3)).status_code == 200, "who is in stays in"
    for wrong in (
        {"name": "x" * 25},
        {"name": ""},
        {"solved": True},
        {"solved": 10**9},
        {"answers": [{"scene": "loop", "text": "x" * 41, "right": True}]},
        {"answers": pupil(1, *[("loop", "1", True)] * 33)["answers"]},
        {"scene": "kv"},
    ):
        assert client.post("/room/pupil", json=pupil(0) | wrong).status_code == 400, wrong
    assert client.post("/room/teacher", json=TEACHER | {"secret": "ä" * 16}).status_code == 429
    half = json.dumps(TEACHER | {"secret": "\ud800" * 16})  # half a character, which JSON may escape
    assert client.post("/room/teacher", content=half, headers={"content-type": "application/json"}).status_code in (
        400,
        429,
    )
    monkeypatch.setattr(room, "IDLE_S", 0)
    assert client.post("/room/teacher", json=other).json() == [], "a room that was left is free"


def test_thirty_pages_of_a_class_at_once():
    """Each does what a page does: it joins, goes with the teacher's scenes through a run of its own and looks into its
    attention, lets the engine check its answers, and says them in the room. None is refused, all have the same text."""
    assert min(MOST_LIVE, MOST_WAITING) >= room.MOST_PUPILS, "a room that is full has a run and a check for each"
    scenes, steps, every = ("loop", "decode", "newest"), 8, 30
    together = Barrier(every + 1, timeout=HANGS)  # pages and the teacher
    day = {"prompt": "The next day is bright", "max_tokens": 24, "temperature": 0, "seed": 1, "ignore_eos": True}
    with live("stories", trace=True, pages=1024) as server:

        def page(number):
            written, said = [], []
            with httpx2.Client(base_url=server.url, timeout=HANGS) as client:
                assert client.get("/model").status_code == client.get("/learn").status_code == 200
                run = client.post("/runs", json=day)
                assert run.status_code == 201, run.text
                run = run.json()["run"]
                with connect(f"ws://{server.address}/runs/{run}/stream?since_step=0", origin=server.url) as socket:
                    for scene in scenes:
                        together.wait()
                        assert client.post("/room/pupil", json=pupil(number, *said)).json() == {"scene": scene}
                        socket.send(json.dumps({"op": "cache", "on": scene != "newest"}))
                        while len(written) < steps * (1 + len(said)):
                            socket.send(json.dumps({"op": "step"}))
                            while isinstance(got := socket.recv(HANGS), str):
                                pass
                            socket.send(json.dumps({"op": "ack", "step": (frame := unpack(got)).step}))
                            if frame.token is not None:  # else it was a part of a step, beside those of others
                                written.append(frame.token)
                        row = client.get(f"/runs/{run}/attention?step={frame.step}&layer=1&head=0")
                        assert row.status_code == 200, row.text
                        kept = {"level": "cache alone", "kv_heads": "8", "full_layers": 32, "window": 1}
                        right = number % 2 == 0
                        check = client.post(
                            "/check/fit", json={"answer": kept | {"kv": "int4" if right else "float16"}}
                        )
                        assert check.status_code == 200 and check.json()["passed"] is right, check.text
                        said.append((scene, str(number % 3), right))
                        client.post("/room/pupil", json=pupil(number, *said, solved=len(said))).raise_for_status()
                        together.wait()
            return written, said

        with ThreadPoolExecutor(every) as threads, httpx2.Client(base_url=server.url, timeout=HANGS) as client:
            pages = [threads.submit(page, number) for number in range(every)]
            for scene in scenes:
                client.post("/room/teacher", json=TEACHER | {"scene": scene}).raise_for_status()
                together.wait()
                together.wait()
                seen = client.post("/room/teacher", json=TEACHER | {"scene": scene}).json()
                assert len(seen) == every
            texts, answers = zip(*(one.result(HANGS) for one in pages), strict=True)
        assert len(texts[0]) == len(scenes) * steps and set(map(tuple, texts)) == {tuple(texts[0])}
        shown = {one["identity"]: [tuple(answer.values()) for answer in one["answers"]] for one in seen}
        assert shown == {f"{number:032x}": said for number, said in enumerate(answers)}
        assert {one["solved"] for one in seen} == {len(scenes)}
