"""What clients are known to send, in every API: it is implemented, or harmless, or named in X-Tokenwright-Ignored."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
import openai
import pytest

from tests.serve.talking import Talker
from tokenwright.llm.chat.template_messages import without_volatile

USER = {"role": "user", "content": "Hello"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LEAST: Mapping[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [USER], "max_tokens": 2},
    MESSAGES: {"model": "tiny", "messages": [USER], "max_tokens": 2},
    RESPONSES: {"model": "tiny", "input": "Hello", "max_output_tokens": 2},
    "/v1/completions": {"model": "tiny", "prompt": "Hello", "max_tokens": 2},
    "/api/chat": {"model": "tiny", "messages": [USER], "options": {"num_predict": 2}},
    "/api/generate": {"model": "tiny", "prompt": "Hello", "options": {"num_predict": 2}},
    "/api/embed": {"model": "tiny", "input": "Hello"},
    "/v1/embeddings": {"model": "tiny", "input": "Hello"},
}
ODD = {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}
WRONG = {"type": "object", "properties": {"tags": {"type": "any"}}}
CALL = {"id": "c" * 300, "type": "function", "index": 0, "function": {"name": "a.b:c", "arguments": "not JSON"}}
ANY_TOOL = {"type": "function", "function": {"name": "f"}}
NOTHING = {"role": "tool", "tool_call_id": "c" * 300, "content": None}
MARK = {"cache_control": {"type": "ephemeral", "scope": "global", "ttl": "1h"}}


def ask(talker: Talker, path: str, **more: Any) -> httpx.Response:
    return httpx.post(talker.url + path, json=LEAST[path] | more, timeout=120)


def ignored(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [name for name in answer.headers.get("x-tokenwright-ignored", "").split(", ") if name]


def parts(**more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "Hello", **more}]}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER | {"name": "planner"}]}),
        (CHAT, {"messages": parts(**MARK)}),
        (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [CALL], "parsed": None, "reasoning": "so"}]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_details": [{}]}, USER]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, NOTHING]}),
        (CHAT, {"store": True, "service_tier": "flex", "verbosity": "low", "metadata": {"a": {"b": 1}}}),
        (CHAT, {"top_k": -1, "max_tokens": -1, "max_completion_tokens": 2, "stop": [], "functions": [], "seed": -1}),
        (CHAT, {"tools": [ANY_TOOL], "tool_choice": {"type": "auto"}}),
        *(
            (CHAT, {"tools": [ANY_TOOL], "tool_choice": {"type": kind, "name": ANY_TOOL["function"]["name"]}})
            for kind in ("function", "tool")
        ),
        (CHAT, {"tools": [ANY_TOOL], "tool_choice": {"type": "any"}, "n_predict": 2}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True, "anything": [1]}}),
        (CHAT, {"prediction": {"type": "content", "content": "x"}, "prompt_cache_retention": "24h"}),
        ("/v1/completions", {"cache_prompt": True, "suffix": "", "user": "a", "num_thread": 4}),
        (MESSAGES, {"messages": parts(**MARK), "system": [{"type": "text", "text": "Hi", **MARK}], **MARK}),
        (MESSAGES, {"metadata": {"user_id": "u" * 900}, "output_config": {"effort": "medium"}, "speed": "fast"}),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
        (MESSAGES, {"thinking": {"type": "adaptive"}, "mcp_servers": [], "betas": ["x"]}),
        (RESPONSES, {"include": ["reasoning.encrypted_content"], "client_metadata": {}, "text": {"verbosity": "low"}}),
        (RESPONSES, {"store": False, "truncation": "auto", "reasoning": {"effort": "medium", "summary": "auto"}}),
        ("/api/chat", {"options": {"num_predict": 2, "num_gpu": 99, "num_keep": 4, "use_mlock": True}}),
        ("/api/chat", {"options": {"num_predict": 2.0, "num_ctx": 0, "seed": 1.0}}),
        ("/api/chat", {"keep_alive": 0, "truncate": True, "messages": [USER | {"name": "a"}]}),
        ("/api/generate", {"keep_alive": "0s", "options": {"main_gpu": 0, "num_thread": 4, "f16_kv": True}}),
        ("/api/embed", {"options": {"num_ctx": 512, "temperature": 0.0}, "truncate": True, "stream": False}),
        ("/v1/embeddings", {"user": "a"}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_changes_no_answer_is_accepted(talker: Talker, path: str, body: dict[str, Any]) -> None:
    assert ignored(ask(talker, path, **body)) == []


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (CHAT, {"brand_new": 1, "messages": [USER | {"newer": 1}]}, ["brand_new", "messages.newer"]),
        ("/v1/completions", {"brand new\n": 1}, ["brand new?"]),
        (MESSAGES, {"brand_new": 1}, ["brand_new"]),
        (
            MESSAGES,
            {"tools": [{"type": "web_search_20250305", "name": "w"}, {"name": "Ask", "input_schema": ODD}]},
            ["tools.web_search_20250305", "tools.Ask.uniqueItems"],
        ),
        (
            RESPONSES,
            {
                "tools": [
                    {"type": "web_search"},
                    {"type": "function", "name": "f", "parameters": ODD},
                    {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": 'start: "x"'}},
                    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
                ]
            },
            ["tools.web_search", "tools.f.uniqueItems"],
        ),
        (RESPONSES, {"input": [{"type": "web_search_call", "id": "w"}, USER]}, ["input.web_search_call"]),
        (
            "/api/chat",
            {"options": {"num_predict": 2, "brand_new": 1}, "format": ODD},
            ["options.brand_new", "schema.uniqueItems"],
        ),
        ("/api/embed", {"brand_new": 1}, ["brand_new"]),
        ("/v1/embeddings", {"brand_new": 1}, ["brand_new"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_left_out_is_named(talker: Talker, path: str, body: dict[str, Any], names: list[str]) -> None:
    assert sorted(ignored(ask(talker, path, **body))) == sorted(names)


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
    ],
    ids=lambda value: str(value)[:80],
)
def test_schemas_are_loosened_by_steps_unless_they_are_strict(
    talker: Talker, form: dict[str, Any], named: str, refused: str, streamed: bool
) -> None:
    """A keyword is left out, then the schema; what is left is followed, and a strict one is refused."""
    answer = ask(talker, CHAT, **form, stream=streamed, max_tokens=60, temperature=0)
    if refused:
        assert answer.status_code == 400
        assert refused in answer.json()["error"]["message"]
        return
    assert ignored(answer) == [named]
    if "response_format" in form and not streamed:
        assert answer.json()["choices"][0]["message"]["content"].startswith("{"), "an object all the same"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {"temprature": 1}, "did you mean temperature?"),
        (CHAT, {"modalities": ["audio"]}, "modalities is not supported"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "and this server runs none"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": ODD}}]},
            "f is strict, and properties.tags.uniqueItems",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": ODD}}},
            "properties.tags.uniqueItems cannot be enforced",
        ),
        (CHAT, {"guided_regex": "a", "guided_choice": ["a"]}, "each say the form"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": WRONG}}]},
            "f: properties.tags.type of its parameters is wrong",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_would_change_the_answer_is_refused(talker: Talker, path: str, body: dict[str, Any], said: str) -> None:
    answer = ask(talker, path, **body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_blocks_of_anthropics_own_tools_are_left_out_and_texts_are_read(talker: Talker) -> None:
    def asked(*blocks: dict[str, Any]) -> tuple[list[str], int]:
        answer = ask(talker, MESSAGES, messages=[{"role": "user", "content": [*blocks]}])
        usage = answer.json()["usage"]
        return ignored(answer), usage["input_tokens"] + usage["cache_read_input_tokens"]

    text = {"type": "text", "text": "a b"}
    document = {"type": "document", "title": "a b", "source": {"type": "text", "media_type": "text/plain", "data": "c"}}
    found = {"type": "search_result", "title": "a b", "source": "c", "content": [text]}
    hosted = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "x"}}
    assert asked(hosted, text) == (["messages.content.tool_addition"], asked(text)[1])
    assert asked(document) == asked(text, {"type": "text", "text": "c"})
    assert asked(found) == asked(text, {"type": "text", "text": "c"}, text)
    answered = [
        {"type": "compaction", "content": "a b", "encrypted_content": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
    ]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document, {"type": "tool_reference"}]}
    history = [USER, {"role": "assistant", "content": answered}, {"role": "user", "content": [result]}]
    names = ["server_tool_use", "web_search_tool_result", "tool_reference"]
    assert ignored(ask(talker, MESSAGES, messages=history)) == [f"messages.content.{name}" for name in names]
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aa"}}
    refused = ask(talker, MESSAGES, messages=[{"role": "user", "content": [pdf]}])
    assert refused.status_code == 400 and "source: type 'base64' is not supported" in refused.text
    assert ask(talker, MESSAGES, messages=[{"role": "user", "content": [hosted]}]).status_code in (200, 400)


def test_a_field_may_not_be_half_a_character(talker: Talker) -> None:
    for path in LEAST:
        answer = httpx.post(talker.url + path, content=b'{"\\ud800": 1}', headers={"content-type": "application/json"})
        assert (answer.status_code, "surrogate" in answer.text) == (400, True), path


def test_the_model_may_be_left_out_where_there_is_one(talker: Talker) -> None:
    for path in (CHAT, MESSAGES, RESPONSES, "/v1/completions", "/v1/embeddings"):
        body = {name: value for name, value in LEAST[path].items() if name != "model"}
        answer = httpx.post(talker.url + path, json=body, timeout=120)
        assert (answer.status_code, answer.json()["model"]) == (200, "tiny"), path


@pytest.mark.parametrize("path", [path for path in LEAST if not path.startswith("/api/")])
def test_one_model_answers_under_any_name(talker: Talker, path: str) -> None:
    answer = ask(talker, path, model="claude-haiku-4-5")
    assert (ignored(answer), answer.json()["model"]) == (["model"], "tiny")
    assert httpx.get(f"{talker.url}/v1/models/claude-haiku-4-5").status_code == 404


def test_openais_paths_need_no_version(talker: Talker) -> None:
    client = openai.OpenAI(base_url=talker.url, api_key="none", max_retries=0)
    for _ in client.chat.completions.create(model="tiny", messages=[USER], max_tokens=2, stream=True):  # type: ignore[call-overload]
        pass
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).usage
    assert client.embeddings.create(model="tiny", input="a").data
    made = client.responses.create(model="tiny", input="a", max_output_tokens=2)
    assert client.responses.retrieve(made.id).id == made.id
    assert [one.id for one in client.models.list()] == [client.models.retrieve("tiny").id] == ["tiny"]
    wrong = httpx.post(f"{talker.url}/chat/completions", json={"temprature": 1})
    assert wrong.json()["error"]["type"] == "invalid_request_error", "an error has the API's own form"


@pytest.mark.parametrize(
    "form",
    [
        {"guided_choice": ["yes", "no"]},
        {"choice": ["yes", "no"]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_regex": "yes|no"},
        {"structured_outputs": {"regex": "yes|no"}},
        {"grammar": 'root ::= "yes" | "no"'},
        {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
        {"response_format": {"type": "regex", "pattern": "yes|no"}},
        {"response_format": {"type": "grammar", "grammar": 'root ::= "yes" | "no"'}},
    ],
    ids=str,
)
def test_the_form_of_a_text_has_many_names(talker: Talker, form: dict[str, Any]) -> None:
    answer = ask(talker, CHAT, max_tokens=8, temperature=0, **form).json()
    assert answer["choices"][0]["message"]["content"] in ("yes", "no")
    if "response_format" not in form:
        assert ask(talker, "/v1/completions", max_tokens=8, **form).json()["choices"][0]["text"] in ("yes", "no")


@pytest.mark.parametrize(
    "form",
    [
        {
            "type": "json_object",
            "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        },
        {
            "type": "json_schema",
            "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        },
        {
            "type": "json_schema",
            "json_schema": {
                "strict": "true",
                "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            },
        },
    ],
    ids=str,
)
def test_a_schema_stands_where_servers_have_it(talker: Talker, form: dict[str, Any]) -> None:
    answer = ask(talker, CHAT, max_tokens=40, response_format=form).json()
    found = json.loads(answer["choices"][0]["message"]["content"])
    assert list(found) == ["a"] and type(found["a"]) is bool, "closed, though the schema says nothing of it"


def test_an_answer_goes_on_from_the_assistants_last_message(talker: Talker) -> None:
    begun = [USER, {"role": "assistant", "content": "in a"}]
    ids = [*talker.llm.template.render([USER]).ids, *talker.llm.tokenizer.encode("in a", add_special=False)]
    [whole] = talker.llm.generate([ids], talker.llm.sampling(temperature=0.0, max_tokens=4))
    chat = ask(talker, CHAT, messages=begun, temperature=0, max_tokens=4).json()
    assert chat["choices"][0]["message"]["content"] == whole.text
    options = {"temperature": 0, "num_predict": 4}
    assert (
        ask(talker, "/api/chat", messages=begun, options=options, stream=False).json()["message"]["content"]
        == whole.text
    )
    new = ask(talker, CHAT, messages=begun, temperature=0, max_tokens=4, add_generation_prompt=True).json()
    assert new["usage"]["prompt_tokens"] != chat["usage"]["prompt_tokens"]


def test_a_message_keeps_its_name(talker: Talker) -> None:
    plain = ask(talker, CHAT).json()["usage"]["prompt_tokens"]
    assert ask(talker, CHAT, messages=[USER | {"name": "planner"}]).json()["usage"]["prompt_tokens"] > plain


def test_a_billing_line_is_left_out() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=aaaaa;"
    assert without_volatile(f"{line}\nYou help.") == "You help."
    assert without_volatile(f"You help.\n{line}") == "You help."
    assert without_volatile("You help.") == "You help."


def test_a_billing_line_does_not_undo_the_prefix_cache(talker: Talker) -> None:
    def read(mark: str) -> int:
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cch={mark};"},
            {"type": "text", "text": "a b " * 99},
        ]
        found: int = ask(talker, MESSAGES, system=system).json()["usage"]["cache_read_input_tokens"]
        return found

    read("aaaaa")
    assert read("bbbbb") > 99
