"""What clients send beside the fields of an API, whole and streamed: it is accepted, and is done or has no effect."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.talking import HANGS_S, SCHEMA, Talker, make_talker, talking
from tokenwright.serve.app import Served

CHAT, COMPLETE, RESPOND, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OLLAMA, GENERATE, EMBED, EMBEDDINGS = "/api/chat", "/api/generate", "/api/embed", "/v1/embeddings"
HELLO = [{"role": "user", "content": "Hello"}]
SANE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 4, "temperature": 0},
    COMPLETE: {"prompt": "Hello", "max_tokens": 4, "temperature": 0},
    RESPOND: {"input": "Hello", "max_output_tokens": 4, "temperature": 0},
    MESSAGE: {"messages": HELLO, "max_tokens": 4, "temperature": 0},
    OLLAMA: {"messages": HELLO, "options": {"num_predict": 4, "temperature": 0}},
    GENERATE: {"prompt": "Hello", "options": {"num_predict": 4, "temperature": 0}},
    EMBED: {"input": "Hello"},
    EMBEDDINGS: {"input": "Hello"},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/apply-template": {"messages": HELLO},
}
STREAMED = (CHAT, COMPLETE, RESPOND, MESSAGE, OLLAMA, GENERATE)
FUNCTION = {"name": "weather", "parameters": SCHEMA}
NULLS = {"type": "object", "properties": None, "required": None, "anyOf": None, "$defs": None, "title": None}
CACHED = {"type": "ephemeral", "scope": "global", "ttl": "1h"}
CALL = {"id": "c" * 5000, "type": "function", "index": 0, "function": {"name": "weather", "arguments": '{"hot": tr'}}
SEARCH = {"type": "web_search", "external_web_access": False}


def part(text: str, kind: str = "text", **more: Any) -> list[Any]:
    return [{"type": kind, "text": text, **more}]


def answered_before(**more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "Hi", **more}
    return {"messages": [*HELLO, message, {"role": "user", "content": "And?"}]}


# path, fields, and what the header names
TAKEN: list[tuple[str, dict[str, Any], str]] = [
    *((path, {"novel": 1, "shiny": {"a": [2]}, "empty": None}, "novel, shiny") for path in SANE),
    *((path, {"model": ""}, "") for path in SANE if path != "/tokenize"),
    (CHAT, {"messages": [HELLO[0] | {"name": "planner", "novel": 1}]}, "messages.novel"),
    (CHAT, {"messages": [{"role": "user", "content": part("Hi", cache_control=CACHED)}]}, ""),
    (CHAT, {"messages": [{"role": "system", "content": part("Hi", cache_control=CACHED), "name": "a"}, *HELLO]}, ""),
    (CHAT, {"messages": [{"role": "user", "content": part("Hi", "input_text")}]}, ""),
    (
        CHAT,
        answered_before(reasoning="Hm", parsed={"a": 1}, provider_specific_fields={}, annotations=[], audio=None),
        "",
    ),
    (CHAT, answered_before(reasoning_details=[{"type": "reasoning.text", "text": "Hm", "index": 0}]), ""),
    (CHAT, answered_before(content=[{"type": "thinking", "thinking": "Hm", "signature": "x"}, *part("Hi")]), ""),
    (CHAT, answered_before(refusal=None, function_call=None, tool_calls=[CALL]), ""),
    (CHAT, answered_before(tool_calls=[CALL | {"provider_specific_fields": {"a": 1}}]), ""),
    (CHAT, {"store": True, "service_tier": "flex", "verbosity": "low", "prediction": {"type": "content"}}, ""),
    (CHAT, {"metadata": {"a": {"b": 1}}, "user": "x" * 600, "client_metadata": {"a": "b"}}, ""),
    (CHAT, {"top_k": -1, "max_tokens": -1, "max_completion_tokens": 4, "seed": -1, "cache_prompt": True}, ""),
    (CHAT, {"reasoning_effort": "medium", "reasoning": {"effort": "medium", "summary": "auto"}}, ""),
    (CHAT, {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"anything": [1], "thinking": True}}, ""),
    (
        CHAT,
        {"tools": [{"type": "function", "function": FUNCTION, "cache_control": CACHED}, SEARCH]},
        "tools.web_search",
    ),
    (CHAT, {"top_logprobs": 0, "stream_options": {}, "guided_choice": [], "grammar": "", "best_of": 1}, ""),
    (CHAT, {"dry_allowed": 0, "tfs": 1.0, "samplers_of": [], "mirostat_x": -1, "logit_bias": []}, ""),
    (CHAT, {"reasoning_effort": "auto", "tools": None, "n": 1}, ""),
    (CHAT, {"messages": [{"role": "system", "content": None}, {"role": "user", "content": None}]}, ""),
    (CHAT, answered_before(function_call={"name": "weather"}), ""),
    (CHAT, {"tool_choice": None, "functions": [], "function_call": "auto", "tools": []}, ""),
    *(
        (path, {"stream_options": {"include_usage": True}, "top_p": 0, "stop": "", "n": 2}, "")
        for path in (CHAT, COMPLETE)
    ),
    *((path, {"top_p": 0}, "") for path in (RESPOND, MESSAGE)),
    *(
        (path, {"options": {"num_predict": 2, "top_p": 0, "typical_p": 0, "repeat_penalty": 0, "stop": ""}}, "")
        for path in (OLLAMA, GENERATE)
    ),
    *(
        (path, {"tools": [{"type": "function", "function": {"name": "a", "parameters": NULLS}}]}, "")
        for path in (CHAT, OLLAMA)
    ),
    (MESSAGE, {"tools": [{"name": "a", "input_schema": NULLS}]}, ""),
    (MESSAGE, {"seed": -1}, ""),
    (MESSAGE, {"tools": [{"name": "a", "input_schema": SCHEMA}] * 2}, ""),
    (OLLAMA, {"tools": [{"type": "function", "function": FUNCTION}] * 2}, ""),
    (COMPLETE, {"logprobs": False, "suffix": "", "stop": []}, ""),
    (CHAT, {"tools": [], "functions": None, "logit_bias": {}, "stop": None, "modalities": ["text"]}, ""),
    (
        CHAT,
        {"tools": [{"type": "function", "function": FUNCTION | {"strict": None, "novel": 1}}]},
        "tools.function.novel",
    ),
    (RESPOND, {"tools": [{"type": "function", **FUNCTION}] * 2, "tool_choice": None}, ""),
    (RESPOND, {"store": False, "truncation": "auto", "client_metadata": {"a": "b"}, "service_tier": "flex"}, ""),
    (RESPOND, {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"}}, ""),
    (RESPOND, {"text": {"verbosity": "low"}, "stream_options": {"include_obfuscation": True}}, ""),
    (RESPOND, {"tools": [SEARCH, {"type": "function", **FUNCTION, "strict": False}]}, "tools.web_search"),
    (RESPOND, {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]}]}, ""),
    (RESPOND, {"input": [{"role": "user", "content": part("Hi", "input_text", novel=1)}]}, "input.content.novel"),
    (RESPOND, {"input": [*HELLO, {"type": "web_search_call", "id": "ws_1", "action": {}}]}, "input.web_search_call"),
    (
        RESPOND,
        {
            "input": [
                *HELLO,
                {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
                {"type": "function_call", "call_id": "d", "name": "weather", "arguments": "[1"},
                {"type": "function_call_output", "call_id": "d", "output": part("cold", "input_text")},
                {"type": "function_call", "call_id": "e", "name": "weather", "arguments": ""},
                {"type": "function_call_output", "call_id": "e", "output": part("cold", "output_text")},
            ]
        },
        "",
    ),
    (MESSAGE, {"system": part("Help.", cache_control=CACHED), "metadata": {"user_id": "x" * 600}}, ""),
    (MESSAGE, {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "medium"}}, ""),
    (MESSAGE, {"betas": ["a"], "speed": "fast", "service_tier": "auto", "inference_geo": "eu"}, ""),
    (MESSAGE, {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    (MESSAGE, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, ""),
    (MESSAGE, {"context_management": {"edits": [{"type": "compact_9"}]}}, "context_management.edits.compact_9"),
    (
        MESSAGE,
        {"tools": [{"name": "a", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}]},
        "tools.bash_20250124",
    ),
    (MESSAGE, answered_before(content=[{"type": "redacted_thinking", "data": "x"}, *part("Hi", citations=None)]), ""),
    (OLLAMA, {"keep_alive": 0}, ""),
    (OLLAMA, {"keep_alive": "banana", "truncate": True, "shift": True}, ""),
    (
        OLLAMA,
        {"options": {"num_predict": 2, "num_gpu": 99, "num_thread": 4, "use_mlock": True, "num_keep": 4, "novel": 1}},
        "options.novel",
    ),
    (OLLAMA, {"options": {"num_predict": 2, "main_gpu": 0, "num_batch": 512, "use_mmap": False}}, ""),
    (OLLAMA, answered_before(tool_calls=[{"function": {"name": "weather", "arguments": "[1", "index": 0}}]), ""),
    (OLLAMA, {"messages": [HELLO[0] | {"name": "planner", "images": []}]}, ""),
    (GENERATE, {"keep_alive": -1, "context": [], "suffix": "", "images": []}, ""),
    (EMBED, {"options": {"num_ctx": 512, "temperature": 0.0}, "keep_alive": 0, "truncate": True, "stream": False}, ""),
    (EMBED, {"input": "a" * 20_000}, ""),
    (EMBEDDINGS, {"user": "x", "dimensions": None, "truncate_prompt_tokens": -1}, ""),
]


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    folder = make_talker(tmp_path_factory.mktemp("strict"))
    with talking(folder, served=Served(["tiny"], strict_fields=True)) as running:
        yield running


def post(talker: Talker, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
    return httpx.post(talker.url + path, json={"model": "tiny"} | SANE[path] | body | more, timeout=HANGS_S)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "body", "named"), TAKEN, ids=lambda one: str(one)[:60])
def test_it_is_accepted(talker: Talker, path: str, body: dict[str, Any], named: str, streamed: bool) -> None:
    more = {"stream": streamed} if path in STREAMED else {}
    answer = post(talker, path, body, **more)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-tokenwright-ignored", "") == named
    assert "error" not in answer.text[-200:]


@pytest.mark.parametrize("path", SANE)
def test_a_typing_error_is_refused_with_a_suggestion(talker: Talker, path: str) -> None:
    answer = post(talker, path, {"modle": "x"})
    assert answer.status_code == 400
    assert "modle: this API has no such field; did you mean model?" in answer.text


@pytest.mark.parametrize("path", SANE)
def test_strict_servers_refuse_unknown_fields_alone(strict: Talker, path: str) -> None:
    assert post(strict, path, {"empty": None}).status_code == 200
    answer = post(strict, path, {"novel": 1})
    assert answer.status_code == 400
    assert "novel: this API has no such field; remove it" in answer.text
    assert post(strict, path, {"model": "other"}).status_code == 404


def test_unknown_fields_are_counted_and_logged_once(talker: Talker, caplog: pytest.LogCaptureFixture) -> None:
    def counted() -> float:
        lines = httpx.get(f"{talker.url}/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("tokenwright_ignored_fields_total")).split()[1])

    before = counted()
    for _ in range(2):
        answer = post(talker, CHAT, {"brand new": 1, 'größe, "': 2})
        assert answer.headers["x-tokenwright-ignored"] == "brand new, gr??e? ?"
    assert counted() == before + 4
    assert len([one for one in caplog.messages if "brand new" in one]) == 1


@pytest.mark.parametrize("path", [CHAT, RESPOND, MESSAGE, OLLAMA])
def test_the_line_of_an_agents_bill_is_not_part_of_the_prompt(talker: Talker, path: str) -> None:
    def tokens(first: str) -> int:
        told = f"{first}You help in a terminal."
        body: dict[str, Any] = {"messages": [{"role": "system", "content": told}, *HELLO]}
        if path == RESPOND:
            body = {"instructions": told}
        elif path == MESSAGE:
            body = {"system": told}
        found = post(talker, path, body, stream=False).json()
        usage = found.get("usage", found)
        cached = usage.get("cache_read_input_tokens", 0)
        names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
        return int(next(usage[name] for name in names if name in usage) + cached)

    bare = tokens("")
    assert [tokens(f"x-anthropic-billing-header: cc_version=2; cch={n};\n") for n in ("a", "b")] == [bare, bare]
    assert tokens("x-anthropic-other: a\n") > bare


@pytest.mark.parametrize("path", [CHAT, RESPOND, MESSAGE, OLLAMA, "/completion"])
def test_a_nucleus_of_0_is_greedy_and_a_seed_is_heeded(talker: Talker, path: str) -> None:
    def text(**more: Any) -> str:
        body = SANE.get(path, {"prompt": "Hello", "n_predict": 4}) | {"stream": False, "model": "tiny"}
        given = more | {"temperature": 1}
        body |= {"options": body["options"] | given} if path == OLLAMA else given
        found = httpx.post(talker.url + path, json=body, timeout=HANGS_S).json()
        message = found.get("output") or found.get("content") or found.get("message") or found["choices"][0]["message"]
        message = message[0] if isinstance(message, list) else message
        message = message["content"] if path in (CHAT, OLLAMA, RESPOND) else message
        return json.dumps(message[0]["text"] if path == RESPOND else message)

    assert len({text(top_p=0, seed=seed) for seed in range(3)}) == 1
    if path != RESPOND:  # which has no seeds
        assert text(seed=5) == text(seed=5)
        assert len({text(seed=seed) for seed in range(3)}) > 1


FORMS: list[dict[str, Any]] = [
    {"choice": ["yes", "no"]},
    {"guided_choice": ["yes", "no"]},
    {"regex": "yes|no"},
    {"guided_regex": "yes|no"},
    {"grammar": 'root ::= "yes" | "no"'},
    {"grammar": 'start: "yes" | "no"'},
    {"guided_grammar": 'root ::= answer\nanswer ::= "y" [e] "s" | "no"  # a comment'},
    {"ebnf": 'root ::= ("yes" | "no")'},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"regex": "yes|no"}},
    {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
    {"response_format": {"type": "regex", "pattern": "yes|no"}},
    {"response_format": {"type": "grammar", "grammar": 'root ::= "yes" | "no"'}},
]
ANSWER = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
SCHEMAS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER, "strict": "true"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": ANSWER}}},
    {"response_format": {"type": "json_schema", "schema": ANSWER}},
    {"response_format": {"type": "json_object", "schema": ANSWER}},
    {"response_format": {"type": "json", "value": ANSWER}},
    {"json_schema": ANSWER},
    {"guided_json": ANSWER},
    {"guided_json": json.dumps(ANSWER)},
    {"structured_outputs": {"json": ANSWER}},
]


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("form", [*FORMS, *SCHEMAS], ids=str)
def test_the_form_of_an_answer_has_many_names(talker: Talker, path: str, form: dict[str, Any]) -> None:
    choice = post(talker, path, form, max_tokens=60).json()["choices"][0]
    text = choice["text"] if path == COMPLETE else choice["message"]["content"]
    assert text in ("yes", "no") if form in FORMS else json.loads(text) == {"a": 1}


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"choice": ["a"], "regex": "b"}, "regex and choice each say the form"),
        ({"grammar": "root ::= []"}, "the grammar has the empty class []"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused(talker: Talker, form: dict[str, Any], named: str) -> None:
    answer = post(talker, CHAT, form)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
