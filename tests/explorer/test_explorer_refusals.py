"""What is wrong with a request of the page is said in our words, with the field: in bodies, queries and commands."""

import pytest
from starlette.websockets import WebSocketDisconnect

from tests.serve.conftest import HOST, begin, served


@pytest.fixture(scope="module")
def door(tiny):
    with served(tiny, pages=64) as (client, _):
        yield client


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/runs", {"prompt": 3}, "prompt must be text, not 3"),
        ("/runs", {"prompt": "a", "ids": [1, "2"]}, "ids.1 must be a whole number, not '2'"),
        ("/runs", {"prompt": "a", "tempreature": 1}, "tempreature: this API has no such field; remove it"),
        ("/runs", {}, "prompt: this field is required"),
        ("/runs", [], "the body must be an object, not a list"),
        ("/runs", {"prompt": "a", "seed": -1}, "seed must be at least 0, not -1"),
        ("/runs/x/fork", {"step": True}, "step must be a whole number, not true"),
        ("/runs/x/lab", {"kv": 8}, "kv must be text, not 8"),
        ("/race", {"prompt": "a", "budget_s": 1e9}, "budget_s must be at most 120, not 1000000000.0"),
        ("/beams", {"prompt": "a", "beams": 1}, "beams must be at least 2, not 1"),
        ("/calculate", {"batch": 0.5}, "batch must be a whole number, not 0.5"),
        ("/batches", {"prompts": []}, "prompts: it has fewer than 1 entries"),
        ("/batches/x/write", {"tokens": None}, "tokens must be a whole number, not null"),
        ("/check/x", {"answer": {str(n): 1 for n in range(17)}}, "answer: it has more than 16 entries"),
        ("/learn/score", {"ids": [1]}, "ids: it has fewer than 2 entries"),
    ],
)
def test_bodies(door, path, body, said):
    answer = door.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["kind"]) == (400, "bad_request")
    assert answer.json()["error"]["message"].startswith(said)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("step=a&layer=0&head=0", "step must be a whole number, not 'a'"),
        ("step=0&layer=0", "head: this field is required"),
        ("step=1.5&layer=0&head=0", "step must be a whole number, not '1.5'"),
        (f"step={'9' * 5000}&layer=0&head=0", "step must be a whole number, not '999"),
    ],
)
def test_queries(door, query, said):
    answer = door.get(f"/runs/x/attention?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ('{"op": "fly"}', "op 'fly' is not supported; it is "),
        ('{"step": 1}', "the field 'op' is required in it"),
        ('{"op": "watch", "layer": "x", "head": 0}', "layer must be a whole number, not 'x'"),
        ('{"op": "play", "pace": 0}', "pace must be at least 0.01, not 0"),
        ('{"op": "step", "more": 1}', "more: this API has no such field"),
        ("fly", "a command is a JSON object"),
        ("[" * 10**5, "a command is a JSON object"),
        ('{"op": "' + "ü" * 200 + '"}', "op 'üü"),  # a closing has room for 123 bytes
    ],
)
def test_commands(door, command, said):
    run = begin(door)["run"]
    with door.websocket_connect(f"ws://{HOST}/runs/{run}/stream") as socket:
        socket.send_text(command)
        with pytest.raises(WebSocketDisconnect) as closed:
            all(iter(socket.receive_json, None))
    assert closed.value.code == 4400
    assert closed.value.reason.startswith(said)
    assert len(closed.value.reason.encode()) <= 123
    assert door.delete(f"/runs/{run}").status_code == 204
