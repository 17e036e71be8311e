"""A server over a tiny random model, or over the model that ships inside; each with a client of its own."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import asdict

import pytest
from fastapi.testclient import TestClient

from tests.engines import until
from tests.models.fixtures import copy_checkpoint
from tests.serve.talking import make_talker, talking
from tokenwright import LLM
from tokenwright.serve.app import make_app
from tokenwright.serve.service.model_host import ModelHost
from tokenwright.trace.frame_codec import unpack

HOST = "127.0.0.1:8321"


@contextmanager
def served(model, page=None, **options):
    """A client of a server whose model has been read, and its Explorer."""
    host = ModelHost(str(model), lambda report: LLM(model, trace=True, report=report, **options))
    app = make_app(host, [HOST], page)
    with TestClient(app, base_url=f"http://{HOST}") as client:
        until(lambda: client.get("/status").json()["phase"] != "loading")
        yield client, app.state.explorer
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("run ")], "no thread is left"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return copy_checkpoint(tmp_path_factory.mktemp("tiny") / "qwen2", "qwen2")


@pytest.fixture
def server(tiny):
    with served(tiny, pages=64) as (client, explorer):
        yield client, explorer


@pytest.fixture(scope="session")
def talker(tmp_path_factory):
    """A server on a socket, for the official clients."""
    folder = make_talker(tmp_path_factory.mktemp("talker"))
    with talking(folder) as running:
        yield running


class Page:
    """What the page is to the server: it takes what comes and acknowledges it."""

    def __init__(self, socket, acks=True):
        self.socket, self.acks = socket, acks
        self.frames, self.messages = [], []

    def take(self):
        message = self.socket.receive()
        if message.get("bytes"):
            self.frames.append(unpack(message["bytes"]))
            if self.acks:
                self.ack()
        elif message["type"] == "websocket.close":
            raise AssertionError(f"the server closed the stream: {message}")
        else:
            self.messages.append(json.loads(message["text"]))

    def ack(self):
        self.send(op="ack", step=self.frames[-1].step)

    def send(self, **command):
        self.socket.send_json(command)

    def until(self, condition):
        while not condition(self):
            self.take()

    @property
    def states(self):
        return [message for message in self.messages if message["kind"] == "state"]

    @property
    def state(self):
        return self.states[-1]["state"] if self.states else None


@contextmanager
def watching(client, run, since=0, acks=True):
    with client.websocket_connect(f"ws://{HOST}/runs/{run}/stream?since_step={since}") as socket:
        yield Page(socket, acks)


def begin(client, **wanted):
    answer = client.post("/runs", json={"prompt": "ab", "max_tokens": 8, "ignore_eos": True, "seed": 1} | wanted)
    assert answer.status_code == 201, answer.text
    return answer.json()


def stepped(player, caches):
    """Make a step for each of `caches`, with the cache or without, and wait for its token."""
    for written, cache in enumerate(caches, 1):
        player.use_cache(cache)
        player.step()
        until(lambda written=written: sum(frame.token is not None for frame in player.run.frames) >= written)
    return player


__all__ = ["HOST", "Page", "asdict", "begin", "served", "stepped", "watching"]
