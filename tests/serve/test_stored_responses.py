"""Responses that are kept: a later request goes on from one, and clients read, list and delete them."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.serve.talking import Talker
from tokenwright.serve.openai.reply_schema import DeletedResponse, InputItems, InputTokens
from tokenwright.serve.openai.stored_responses import AGE_S, StoredResponses, answer_of


@pytest.fixture(scope="module")
def client(talker: Talker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{talker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(client: openai.OpenAI, text: str, **more: Any) -> Any:
    return client.responses.create(model="tiny", input=text, max_output_tokens=4, temperature=0, **more)


def test_a_request_goes_on_from_a_stored_response(talker: Talker, client: openai.OpenAI) -> None:
    first = create(client, "Hello", instructions="Be brief.")
    second = create(client, "And now?", previous_response_id=first.id)
    whole = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And now?"},
    ]
    assert second.usage.input_tokens == len(talker.llm.template.render(whole).ids)
    other = create(client, "And now?", previous_response_id=first.id, instructions="Sing.")
    assert other.usage.input_tokens == len(
        talker.llm.template.render([{"role": "system", "content": "Sing."}, *whole[1:]]).ids
    ), "instructions are not carried over"


def test_streams_are_kept_too(client: openai.OpenAI) -> None:
    *_, last = create(client, "Hello", stream=True)
    assert client.responses.retrieve(last.response.id).output_text == last.response.output_text


def test_a_response_is_read_and_forgotten(talker: Talker, client: openai.OpenAI) -> None:
    made = create(client, "Hello")
    assert client.responses.retrieve(made.id).output_text == made.output_text
    assert client.responses.cancel(made.id).id == made.id
    items = httpx.get(f"{talker.url}/v1/responses/{made.id}/input_items")
    assert InputItems.model_validate_json(items.content).data[0]["content"][0]["text"] == "Hello"
    DeletedResponse.model_validate_json(httpx.delete(f"{talker.url}/v1/responses/{made.id}").content)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="is forgotten"):
            call(made.id)
    assert create(client, "Hello", store=False).id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(create(client, "Hello", store=False).id)


def test_the_tokens_of_an_input_are_counted(talker: Talker, client: openai.OpenAI) -> None:
    counted = httpx.post(f"{talker.url}/v1/responses/input_tokens", json={"model": "tiny", "input": "Hello"})
    assert InputTokens.model_validate_json(counted.content).input_tokens == create(client, "Hello").usage.input_tokens


def test_reasoning_comes_back_as_one_text(talker: Talker, client: openai.OpenAI) -> None:
    made = create(client, "Hello", reasoning={"effort": "low"}, include=["reasoning.encrypted_content"])
    [item] = [one for one in made.output if one.type == "reasoning"]
    text = item.content[0].text
    user = {"role": "user", "content": "Hello"}
    sealed = {"type": "reasoning", "id": item.id, "summary": [], "encrypted_content": item.encrypted_content}
    back = [user, sealed, user]
    again = client.responses.create(model="tiny", input=back, max_output_tokens=1)
    said = [user, {"role": "assistant", "content": "", "reasoning_content": text}, user]
    assert text
    assert again.usage.input_tokens == len(talker.llm.template.render(said).ids)


def response(name: str, size: int = 0) -> dict[str, Any]:
    return {"id": name, "output": [], "more": "x" * size}


def test_they_are_kept_by_key_within_bytes_and_an_age() -> None:
    now = [0.0]
    kept = StoredResponses(1000, lambda: now[0])
    for name in ("a", "b", "c"):
        kept.add("key", response(name, 300), [], [])
    assert [kept.get("key", name) is not None for name in "abc"] == [False, True, True], "the oldest goes first"
    assert kept.get("other", "b") is None
    kept.add("key", response("large", 2000), [], [])
    assert kept.get("key", "large") is None
    assert kept.get("key", "c") is not None
    assert kept.nbytes <= 1000
    now[0] = AGE_S + 1
    assert kept.get("key", "c") is None
    assert kept.nbytes == 0


def test_an_answer_is_put_together_from_its_items() -> None:
    output = [
        {"type": "reasoning", "content": [{"text": "so"}]},
        {"type": "message", "content": [{"text": "It "}, {"text": "is."}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "x"},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{cut"},
    ]
    found = answer_of(output)
    assert (found["reasoning_content"], found["content"]) == ("so", "It is.")
    assert [call["function"]["arguments"] for call in found["tool_calls"]] == [{"a": 1}, {"input": "x"}, "{cut"]
