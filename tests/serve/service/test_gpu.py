"""A GPU that fails: each failure is an error that says so, a server goes on, and no text is wrong."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.backends.gpu import needs_gpu, open_gpu
from tests.models.fixtures import make_checkpoint
from tests.serve.live import HANGS, live
from tests.serve.many import Many, many
from tokenwright import LLM, SamplingParams
from tokenwright.backends.wgpu import gpu as gpus
from tokenwright.backends.wgpu.gpu import Gpu
from tokenwright.errors import EngineError

pytestmark = needs_gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Many]:
    folder = tmp_path_factory.mktemp("models")
    models = {name: make_checkpoint(folder / name, kind).path for name, kind in (("a", "qwen2"), ("b", "llama2"))}
    with many(models, limit=1 << 30, device="gpu", dtype="float32") as running:
        yield running


def complete(server: Many, model: str, **more: Any) -> Any:
    body = {"model": model, "prompt": "the and", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | more
    return httpx2.post(f"{server.url}/v1/completions", json=body, timeout=HANGS)


def failed(reply: Any, status: int, told: str) -> None:
    assert reply.status_code == status and told in reply.json()["error"]["message"], reply.text


def test_a_failure_is_told_and_the_next_text_is_right(
    server: Many, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost device, exhausted memory, and a shader that the driver does not compile."""
    import wgpu

    expected = complete(server, "a").json()["choices"][0]["text"]
    assert expected

    open_gpu(None).device.destroy()
    failed(complete(server, "a"), 503, "was lost; open the model again")
    assert complete(server, "a").json()["choices"][0]["text"] == expected

    device = type(open_gpu(None).device)
    made = device.create_buffer

    def create_buffer(self: Any, *, size: int, **more: Any) -> Any:
        if size > 1 << 18:
            raise wgpu.GPUValidationError("Validation Error\n\nCaused by:\n    Not enough memory left.")
        return made(self, size=size, **more)

    with monkeypatch.context() as patched:
        patched.setattr(device, "create_buffer", create_buffer)
        failed(complete(server, "a", prompt=[7] * 300, max_tokens=1), 500, "its log says more")
        assert "is exhausted; lower kv_memory" in caplog.text
        assert complete(server, "a").json()["choices"][0]["text"] == expected

    with monkeypatch.context() as patched:
        patched.setattr(open_gpu(None), "_kernels", {})
        patched.setattr(Gpu, "altered", lambda _, name, text: text.replace("fact(0u)", "") if name == "norm" else text)
        failed(complete(server, "b"), 503, "cannot compile the kernel norm")
        assert complete(server, "a").json()["choices"][0]["text"] == expected
    assert complete(server, "b").json()["usage"]["completion_tokens"] == 8


def test_a_server_whose_device_is_lost_ends_the_streams_and_then_itself() -> None:
    """It would answer every later request with the same error: what started it starts it again, with another device."""
    with live("stories", device="gpu", dtype="float32") as server:
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANGS) as reply:
            lines = (line for line in reply.iter_lines() if line)
            assert "choices" in next(lines)
            server.llm.llm_engine.loop.post(lambda _: open_gpu(None).device.destroy())
            *_, last = lines
        assert json.loads(last[6:])["error"]["type"] == "service_unavailable_error"
        server.thread.join(HANGS)
        assert not server.thread.is_alive() and "was lost; open the model again" in str(server.service.failure)
    with live("stories", device="gpu", dtype="float32") as server:
        found = httpx2.post(
            f"{server.url}/v1/completions", json=body | {"max_tokens": 3, "stream": False}, timeout=HANGS
        )
        assert found.json()["usage"]["completion_tokens"] == 3


def test_a_lost_device_ends_the_texts_and_the_next_model_opens_another(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.open_gpu.cache_clear()
    with LLM("stories", device="gpu", dtype="float32") as llm:
        open_gpu(None).device.destroy()
        with pytest.raises(EngineError, match=r"GPU .* was lost; open the model again"):
            llm.generate("Once upon a time", GREEDY)
    with LLM("stories", device="gpu", dtype="float32") as llm:
        assert len(llm.generate("Once upon a time", GREEDY)[0].token_ids) == 6


def test_a_step_without_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import wgpu

    with LLM("stories", device="gpu", dtype="float32", speculate="off") as llm:
        expected, device = llm.generate("Once upon a time", GREEDY)[0].token_ids, open_gpu(None).device
        made = type(device).create_buffer

        def create_buffer(self: Any, *, size: int, **more: Any) -> Any:
            if size > 1 << 20:
                raise wgpu.GPUValidationError("Validation Error\n\nCaused by:\n    Not enough memory left.")
            return made(self, size=size, **more)

        with monkeypatch.context() as patched:
            patched.setattr(type(device), "create_buffer", create_buffer)
            with pytest.raises(EngineError, match="is exhausted"):
                llm.score(list(range(100, 600)))
            assert llm.generate("Once upon a time", GREEDY)[0].token_ids == expected
