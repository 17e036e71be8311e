"""Harmony's channels where their marks are special tokens: read, and gone on from."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.engines import HANGS_S
from tests.serve.chat.channel_model import make_channels
from tests.serve.chat.test_tool_apis import Scripted
from tests.serve.talking import SCHEMA, Talker, talking, valid
from tokenwright.decode.grammars.grammar_trials import Budget
from tokenwright.llm.chat.chat_options import ChatRequest, Tool, ToolMode
from tokenwright.llm.chat.output_parser import Delta
from tokenwright.llm.chat.tool_forms.channels import MARKS, ChannelReader

BEGUN = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I am"}]
OPENED = "<|start|>user<|message|>Hello<|end|><|start|>assistant"
CHAT, MESSAGE, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Talker, Scripted]]:
    with talking(make_channels(tmp_path_factory.mktemp("harmony"))) as talker:
        engine = talker.llm.llm_engine._open().loop.engine
        [end, *_] = sorted(talker.llm.eos_ids)
        engine.sampler = script = Scripted(engine.sampler, end)
        yield talker, script


def post(talker: Talker, path: str, **body: Any) -> Any:
    answer = httpx.post(talker.url + path, json={"max_tokens": 60, "stream": False} | body, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(reply: Any, path: str) -> str:
    if path == MESSAGE:
        return "".join(block.get("text", "") for block in reply["content"])
    return str((reply if path == OLLAMA else reply["choices"][0])["message"]["content"])


@pytest.mark.parametrize("path", [CHAT, MESSAGE, OLLAMA])
@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (" well.<|return|>", " well."),
        (" <|constrain|>well.<|return|>", " <|constrain|>well."),
        (" well.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>", " well."),
    ],
)
def test_an_answer_goes_on_inside_its_channel(
    harmony: tuple[Talker, Scripted], path: str, written: str, shown: str
) -> None:
    """A mark that steers nothing is spelled: no reply has half of a surrogate pair."""
    talker, script = harmony
    script.script = talker.llm.tokenizer.encode(written, add_special=False)
    assert len(script.script) <= len(written) - 9, "marks are tokens"
    assert text_of(post(talker, path, messages=BEGUN), path) == shown


def test_the_prompt_of_an_answer_that_goes_on_has_its_channels(harmony: tuple[Talker, Scripted]) -> None:
    talker, _ = harmony
    final = "<|channel|>final<|message|>I am"
    assert post(talker, "/apply-template", messages=BEGUN)["prompt"] == OPENED + final
    thought = [BEGUN[0], BEGUN[1] | {"reasoning_content": "<|end|>Hm."}]
    prompt = f"{OPENED}<|channel|>analysis<|message|><|end|>Hm.<|end|><|start|>assistant{final}"
    assert post(talker, "/apply-template", messages=thought)["prompt"] == prompt
    ids = post(talker, "/tokenize", messages=thought, continue_final_message=True, add_generation_prompt=False)
    assert ids["tokens"].count(talker.llm.tokenizer.control.ids["<|end|>"]) == 2, "that of the thoughts is text"


def test_stop_strings_and_calls_of_an_answer_that_goes_on(harmony: tuple[Talker, Scripted]) -> None:
    talker, script = harmony
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    script.script = talker.llm.tokenizer.encode(" very well.", add_special=False)
    assert text_of(post(talker, CHAT, messages=BEGUN, stop=" well"), CHAT) == " very"
    assert text_of(post(talker, CHAT, messages=BEGUN, tools=tools), CHAT) == " very well."
    call = '{"hot": true, "where": "in"}'
    written = (
        f" so.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{call}"
    )
    script.script = talker.llm.tokenizer.encode(f"{written}<|call|>", add_special=False)
    for choice in ("auto", "required"):
        message = post(talker, CHAT, messages=BEGUN, tools=tools, tool_choice=choice, max_tokens=200)["choices"][0]
        assert message["message"]["content"] == " so." and message["finish_reason"] == "tool_calls"
        [called] = message["message"]["tool_calls"]
        assert valid(json.loads(called["function"]["arguments"]))


def read(pieces: Sequence[tuple[str, int]]) -> Delta:
    parser, delta = ChannelReader((), dict(enumerate(MARKS))), Delta(0)
    for text, token in pieces:
        parser.push(text, token, delta)
    parser.finish(delta)
    return delta


def test_marks_that_steer_nothing_are_spelled() -> None:
    at = {mark: ("", n) for n, mark in enumerate(MARKS)}
    head = [at["<|channel|>"], ("analysis", 90), at["<|message|>"]]
    found = read([*head, ("a", 91), at["<|constrain|>"], at["<|end|>"], ("b", 92), at["<|message|>"], ("c", 93)])
    assert (found.reasoning, found.text) == ("a<|constrain|>", "b<|message|>c")


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_the_grammar_allows_a_call_on_either_channel(harmony: tuple[Talker, Scripted], choice: ToolMode) -> None:
    """By the tokens of the model: a recipient makes a call, behind the channel or before it."""
    llm = harmony[0].llm
    wanted = ChatRequest(messages=BEGUN[:1], tools=[Tool("look", "", SCHEMA)], tool_choice=choice)
    schemas = llm.conversations.schemas(wanted, None, Budget())
    grammar = llm.conversations.grammar(wanted, OPENED, schemas)
    assert grammar is not None
    arguments = '<|constrain|>json<|message|>{"hot": true, "where": "in"}<|call|>'
    for head in (
        "<|channel|>analysis to=functions.look ",
        "<|channel|>commentary to=functions.look ",
        " to=functions.look<|channel|>analysis ",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis to=functions.look ",
    ):
        request = llm.prepare([0], llm.sampling(grammar=grammar))
        allowed = True
        for token in llm.tokenizer.encode(head + arguments, add_special=False):
            allowed = allowed and bool(int(request.stop_checker.mask()[token // 32]) >> token % 32 & 1)
            if allowed:
                request.stop_checker.advance(token)
        assert allowed == (choice != "none"), head
