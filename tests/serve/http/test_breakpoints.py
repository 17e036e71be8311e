"""Breakpoints of three APIs pin a prompt, sessions release it, and explicit caches nothing behind the last one."""

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from anthropic.types import Message, TextBlockParam
from openai.types.chat import ChatCompletion

from tests.serve.live import HANGS, Live, live, make_chat_model, settled
from tokenwright.engine import Engine
from tokenwright.engine.pins import Pins
from tokenwright.serve.app import Served
from tokenwright.serve.service.service import Service
from tokenwright.serve.transport.guard import Policy, read_keys

SYSTEM = "You answer in few words, and only what was asked. " * 6
SAID = "once upon a time "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = make_chat_model(tmp_path_factory.mktemp("pins") / "model")
    (folder.parent / "keys").write_text("first-key-of-two\nsecond-key-of-two\n")
    keys = read_keys(folder.parent / "keys")
    with live(
        folder, policy=lambda at: Policy.of([at], keys), served=Served(["tiny"], timings=True), pages=90
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def fresh(server: Live) -> Iterator[None]:
    yield
    for owner, session in {(pin.owner, pin.session) for pin in pins_of(server)}:
        server.llm.llm_engine.release(owner, session)


def pins_of(server: Live) -> Pins:
    return server.llm.inspect(lambda engine: engine.scheduler.kv.pins)


def ask(server: Live, path: str, body: dict[str, Any], key: str = "first-key-of-two", **headers: str) -> Any:
    given = {"authorization": f"Bearer {key}", **headers}
    answer = httpx2.post(f"{server.url}{path}", json={"model": "tiny"} | body, headers=given, timeout=HANGS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def messages(server: Live, system: str = SYSTEM, marked: bool = True, user: str = "Hello", **more: Any) -> Message:
    block: TextBlockParam = {"type": "text", "text": system}
    if marked:
        block["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    body = {"max_tokens": 2, "system": [block], "messages": [{"role": "user", "content": user}]}
    return Message.model_validate(ask(server, "/v1/messages", body | more.pop("body", {}), **more))


def flood(server: Live) -> None:
    """Other prompts, in all more than the pool holds."""
    for number in range(4):
        ask(server, "/v1/completions", {"prompt": f"{number} " + SAID * 40, "max_tokens": 2})


def test_a_marked_system_prompt_survives_a_flood(server: Live) -> None:
    first = messages(server)
    pinned = first.usage.model_extra["pinned_input_tokens"]  # type: ignore[index]
    assert first.usage.model_extra["unpinned_breakpoints"] == 0 and pinned >= 48  # type: ignore[index]
    assert first.usage.cache_creation_input_tokens == pinned and first.usage.cache_creation is not None
    assert first.usage.cache_creation.to_dict() == {"ephemeral_1h_input_tokens": pinned, "ephemeral_5m_input_tokens": 0}
    flood(server)
    again = messages(server, marked=False, user="Another question")
    assert again.usage.cache_read_input_tokens >= pinned // 16 * 16 and not again.usage.cache_creation_input_tokens
    [pin] = pins_of(server)
    assert pin.ttl_s == 3600.0


def test_openai_breakpoints_and_message_marks_pin_too(server: Live) -> None:
    part = {"type": "text", "text": SYSTEM, "prompt_cache_breakpoint": {"mode": "explicit"}}
    chat = [{"role": "system", "content": [part]}, {"role": "user", "content": "Hello", "cache_marks": "a client's"}]
    options = {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}, "max_tokens": 2}
    first = ChatCompletion.model_validate(ask(server, "/v1/chat/completions", {"messages": chat} | options))
    assert first.usage is not None and first.usage.prompt_tokens_details is not None
    pinned = first.usage.prompt_tokens_details.model_extra["pinned_tokens"]  # type: ignore[index]
    second = ask(server, "/v1/chat/completions", {"messages": chat} | options)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == pinned // 16 * 16, "nothing behind it"
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": SAID * 8} | {"cache_control": {"type": "ephemeral"}}],
        }
    ]
    response = ask(server, "/v1/responses", {"input": items, "max_output_tokens": 2, "store": False})
    assert response["usage"]["input_tokens_details"]["pinned_tokens"] > 16
    assert {pin.ttl_s for pin in pins_of(server)} == {1800.0, 300.0}


@pytest.mark.parametrize(
    ("body", "headers", "session"),
    [
        ({"metadata": {"user_id": "user_1_session_2"}}, {}, "user_1_session_2"),
        ({"metadata": {"user_id": '{"device_id": "d"}'}}, {"x-claude-code-session-id": "abc"}, "abc"),
        ({"metadata": {"other": 1}}, {"session_id": "codex"}, "codex"),
        ({"metadata": {"user_id": "own"}}, {"x-session-id": "agent", "x-dynamo-session-id": "given"}, "given"),
        ({}, {}, ""),
    ],
)
def test_a_session_is_released_by_its_key_only(
    server: Live, body: dict[str, Any], headers: dict[str, str], session: str
) -> None:
    """Other conversations may have the name of a user, or a key of the cache, where no header names the session."""
    messages(server, body=body, **headers)
    assert [pin.session for pin in pins_of(server)] == [session]
    asked = [one for its in server.llm.llm_engine.prompts._records.values() for one in its.values()]
    newest = max(asked, key=lambda one: one.ended).asked
    assert (newest.session, newest.shared) == (session, not headers)
    if session:
        for key, left in (("second-key-of-two", 1), ("first-key-of-two", 0)):
            given = {"authorization": f"Bearer {key}"}
            answer = httpx2.delete(f"{server.url}/v1/cache/sessions/{session}", headers=given, timeout=HANGS)
            assert answer.json() == {"id": session, "object": "cache.session.released"}
            assert len(pins_of(server)) == left


def test_a_session_that_ends_is_released_with_its_last_stream(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's header or body says so. While another of its requests runs, its pins stay."""
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: time.sleep(0.02) or step(self))  # type: ignore[func-returns-value]
    given = {"authorization": "Bearer first-key-of-two", "x-dynamo-session-id": "ending"}
    messages(server, "Others stay, and for long.", **{"x-dynamo-session-id": "other"})
    messages(server, **{"x-dynamo-session-id": "ending"})
    body = {"model": "tiny", "prompt": SAID, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, headers=given, timeout=HANGS) as stream:
        lines = stream.iter_lines()
        next(lines)
        messages(server, **{"x-dynamo-session-id": "ending", "x-dynamo-session-final": "True"})
        assert {pin.session for pin in pins_of(server)} == {"ending", "other"}, "one of its streams goes on"
    settled(server)
    assert {pin.session for pin in pins_of(server)} == {"other"}
    context = {"nvext": {"agent_context": {"session_id": "other", "session_final": True}}}
    ask(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Bye"}], "max_tokens": 2} | context)
    settled(server)
    assert not len(pins_of(server))


def test_agent_hints_order_requests(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()
    start = Service.start

    async def heard(self: Service, wanted: Any) -> Any:
        seen.append(wanted.priority)
        return await start(self, wanted)

    monkeypatch.setattr(Service, "start", heard)
    for hints in ({"priority": 5, "osl": 9}, {"priority": -100}, {}):
        body = {"prompt": "a", "max_tokens": 1, "nvext": {"agent_hints": hints}}
        ask(server, "/v1/completions", body)
        ask(server, "/v1/responses", {"input": "a", "max_output_tokens": 1, "nvext": {"agent_hints": hints}})
    ask(
        server,
        "/v1/completions",
        {"prompt": "a", "max_tokens": 1, "priority": -2, "nvext": {"agent_hints": {"priority": 7}}},
    )
    assert seen == [-5, -5, 8, 8, 0, 0, -2]


def test_a_marked_tool_pins_the_tools(server: Live) -> None:
    tool = {"name": "weather", "description": SAID * 2, "input_schema": {"type": "object"}}
    marked = tool | {"cache_control": {"type": "ephemeral"}}
    answer = messages(server, "Be brief.", marked=False, body={"tools": [tool | {"name": "clock"}, marked]})
    [pin] = pins_of(server)
    assert answer.usage.cache_creation_input_tokens == pin.tokens > 32 and pin.ttl_s == 300.0


def test_what_a_client_wants_not_cached_is_not_evicted(server: Live) -> None:
    body = {
        "messages": [{"role": "user", "content": "Forget all of this. " * 9}],
        "prompt_cache_options": {"mode": "explicit"},
    }
    for _ in range(2):
        answer = ask(server, "/v1/chat/completions", body | {"max_tokens": 2})
        details, cache = answer["usage"]["prompt_tokens_details"], answer["timings"]["cache"]
        assert (details["cached_tokens"], details["cache_write_tokens"], cache["recomputed"]) == (0, 0, 0)
        assert cache["cause"] in ("nothing_to_compare", None)


def test_a_prompt_that_comes_again_has_not_diverged(server: Live) -> None:
    first = messages(server, SAID * 10)
    again = messages(server, SAID * 10, body={"diagnostics": {"previous_message_id": first.id}})
    assert 0 < again.usage.input_tokens < 16 and again.diagnostics is None
    body: dict[str, Any] = {"input": SAID * 10, "max_output_tokens": 2}
    compared = {"comparison_response_id": ask(server, "/v1/responses", body)["id"]}
    answer = ask(server, "/v1/responses", body | {"prompt_cache_options": compared})
    assert answer["prompt_cache_diagnostics"] == {"type": "cache_hit"}


def test_what_has_no_room_is_said(server: Live) -> None:
    long = messages(server, SAID * 70)
    assert long.usage.model_extra == {"pinned_input_tokens": 0, "unpinned_breakpoints": 1}
    assert not len(pins_of(server))
