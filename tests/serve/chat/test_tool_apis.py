"""Calls of every family through four APIs, whole and streamed: no markup reaches a client, and a cut text says so."""

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

from tests.engines import HANGS_S
from tests.serve.chat.channel_model import make_channels
from tests.serve.chat.test_tool_families import facts_of
from tests.serve.chat.tool_families import FAMILIES, Family
from tests.serve.talking import make_talker, talking
from tokenwright.engine import Pick

SAID = "Let me look."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "sure": {"type": "boolean"}},
}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
CALLS = [("get_weather", {"city": "Oslo", "sure": True}), ("get_weather", {"days": 3})]
USER = [{"role": "user", "content": "Hello"}]
Found = tuple[str, list[tuple[str, Any]], str]  # the text, the calls (names and arguments), and how it ended


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
        sequence = sequences[one.sequence]
        at = len(sequence.tokens) - sequence.request.prompt_length
        tokens = (*self.script, self.end)[at : None if self.at_once else at + 1]
        zeros = (0.0,) * len(tokens)
        return replace(one, tokens=tokens, logprobs=zeros, sampler_logprobs=zeros, tops=((),) * len(tokens))


def of_chat(answer: Any) -> Found:
    [choice] = answer["choices"]
    message = choice["message"]
    calls = [one["function"] for one in message.get("tool_calls") or []]
    return message["content"] or "", [(one["name"], one["arguments"]) for one in calls], choice["finish_reason"]


def of_chat_events(events: list[Any]) -> Found:
    deltas = [one["choices"][0]["delta"] for one in events if one.get("choices")]
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls") or ()):
        begun = calls.setdefault(call["index"], ["", ""])
        begun[0] += call["function"].get("name") or ""
        begun[1] += call["function"].get("arguments") or ""
    [end] = [found for one in events for choice in one["choices"] if (found := choice["finish_reason"])]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return text, [(name, arguments) for name, arguments in calls.values()], end


def of_responses(answer: Any) -> Found:
    texts = [part["text"] for one in answer["output"] if one["type"] == "message" for part in one["content"]]
    calls = [(one["name"], one["arguments"]) for one in answer["output"] if one["type"] == "function_call"]
    last = answer["output"][-1]
    assert last["status"] == answer["status"]
    return "".join(texts), calls, answer["status"]


def of_responses_events(events: list[Any]) -> Found:
    text = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"
    calls = [(one["name"], one["arguments"]) for one in done if one["type"] == "function_call"]
    return text, calls, events[-1]["response"]["status"]


def of_messages(answer: Any) -> Found:
    texts = [one["text"] for one in answer["content"] if one["type"] == "text"]
    calls = [(one["name"], one["input"]) for one in answer["content"] if one["type"] == "tool_use"]
    return "".join(texts), calls, answer["stop_reason"]


def of_messages_events(events: list[Any]) -> Found:
    deltas = [(one["index"], one["delta"]) for one in events if one["type"] == "content_block_delta"]
    begun = [one for one in events if one["type"] == "content_block_start"]
    calls = [
        (one["index"], one["content_block"]["name"]) for one in begun if one["content_block"]["type"] == "tool_use"
    ]
    texts = {at: "".join(delta.get("partial_json", "") for place, delta in deltas if place == at) for at, _ in calls}
    [end] = [one["delta"]["stop_reason"] for one in events if one["type"] == "message_delta"]
    return "".join(delta.get("text", "") for _, delta in deltas), [(name, texts[at]) for at, name in calls], end


def of_ollama(answer: Any) -> Found:
    calls = [one["function"] for one in answer["message"].get("tool_calls") or ()]
    return (
        answer["message"]["content"],
        [(one["name"], one["arguments"]) for one in calls],
        answer.get("done_reason", ""),
    )


def of_ollama_events(events: list[Any]) -> Found:
    indexes = [call["function"]["index"] for one in events for call in one["message"].get("tool_calls") or ()]
    assert indexes == list(range(len(indexes)))
    found = [of_ollama(one) for one in events]
    return "".join(text for text, _, _ in found), [call for _, calls, _ in found for call in calls], found[-1][2]


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
        lambda answer: of_ollama_events([answer]),
        of_ollama_events,
    ),
}


WHOLE = {
    "/v1/chat/completions": "tool_calls",
    "/v1/responses": "completed",
    "/v1/messages": "tool_use",
    "/api/chat": "stop",
}
CUT = {
    "/v1/chat/completions": "length",
    "/v1/responses": "incomplete",
    "/v1/messages": "max_tokens",
    "/api/chat": "length",
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
    with writing(make_talker(folder, template=family.template), text) as found:
        yield found


@contextmanager
def writing(model: Path, text: str, *, marks: bool = False) -> Iterator[tuple[httpx.Client, Scripted]]:
    """A client of a server whose model writes this text. marks: special tokens in it are these tokens."""
    with talking(model) as talker:
        engine = talker.llm.llm_engine._open().loop.engine
        [end, *_] = sorted(talker.llm.eos_ids)
        engine.sampler = script = Scripted(engine.sampler, end)
        script.script = talker.llm.tokenizer.encode(text, add_special=False, parse_special=marks)
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
        cut_everywhere(http, script, said, calls, step)


def cut_everywhere(
    http: httpx.Client, script: Scripted, said: str, calls: Sequence[tuple[str, Any]], step: int = 1
) -> None:
    """Whole: the text and the calls. Cut at a length: a beginning of them, which every API says to be cut."""
    tokens, ways = len(script.script), list(product(APIS, (True, False)))
    for path, stream in ways:
        script.at_once = not stream
        content, found, end = asked(http, path, tokens + 1, stream=stream)
        assert (content.strip(), [(name, read(one)) for name, one in found]) == (said, calls), (path, stream)
        assert end == WHOLE[path], (path, stream)
    script.at_once = True  # so that a cut text takes one step, and the whole a time in proportion to its length
    for most, (path, stream) in zip(range(1, tokens, step), cycle(ways), strict=False):
        content, found, end = asked(http, path, most, stream=stream)
        assert said.startswith(content.strip()), (path, stream, most)
        assert end == CUT[path], (path, stream, most)
        for (name, arguments), (wanted, whole) in zip(found, calls, strict=False):
            assert name == wanted
            if isinstance(arguments, str):
                assert json.dumps(whole).startswith(arguments), (path, stream, most)
            else:
                assert arguments.items() <= whole.items(), (path, stream, most)
                assert path != "/api/chat" or arguments == whole, "a call that was cut off is none there"


def test_a_call_of_harmony_that_is_cut_says_so(tmp_path: Path) -> None:
    """On the analysis channel as well: what has a recipient is a call."""
    for n, channel in enumerate(("commentary", "analysis")):
        head = f"<|channel|>{channel} to=functions.get_weather <|constrain|>json<|message|>"
        text = f"{head}{json.dumps(CALLS[0][1])}<|call|>"
        with writing(make_channels(tmp_path / str(n)), text, marks=True) as (http, script):
            cut_everywhere(http, script, "", CALLS[:1], step=3 + n)


def test_a_stop_string_inside_a_call_leaks_no_markup(tmp_path: Path) -> None:
    family = FAMILIES[0]
    assert facts_of(family).form.name == "hermes"
    with scripted(tmp_path, family, CALLS[:1]) as (http, script):
        tokens, script.at_once = len(script.script), True
        for path in [path for path in APIS if path != "/v1/responses"]:  # which has no stop strings
            for stream in (False, True):
                for stop, begun in (("call>", 0), ('"', 0), ("weather", 0), ("arguments", 1), ("Oslo", 1)):
                    begun = 0 if path == "/api/chat" else begun  # which leaves a call out that was cut off
                    content, found, end = asked(http, path, tokens + 1, stream=stream, stop=stop)
                    assert (content.strip(), len(found)) == (SAID, begun), (path, stream, stop)
                    assert end == ("stop_sequence" if path == "/v1/messages" else "stop"), (path, stream, stop)
                _, found, end = asked(http, path, tokens + 1, stream=stream, stop="</tool_call>")
                assert (read(found[0][1]), end) == (CALLS[0][1], WHOLE[path]), "the call is whole"
                content, _, _ = asked(http, path, tokens + 1, stream=stream, stop="look")
                assert content.strip() == "Let me", "before the call it acts as ever"
