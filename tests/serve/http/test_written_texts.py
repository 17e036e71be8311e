"""Texts that a model writes, as the official clients and others read them: characters, special tokens, summaries."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from tests.engines import HANGS_S
from tests.serve.chat.test_tool_apis import Scripted
from tests.serve.declared import read
from tests.serve.talking import TEMPLATE, Talker, make_talker, talking
from tokenwright.serve.openai.responses.input_items import SUMMARY
from tokenwright.serve.openai.responses.output_items import CompactedReply

LINES = "one \u2028two, \u0085three, \u2029four."
USER: Any = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}}


class Writer:
    """A server whose model writes what a test says. `says`: a text; special tokens in it are these tokens."""

    def __init__(self, talker: Talker) -> None:
        self.talker = talker
        self.http = httpx.Client(base_url=talker.url, timeout=HANGS_S)
        engine = talker.llm.llm_engine._open().loop.engine
        [self.end, *_] = sorted(talker.llm.eos_ids)
        engine.sampler = self.script = Scripted(engine.sampler, self.end)

    def says(self, text: str, *, at_once: bool = False) -> int:
        """Returns the number of its tokens."""
        self.script.script = self.talker.llm.tokenizer.encode(text, add_special=False)
        self.script.at_once = at_once
        return len(self.script.script)

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return (
            answer.json()
            if not body.get("stream")
            else [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
        )


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writer]:
    with talking(make_talker(tmp_path_factory.mktemp("writer"))) as talker:
        made = Writer(talker)
        with made.http:
            yield made


def test_a_line_of_a_stream_is_one_line_for_every_client(writer: Writer) -> None:
    """Many cut lines where str.splitlines does, as ollama's own client."""
    writer.says(LINES)
    url = writer.talker.url
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", timeout=HANGS_S) as asked:
        chunks = asked.chat.completions.create(model="tiny", messages=USER, stream=True)
        assert "".join(one.choices[0].delta.content or "" for one in chunks) == LINES
        with asked.responses.stream(model="tiny", input="Hello") as response:
            assert response.get_final_response().output_text == LINES
    client = anthropic.Anthropic(base_url=url, api_key="x", timeout=HANGS_S)
    with client, client.messages.stream(model="tiny", max_tokens=60, messages=USER) as stream:
        assert stream.get_final_text() == LINES
    with ollama.Client(url, timeout=HANGS_S) as lines:
        parts = lines.chat("tiny", USER, stream=True)
        assert "".join(one.message.content or "" for one in parts) == LINES
    for path, body in (
        ("/v1/chat/completions", {"messages": USER, "logprobs": True}),
        ("/v1/completions", {"prompt": LINES, "echo": True, "max_tokens": 60}),
        ("/completion", {"prompt": LINES, "n_predict": 60}),
        ("/v1/responses", {"input": LINES, "instructions": LINES}),
        ("/v1/messages", {"messages": USER, "max_tokens": 60}),
        ("/api/generate", {"prompt": LINES}),
    ):
        answer = writer.http.post(path, json={"model": "tiny", "stream": True, **body})
        lines = [one.removeprefix("data: ") for one in answer.text.splitlines()]
        events = [json.loads(one) for one in lines if one and not one.startswith(("event: ", "[DONE]"))]
        assert "\u2028" in json.dumps(events, ensure_ascii=False), path


@pytest.mark.parametrize("streamed", [False, True])
def test_special_tokens_are_part_of_a_text_if_that_is_asked_for(writer: Writer, streamed: bool) -> None:
    """As vLLM and SGLang write them; the end token is none of the text."""
    text = "<|im_start|>12 34<|im_start|>title."
    tokens = writer.says(text)

    def written(path: str, **body: Any) -> list[str]:
        found = writer.post(path, model="tiny", stream=streamed, max_tokens=tokens + 1, **body)
        texts = [""] * body.get("n", 1)
        for choice in (choice for one in (found if streamed else [found]) for choice in one["choices"]):
            message = choice.get("delta" if streamed else "message", choice)
            texts[choice["index"]] += message.get("content") or message.get("text") or ""
        return texts

    plain = text.replace("<|im_start|>", "")
    for more, wanted in (({}, plain), ({"skip_special_tokens": False}, text), ({"skip_special_tokens": True}, plain)):
        assert written("/v1/chat/completions", messages=USER, n=2, **more) == [wanted] * 2
        assert written(
            "/v1/chat/completions", messages=USER, tools=[{"type": "function", "function": TOOL}], **more
        ) == [wanted]
        assert written("/v1/completions", prompt="Hello", **more) == [wanted]


def test_a_text_that_is_known_at_the_end_alone_leaves_the_field_out_and_says_so(writer: Writer) -> None:
    body = {"model": "tiny", "prompt": "Hello", "n": 1, "best_of": 2, "skip_special_tokens": False, "max_tokens": 3}
    answer = writer.http.post("/v1/completions", json=body)
    assert answer.headers["x-tokenwright-ignored"] == "skip_special_tokens"


def test_calls_that_shall_not_be_parsed_are_text(writer: Writer) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"where": "in"}}\n</tool_call>'
    tokens = writer.says(call)
    for parsed in (True, False):
        answer = writer.post(
            "/v1/chat/completions",
            model="tiny",
            messages=USER,
            tools=[{"type": "function", "function": TOOL}],
            parse_tool_calls=parsed,
            max_tokens=tokens + 1,
        )
        [choice] = answer["choices"]
        found = choice["message"]["content"], bool(choice["message"].get("tool_calls")), choice["finish_reason"]
        assert found == ((None, True, "tool_calls") if parsed else (call, False, "stop"))


def test_every_chunk_has_the_usage_if_that_is_asked_for(writer: Writer) -> None:
    tokens = writer.says("one two three")
    for path, body in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": ["Hello", "Hi"]})):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = writer.post(path, model="tiny", stream=True, stream_options=options, max_tokens=tokens + 1, **body)
        counts = [one["usage"]["completion_tokens"] for one in chunks]
        assert counts == sorted(counts)
        assert counts[0] > 0
        assert counts[-1] == (tokens + 1) * (1 if path.startswith("/v1/chat") else 2)
        assert all(one["choices"] for one in chunks[:-1])


def test_a_prompt_has_the_tokens_that_the_tokenizer_adds_unless_the_request_says_otherwise(writer: Writer) -> None:
    writer.says("one")
    [some, none] = [
        writer.post("/v1/completions", model="tiny", prompt="Hello", add_special_tokens=added)["usage"]["prompt_tokens"]
        for added in (True, False)
    ]
    encode = writer.talker.llm.tokenizer.encode
    assert (some, none) == (len(encode("Hello")), len(encode("Hello", add_special=False)))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_summary_stands_for_the_conversation(writer: Writer, streamed: bool) -> None:
    """`compaction_trigger` ends the input: one item comes back, and tells a later request what the summary said."""
    tokens = writer.says("<think>Hm.</think>They said Hello.")
    tools = [{"type": "function", "strict": False, **TOOL}]
    given = [*USER, {"type": "compaction_trigger"}]
    more = {"tools": tools, "tool_choice": "required", "text": {"format": {"type": "json_object"}}}
    ends = [("completed", tokens + 1), ("incomplete", tokens - 1)]
    for status, most in ends:
        found = writer.post("/v1/responses", model="tiny", input=given, stream=streamed, max_output_tokens=most, **more)
        if streamed:
            assert [one["item"]["type"] for one in found if one["type"] == "response.output_item.done"] == [
                "compaction"
            ]
            assert [one["sequence_number"] for one in found] == list(range(len(found)))
            found = found[-1]["response"]
        [item] = found["output"]
        assert (item["type"], found["status"]) == ("compaction", status)
        sealed = item["encrypted_content"].split(".", 1)[1]
        assert "They said Hello.".startswith(base64.urlsafe_b64decode(sealed).decode())
    [whole, prompt] = [
        writer.post("/v1/responses/input_tokens", model="tiny", input=input_)["input_tokens"]
        for input_ in ([item, *USER], [{"role": "user", "content": f"{SUMMARY}\nThey said Hello"}, *USER])
    ]
    assert abs(whole - prompt) <= 3
    if not streamed:
        compacted = writer.post("/v1/responses/compact", model="tiny", input=USER, tools=tools)
        [only] = read(CompactedReply, compacted).output
        assert base64.urlsafe_b64decode(only.encrypted_content.split(".", 1)[1]) == b"They said Hello."
        short = {"model": "tiny", "input": USER, "max_output_tokens": tokens - 1}
        cut = writer.http.post("/v1/responses/compact", json=short)
        assert cut.status_code == 400 and "max_output_tokens allows" in cut.text, "a summary that is cut is none"
    other = {"type": "compaction", "encrypted_content": "gAAAA of another server"}
    answer = writer.http.post("/v1/responses", json={"model": "tiny", "input": [other, *USER], "max_output_tokens": 2})
    assert answer.headers["x-tokenwright-ignored"] == "input.compaction"


def test_a_thought_is_signed_and_the_first_event_knows_what_was_cached(writer: Writer) -> None:
    tokens = writer.says("<think>Hm.</think>Yes.")
    long = [{"role": "user", "content": "Tell me of it. " * 40}]
    body = {"model": "tiny", "max_tokens": tokens + 1, "messages": long}
    whole = writer.post("/v1/messages", **body)
    events = writer.post("/v1/messages", stream=True, **body)
    assert events[0]["type"] == "message_start"
    [delta] = [one for one in events if one["type"] == "message_delta"]
    begun, ended = events[0]["message"]["usage"], delta["usage"]
    assert begun["cache_read_input_tokens"] == ended["cache_read_input_tokens"] > 0
    assert begun["input_tokens"] == ended["input_tokens"]
    kinds = [(one["index"], one.get("delta", {}).get("type", one["type"])) for one in events[1:-2]]
    thought = [kind for index, kind in kinds if index == 0]
    assert thought[-2:] == ["signature_delta", "content_block_stop"]
    [signature] = [one["delta"]["signature"] for one in events if one.get("delta", {}).get("type") == "signature_delta"]
    assert signature
    assert signature == whole["content"][0]["signature"]
    with anthropic.Anthropic(base_url=writer.talker.url, api_key="x", timeout=HANGS_S) as client:
        with client.messages.stream(model="tiny", max_tokens=tokens + 1, messages=USER) as stream:
            [block, _] = stream.get_final_message().content
        again = [{"role": "assistant", "content": [block.model_dump()]}, *USER]
        client.messages.create(model="tiny", max_tokens=2, messages=[*USER, *again])


NAMES = ["run shell cmd", "$READFILE", "\u5929\u6c14", "", "look<|im_start|>x", "a" * 300, 'say "it"\n']


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_a_model_made_up_does_not_end_the_conversation(writer: Writer, name: str) -> None:
    """In every API, also where the call has no arguments and no id: a client cannot repair what a model wrote."""
    writer.says("one")
    call = {"function": {"name": name, "arguments": "{}"}}
    chat = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", **call}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "no such tool"}
    older = [
        {"role": "assistant", "function_call": call["function"]},
        {"role": "function", "name": name, "content": "no"},
    ]
    custom = {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": name, "input": ""}}]}
    lines = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_name": name, "content": "no"}]
    block = {"type": "tool_use", "id": "c", "name": name, "input": {}}
    blocks = [
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
    ]
    items = [{"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"}]
    customs = [{"type": "custom_tool_call", "call_id": "c", "name": name, "input": ""}]
    done = [{"type": "function_call_output", "call_id": "c", "output": "no such tool"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": [*USER, chat, result, *USER], "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [*USER, *older, *USER], "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [*USER, custom, result, *USER], "max_tokens": 2}),
        ("/v1/responses", {"input": [*USER, *items, *done, *USER], "max_output_tokens": 2}),
        ("/v1/responses", {"input": [*USER, *customs, *done], "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [*USER, *blocks], "max_tokens": 2}),
        ("/api/chat", {"messages": [*USER, *lines, *USER], "stream": False, "options": {"num_predict": 2}}),
    ):
        tools = [{"name": "look", "input_schema": TOOL["parameters"]}] if path == "/v1/messages" else []
        writer.post(path, model="tiny", **body, **({"tools": tools} if tools else {}))


def test_hundreds_of_tools_are_taken(tmp_path: Path) -> None:
    named = TEMPLATE.replace("{{ tool | tojson }}", "{{ tool.function.name }} ")
    with talking(make_talker(tmp_path, template=named)) as talker:
        writer = Writer(talker)
        tokens = writer.says('<tool_call>\n{"name": "t199", "arguments": {"where": "in"}}\n</tool_call>')
        tools = [{"type": "function", "function": TOOL | {"name": f"t{n}"}} for n in range(200)]
        body = {"messages": USER, "tools": tools, "max_tokens": tokens + 1, "tool_choice": "required"}
        with writer.http:
            [choice] = writer.post("/v1/chat/completions", model="tiny", **body)["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "t199"


NULL = [{"type": "text", "text": None}]
CALLED = {"id": "", "type": "", "function": {"name": "look", "arguments": None}}
CALLING = {"role": "assistant", "tool_calls": [CALLED]}
USED = {"type": "tool_use", "id": "", "name": "look", "input": None}
RESULT = {"type": "tool_result", "tool_use_id": "", "content": None}


@pytest.mark.parametrize(
    ("path", "messages"),
    [
        ("/v1/chat/completions", [{"role": "user", "content": NULL}]),
        (
            "/v1/chat/completions",
            [*USER, CALLING, {"role": "tool", "content": None}],
        ),
        ("/v1/chat/completions", [*USER, {"role": "assistant", "content": NULL}, *USER]),
        ("/v1/messages", [{"role": "user", "content": NULL}]),
        ("/v1/messages", [*USER, {"role": "assistant", "content": None}, *USER]),
        ("/v1/messages", [*USER, {"role": "assistant", "content": [USED]}, {"role": "user", "content": [RESULT]}]),
        ("/v1/responses", [*USER, {"role": "assistant", "content": None}, *USER]),
        ("/v1/responses", [*USER, {"type": "function_call", "call_id": "", "name": None, "arguments": None}, *USER]),
        ("/v1/responses", [{"type": "reasoning", "summary": None, "content": None}, *USER]),
        (
            "/api/chat",
            [*USER, CALLING, {"role": "tool", "tool_name": ""}],
        ),
    ],
)
def test_an_earlier_answer_may_lack_its_words(writer: Writer, path: str, messages: list[Any]) -> None:
    """Other servers and frameworks write null and "" for what there is not."""
    writer.says("one")
    name = "input" if path == "/v1/responses" else "messages"
    more = {"max_tokens": 2} if path == "/v1/messages" else {"stream": False}
    writer.post(path, model="tiny", **{name: messages}, **more)
