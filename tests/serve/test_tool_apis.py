"""Calls of every family through four APIs: whole and streamed, and cut at every token, no markup reaches a client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.talking import HANGS_S, Talker, make_talker, talking
from tests.serve.test_tool_families import facts_of
from tests.serve.tool_families import FAMILIES, Family
from tokenwright.engine import Pick

SAID = "Let me look."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "sure": {"type": "boolean"}},
}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
ARGUMENTS = {"city": "Oslo", "days": 3, "sure": True}
USER = [{"role": "user", "content": "Hello"}]
Found = tuple[str, list[tuple[str, Any]]]  # the text, and the calls: names and arguments


class Scripted:
    """A sampler that picks the tokens of a text whatever the model says, and then the end token."""

    def __init__(self, inner: Any, end: int) -> None:
        self.inner, self.end = inner, end
        self.script: list[int] = []

    def pick(self, output: Any, step: Any) -> list[Any]:
        sequences = {chunk.sequence.id: chunk.sequence for chunk in step.chunks}
        return [self._written(one, sequences) for one in self.inner.pick(output, step)]

    def _written(self, one: Any, sequences: Any) -> Any:
        if not isinstance(one, Pick):
            return one
        sequence = sequences[one.parent]
        at = len(sequence.tokens) - sequence.request.prompt_length
        token = self.script[at] if at < len(self.script) else self.end
        return replace(one, tokens=(token,), logprobs=(0.0,), sampler_logprobs=(0.0,), tops=((),))


def of_chat(answer: Any) -> Found:
    message = answer["choices"][0]["message"]
    calls = [one["function"] for one in message.get("tool_calls") or []]
    return message["content"] or "", [(one["name"], one["arguments"]) for one in calls]


def of_chat_events(events: list[Any]) -> Found:
    deltas = [one["choices"][0]["delta"] for one in events if one.get("choices")]
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls") or ()):
        begun = calls.setdefault(call["index"], ["", ""])
        begun[0] += call["function"].get("name") or ""
        begun[1] += call["function"].get("arguments") or ""
    return "".join(delta.get("content") or "" for delta in deltas), [(name, text) for name, text in calls.values()]


def of_responses(answer: Any) -> Found:
    texts = [part["text"] for one in answer["output"] if one["type"] == "message" for part in one["content"]]
    calls = [(one["name"], one["arguments"]) for one in answer["output"] if one["type"] == "function_call"]
    return "".join(texts), calls


def of_responses_events(events: list[Any]) -> Found:
    text = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    return text, [(one["name"], one["arguments"]) for one in done if one["type"] == "function_call"]


def of_messages(answer: Any) -> Found:
    texts = [one["text"] for one in answer["content"] if one["type"] == "text"]
    return "".join(texts), [(one["name"], one["input"]) for one in answer["content"] if one["type"] == "tool_use"]


def of_messages_events(events: list[Any]) -> Found:
    deltas = [(one["index"], one["delta"]) for one in events if one["type"] == "content_block_delta"]
    begun = [one for one in events if one["type"] == "content_block_start"]
    calls = [
        (one["index"], one["content_block"]["name"]) for one in begun if one["content_block"]["type"] == "tool_use"
    ]
    texts = {at: "".join(delta.get("partial_json", "") for place, delta in deltas if place == at) for at, _ in calls}
    return "".join(delta.get("text", "") for _, delta in deltas), [(name, texts[at]) for at, name in calls]


def of_ollama(answer: Any) -> Found:
    calls = [one["function"] for one in answer["message"].get("tool_calls") or ()]
    return answer["message"]["content"], [(one["name"], one["arguments"]) for one in calls]


def of_ollama_events(events: list[Any]) -> Found:
    found = [of_ollama(one) for one in events]
    return "".join(text for text, _ in found), [call for _, calls in found for call in calls]


WRAPPED = [{"type": "function", "function": FUNCTION}]
APIS: dict[str, tuple[Callable[[int], dict[str, Any]], Callable[[Any], Found], Callable[[list[Any]], Found]]] = {
    "/v1/chat/completions": (
        lambda most: {"messages": USER, "tools": WRAPPED, "max_tokens": most},
        of_chat,
        of_chat_events,
    ),
    "/v1/responses": (
        lambda most: {"input": USER, "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": most},
        of_responses,
        of_responses_events,
    ),
    "/v1/messages": (
        lambda most: {
            "messages": USER,
            "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
            "max_tokens": most,
        },
        of_messages,
        of_messages_events,
    ),
    "/api/chat": (
        lambda most: {"messages": USER, "tools": WRAPPED, "options": {"num_predict": most}},
        of_ollama,
        of_ollama_events,
    ),
}


def asked(talker: Talker, path: str, most: int, *, stream: bool, stop: str = "") -> Found:
    make, whole, pieces = APIS[path]
    body = {"model": "tiny", "stream": stream, **make(most)}
    where = body.get("options", body)
    where |= {"stop_sequences" if path == "/v1/messages" else "stop": [stop]} if stop else {}
    answer = httpx.post(talker.url + path, json=body, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    if not stream:
        return whole(answer.json())
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith(("data: {", "{"))]
    return pieces([json.loads(line) for line in lines])


def read(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


@contextmanager
def scripted(folder: Path, family: Family, calls: Sequence[tuple[str, Any]]) -> Iterator[tuple[Talker, str, int]]:
    """A server whose model makes these calls, the text before them, and the tokens of the whole."""
    form = facts_of(family).form
    said = SAID if form.open else ""
    with talking(make_talker(folder, template=family.template)) as talker:
        engine = talker.llm.llm_engine._open().loop.engine
        [end, *_] = sorted(talker.llm.eos_ids)
        engine.sampler = script = Scripted(engine.sampler, end)
        text = (f"{said}\n" if said else "") + form.written(calls)
        script.script = talker.llm.tokenizer.encode(text, add_special=False, parse_special=False)
        yield talker, said, len(script.script)


BRIEF = [FAMILIES[8]]


@pytest.mark.parametrize(
    ("family", "step"),
    [
        *(pytest.param(one, 23, id=one.name) for one in BRIEF),
        *(pytest.param(one, 1, id=f"{one.name}, every token", marks=pytest.mark.sweep) for one in FAMILIES),
    ],
)
def test_no_markup_reaches_a_client_in_any_api(tmp_path: Path, family: Family, step: int) -> None:
    calls = [("get_weather", ARGUMENTS), ("get_weather", {"city": "Rome"})][: 1 if family.single else 2]
    with scripted(tmp_path, family, calls) as (talker, said, tokens):
        for path in APIS:
            for stream in (False, True):
                content, found = asked(talker, path, tokens + 1, stream=stream)
                assert (content.strip(), [(name, read(one)) for name, one in found]) == (said, calls), (path, stream)
                for most in range(1, tokens, step):
                    content, found = asked(talker, path, most, stream=stream)
                    assert said.startswith(content.strip()), (path, stream, most)
                    assert [name for name, _ in found] == ["get_weather"] * len(found)


def test_a_stop_string_inside_a_call_leaks_no_markup(tmp_path: Path) -> None:
    family = FAMILIES[0]
    assert facts_of(family).form.name == "hermes"
    with scripted(tmp_path, family, [("get_weather", ARGUMENTS)]) as (talker, said, tokens):
        for path in [path for path in APIS if path != "/v1/responses"]:  # which has no stop strings
            for stream in (False, True):
                for stop, begun in (("call>", 0), ('"', 0), ("weather", 0), ("arguments", 1), ("Oslo", 1)):
                    content, found = asked(talker, path, tokens + 1, stream=stream, stop=stop)
                    assert (content.strip(), len(found)) == (said, begun), (path, stream, stop)
                content, _ = asked(talker, path, tokens + 1, stream=stream, stop="look")
                assert content.strip() == "Let me", "before the call it acts as ever"
