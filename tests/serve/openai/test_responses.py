"""OpenAI's Responses API, as the official client drives it."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.serve.talking import SCHEMA, Talker, valid
from tokenwright import SamplingParams
from tokenwright.llm.outputs import Piece
from tokenwright.serve.openai.responses.bodies import Create
from tokenwright.serve.openai.responses.output_items import Envelope, ResponseOutput
from tokenwright.serve.service.types import Delta, TokenCounts

HELLO = "Hello, how are you?"
ASKED = [{"role": "user", "content": HELLO}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "max_output_tokens": 8}
TOOL: Any = {"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": True}


@pytest.fixture
def client(talker: Talker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{talker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response_is_what_the_model_says(talker: Talker, client: openai.OpenAI) -> None:
    response = client.responses.create(input=HELLO, store=False, user="u", metadata={"a": "b"}, **GREEDY)
    assert response.output_text == talker.greedy(ASKED)
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert (response.object, response.status) == ("response", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (talker.tokens(ASKED), 8)
    assert response.usage.total_tokens == talker.tokens(ASKED) + 8
    assert (response.store, response.user, response.metadata) == (False, "u", {"a": "b"})  # type: ignore[attr-defined]
    assert (response.temperature, response.top_p) == (0.0, 1.0)
    whole = client.responses.create(input=HELLO, **GREEDY | {"max_output_tokens": 900})
    assert (whole.status, whole.output_text) == ("completed", talker.greedy(ASKED, 900))


def test_a_stream_builds_the_same_response_event_by_event(talker: Talker, client: openai.OpenAI) -> None:
    events = list(client.responses.create(input=HELLO, stream=True, **GREEDY | {"max_output_tokens": 900}))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    [last] = [event.response for event in events if event.type == "response.completed"]
    assert text == last.output_text == talker.greedy(ASKED, 900)
    assert last.usage is not None
    assert last.usage.output_tokens > 8
    with client.responses.stream(input=HELLO, **GREEDY | {"max_output_tokens": 900}) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
        assert stream.get_final_response().output_text == text


def test_a_raw_stream_names_its_events(talker: Talker, client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(input=HELLO, **GREEDY)
    assert raw.headers["x-request-id"]
    assert raw.parse().output_text == talker.greedy(ASKED)
    with httpx.stream("POST", f"{talker.url}/v1/responses", json=GREEDY | {"input": HELLO, "stream": True}) as answer:
        chunks = list(answer.iter_raw())
    assert all(chunk.decode().endswith("\n\n") for chunk in chunks)
    for event in b"".join(chunks).decode().split("\n\n")[:-1]:
        name, data = event.split("\n", 1)
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_function_is_called_with_valid_arguments(client: openai.OpenAI, streamed: bool, choice: Any) -> None:
    asked = {"model": "tiny", "input": HELLO, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    if streamed:
        with client.responses.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            response = stream.get_final_response()
        assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    else:
        response = client.responses.create(**asked)
    [call] = response.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert valid(json.loads(call.arguments))


def test_an_answer_and_its_results_can_be_sent_back(talker: Talker, client: openai.OpenAI) -> None:
    asked = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    first = client.responses.create(model="tiny", input=HELLO, **asked)
    call: Any = first.output[0]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
    history: list[Any] = [*ASKED, *first.output, result]
    second = client.responses.create(input=history, **GREEDY)
    function = {"name": "weather", "arguments": json.loads(call.arguments)}
    told = [
        *ASKED,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "name": "weather", "content": "warm"},
    ]
    assert second.output_text == talker.greedy(told)


def test_items_become_the_turns_of_a_conversation(talker: Talker, client: openai.OpenAI) -> None:
    items: list[Any] = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be"}, {"type": "input_text", "text": "brief"}],
        },
        {"type": "message", "role": "user", "content": "One"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Two", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"hot": true}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "cold"}]},
        {"role": "assistant", "content": "Three"},
        {"role": "assistant", "content": "Four"},
        {"role": "user", "content": "Five"},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for name, arguments in (("c1", {"hot": True}), ("c2", {}))
    ]
    told = [
        {"role": "system", "content": "Think"},
        {"role": "system", "content": "Be\nbrief"},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c2", "name": "weather", "content": "cold"},
        {"role": "assistant", "content": "Three"},
        {"role": "assistant", "content": "Four"},
        {"role": "user", "content": "Five"},
    ]
    response = client.responses.create(input=items, instructions="Think", tools=[TOOL], tool_choice="none", **GREEDY)
    assert response.output_text == talker.greedy(told, grammar=talker.silence)


def test_reasoning_is_an_item_of_its_own(talker: Talker, client: openai.OpenAI) -> None:
    thoughts = talker.greedy(ASKED, variables={"enable_thinking": True})
    response = client.responses.create(input=HELLO, reasoning={"effort": "high"}, **GREEDY)
    item: Any = response.output[0]
    assert (item.type, item.content[0].text.strip()) == ("reasoning", thoughts.strip())
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    events = client.responses.create(input=HELLO, reasoning={"effort": "high"}, stream=True, **GREEDY)
    assert (
        "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        == item.content[0].text
    )
    plain = client.responses.create(input=HELLO, reasoning={"effort": "none"}, **GREEDY)
    assert plain.output_text == talker.greedy(ASKED)


class Weather(BaseModel):
    hot: bool
    where: Literal["in", "out"]


def test_an_answer_follows_a_schema(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="tiny", input=HELLO, text_format=Weather)
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.where in ("in", "out")
    form: Any = {"format": {"type": "json_object"}}
    anything = client.responses.create(input=HELLO, text=form, **GREEDY)
    assert anything.output_text.lstrip().startswith("{")


def test_log_probabilities(talker: Talker, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = client.responses.create(input=HELLO, **asked, **GREEDY)
    params = talker.llm.sampling(temperature=0.0, max_tokens=8, logprobs=2)
    [whole] = talker.llm.generate([talker.llm.template.render(ASKED).ids], params)
    part: Any = response.output[0].content[0]  # type: ignore[union-attr,index]
    assert [one.logprob for one in part.logprobs] == list(whole.logprobs)
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    events = client.responses.create(input=HELLO, stream=True, **asked, **GREEDY)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [one.logprob for event in deltas for one in event.logprobs] == list(whole.logprobs)


def test_tokens_without_text_keep_their_log_probabilities() -> None:
    """The last token of a text may add no text, as half of a character does, and may come in a delta of its own."""

    def logprobs(*deltas: Delta) -> list[float]:
        body = Create(model="tiny", input=HELLO)
        output = ResponseOutput(
            Envelope("resp_1", body, "tiny", SamplingParams()),
            lambda tokens: [{"token": "", "bytes": [], "logprob": one.logprob, "top_logprobs": []} for one in tokens],
        )
        events = [dict(event) for delta in deltas for event in output.take(delta)]
        found = [one["logprob"] for e in events if e["type"] == "response.output_text.delta" for one in e["logprobs"]]
        [item] = output.response(TokenCounts(1, 1, 0))["output"]
        assert [one["logprob"] for one in item["content"][0]["logprobs"]] == found
        return found

    one, two = (Piece("", token, -float(token), 0.0, (), 0) for token in (1, 2))
    assert logprobs(Delta(0, "a", tokens=[one]), Delta(0, tokens=[two]), Delta(0, finish="length")) == [-1, -2]
    assert logprobs(Delta(0, "a", tokens=[one]), Delta(0, tokens=[two], finish="stop")) == [-1, -2]
    assert logprobs(Delta(0, tokens=[one], finish="length")) == [-1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "atuo"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"verbsity": "low"}}, "text.verbsity"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "x"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.id"),
        ({"inptu": "a"}, "inptu"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_done_is_refused_by_name(client: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "tiny", "input": HELLO} | {"extra_body": body})
    assert refused.value.param is not None
    assert refused.value.param.startswith(param)
    assert param.rpartition(".")[0] in refused.value.message


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
