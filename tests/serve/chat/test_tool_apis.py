"""Calls of every family through four APIs: whole and streamed, and cut at every token, no markup reaches a client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.chat.test_tool_families import facts_of
from tests.serve.chat.tool_families import FAMILIES, Family
from tests.serve.talking import HANGS_S, make_talker, talking
from tokenwright.engine import Pick

SAID = "Let me look."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "sure": {"type": "boolean"}},
}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
CALLS = [("get_weather", {"city": "Oslo", "sure": True}), ("get_weather", {"days": 3})]
USER = [{"role": "user", "content": "Hello"}]
Found = tuple[str, list[tuple[str, Any]]]  # the text, and the calls: names and arguments


class Scripted:
    """A sampler that picks the tokens of a text whatever the model says, and then the end token.

    at_once: all in one step, as accepted drafts are; else a token a step.
    """

    def __init__(self, inner: Any, end: int) -> None:
        self.inner, self.end = inner, end
        self.script: list[int] = []
        self.at_once = False

    def pick(self, output: Any, step: Any) -> list[Any]:
        sequences = {chunk.sequence.id: chunk.sequence for chunk in step.chunks}
        return [self._written(one, sequences) for one in self.inner.pick(output, step)]

    def _written(self, one: Any, sequences: Any) -> Any:
        if not isinstance(one, Pick):
            return one
        sequence = sequences[one.parent]
        at = len(sequence.tokens) - sequence.request.prompt_length
        tokens = (*self.script, self.end)[at : None if self.at_once else at + 1]
        zeros = (0.0,) * len(tokens)
        return replace(one, tokens=tokens, logprobs=zeros, sampler_logprobs=zeros, tops=((),) * len(tokens))


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


def asked(http: httpx.Client, path: str, most: int, *, stream: bool, stop: str = "") -> Found:
    make, whole, pieces = APIS[path]
    body = {"model": "tiny", "stream": stream, **make(most)}
    where = body.get("options", body)
    where |= {"stop_sequences" if path == "/v1/messages" else "stop": [stop]} if stop else {}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return whole(answer.json())
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith(("data: {", "{"))]
    return pieces([json.loads(line) for line in lines])


def read(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


@contextmanager
def scripted(folder: Path, family: Family, calls: Sequence[tuple[str, Any]]) -> Iterator[tuple[httpx.Client, Scripted]]:
    """A client of a server whose model says something, where the form allows it, and then makes these calls."""
    form = facts_of(family).form
    text = (f"{SAID}\n" if form.open else "") + form.written(calls)
    with talking(make_talker(folder, template=family.template)) as talker:
        engine = talker.llm.llm_engine._open().loop.engine
        [end, *_] = sorted(talker.llm.eos_ids)
        engine.sampler = script = Scripted(engine.sampler, end)
        script.script = talker.llm.tokenizer.encode(text, add_special=False, parse_special=False)
        with httpx.Client(base_url=talker.url, timeout=HANGS_S) as http:
            yield http, script


BRIEF = [FAMILIES[8]]


@pytest.mark.parametrize(
    ("family", "step"),
    [
        *(pytest.param(one, 2, id=one.name) for one in BRIEF),
        *(pytest.param(one, 1, id=f"{one.name}, every token", marks=pytest.mark.sweep) for one in FAMILIES),
    ],
)
def test_no_markup_reaches_a_client_in_any_api(tmp_path: Path, family: Family, step: int) -> None:
    """Whole, and streamed token by token, in each API; and cut at each token, in each of these ways in turn."""
    calls = CALLS[: 1 if family.single else 2]
    said = SAID if facts_of(family).form.open else ""
    with scripted(tmp_path, family, calls) as (http, script):
        tokens, ways = len(script.script), list(product(APIS, (True, False)))
        for path, stream in ways:
            script.at_once = not stream
            content, found = asked(http, path, tokens + 1, stream=stream)
            assert (content.strip(), [(name, read(one)) for name, one in found]) == (said, calls), (path, stream)
        script.at_once = True  # so that a cut text takes one step, and the whole a time in proportion to its length
        for most, (path, stream) in zip(range(1, tokens, step), cycle(ways), strict=False):
            content, found = asked(http, path, most, stream=stream)
            assert said.startswith(content.strip()), (path, stream, most)
            assert [name for name, _ in found] == ["get_weather"] * len(found)


def test_a_stop_string_inside_a_call_leaks_no_markup(tmp_path: Path) -> None:
    family = FAMILIES[0]
    assert facts_of(family).form.name == "hermes"
    with scripted(tmp_path, family, CALLS[:1]) as (http, script):
        tokens, script.at_once = len(script.script), True
        for path in [path for path in APIS if path != "/v1/responses"]:  # which has no stop strings
            for stream in (False, True):
                for stop, begun in (("call>", 0), ('"', 0), ("weather", 0), ("arguments", 1), ("Oslo", 1)):
                    content, found = asked(http, path, tokens + 1, stream=stream, stop=stop)
                    assert (content.strip(), len(found)) == (SAID, begun), (path, stream, stop)
                content, _ = asked(http, path, tokens + 1, stream=stream, stop="look")
                assert content.strip() == "Let me", "before the call it acts as ever"
