"""What clients are known to send, in every API, whole and streamed: it is done, is harmless, is named in
X-Tokenwright-Ignored, or is refused because leaving it out would change the answer.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.engines import HANGS_S
from tests.serve.talking import SCHEMA, Talker, make_talker, talking
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
ODD = {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}
ANY_TOOL = {"type": "function", "function": {"name": "f"}}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": 'start: "x"'}}
NOTHING = {"role": "tool", "tool_call_id": "c" * 5000, "content": None}


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
    (CHAT, answered_before(reasoning_details=[{}]), ""),
    (CHAT, answered_before(refusal=None, function_call=None, tool_calls=[CALL]), ""),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL]}, NOTHING]}, ""),
    *(
        (CHAT, {"tools": [ANY_TOOL], "tool_choice": {"type": kind} | ANY_TOOL["function"], "n_predict": 4}, "")
        for kind in ("function", "tool")
    ),
    *((CHAT, {"tools": [ANY_TOOL], "tool_choice": {"type": kind}}, "") for kind in ("auto", "any")),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": True}, "prompt_cache_retention": "24h"}, ""),
    (CHAT, answered_before(tool_calls=[CALL | {"provider_specific_fields": {"a": 1}}]), ""),
    (CHAT, {"store": True, "service_tier": "flex", "verbosity": "low", "prediction": {"type": "content"}}, ""),
    (CHAT, {"metadata": {"a": {"b": 1}}, "user": "x" * 600, "client_metadata": {"a": "b"}}, ""),
    (CHAT, {"safety_identifier": "x", "prompt_cache_key": "x"}, ""),
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
    (COMPLETE, {"cache_prompt": True, "user": "a", "num_thread": 4}, ""),
    (COMPLETE, {"brand new\n": 1}, "brand new?"),
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
    (RESPOND, {"tools": [PATCH, {"type": "function", "name": "f", "parameters": ODD}]}, "tools.f.uniqueItems"),
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
    (MESSAGE, {"thinking": {"type": "adaptive"}, "mcp_servers": []}, ""),
    (
        MESSAGE,
        {"messages": [{"role": "user", "content": part("Hi", cache_control=CACHED)}], "cache_control": CACHED},
        "",
    ),
    (MESSAGE, {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    (MESSAGE, {"tools": [{"name": "Ask", "input_schema": ODD}]}, "tools.Ask.uniqueItems"),
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
    (OLLAMA, {"options": {"num_predict": 2, "main_gpu": 0, "num_batch": 512, "use_mmap": False, "f16_kv": True}}, ""),
    (OLLAMA, {"options": {"num_predict": 2.0, "num_ctx": 0, "seed": 1.0}}, ""),
    (OLLAMA, {"options": {"num_predict": 2}, "format": ODD}, "schema.uniqueItems"),
    (OLLAMA, answered_before(tool_calls=[{"function": {"name": "weather", "arguments": "[1", "index": 0}}]), ""),
    (OLLAMA, {"messages": [HELLO[0] | {"name": "planner", "images": []}]}, ""),
    (GENERATE, {"keep_alive": -1, "context": [], "suffix": "", "images": []}, ""),
    (GENERATE, {"keep_alive": "0s"}, ""),
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


@pytest.mark.parametrize(("number", "taken"), [*enumerate(TAKEN)], ids=lambda one: str(one)[:60])
def test_it_is_accepted(talker: Talker, number: int, taken: tuple[str, dict[str, Any], str]) -> None:
    path, body, named = taken
    more = {"stream": bool(number % 2)} if path in STREAMED else {}  # each kind of answer in its turn
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
        elif path == MESSAGE:  # in a block of its own, as it is sent
            body = {"system": [{"type": "text", "text": line} for line in told.split("\n")]}
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
ANSWER = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}  # closed, though it does not say so
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


WRONG = {"type": "object", "properties": {"tags": {"type": "any"}}}
NOWHERE = {"type": "object", "properties": {"tags": {"$ref": "#/definitions/none"}}}
REPEATING = {"type": "object", "properties": {"tags": {"type": "string", "pattern": r"^(a|b)\1"}}}


def of_schema(schema: Any, strict: bool) -> Any:
    return {"response_format": {"type": "json_schema", "json_schema": {"strict": strict, "schema": schema}}}


def of_tool(schema: Any, strict: bool) -> Any:
    return {"tools": [{"type": "function", "function": {"name": "f", "strict": strict, "parameters": schema}}]}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("form", "named", "refused"),
    [
        (of_tool(REPEATING, False), "tools.f.pattern", ""),
        (of_tool(NOWHERE, False), "tools.f.parameters", ""),
        (of_schema(REPEATING, False), "schema.pattern", ""),
        (of_schema(NOWHERE, False), "schema", ""),
        (of_tool(REPEATING, True), "", "f is strict, and properties.tags.pattern"),
        (of_tool(NOWHERE, True), "", "f is strict, and its parameters cannot be enforced"),
        (of_schema(REPEATING, True), "", "properties.tags.pattern cannot be enforced"),
        (of_schema(NOWHERE, True), "", "/definitions/none"),
        (of_tool(ODD, True), "", "f is strict, and properties.tags.uniqueItems"),
        (of_schema(ODD, True), "", "properties.tags.uniqueItems cannot be enforced"),
        (of_tool(WRONG, False), "", "f: properties.tags.type of its parameters is wrong"),
        ({"choice": ["a"], "regex": "b"}, "", "regex and choice each set the answer"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "", "each set the answer"),
        ({"grammar": "root ::= []"}, "", "the grammar has the empty class []"),
        ({"response_format": {"type": "json_schema"}}, "", "response_format.json_schema.schema"),
        ({"modalities": ["audio"]}, "", "modalities is not supported"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_schemas_are_loosened_by_steps_unless_they_are_strict(
    talker: Talker, form: dict[str, Any], named: str, refused: str, streamed: bool
) -> None:
    """A keyword is left out, then the schema; what is left is followed, and a strict one is refused."""
    answer = post(talker, CHAT, form, stream=streamed, max_tokens=60)
    if refused:
        assert answer.status_code == 400
        assert refused in answer.json()["error"]["message"]
        return
    assert (answer.status_code, answer.headers["x-tokenwright-ignored"]) == (200, named)
    if "response_format" in form and not streamed:
        assert answer.json()["choices"][0]["message"]["content"].startswith("{"), "an object all the same"


def test_blocks_of_anthropics_own_tools_are_left_out_and_texts_are_read(talker: Talker) -> None:
    def asked(*blocks: dict[str, Any]) -> tuple[str, int]:
        answer = post(talker, MESSAGE, {"messages": [{"role": "user", "content": [*blocks]}]})
        usage = answer.json()["usage"]
        return answer.headers.get("x-tokenwright-ignored", ""), usage["input_tokens"] + usage["cache_read_input_tokens"]

    text = {"type": "text", "text": "a b"}
    document = {"type": "document", "title": "a b", "source": {"type": "text", "media_type": "text/plain", "data": "c"}}
    found = {"type": "search_result", "title": "a b", "source": "c", "content": [text]}
    hosted = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "x"}}
    assert asked(hosted, text) == ("messages.content.tool_addition", asked(text)[1])
    assert asked(document) == asked(text, {"type": "text", "text": "c"})
    assert asked(found) == asked(text, {"type": "text", "text": "c"}, text)
    answered = [
        {"type": "compaction", "content": "a b", "encrypted_content": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
    ]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document, {"type": "tool_reference"}]}
    history = [*HELLO, {"role": "assistant", "content": answered}, {"role": "user", "content": [result]}]
    names = ["server_tool_use", "web_search_tool_result", "tool_reference"]
    named = post(talker, MESSAGE, {"messages": history}).headers["x-tokenwright-ignored"]
    assert named.split(", ") == [f"messages.content.{name}" for name in names]
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aa"}}
    refused = post(talker, MESSAGE, {"messages": [{"role": "user", "content": [pdf]}]})
    assert refused.status_code == 400 and "source: type 'base64' is not supported" in refused.text
    assert post(talker, MESSAGE, {"messages": [{"role": "user", "content": [hosted]}]}).status_code in (200, 400)


def test_the_model_may_be_left_out_where_there_is_one(talker: Talker) -> None:
    for path in (CHAT, MESSAGE, RESPOND, COMPLETE, EMBEDDINGS):
        answer = httpx.post(talker.url + path, json=SANE[path], timeout=HANGS_S)
        assert (answer.status_code, answer.json()["model"]) == (200, "tiny"), path


@pytest.mark.parametrize("path", [CHAT, MESSAGE, RESPOND, COMPLETE, EMBEDDINGS])
def test_one_model_answers_under_any_name(talker: Talker, path: str) -> None:
    answer = post(talker, path, {"model": "claude-haiku-4-5"})
    assert (answer.headers["x-tokenwright-ignored"], answer.json()["model"]) == ("model", "tiny")
    assert httpx.get(f"{talker.url}/v1/models/claude-haiku-4-5").status_code == 404


def test_openais_paths_need_no_version(talker: Talker) -> None:
    with openai.OpenAI(base_url=talker.url, api_key="none", max_retries=0) as client:
        for _ in client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2, stream=True):  # type: ignore[call-overload]
            pass
        assert client.completions.create(model="tiny", prompt="a", max_tokens=2).usage
        assert client.embeddings.create(model="tiny", input="a").data
        made = client.responses.create(model="tiny", input="a", max_output_tokens=2)
        assert client.responses.retrieve(made.id).id == made.id
        assert [one.id for one in client.models.list()] == [client.models.retrieve("tiny").id] == ["tiny"]
    wrong = httpx.post(f"{talker.url}/chat/completions", json={"temprature": 1})
    assert wrong.json()["error"]["type"] == "invalid_request_error", "an error has the API's own form"


def test_a_message_keeps_its_name(talker: Talker) -> None:
    named = [HELLO[0] | {"name": "planner"}]
    plain, longer = (post(talker, CHAT, {"messages": one}).json()["usage"]["prompt_tokens"] for one in (HELLO, named))
    assert longer > plain
