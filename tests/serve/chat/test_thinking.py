"""How a request asks a model to reason: switches, budgets, what is told of it, and what is sent back."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from tests.engines import HANGS_S
from tests.serve.talking import TEMPLATE, Talker, make_talker, talking
from tokenwright import SamplingParams
from tokenwright.engine import Grammar
from tokenwright.llm.chat.chat_options import ChatRequest
from tokenwright.llm.chat.chat_processor import ChatProcessor
from tokenwright.llm.chat.output_parser import ThinkTags
from tokenwright.llm.chat.thinking import ThoughtGate, TokenMasks, closing, switches_of, variables_of
from tokenwright.text.control import ControlTokens

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
CHAT, RESPOND, MESSAGE = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BUDGET = 5
BUDGETS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"thinking": {"type": "enabled", "budget_tokens": BUDGET}}),
    (CHAT, {"reasoning": {"max_tokens": BUDGET, "enabled": True}}),
    *(
        (CHAT, {name: BUDGET, "enable_thinking": True})
        for name in ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget")
    ),
    (RESPOND, {"reasoning": {"max_tokens": BUDGET, "effort": "high"}, "max_output_tokens": 40, "temperature": 0}),
    (MESSAGE, {"thinking": {"type": "enabled", "budget_tokens": BUDGET}}),
    (MESSAGE, {"thinking": {"type": "adaptive", "budget_tokens": BUDGET}}),
]


def asked(talker: Talker, path: str, body: dict[str, Any]) -> httpx.Response:
    sane = {"input": "Hello"} if path == RESPOND else {"messages": HELLO, "max_tokens": 40, "temperature": 0}
    answer = httpx.post(talker.url + path, json={"model": "tiny"} | sane | body, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    return answer


def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def told(answer: httpx.Response, path: str, streamed: bool) -> tuple[str, str]:
    """The reasoning of an answer and its text."""
    if path == CHAT and streamed:
        deltas = [choice["delta"] for one in events(answer) for choice in one["choices"]]
        found = [[one.get(name) or "" for one in deltas] for name in ("reasoning_content", "content")]
        return "".join(found[0]), "".join(found[1])
    if path == CHAT:
        message = answer.json()["choices"][0]["message"]
        return message.get("reasoning_content", ""), message["content"]
    if path == RESPOND:
        items = (events(answer)[-1]["response"] if streamed else answer.json())["output"]
        texts = {item["type"]: "".join(part["text"] for part in item["content"]) for item in items}
        return texts.get("reasoning", ""), texts.get("message", "")
    if streamed:
        deltas = [one["delta"] for one in events(answer) if one["type"] == "content_block_delta"]
        return "".join(one.get("thinking", "") for one in deltas), "".join(one.get("text", "") for one in deltas)
    texts = {block["type"]: block.get("thinking") or block.get("text") for block in answer.json()["content"]}
    return texts.get("thinking", ""), texts.get("text", "")


def test_a_budget_closes_the_thoughts(talker: Talker) -> None:
    """Under each of its names; and streamed once in each API."""
    whole = talker.greedy(HELLO, BUDGET, variables={"enable_thinking": True})
    streamed = {path: (path, body) for path, body in BUDGETS}
    for (path, body), stream in [*((one, False) for one in BUDGETS), *((one, True) for one in streamed.values())]:
        reasoning, text = told(asked(talker, path, body | {"stream": stream}), path, stream)
        assert reasoning.strip() == whole.strip(), (path, body, stream)
        assert text, "the answer follows"


def test_without_a_budget_the_thoughts_go_on(talker: Talker) -> None:
    free = {"thinking": {"type": "enabled", "budget_tokens": -1}}
    reasoning, text = told(asked(talker, CHAT, free), CHAT, False)
    assert (reasoning.strip(), text) == (talker.greedy(HELLO, 40, variables={"enable_thinking": True}).strip(), "")


class Letters:
    """A tokenizer whose tokens are letters; marks: special tokens, by their letters."""

    def __init__(self, marks: dict[str, str] | None = None) -> None:
        self.marks = marks or {}
        self.control = ControlTokens({name: ord(letter) for letter, name in self.marks.items()})
        self.special_ids = frozenset(self.control.ids.values())

    def token_text(self, token: int) -> str:
        return self.marks.get(chr(token), chr(token))

    def token_bytes(self, token: int) -> bytes | None:
        return None if chr(token) in self.marks else chr(token).encode()

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        assert not add_special
        for letter, name in self.marks.items():
            text = text.replace(name, letter)
        return list(map(ord, text))


class Nothing:
    """A constraint that allows every letter but one."""

    def __init__(self, banned: str) -> None:
        self.banned, self.read = ord(banned), ""

    def mask(self, left: int | None = None) -> Any:
        bits = np.ones(128, dtype=np.uint8)
        bits[self.banned] = 0
        return np.packbits(bits, bitorder="little").view("<u4")

    def advance(self, token: int) -> bool:
        self.read += chr(token)
        return self.read.endswith("!")

    def fork(self) -> "Nothing":
        other = Nothing(chr(self.banned))
        other.read = self.read
        return other

    accepting, answering = False, True


def gate(inner: Any, opened: bool, most: int | None, letters: Any = None, **tags: str) -> ThoughtGate:
    letters = letters or Letters()
    thoughts = ThinkTags(opened=opened, **tags).thoughts(most)
    return ThoughtGate(inner, thoughts, letters, TokenMasks(letters, 128, [0]))


def written(budget: ThoughtGate, text: str) -> str:
    """What is written by a model that wants to write this text, until the text is over."""
    found, at = "", 0
    while at < len(text):
        mask = budget.mask()
        allowed = None if mask is None else [one for one in range(128) if int(mask[one // 32]) >> one % 32 & 1]
        if allowed is not None and len(allowed) == 1:
            token = allowed[0]
        else:
            token, at = ord(text[at]), at + 1
        found += chr(token)
        if budget.advance(token):
            break
    return found


@pytest.mark.parametrize(
    ("opened", "most", "text", "wanted", "answer"),
    [
        (True, 3, "abcdef", "abc\n</think>\n\ndef", "def"),
        (True, 0, "abc", "\n</think>\n\nabc", "abc"),
        (True, 20, "ab</think>\ncd", "ab</think>\ncd", "cd"),
        (True, None, "a%b</think>cd", "a%b</think>cd", "cd"),
        (False, 2, "<think>abcd", "<think>ab\n</think>\n\ncd", "cd"),
        (False, 2, " \n<think>abcd", " \n<think>ab\n</think>\n\ncd", "cd"),
        (False, 2, "abcdef<think>gh", "abcdef<think>gh", "abcdef<think>gh"),
        (False, 2, "<thin king", "<thin king", "<thin king"),
    ],
)
def test_a_budget_ends_the_thoughts_and_a_grammar_begins_behind_them(
    opened: bool, most: int | None, text: str, wanted: str, answer: str
) -> None:
    assert written(gate(None, opened, most), text) == wanted
    inner = Nothing("%")
    held = gate(inner, opened, most)
    assert written(held.fork(), text) == wanted
    assert inner.read == "", "a fork has its own state"
    assert written(held, f"{text}!x") == f"{wanted}!"
    assert held.answering and not held.accepting
    state: Any = held._inner
    assert state.read == f"{answer}!"


MARKS = {"S": "<t>", "E": "</t>"}


@pytest.mark.parametrize(
    ("text", "shown"), [("SabEcd", "cd"), ("Sa</t>bEcd", "cd"), ("ab", "ab"), ("SE\n\nc", "c")], ids=str
)
def test_think_tags_that_are_special_tokens_may_be_written_and_never_spelled(text: str, shown: str) -> None:
    """The grammar allows neither tag; the gate does, at the start, and no end of the text inside the thoughts."""
    letters = Letters(MARKS)
    inner = Nothing("S")
    held = gate(inner, False, None, letters, start="<t>", end="</t>")
    for at, letter in enumerate(text):
        mask = held.mask()
        assert int(mask[ord(letter) // 32]) >> ord(letter) % 32 & 1, text[:at]
        held.advance(ord(letter))
        assert bool(int(held.mask()[0]) & 1) == held.answering, "an end token ends no thoughts"
    state: Any = held._inner
    assert state.read == shown


def test_the_switches_of_a_template_are_those_that_it_asks_for() -> None:
    assert switches_of(TEMPLATE) == ("enable_thinking",)
    assert switches_of("{% if thinking is defined and thinking %}a{% endif %}") == ("thinking",)
    assert switches_of("thinking {{ message.thinking }}{% set thinking = 1 %}{{ 'thinking' }}") == ()
    assert variables_of(True, {"a": 1, "thinking": False}, ("thinking",)) == {"thinking": False, "a": 1}
    assert variables_of(None, {}, ("thinking",)) == {}


ALWAYS = TEMPLATE.replace("{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}", "<think>\n")


def test_a_model_that_always_reasons_is_given_empty_thoughts(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert "enable_thinking" not in ALWAYS
    with talking(make_talker(tmp_path_factory.mktemp("always"), template=ALWAYS)) as talker:
        off = [
            (CHAT, {"reasoning_effort": "none"}),
            (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
            (MESSAGE, {"thinking": {"type": "disabled"}}),
            (RESPOND, {"reasoning": {"effort": "none"}, "temperature": 0, "max_output_tokens": 40}),
        ]
        answers = [told(asked(talker, path, body), path, False) for path, body in off]
        assert len(set(answers)) == 1
        assert answers[0][0] == "" and answers[0][1]
        prompt = asked(talker, "/apply-template", off[0][1]).json()["prompt"]
        assert prompt.endswith("<think>\n\n</think>\n\n")
    assert closing("a<think>\n", ThinkTags()) == "\n</think>\n\n"
    assert closing("a", ThinkTags()) == "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("off", [{"variables": {"enable_thinking": False}}, {"thinking": False}])
def test_no_thoughts_take_the_place_of_json_where_they_are_switched_off(off: dict[str, Any]) -> None:
    processor = ChatProcessor.__new__(ChatProcessor)
    processor.think_tags, processor._channels = ThinkTags(), False
    schema = SamplingParams(grammar=Grammar.json_schema({"type": "object"}))
    assert processor.tags(ChatRequest(messages=HELLO), "", schema) == ThinkTags(opened=False)
    assert processor.tags(ChatRequest(messages=HELLO, **off), "", schema) is None
    assert processor.tags(ChatRequest(messages=HELLO, **off), "", SamplingParams()) is not None


PLAIN = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{{ level }}{{ messages[0].name }}"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with talking(make_talker(tmp_path_factory.mktemp("plain"), template=PLAIN)) as talker:
        yield talker


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"reasoning_effort": "high"}),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 9}}),
        (MESSAGE, {"thinking": {"type": "enabled", "budget_tokens": 9}}),
        (RESPOND, {"reasoning": {"effort": "high"}}),
        ("/api/chat", {"think": "high", "stream": False, "options": {"num_predict": 2}}),
    ],
)
def test_a_model_that_cannot_reason_answers_all_the_same(plain: Talker, path: str, body: dict[str, Any]) -> None:
    asked(plain, path, body)


def test_variables_of_any_name_are_the_templates(plain: Talker) -> None:
    def prompt(**variables: Any) -> str:
        return str(asked(plain, "/apply-template", {"chat_template_kwargs": variables}).json()["prompt"])

    assert prompt(level="deep") == "[user]Hellodeep"
    assert prompt(level=[1, {"a": None}]) == "[user]Hello[1, {'a': None}]"
    named = {"messages": [HELLO[0] | {"name": "planner"}]}
    assert asked(plain, "/apply-template", named).json()["prompt"] == "[user]Helloplanner"
    bad = {"model": "tiny", "messages": HELLO, "chat_template_kwargs": {"level": "<|im_end|>"}}
    ids = httpx.post(f"{plain.url}/tokenize", json=bad).json()["tokens"]
    assert plain.llm.tokenizer.control.ids["<|im_end|>"] not in ids, "a request writes no control tokens"


def test_reasoning_as_a_summary_and_as_an_opaque_text(talker: Talker) -> None:
    wanted = {
        "reasoning": {"effort": "high", "summary": "auto", "max_tokens": BUDGET},
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 40,
        "temperature": 0,
    }
    response = asked(talker, RESPOND, wanted).json()
    thought, message = response["output"]
    assert thought["content"] == []
    [summary] = thought["summary"]
    assert (summary["type"], response["reasoning"]["summary"]) == ("summary_text", "auto")
    streamed = events(asked(talker, RESPOND, wanted | {"stream": True}))
    kinds = [one["type"].removeprefix("response.") for one in streamed if "reasoning_summary" in one["type"]]
    ends = ["reasoning_summary_text.done", "reasoning_summary_part.done"]
    assert (kinds[0], kinds[-2:]) == ("reasoning_summary_part.added", ends)
    assert set(kinds[1:-2]) == {"reasoning_summary_text.delta"}
    assert streamed[-1]["response"]["output"][0]["encrypted_content"] == thought["encrypted_content"]
    sealed = {
        "type": "reasoning",
        "id": thought["id"],
        "summary": [],
        "encrypted_content": thought["encrypted_content"],
    }
    plain = sealed | {"summary": thought["summary"], "encrypted_content": None}

    def tokens(item: dict[str, Any]) -> int:
        given = [*HELLO, item, message, {"role": "user", "content": "And?"}]
        return int(asked(talker, "/v1/responses/input_tokens", {"input": given}).json()["input_tokens"])

    assert tokens(sealed) == tokens(plain) > tokens(sealed | {"encrypted_content": "of another server"})
