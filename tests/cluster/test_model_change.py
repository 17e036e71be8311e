"""SIGHUP once other files lie where a model was: the server goes over to them, and no text is written by two models."""

import json
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx2
import pytest

from tests.cluster.test_cluster import HANGS, PROMPTS, lines_of, served, stream
from tests.models.fixtures import make_checkpoint
from tokenwright import LLM

pytestmark = pytest.mark.slow

BODIES = [{"prompt": PROMPTS[at % 4], "max_tokens": 150, "temperature": at % 2, "seed": at} for at in range(4)]
LONG = {"prompt": PROMPTS[0], "max_tokens": 3000, "temperature": 1.0, "seed": 9, "ignore_eos": True}
LENGTHS = {"one": 4096, "two": 2048}  # contexts


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models that share neither weights nor architecture, nor the ids of letters."""
    found = tmp_path_factory.mktemp("models")
    for name, kind in (("one", "qwen2"), ("two", "llama2")):
        make_checkpoint(found / name, kind, changes={"max_position_embeddings": LENGTHS[name]})
    file = found / "two" / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = content["model"]["vocab"]
    ids["e"], ids["o"] = ids["o"], ids["e"]
    file.write_text(json.dumps(content))
    return found


@pytest.fixture(scope="module")
def texts(models):
    """The texts of each model alone."""
    found = {}
    for name in LENGTHS:
        with LLM(models / name, kv_memory="64MB") as llm:
            found[name] = [llm.generate(**_named(body))[0].text for body in BODIES]
            if name == "one":
                found["long"] = llm.generate(**_named(LONG))[0].text
    assert not set(found["one"]) & set(found["two"])
    return found


def _named(body):
    return {{"prompt": "prompts"}.get(key, key): value for key, value in body.items()}


class Place:
    """A server of what a link leads to. version: of the model that it serves."""

    def __init__(self, server, link):
        self.server, self.link, self.version = server, link, 1

    def lead_to(self, folder):
        self.link.with_name("next").symlink_to(folder)
        self.link.with_name("next").rename(self.link)

    def hang_up(self):
        self.server.process.send_signal(signal.SIGHUP)

    def change(self):
        """SIGHUP, and wait until a new model takes requests."""
        self.hang_up()
        self.version += 1
        self.server.wait(lambda: self.server.gauge("tokenwright_model_version") == self.version)

    def settle(self):
        """Wait until nothing of a former model is left."""
        self.server.wait(lambda: self.server.gauge("tokenwright_replicas") == len(self.server.replicas) == 2)

    def texts(self):
        return [stream(self.server, **body)[0] for body in BODIES]


@pytest.fixture
def place(models, tmp_path):
    link = tmp_path / "model"
    shutil.copytree(models / "one", tmp_path / "first")
    link.symlink_to(tmp_path / "first")
    flags = "--kv-disk", str(tmp_path / "pages"), "--drain-timeout", "0.2"
    with served(2, *flags, "--heartbeat", "3600", model=link) as server:
        yield Place(server, link)


@contextmanager
def asked(place, clients):
    """Clients that ask for BODIES again and again; the texts that they got."""
    stopped, got = threading.Event(), []

    def ask(_):
        while not stopped.is_set():
            got.append(place.texts())

    with ThreadPoolExecutor(clients) as threads:
        running = [threads.submit(ask, at) for at in range(clients)]
        try:
            yield got
        finally:
            stopped.set()
        for one in running:
            one.result()


@contextmanager
def held(server):
    """A text that all replicas of now have stopped to write, for good; `rest` reads it, and an error at its end."""
    body = LONG | {"model": "any", "stream": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANGS) as response:
        lines = lines_of(response)
        first = next(lines)
        for pid in server.replicas:
            os.kill(pid, signal.SIGSTOP)

        def rest():
            events = [json.loads(line[6:]) for line in (first, *lines) if line.startswith("data: {")]
            error = next((one["error"]["message"] for one in events if "error" in one), None)
            return "".join(choice["text"] for one in events for choice in one.get("choices", ())), error

        yield rest


def test_each_text_is_one_models_and_none_is_lost_though_replicas_die(place, models, texts):
    server, old = place.server, set(place.server.replicas)
    with asked(place, 3) as got:
        server.wait(lambda: len(got) >= 3)
        with held(server) as rest:
            place.lead_to(models / "two")
            place.change()
            assert place.texts() == texts["two"]
            server.wait(lambda: len(old & set(server.replicas)) == 1)  # it has all texts of the model before
            for pid in old & set(server.replicas):
                os.kill(pid, signal.SIGKILL)
            assert rest() == (texts["long"], None)
    assert all(text in pair for each in got for text, *pair in zip(each, texts["one"], texts["two"], strict=True))
    place.settle()
    [model] = server.get("/v1/models").json()["data"]
    assert (model["max_model_len"], model["id"]) == (LENGTHS["two"], str(place.link))
    assert not old & set(server.replicas)


def test_files_that_cannot_be_opened_leave_the_model_as_it_is(place, models, texts):
    """And the next ones are opened; their model finds no page of the one before, not even on the disk of both."""
    body, replicas = {"prompt": PROMPTS[0] * 20, "max_tokens": 2}, set(place.server.replicas)
    broken = shutil.copytree(models / "two", place.link.with_name("broken"))
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    place.lead_to(broken)
    place.hang_up()
    place.server.wait(lambda: any("so the model stays" in line for line in place.server.said))
    [said] = [line for line in place.server.said if "could not" in line or "so the model stays" in line]
    assert "model.safetensors" in said and "Traceback" not in "".join(place.server.said)
    assert [stream(place.server, **body)[2]["cached_tokens"] > 0 for _ in range(2)] == [False, True]
    assert place.texts() == texts["one"]
    assert set(place.server.replicas) == replicas, "no process of the new one is left"
    assert place.server.gauge("tokenwright_model_version") == 1
    place.lead_to(models / "two")
    place.change()
    assert [stream(place.server, **body)[2]["cached_tokens"] > 0 for _ in range(2)] == [False, True]
    assert place.texts() == texts["two"]


def test_without_the_files_of_a_text_it_ends_with_an_error(place, models, texts):
    """They were replaced where they lay, so no replica of the model before can be started again."""
    server, old, first = place.server, set(place.server.replicas), place.link.resolve()
    with held(server) as rest:
        for file in (models / "two").iterdir():
            shutil.copyfile(file, first / file.name)
        place.change()
        server.wait(lambda: len(old & set(server.replicas)) == 1)
        for pid in old & set(server.replicas):
            os.kill(pid, signal.SIGKILL)
        text, error = rest()
    assert "the model was replaced" in error and "tokens of it were delivered" in error
    assert text and texts["long"].startswith(text)
    assert place.texts() == texts["two"]
    place.settle()
