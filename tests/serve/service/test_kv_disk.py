"""A server that is started again on the folder of --kv-disk: what its replies, timings and metrics say."""

from pathlib import Path

import httpx2

from tests.serve.live import HANGS, live, make_chat_model
from tokenwright.serve.app import Served


def test_a_restarted_server_reads_the_prompt(tmp_path: Path) -> None:
    folder = make_chat_model(tmp_path / "model")
    body = {"model": "tiny", "prompt": "once upon a time " * 20, "max_tokens": 2, "temperature": 0}
    found = []
    for _ in range(2):
        with live(folder, kv_disk=tmp_path / "kv", served=Served(["tiny"], timings=True)) as server:
            for _ in range(2):
                answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=HANGS)
                assert answer.status_code == 200, answer.text
                found.append(answer.json())
            metrics = httpx2.get(f"{server.url}/metrics", timeout=HANGS).text
    details = [one["usage"]["prompt_tokens_details"] for one in found]
    cached, prompt = details[1]["cached_tokens"], found[0]["usage"]["prompt_tokens"]
    assert prompt - 16 <= cached < prompt
    written = [one.pop("cache_write_tokens") for one in details]
    assert written == [prompt - one["cached_tokens"] for one in details]
    assert details[0] == {"cached_tokens": 0} and details[1] == details[3] == {"cached_tokens": cached}
    assert details[2] == {"cached_tokens": cached // 16 * 16, "disk_tokens": cached // 16 * 16}
    assert [one["timings"]["disk_tokens"] for one in found] == [0, 0, cached // 16 * 16, 0]
    assert f"tokenwright_disk_tokens_total {cached // 16 * 16:.1f}" in metrics
    assert len({one["choices"][0]["text"] for one in found}) == 1
