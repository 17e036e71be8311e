"""A server of several models: which one answers, what the lists say, keys, and Ollama's pull, copy and delete."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub.constants as settings
import ollama
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.checkpoints.test_hub import contents
from tests.engines import slowed, until
from tests.models.files.fake_hub import FakeHub
from tests.models.fixtures import make_checkpoint
from tests.processes import running
from tests.profiles import share
from tests.serve.declared import read
from tests.serve.live import HANGS
from tests.serve.many import PAGES, Many, many
from tokenwright import LLM
from tokenwright.checkpoints import local_models as store
from tokenwright.cli.commands.serve import NamedModel, models_of, needed
from tokenwright.errors import RequestError
from tokenwright.serve.model_list import ModelList
from tokenwright.serve.ollama.bodies import keep_alive
from tokenwright.serve.ollama.replies import OllamaRunning, OllamaTags
from tokenwright.serve.operations import Health
from tokenwright.serve.service.residents import find
from tokenwright.serve.service.types import MOST_NAMED
from tokenwright.serve.store_routes import MOST_COPIES

ASKED: dict[str, Any] = {"prompt": "the and", "max_tokens": 8, "temperature": 0.0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_checkpoint(folder / name, kind).path for name, kind in (("a", "qwen2"), ("b", "llama2"))}


@pytest.fixture(scope="module")
def server(models: dict[str, Path]) -> Iterator[Many]:
    """Its memory holds one of the two."""
    with many(models) as running:
        until(lambda: running.states()["a"] == "ready")
        yield running


def complete(server: Many, model: str | None, **more: Any) -> httpx.Response:
    named = {} if model is None else {"model": model}
    return httpx.post(f"{server.url}/v1/completions", json=ASKED | named | more, timeout=60)


def text(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def expected(path: Path) -> str:
    with LLM(path, pages=PAGES) as llm:
        [one] = llm.generate("the and", llm.sampling(temperature=0.0, max_tokens=8))
        return one.text


def test_a_session_is_released_in_every_model_and_opens_none(models: dict[str, Path]) -> None:
    keys = ("first-key-of-two", "second-key-of-two a")
    with many(models, limit=2**30, keys=keys) as running:
        mark = [{"type": "text", "text": "the and " * 12, "cache_control": {"type": "ephemeral"}}]
        body = {"max_tokens": 1, "system": mark, "messages": [{"role": "user", "content": "and"}]}
        for name in "ab":
            for key in ("first-key-of-two", "second-key-of-two"):
                asked = body | {"model": name, "metadata": {"user_id": "mine"}}
                told = {"authorization": f"Bearer {key}"}
                reply = httpx.post(f"{running.url}/v1/messages", json=asked, headers=told, timeout=60)
                assert reply.status_code == (200 if name == "a" or key.startswith("first") else 404), reply.text

        def pins() -> list[int]:
            each = (one.host.llm.inspect(lambda engine: len(engine.scheduler.kv.pins)) for one in running.fleet.apps)
            return list(each)

        assert pins() == [2, 1]
        for key, left in (("second-key-of-two", [1, 1]), ("first-key-of-two", [0, 0])):
            told = {"authorization": f"Bearer {key}"}
            reply = httpx.delete(f"{running.url}/v1/cache/sessions/mine", headers=told, timeout=60)
            assert reply.json() == {"id": "mine", "object": "cache.session.released"} and pins() == left
    with many(models) as running:
        until(lambda: running.states()["a"] == "ready")
        assert httpx.delete(f"{running.url}/v1/cache/sessions/x/y", timeout=60).json()["id"] == "x/y"
        assert running.states()["b"] == "absent"


def test_the_model_that_a_body_names_answers(server: Many, models: dict[str, Path]) -> None:
    texts = {name: expected(path) for name, path in models.items()}
    assert texts["a"] != texts["b"]
    for name in "abba":
        assert text(complete(server, name)) == texts[name]
        assert server.states() == {one: "ready" if one == name else "absent" for one in "ab"}
    assert text(complete(server, "")) == texts["a"], "a client without a name for it sends none"
    assert complete(server, "c").status_code == 404
    assert complete(server, "a", temperature=9).status_code == 400


def test_random_requests_lose_none(server: Many) -> None:
    """Two models under a memory that holds one."""
    draw, before = random.Random(1), server.fleet.residents.loads
    order = [draw.choice("ab") for _ in range(share(72))]
    found: list[tuple[str, str]] = []

    def work(names: list[str]) -> None:
        found.extend((name, text(complete(server, name, stream=False))) for name in names)

    threads = [threading.Thread(target=work, args=(order[at::6],)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for name, _ in found) == sorted(order)
    assert len(set(found)) == 2
    residents = server.fleet.residents
    assert 0 < residents.loads - before < len(order)
    assert residents.used <= residents.limit and residents.waiting == 0
    until(lambda: not any(one.users for one in residents.entries))  # an answer is read before its end is noted


def test_a_stream_holds_its_model_to_its_end(server: Many) -> None:
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json=ASKED | {"model": "a", "stream": True, "max_tokens": 300},
        timeout=60,
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        waits: list[str] = []
        other = threading.Thread(target=lambda: waits.append(text(complete(server, "b"))))
        other.start()
        until(lambda: server.fleet.residents.waiting or waits)
        assert "data: [DONE]" in list(lines)
    other.join()
    assert len(waits) == 1


def test_stored_responses_outlive_their_model(server: Many) -> None:
    body = {"model": "a", "input": "the", "max_output_tokens": 4, "store": True}
    reply = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    complete(server, "b")
    assert server.states()["a"] == "absent"
    assert httpx.get(f"{server.url}/v1/responses/{reply.json()['id']}").json()["output"] == reply.json()["output"]


@pytest.mark.parametrize("path", ["input_tokens", "compact"])
def test_what_is_computed_of_an_input_is_asked_of_the_model_that_it_names(server: Many, path: str) -> None:
    complete(server, "b")
    body = {"model": "a", "input": "the", **({"max_output_tokens": 4} if path == "compact" else {})}
    reply = httpx.post(f"{server.url}/v1/responses/{path}", json=body, timeout=60)
    assert reply.status_code != 404 and server.states()["a"] == "ready", reply.text


def test_a_conversation_is_read_and_deleted_where_no_model_is_loaded(server: Many) -> None:
    made = httpx.post(f"{server.url}/v1/conversations", json={}, timeout=60).json()["id"]
    place = f"{server.url}/v1/conversations/{made}"
    for method, status in (("GET", 200), ("DELETE", 200), ("GET", 404)):
        for entry in server.fleet.residents.entries:
            asyncio.run_coroutine_threadsafe(server.fleet.residents.unload(entry), server.loop).result(HANGS)
        assert set(server.states().values()) == {"absent"}
        assert httpx.request(method, place, timeout=60).status_code == status


def test_a_class_asks_whichever_model_is_loaded(server: Many) -> None:
    """A pupil's name is no model's, and what 30 pages say every 1.5 s loads none in place of another."""
    complete(server, "b")
    teacher = {"secret": "0123456789abcdef", "scene": "loop"}
    assert httpx.post(f"{server.url}/room/teacher", json=teacher).status_code == 200
    pupil = {"identity": "1", "name": "Ada", "solved": 0, "answers": []}
    assert httpx.post(f"{server.url}/room/pupil", json=pupil).json() == {"scene": "loop"}
    assert server.states() == {"a": "absent", "b": "ready"}


def test_a_response_is_cancelled_while_only_its_model_fits(server: Many) -> None:
    """To cancel it must not wait for another model, which would wait for this response's end."""
    body = {"model": "b", "input": "the", "max_output_tokens": 300, "stream": True}
    complete(server, "b")
    [opened] = server.fleet.apps
    with (
        slowed(opened.host.llm, 8),
        httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        created = next(line for line in lines if line.startswith("data: "))
        identity = json.loads(created.removeprefix("data: "))["response"]["id"]
        reply = httpx.post(f"{server.url}/v1/responses/{identity}/cancel", timeout=60)
        assert (reply.status_code, reply.json()["status"]) == (200, "cancelled")
        assert '"status":"cancelled"' in "".join(lines)


def test_lists_health_and_metrics(server: Many) -> None:
    complete(server, "b")
    listed = read(ModelList, httpx.get(f"{server.url}/v1/models").json())
    assert [(one.id, one.max_model_len is None) for one in listed.data] == [("a", True), ("b", False)]
    context = listed.data[1].max_model_len
    assert listed.data[1].context_length == listed.data[1].meta.n_ctx == context
    assert httpx.get(f"{server.url}/v1/models/a").json()["id"] == "a"
    tags = read(OllamaTags, httpx.get(f"{server.url}/api/tags").json())
    assert [one.name for one in tags.models] == ["a", "b"]
    running = read(OllamaRunning, httpx.get(f"{server.url}/api/ps").json())
    assert [one.name for one in running.models] == ["b"]
    health = read(Health, httpx.get(f"{server.url}/health").json())
    assert [(one.name, one.state) for one in health.models] == [("a", "absent"), ("b", "ready")]
    assert httpx.head(f"{server.url}/health").status_code == httpx.get(f"{server.url}/ready").status_code == 200
    assert "tokenwright_pages 64.0" in httpx.get(f"{server.url}/metrics").text
    assert httpx.post(f"{server.url}/health").status_code == 405


def test_the_page_has_the_first_model_loaded(server: Many) -> None:
    complete(server, "b")
    assert httpx.get(f"{server.url}/status").json()["phase"] == "loading"
    until(lambda: httpx.get(f"{server.url}/status").json()["phase"] == "ready")
    assert httpx.get(f"{server.url}/model").json()["name"] == "a"


def test_the_page_follows_runs_of_the_first_model(server: Many) -> None:
    """Each of its sockets was refused with a traceback."""
    complete(server, "a")
    with connect(f"ws{server.url.removeprefix('http')}/runs/none/stream") as stream, pytest.raises(ConnectionClosed):
        stream.recv(60)
    assert stream.close_code == 4404


@pytest.fixture
def client(server: Many) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as made:
        yield made


def test_a_model_that_leaves_is_no_failure(server: Many) -> None:
    seen, over = set[int](), threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.add(httpx.get(f"{server.url}/health", timeout=60).status_code)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(share(20)):
        complete(server, "b")
        httpx.post(f"{server.url}/api/generate", json={"model": "b", "keep_alive": 0}, timeout=60).raise_for_status()
    over.set()
    watcher.join()
    assert seen == {200}


def test_keep_alive_unloads(server: Many, client: ollama.Client) -> None:
    client.generate("b", "the", raw=True, options={"num_predict": 2}, keep_alive="5m")
    assert server.states()["b"] == "ready"
    assert client.ps().models[0].expires_at is not None
    assert client.generate("b", keep_alive=0).done_reason == "unload"
    assert server.states()["b"] == "absent"
    client.generate("b", "the", raw=True, options={"num_predict": 2}, keep_alive=0)
    until(lambda: server.states()["b"] == "absent")
    client.generate("b", "the", raw=True, options={"num_predict": 2}, keep_alive=-1)
    assert find("b", server.fleet.residents.entries).pinned


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((0, 0.0), (-1, math.inf), ("5m", 300.0), ("1h30m", 5400.0), ("-1s", math.inf), ("0", 0.0), (".5s", 0.5)),
        *(("9" * 60 + "h", math.inf), (2**62, math.inf), ("1.s", 1.0)),
    ],
)
def test_durations_are_gos(value: object, seconds: float) -> None:
    assert keep_alive(value) == seconds


@pytest.mark.parametrize("value", ["", "5", "m", None, True, [], "five minutes", "9" * 64, "1.2.3s"])
def test_what_is_no_duration_says_nothing(value: object) -> None:
    assert keep_alive(value) is None


# The text of JSON: a client of Python's writes some of them.
HOSTILE = [
    *(json.dumps("1" * digits + tail) for digits in (65, 20_000) for tail in ("", "h", "x", "." + "1" * 20_000)),
    *("NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 400, "-1" + "0" * 400, json.dumps("1s" * 30_000)),
]


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat", "/api/embed"])
def test_a_hostile_keep_alive_is_refused_by_name_and_leaves_no_trace(server: Many, path: str) -> None:
    """Durations of 20,000 digits held the event loop for 40 s, and NaN made every later /api/ps fail."""
    before = [(one.keep_s, one.pinned) for one in server.fleet.residents.entries]
    for written in HOSTILE:
        body = b'{"model": "a", "prompt": "", "input": "", "messages": [], "keep_alive": %s}' % written.encode()
        reply = httpx.post(f"{server.url}{path}", content=body, timeout=60)
        assert (reply.status_code, "keep_alive" in reply.text) == (400, True), (written[:30], reply.text)
    assert [(one.keep_s, one.pinned) for one in server.fleet.residents.entries] == before
    assert httpx.get(f"{server.url}/api/ps").status_code == 200


def test_a_copy_is_a_further_name(server: Many, client: ollama.Client) -> None:
    client.copy("a", "mine")
    assert text(complete(server, "mine")) == text(complete(server, "a"))
    assert [one.model for one in client.list().models] == ["a", "mine", "b"]
    with pytest.raises(ollama.ResponseError, match="taken"):
        client.copy("a", "b")
    for number in range(MOST_COPIES - 1):
        client.copy("a", f"mine-{number}")
    with pytest.raises(ollama.ResponseError, match=f"there are {MOST_COPIES} further names"):
        client.copy("a", "one-too-many")
    missing = complete(server, "min")
    assert "did you mean mine?" in missing.text and f"and {MOST_COPIES + 2 - MOST_NAMED} more" in missing.text
    for number in range(MOST_COPIES - 1):
        client.delete(f"mine-{number}")
    client.delete("mine")
    assert complete(server, "mine").status_code == 404
    assert complete(server, "a").status_code == 200


def test_a_model_that_is_not_of_the_hub_stays(server: Many, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="there is no a to remove"):
        client.delete("a")
    assert complete(server, "a").status_code == 200


def test_a_key_of_some_models_sees_and_changes_no_others(models: dict[str, Path]) -> None:
    keys = ("key-of-everything", "key-of-b-alone b")
    with many({"first-secret": models["a"], "b": models["b"]}, keys=keys) as server:

        def asked(key: str, path: str, **body: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            if not body:
                return httpx.get(f"{server.url}{path}", headers=headers)
            return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)

        both, one = "key-of-everything", "key-of-b-alone"
        until(lambda: server.states()["first-secret"] == "ready")
        assert asked(one, "/status").json()["phase"] == "loading", "its own first model"
        until(lambda: asked(one, "/status").json()["phase"] == "ready")
        assert asked(both, "/v1/completions", model="first-secret", **ASKED).status_code == 200
        assert asked(one, "/v1/completions", model="b", **ASKED).status_code == 200
        assert asked(one, "/v1/completions", **ASKED).status_code == 200, "the first model that it may use"
        assert asked(one, "/api/copy", source="b", destination="mine").status_code == 403
        assert asked(one, "/api/generate", model="b", keep_alive=0).status_code == 403, "others use it too"
        assert server.states()["b"] == "ready"
        kept = asked(one, "/api/generate", model="b", prompt="the", stream=False, keep_alive=0)
        assert (kept.status_code, kept.headers["x-tokenwright-ignored"]) == (200, "keep_alive")
        assert server.states()["b"] == "ready"
        assert asked("another-key", "/v1/models").status_code == 401
        paths = ("/v1/models", "/api/tags", "/api/ps", "/health", "/v1/health", "/ping", "/status", "/v1/models/c")
        seen = [asked(one, path) for path in paths]
        for model in ("c", "first-secre", "first-secret"):  # to the key they are all alike
            refused = asked(one, "/v1/completions", model=model, **ASKED)
            assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
            found = [refused, asked(one, "/api/show", model=model), asked(one, f"/v1/models/{model}")]
            assert not [said for one in found if "secret" in (said := one.text.replace(f"'{model}'", ""))]
        seen += [asked("", path) for path in ("/health", "/v1/health", "/ping", "/ready", "/version", "/v1/models")]
        assert not [one.text for one in seen if "secret" in one.text]
        assert {one["name"] for one in asked(both, "/health").json()["models"]} == {"first-secret", "b"}
        assert asked("", "/health").json()["models"] == []
        measured = asked(one, "/metrics").text
        assert "secret" not in measured and 'served="b"' in measured
        both_of_them = asked(both, "/metrics").text
        assert [f'served="{one}"' in both_of_them for one in ("first-secret", "b")] == [
            server.states()[one] == "ready" for one in ("first-secret", "b")
        ]
    with pytest.raises(RequestError, match="names the model z, which is not served"):
        Many(models, 10**9, ("key-of-z-alone z",), None)


@pytest.fixture
def hub(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub({"maker/small": {"main": contents(models["b"])}}) as hub:
        monkeypatch.setattr(settings, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(settings, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(settings, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(settings, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
        yield hub


def test_a_model_is_pulled_served_and_deleted(models: dict[str, Path], tmp_path: Path, hub: FakeHub) -> None:
    with many({"a": models["a"]}, limit=10**8) as server, ollama.Client(server.url) as client:
        assert complete(server, "maker/small").status_code == 404
        assert [one.status for one in client.pull("maker/small", stream=True)] == ["pulling manifest", "success"]
        assert client.pull("maker/small").status == "success"
        assert text(complete(server, "maker/small")) == expected(models["b"])
        with pytest.raises(ollama.ResponseError, match="there is no model maker/other"):
            client.pull("maker/other")
        with pytest.raises(ollama.ResponseError, match="is not a model on the hub"):
            list(client.pull("llama3.2", stream=True))
        client.delete("maker/small")
        assert complete(server, "maker/small").status_code == 404
        assert not list((tmp_path / "cache").rglob("model.safetensors"))


def test_a_pull_that_is_killed_leaves_no_half_model(tmp_path: Path, hub: FakeHub) -> None:
    """kill -9 while the weights come: nothing that is there runs, and the next pull makes it whole."""
    hub.stalling.add("maker/small")
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "tokenwright", "pull", "maker/small"]
    with running(command, env=os.environ | environment):
        assert hub.stalled.wait(60)
    hub.go_on.set()
    hub.stalling.clear()
    assert [one.runs for one in store.in_hub_cache() if one.name == "maker/small"] in ([], [False])
    assert not list((tmp_path / "cache").rglob("model.safetensors"))
    whole = store.fetch("maker/small")
    assert whole.runs and [one.runs for one in store.in_hub_cache()] == [True]
    assert LLM("maker/small", pages=PAGES).close() is None


def test_a_model_that_is_damaged_says_so_and_the_server_goes_on(models: dict[str, Path], tmp_path: Path) -> None:
    broken = make_checkpoint(tmp_path / "broken", "qwen2").path
    (broken / "tokenizer.json").unlink()
    with many({"a": models["a"], "broken": broken}, limit=10**8) as server:
        reply = complete(server, "broken")
        assert reply.status_code == 503 and "broken could not be read" in reply.text
        assert complete(server, "a").status_code == 200
        health = httpx.get(f"{server.url}/health").json()
        assert health["models"][1]["reason"]
        assert str(tmp_path) not in reply.text + str(health), "no folder of this machine"


# The command line


@pytest.mark.parametrize(
    ("arguments", "options", "found"),
    [
        (["x"], [], [NamedModel("x", "x", False)]),
        (["x"], ["x"], [NamedModel("x", "x", False)]),
        (
            ["x", "o/y"],
            ["c=z"],
            [NamedModel("x", "x", False), NamedModel("o/y", "o/y", False), NamedModel("c", "z", True)],
        ),
        ([], [], [NamedModel("stories", "stories", False)]),
    ],
)
def test_models_of_the_command_line(arguments: list[str], options: list[str], found: list[NamedModel]) -> None:
    assert models_of(arguments, options) == found


def test_names_are_given_once() -> None:
    with pytest.raises(RequestError, match="two models are called c"):
        models_of([], ["c=a", "c=b"])


def test_what_a_model_needs_is_about_what_it_takes(models: dict[str, Path]) -> None:
    engine = {"weights": "native", "dtype": "auto", "kv": "native", "window": None, "sinks": 0, "kv_memory": 2**20}
    with LLM(models["a"], kv_memory=2**20) as llm:
        taken = llm.weight_bytes + llm.kv_memory
    assert 0.8 * taken < needed(str(models["a"]), engine) < 1.5 * taken
