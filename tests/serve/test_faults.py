"""Faults around the server, by the numbers of the list of inputs that break engines like ours (test_hostile.py)."""

import errno
import importlib.util
import io
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from tests.engines import HANGS_S, until
from tests.serve.conftest import HOST
from tests.serve.talking import Talker, make_talker, talking
from tokenwright import LLM
from tokenwright.checkpoints import tensor_reader
from tokenwright.checkpoints.files import safetensors
from tokenwright.engine import prefix_index
from tokenwright.engine.page_pool import Group, PagePool
from tokenwright.engine.prefix_index import PrefixIndex
from tokenwright.serve.app import make_app
from tokenwright.serve.service.model_host import ModelHost

ASKED = {"model": "tiny", "prompt": "Once upon", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("faults"))


class Disk(io.FileIO):
    """A file on a disk that fails: a read that ends behind `sound` bytes waits for `mended`, or is an error."""

    sound = 0
    mended: threading.Event | None = None
    reached = threading.Event()

    def readinto(self, buffer: Any) -> int | None:
        if self.tell() + len(buffer) > self.sound:
            self.reached.set()
            if self.mended is None:
                raise OSError(errno.EIO, "Input/output error")
            assert self.mended.wait(HANGS_S)
        return super().readinto(buffer)

    def readall(self) -> bytes:
        size = Path(str(self.name)).stat().st_size
        buffer = bytearray(size - self.tell())
        return bytes(buffer[: self.readinto(buffer)])


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> type[Disk]:
    """All safetensors files are on this disk now."""

    class Own(Disk):
        reached = threading.Event()

    for reader in safetensors, tensor_reader:
        monkeypatch.setattr(reader, "open_regular", lambda file: io.BufferedReader(Own(file)))
    return Own


def server_of(model: Path) -> TestClient:
    host = ModelHost("tiny", lambda report: LLM(model, pages=64, report=report))
    return TestClient(make_app(host, [HOST], None), base_url=f"http://{HOST}")


@pytest.mark.parametrize("sound", [0, 8192], ids=["in the header", "in the weights"])
def test_41_a_disk_that_fails_while_the_model_is_loaded(model: Path, disk: type[Disk], sound: int) -> None:
    disk.sound = sound
    with server_of(model) as client:
        until(lambda: client.get("/ready").json()["status"] == "failed")
        for answer in (client.get("/health"), client.post("/v1/completions", json=ASKED)):
            assert answer.status_code == 503
            assert "model.safetensors: Input/output error" in answer.text
        assert client.get("/v1/models").status_code == 200


def test_41_a_network_disk_that_hangs_while_the_model_is_loaded(model: Path, disk: type[Disk]) -> None:
    disk.sound, disk.mended = 8192, threading.Event()
    with server_of(model) as client:
        try:
            assert disk.reached.wait(HANGS_S)
            for _ in range(3):  # the server answers meanwhile
                answer = client.get("/health")
                assert (answer.status_code, answer.json()["status"]) == (200, "loading")
                assert client.get("/ready").status_code == 503
                assert client.get("/v1/models").status_code == 200
        finally:
            disk.mended.set()
        until(lambda: client.get("/ready").status_code == 200)
        assert client.post("/v1/completions", json=ASKED).status_code == 200


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Talker]:
    with talking(model) as talker:
        yield talker


def test_45_the_clock_is_set_back_again_and_again(served: Talker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting, deadlines and durations follow a clock that nobody can set; dates stay in order within a reply."""
    with httpx.Client(base_url=served.url, timeout=HANGS_S) as http:
        right = http.post("/v1/completions", json=ASKED).raise_for_status().json()["choices"]
        now, hours = time.time(), itertools.count()
        monkeypatch.setattr(time, "time", lambda: now - 3600 * next(hours))
        monkeypatch.setattr(time, "time_ns", lambda: round(1e9 * time.time()))
        headers = {"x-timings": "1"}
        for _ in range(3):
            answer = http.post("/v1/completions", json=ASKED | {"timeout_s": 60}, headers=headers).raise_for_status()
            assert answer.json()["choices"] == right
            spent = {name: value for name, value in answer.json()["timings"].items() if name.endswith("_ms")}
            assert all(0 <= value < 1000 * HANGS_S for value in spent.values()), spent
        body = {"model": "tiny", "input": "Hello, how are you?", "max_output_tokens": 900, "temperature": 0}
        response = http.post("/v1/responses", json=body).raise_for_status().json()
        assert response["status"] == "completed"
        assert response["created_at"] <= response["completed_at"]
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stream": False}
        said = http.post("/api/chat", json=chat | {"options": {"num_predict": 4}}).raise_for_status().json()
        assert all(value >= 0 for name, value in said.items() if name.endswith("_duration"))
        assert http.get("/health").json()["status"] == "ok"
    assert next(hours) > 3, "the server has read the clock"


def test_47_hashes_of_pages_are_keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can look for texts whose pages have equal hashes: hashes follow from a secret of the process.

    Equal texts share pages within an engine, and different ones never do by the way in which they are cut or salted.
    """
    pool = PagePool([Group(4)], 2)
    one, text = PrefixIndex(pool, b"seed"), [1, 2, 3, 4]
    assert one.hashes().extend(text) == PrefixIndex(pool, b"seed").hashes().extend(text)
    texts = (text, [1, 2], [3, 4], [1, 2, 4, 3])
    each = [one.hashes(salt).extend(tokens)[-1] for salt in (b"", b"a") for tokens in texts]
    each += [PrefixIndex(pool, seed).hashes(salt).extend(text)[-1] for seed, salt in ((b"seeda", b""), (b"see", b"d"))]
    spec = importlib.util.spec_from_file_location("another_process", prefix_index.__file__)
    assert spec is not None and spec.loader is not None
    another = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, another)
    spec.loader.exec_module(another)
    each.append(another.PrefixIndex(pool, b"seed").hashes().extend(text)[-1])
    assert len(set(each)) == len(each)
    assert {len(page_hash) for page_hash in each} == {32}
