"""A class over HTTP: a teacher's scene, pupils' answers, and clients that mean harm."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serve.conftest import served
from tokenwright.explorer import room

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
