"""Replies say what the cache found of a prompt and why not more, in the types of the official clients."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.serve.talking import Talker, make_talker, talking
from tokenwright.serve.app import Served

KEYS = ("alpha-0123456789abcdef", "beta-0123456789abcdef")
ASKED = "Tell me of the sea, and of the ships on it, and of all the fish that are in it, one by one."


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    folder = make_talker(tmp_path_factory.mktemp("reports"))
    with talking(folder, served=Served((), timings=True), keys=KEYS) as running:
        yield running


def messages(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]


def test_anthropics_diagnostics(talker: Talker) -> None:
    with anthropic.Anthropic(base_url=talker.url, api_key=KEYS[0], max_retries=0) as client:

        def ask(*contents: str, before: str | None = None, **more: Any) -> Any:
            talk: Any = messages(*contents)
            asked: Any = {"previous_message_id": before}
            return client.messages.create(model="tiny", max_tokens=4, messages=talk, diagnostics=asked, **more)

        first = ask(ASKED, system="Be brief.")
        assert first.diagnostics is None
        assert first.usage.input_tokens > 20 and first.usage.cache_read_input_tokens == 0
        answer = first.content[0].text if first.content else "x"
        found = ask(ASKED, answer, "Go on.", before=first.id, system="Be brief.")
        total = found.usage.input_tokens + found.usage.cache_read_input_tokens + found.usage.cache_creation_input_tokens
        assert found.usage.cache_read_input_tokens > 20 and total > first.usage.input_tokens
        other = ask(ASKED, answer, "Go on.", before=first.id, system="Be verbose.")
        reason = other.diagnostics.cache_miss_reason
        assert reason.type == "system_changed" and 0 < reason.cache_missed_input_tokens <= total
        edited = ask(ASKED.replace("ships", "boats"), answer, "Go on.", before=first.id, system="Be brief.")
        assert edited.diagnostics.cache_miss_reason.type == "messages_changed"
        tools: Any = [{"name": "f", "description": "It does.", "input_schema": {"type": "object"}}]
        tooled = ask(ASKED, answer, "Go on.", before=first.id, system="Be brief.", tools=tools)
        assert tooled.diagnostics.cache_miss_reason.type == "tools_changed"
        lost = ask(ASKED, before="msg_unknown", system="Be brief.")
        assert lost.diagnostics.cache_miss_reason.type == "previous_message_not_found"
        with client.messages.stream(
            model="tiny",
            max_tokens=4,
            messages=messages(ASKED.replace("fish", "whales"), answer, "Go on."),  # type: ignore[arg-type]
            system="Be brief.",
            diagnostics={"previous_message_id": first.id},
        ) as stream:
            final = stream.get_final_message()
        assert final.diagnostics is not None and final.diagnostics.cache_miss_reason is not None
        assert final.diagnostics.cache_miss_reason.type == "messages_changed"


def test_openais_diagnostics(talker: Talker) -> None:
    with openai.OpenAI(base_url=f"{talker.url}/v1", api_key=KEYS[0], max_retries=0) as client:

        def ask(text: str, before: str | None = None, **more: Any) -> Any:
            options: Any = {} if before is None else {"prompt_cache_options": {"comparison_response_id": before}}
            return client.responses.create(model="tiny", max_output_tokens=4, input=text, **options, **more)

        first = ask(f"{ASKED} Now.", instructions="Be kind.")
        details = first.usage.input_tokens_details
        assert first.prompt_cache_diagnostics is None
        assert details.cached_tokens + details.cache_write_tokens == first.usage.input_tokens
        same = ask(f"{ASKED} Now.", first.id, instructions="Be kind.")
        assert same.usage.input_tokens_details.cached_tokens > 20
        other = ask(f"{ASKED} Later.", first.id, instructions="Be kind.")
        assert other.prompt_cache_diagnostics.type == "cache_miss"
        assert other.prompt_cache_diagnostics.reason == "input_changed"
        assert other.prompt_cache_diagnostics.cache_missed_tokens > 0
        assert ask(ASKED, "resp_unknown").prompt_cache_diagnostics.type == "comparison_response_not_found"
        chat: Any = messages(f"{ASKED} Chat.")
        done = client.chat.completions.create(model="tiny", max_tokens=4, messages=chat)
        assert done.usage is not None and done.usage.prompt_tokens_details is not None
        found = done.usage.prompt_tokens_details
        assert (found.cached_tokens or 0) + (found.cache_write_tokens or 0) == done.usage.prompt_tokens


def test_no_key_is_shown_another_keys_text(talker: Talker, caplog: pytest.LogCaptureFixture) -> None:
    """Two keys with equal texts; and where the reports are: timings, header, metrics, log."""
    secret = "My name is Rumpelstiltskin, and nobody else may know of it, whatever they ask of this server."
    talk = messages(secret, "x", "Go on.")

    def ask(key: str, talk: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
        body = {"messages": talk, "max_tokens": 2}
        headers = {"Authorization": f"Bearer {key}"}
        reply = httpx.post(f"{talker.url}/v1/chat/completions", json=body, headers=headers, timeout=100)
        assert reply.status_code == 200, reply.text
        return reply.json()["timings"]["cache"], reply.headers["x-tokenwright-cache"]

    ask(KEYS[0], talk[:1])
    for each in (talk[:1], talk, [{**talk[0], "content": secret[:-1] + "!"}, *talk[1:]]):
        found, header = ask(KEYS[1], each)
        if each is talk[:1]:
            assert (found["cause"], found["reused"]) == ("nothing_to_compare", 0)
        assert found["compared"] is None or found["compared"] != ""
    changed = [{**talk[0], "content": secret.replace("nobody", "everybody")}, *talk[1:]]
    ask(KEYS[0], talk)
    found, header = ask(KEYS[0], changed)
    assert (found["cause"], found["message"], found["change"]) == ("message_changed", 0, "edited"), found
    assert found["recomputed"] > 0 and found["recomputed_ms"] > 0
    assert "nobody" in found["before"] and "everybody" in found["now"]
    assert header.endswith("cause=message_changed") and "nobody" not in header
    [line] = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"][-1:]
    assert "prompt tokens reused" in line and "message changed at token" in line and "nobody" not in line
    fresh = messages("Quite another conversation, which only the second key begins, at some length.", "x", "y")
    found, _ = ask(KEYS[1], fresh)
    assert "Rumpel" not in json.dumps(found)
    metrics = httpx.get(f"{talker.url}/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=100).text
    assert 'tokenwright_recomputed_tokens_total{cause="message_changed"}' in metrics


def test_the_memory_can_be_switched_off(tmp_path: Path) -> None:
    from tokenwright.serve.app import served_of
    from tokenwright.serve.settings import Settings

    assert served_of(Settings(prompt_memory=0)).limits.prompt_memory == 0  # type: ignore[union-attr]
