"""Log-probabilities are those of a message's text, not of its thoughts, its calls or their marks."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serve.chat.test_tool_apis import FUNCTION, SAID, USER, WRAPPED, scripted
from tests.serve.chat.test_tool_families import facts_of
from tests.serve.chat.tool_families import FAMILIES
from tokenwright.llm.chat.answer_reader import TextTokens
from tokenwright.llm.chat.chat_options import Tool
from tokenwright.llm.chat.output_parser import Delta, OutputParser, SortingReader, ThinkTags
from tokenwright.llm.chat.tool_forms.channels import ChannelReader
from tokenwright.llm.chat.tool_forms.reading import FormReader
from tokenwright.llm.outputs import Piece

HERMES = facts_of(FAMILIES[0]).form
CALL = HERMES.written([("get_weather", {"city": "Oslo"})])
THINKS = f"<think>\nSay it </thi nk?\n</think>\n\n  Let me <too look. \n{CALL}"
CHANNELS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Let me look.<|return|>"
MARK = 7


def read(parser: OutputParser, pieces: Sequence[tuple[str, int]], cut: bool) -> tuple[str, list[str]]:
    """The text of an answer, and the texts of the tokens that are said to have written it."""
    tokens, delta, found = TextTokens(parser), Delta(0), []
    for text, token in pieces:
        start = parser.pushed
        parser.push(text, token, delta)
        found += tokens.push(Piece(text, token, 0.0), start)
        assert parser.said <= sum(len(one.text) or 1 for one in found), "text comes with its tokens"
    parser.finish(delta, cut=cut)
    return delta.text, [one.text for one in found + tokens.finish()]


def hermes() -> SortingReader:
    return SortingReader(ThinkTags(), FormReader(HERMES, [Tool("get_weather", "", {})]), {})


@pytest.mark.parametrize(("new", "whole"), [(hermes, THINKS), (lambda: ChannelReader((), {}), CHANNELS)])
def test_the_text_has_its_tokens_wherever_they_are_cut(new: Any, whole: str) -> None:
    for size in (1, 2, 3, 5):
        pieces = [(whole[at : at + size], at) for at in range(0, len(whole), size)]
        for end in range(1, len(pieces) + 1):
            text, tokens = read(new(), pieces[:end], cut=end < len(pieces))
            if size == 1:
                assert "".join(tokens) == text, whole[: len(whole) if end == len(pieces) else end]
            assert text in "".join(tokens)
            assert len(tokens) <= -(-len(text) // size) + 1, "no more than touch it"


def test_tokens_without_text_go_with_the_next_one() -> None:
    """Halves of a character, special tokens that steer the reading, and the end token."""
    pieces = [("", MARK), ("", 1), ("hm", 2), ("", 1), ("!", 3), ("", MARK + 1), ("", 4), ("\N{SNOWMAN}", 5), ("", 6)]
    parser = SortingReader(ThinkTags(), None, {MARK: "<think>", MARK + 1: "</think>"})
    assert read(parser, pieces, cut=False) == ("\N{SNOWMAN}", ["", "\N{SNOWMAN}", ""])
    assert read(hermes(), [*((one, 0) for one in CALL), ("", 1)], cut=False) == ("", [])


def test_reasoning_that_is_not_set_apart_stays_in_the_text() -> None:
    """As it was written, with its tags; calls in it are none."""
    thought = f"<think>\n{CALL} </thi nk>\n</think>\n\n"
    for size in (1, 3, 200):
        whole = thought + SAID
        marks = {MARK: "<think>"} if size > 1 else {}
        pieces = [("", MARK)] if marks else []
        rest = whole.removeprefix("<think>") if marks else whole
        pieces += [(rest[at : at + size], 0) for at in range(0, len(rest), size)]
        parser = SortingReader(ThinkTags(), FormReader(HERMES, [Tool("get_weather", "", {})]), marks, apart=False)
        text, tokens = read(parser, pieces, cut=False)
        assert (text, "".join(tokens), parser.called) == (whole, rest, False)


def logprobs_of(api: str, answer: Any) -> list[str]:
    """The tokens of a reply's log-probabilities, or of those of an event of a stream."""
    match api:
        case "/v1/chat/completions":
            found = [one["logprobs"]["content"] for one in answer["choices"] if one["logprobs"]]
        case "/v1/responses" if "output" in answer:
            found = [one["content"][0]["logprobs"] for one in answer["output"] if one["type"] == "message"]
        case "/v1/responses":
            found = [answer["logprobs"]] if answer["type"] == "response.output_text.delta" else []
        case _:
            found = [answer.get("logprobs", [])]
    return [one["token"] for each in found for one in each]


def test_each_api_has_those_of_the_text_alone(tmp_path: Path) -> None:
    thinking = replace(FAMILIES[0], before="{# <think> </think> #}")
    with scripted(tmp_path, thinking, ()) as (http, script):
        text = f"<think>\n</think>\n\n{SAID}\n{HERMES.written([('get_weather', {})])}"
        script.script = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        most = len(script.script) + 1
        responses = {"input": USER, "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": most}
        for api, body in {
            "/v1/chat/completions": {"messages": USER, "tools": WRAPPED, "logprobs": True, "max_tokens": most},
            "/v1/responses": responses | {"include": ["message.output_text.logprobs"]},
            "/api/chat": {"messages": USER, "tools": WRAPPED, "logprobs": True, "options": {"num_predict": most}},
        }.items():
            script.at_once = True
            whole = http.post(api, json={"model": "tiny", "stream": False} | body).json()
            assert "".join(logprobs_of(api, whole)) == SAID, whole
            script.at_once = False
            lines = http.post(api, json={"model": "tiny", "stream": True} | body).text.splitlines()
            events = [json.loads(one[one.index("{") :]) for one in lines if one.startswith(("data: {", "{"))]
            assert "".join(token for one in events for token in logprobs_of(api, one)) == SAID
