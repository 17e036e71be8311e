"""What is wrong with a request of the page is said in our words, with the field: in bodies, queries and commands.

And what every request needs: a host and an origin that may ask, a path that is there, a body with bounds.
"""

import json

import pytest
from starlette.websockets import WebSocketDisconnect

from tests.engines import settled
from tests.explorer.test_explorer_chat import CONVERSATION
from tests.explorer.test_explorer_learn import FIT
from tests.serve.conftest import HOST, begin, stepped
from tests.serve.live import routes
from tokenwright.serve.llama_cpp import routes as llama_cpp
from tokenwright.serve.openai import routes as openai
from tokenwright.serve.transport.guard import MOST_BODY

AS_JSON = {"content-type": "application/json"}
BATCH = {"prompts": ["a"]}
CHAT = "/chat/prompt"


def end(door, run):
    client, explorer = door
    player = explorer.player(run)
    assert client.delete(f"/runs/{run}").status_code == 204
    player.join()


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/runs", {"prompt": 3}, "prompt must be text, not 3"),
        ("/runs", {"prompt": "a", "ids": [1, "2"]}, "ids.1 must be a whole number, not '2'"),
        ("/runs", {"prompt": "a", "tempreature": 1}, "tempreature: this API has no such field; remove it"),
        ("/runs", {}, "prompt: this field is required"),
        ("/runs", [], "the body must be an object, not a list"),
        ("/runs", {"prompt": "a", "seed": -1}, "seed must be at least 0, not -1"),
        ("/runs", {"prompt": "ab", "max_tokens": True}, "max_tokens"),
        ("/runs", {"prompt": "ab", "max_tokens": -1}, "max_tokens"),
        ("/runs", {"prompt": "ab", "top_p": 0}, "top_p"),
        ("/runs", {"prompt": "ab", "seed": 2**53}, "seed"),
        ("/runs", {"prompt": "ab", "written": [10**6]}, "token ids"),
        ("/runs", {"prompt": "ab", "layer": 99}, "layer must be from 0 to"),
        ("/runs", {"prompt": "ab", "stop": [""]}, "stop"),
        ("/runs", {"prompt": "ab", "stop": ["\udc80"]}, "UTF-8"),
        ("/runs", {"prompt": "\ud800"}, "surrogate"),
        ("/runs", {"prompt": ""}, "the prompt has no tokens"),
        ("/runs/x/fork", {"step": True}, "step must be a whole number, not true"),
        ("/runs/x/lab", {"kv": 8}, "kv must be text, not 8"),
        ("/race", {"prompt": "a", "budget_s": 1e9}, "budget_s must be at most 120, not 1000000000.0"),
        ("/beams", {"prompt": "a", "beams": 1}, "beams must be at least 2, not 1"),
        *(("/beams", {"prompt": "ab"} | one, "") for one in ({"beams": 9}, {"max_tokens": 65}, {"prompt": ""})),
        ("/beams", {"prompt": "ab", "more": 1}, "more"),
        ("/calculate", {"batch": 0.5}, "batch must be a whole number, not 0.5"),
        *(("/calculate", one, "") for one in ({"model": "none"}, {"kv": "int3"}, {"weights": "int3"}, {"sinks": 4})),
        *(("/calculate", {name: value}, name) for name, value in (("context", 0), ("more", 1))),
        ("/batches", {"prompts": []}, "prompts: it has fewer than 1 entries"),
        *(("/batches", BATCH | one, "") for one in ({"prompts": ["a"] * 7}, {"max_tokens": 257}, {"other": 1})),
        ("/batches/x/write", {"tokens": None}, "tokens must be a whole number, not null"),
        ("/check/x", {"answer": {str(n): 1 for n in range(17)}}, "answer: it has more than 16 entries"),
        ("/check/fit", {"answer": FIT | {"window": 0}}, "must be a number from 1"),
        ("/check/fit", {"answer": {name: FIT[name] for name in ("level", "kv")}}, "kv_heads is missing"),
        ("/check/fit", {"answer": FIT, "more": 1}, "more"),
        ("/check/steer", {"answer": {"prompt": "x" * 1001}}, "answer"),
        ("/learn/score", {"ids": [1]}, "ids: it has fewer than 2 entries"),
        ("/learn/score", {"ids": [1, 2**30]}, "size of the vocabulary"),
        ("/learn/score", {"ids": [1, True]}, "ids"),
        ("/learn/score", {"ids": [1, 2] * 2000}, "ids"),
        (CHAT, {}, "give one of prompt and messages"),
        (CHAT, {"prompt": "a", "messages": CONVERSATION}, "give one of prompt and messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "contnet": "a"}]}, "contnet"),
        (CHAT, {"prompt": 3}, "prompt"),
    ],
)
def test_bodies(door, path, body, said):
    answer = door[0].post(path, content=json.dumps(body), headers=AS_JSON)
    assert (answer.status_code, answer.json()["error"]["kind"]) == (400, "bad_request")
    message = answer.json()["error"]["message"]
    assert message.startswith(said) if ": " in said or " must be " in said else said in message and message
    assert settled(door[1].llm).pool.available == 64


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
    answer = door[0].get(f"/runs/x/attention?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ('{"op": "fly"}', "op 'fly' is not supported; it is "),
        ('{"step": 1}', "the field 'op' is required in it"),
        ('{"op": "watch", "layer": "x", "head": 0}', "layer must be a whole number, not 'x'"),
        ('{"op": "watch", "layer": 0, "head": 99}', "head must be from 0"),
        ('{"op": "play", "pace": 0}', "pace must be at least 0.01, not 0"),
        ('{"op": "step", "more": 1}', "more: this API has no such field"),
        ("fly", "a command is a JSON object"),
        ("[" * 10**5, "a command is a JSON object"),
        ('{"op": "' + "ü" * 200 + '"}', "op 'üü"),  # a closing has room for 123 bytes
    ],
)
def test_commands(door, command, said):
    client, _ = door
    run = begin(client)["run"]
    with client.websocket_connect(f"ws://{HOST}/runs/{run}/stream") as socket:
        socket.send_text(command)
        with pytest.raises(WebSocketDisconnect) as closed:
            all(iter(socket.receive_json, None))
    assert closed.value.code == 4400
    assert closed.value.reason.startswith(said)
    assert len(closed.value.reason.encode()) <= 123
    end(door, run)


def test_a_prompt_beyond_the_context_and_more_pages_than_there_are(door):
    client, explorer = door
    answer = client.post("/runs", json={"prompt": "~" * (explorer.llm.config.context + 3)})
    assert answer.json()["error"]["kind"] == "context_overflow"
    assert "3 more than" in answer.json()["error"]["message"]
    assert client.post("/batches", json={"prompts": ["a"] * 6, "max_tokens": 256}).status_code == 503
    assert not settled(explorer.llm).scheduler.sequences


def test_a_fork_that_cannot_be_is_refused_with_the_reason(door):
    client, explorer = door
    run = begin(client)["run"]
    stepped(explorer.player(run), [True] * 3)
    for body, why in (
        ({"step": 99}, "there is no step 100"),
        ({"step": 1, "token": 10**6}, "token ids must be from 0"),
        ({"step": 1, "token": True}, "token must be a whole number, not true"),
        ({"step": 1, "top_p": 2.0}, "top_p"),
        ({"step": 1, "tokens": 3}, "tokens"),
    ):
        answer = client.post(f"/runs/{run}/fork", json=body)
        assert answer.status_code == 400 and why in answer.json()["error"]["message"], body
        assert len(client.get(f"/runs/{run}/branches").json()["branches"]) == 1
    end(door, run)


def test_what_is_not_there_is_gone(door):
    client, _ = door
    run = begin(client)["run"]
    for path in ("/runs/x", "/runs/x/steps/0", "/runs/x/attention?step=0&layer=0&head=0", "/runs/x/heads?step=0"):
        assert client.get(path).json()["error"]["kind"] == "gone"
    assert client.post("/runs/x/fork", json={"step": 0}).json()["error"]["kind"] == "gone"
    assert client.delete("/runs/x").status_code == 404
    assert "there is no step 6" in client.get(f"/runs/{run}/steps/5").json()["error"]["message"]
    with client.websocket_connect(f"ws://{HOST}/runs/x/stream") as socket:
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_text()
        assert closed.value.code == 4404
    answer = client.post("/check/nothing", json={"answer": {}})
    assert answer.status_code == 404 and "there are bound" in answer.json()["error"]["message"]
    assert client.get("/nothing").json()["error"]["kind"] == "bad_request"
    assert client.put("/model").status_code == 405
    end(door, run)


HEADERS = [
    {"host": "evil.example"},
    {"origin": "http://evil.example"},
    {"host": "evil.example:8000"},
    {"host": ""},
    {"origin": "null"},
    {"origin": f"https://{HOST}"},
    {"origin": "http://127.0.0.1:9"},  # another server of this machine
    {"origin": f"http://{HOST}.evil.example"},
]


def test_other_hosts_and_origins_are_turned_away(door):
    """One of each by every route, the others by a route of each kind of error."""
    client, _ = door
    every = [route for route in routes(client.app) if route[0] in ("GET", "POST", "DELETE")]
    assert len(every) > 80
    every += [("GET", "/"), ("GET", "/nothing")]
    some = [("GET", "/model"), ("GET", "/api/tags"), ("GET", "/v1/models")]
    for at, headers in enumerate(HEADERS):
        for method, path in every if at < 2 else some:
            answer = client.request(method, path, headers=headers)
            assert answer.status_code == 403, (method, path, headers)
            error = answer.json()["error"]
            if path.startswith("/api/"):  # the Ollama API tells an error in words alone
                told = "this server answers as" if "host" in headers else "pages of other origins"
                assert error.startswith(told), error
            elif path.startswith((*openai.API.prefixes, *llama_cpp.API.prefixes)):
                assert error["type"] == "permission_error", path
            else:
                assert error["kind"] == "forbidden", path
    for headers in HEADERS[:2]:
        with pytest.raises(WebSocketDisconnect) as closed, client.websocket_connect("/runs/x/stream", headers=headers):
            pass
        assert closed.value.code == 4403


def test_its_own_page_and_a_tunnel_with_another_port_may_call(door):
    client, _ = door
    assert client.get("/model", headers={"origin": f"http://{HOST}"}).status_code == 200
    for host in ("127.0.0.1:9", "127.0.0.1"):
        for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
            assert client.get("/health", headers=headers).status_code == 200


def test_a_body_without_bounds_is_cut_off(door):
    client, _ = door
    body = b'{"text":"' + b"a" * MOST_BODY + b'"}'
    for content in (body, iter([body[: MOST_BODY // 2], body[MOST_BODY // 2 :]])):  # with its length told, and without
        answer = client.post("/tokenize", content=content, headers=AS_JSON)
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    assert client.post("/tokenize", content=iter([b'{"text":', b'"ab"}']), headers=AS_JSON).status_code == 200
