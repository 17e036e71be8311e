"""Filling a gap by HTTP: suffix of OpenAI's completions and of Ollama's, and /infill and /completion of llama.cpp."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.declared import read
from tests.serve.live import Live, live, make_chat_model, settled
from tests.vocabulary import add_tokens
from tokenwright.serve.llama_cpp.replies import Infilled
from tokenwright.text.fill_in_middle import Infill

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|fim_pad|>")
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = make_chat_model(tmp_path_factory.mktemp("coder") / "model")
    add_tokens(model, *MARKS)
    with live(model) as running:
        yield running
        settled(running)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(make_chat_model(tmp_path_factory.mktemp("plain") / "model")) as running:
        yield running


def ask(server: Live, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def filled(server: Live, *gap: Any, tokens: int = 8, **more: Any) -> str:
    """What the model writes after the prompt of a gap."""
    ids = Infill(server.llm.tokenizer).ids(*gap)
    stops = Infill(server.llm.tokenizer).ends
    [one] = server.llm.generate([ids], server.llm.sampling(temperature=0.0, max_tokens=tokens, stop_ids=stops, **more))
    return one.text


def test_openai_completes_before_a_suffix(server: Live) -> None:
    expected = filled(server, "def f(", "):\n")
    body = {"model": "tiny", "prompt": "def f(", "suffix": "):\n", "max_tokens": 8} | GREEDY
    reply = ask(server, "/v1/completions", **body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == expected
    assert reply.json()["usage"]["prompt_tokens"] == len(Infill(server.llm.tokenizer).ids("def f(", "):\n"))
    lines = ask(server, "/v1/completions", stream=True, **body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    assert ask(server, "/v1/completions", **body | {"suffix": ""}).json()["choices"][0]["text"] != expected


def test_each_prompt_has_the_suffix(server: Live) -> None:
    body = {"model": "tiny", "prompt": ["a", "b"], "suffix": "c", "max_tokens": 8} | GREEDY
    texts = [choice["text"] for choice in ask(server, "/v1/completions", **body).json()["choices"]]
    assert texts == [filled(server, "a", "c"), filled(server, "b", "c")]


def test_ollama_generates_before_a_suffix(server: Live) -> None:
    body = {"model": "tiny", "prompt": "def f(", "suffix": "):\n", "options": GREEDY | {"num_predict": 8}}
    assert ask(server, "/api/generate", stream=False, **body).json()["response"] == filled(server, "def f(", "):\n")
    assert ask(server, "/api/generate", stream=False, **body | {"prompt": ""}).json()["response"] == filled(
        server, "", "):\n"
    )
    assert ask(server, "/api/generate", system="You fill.", **body).status_code == 400


def test_infill_as_llama_cpp_has_it(server: Live) -> None:
    files = (("a.py", "x = 1\n"),)
    body = {
        "input_prefix": "def f(", "input_suffix": "):\n", "prompt": "a", "n_predict": 8, "top_k": 40, "seed": -1,
        "input_extra": [{"filename": "a.py", "text": "x = 1\n"}], "cache_prompt": True, "samplers": ["top_k"],
        "t_max_predict_ms": 500, "n_indent": 4, "stop": [],
    } | GREEDY  # fmt: skip
    reply = ask(server, "/infill", **body)
    assert reply.status_code == 200, reply.text
    found = read(Infilled, reply.json())
    expected = filled(server, "def f(", "):\n", files, "a")
    assert (found.content, found.stop, found.tokens_predicted, found.stop_type) == (expected, True, 8, "limit")
    assert found.tokens_evaluated == len(Infill(server.llm.tokenizer).ids("def f(", "):\n", files, "a"))
    lines = ask(server, "/infill", stream=True, **body).text.splitlines()
    *events, last = [read(Infilled, json.loads(line[6:])) for line in lines if line]
    assert "".join(event.content for event in events) == expected
    assert (last.content, last.stop, last.tokens_predicted) == ("", True, 8)
    assert not any(event.stop for event in events)


def test_completion_as_llama_cpp_has_it(plain: Live) -> None:
    def expected(prompt: str) -> str:
        [one] = plain.llm.generate([prompt], plain.llm.sampling(temperature=0.0, max_tokens=8))
        return one.text

    body = {"n_predict": 8, "cache_prompt": True, "id_slot": -1} | GREEDY
    reply = ask(plain, "/completion", prompt="def f(", **body)
    assert reply.status_code == 200, reply.text
    found = read(Infilled, reply.json())
    assert (found.content, found.stop_type, found.tokens_predicted) == (expected("def f("), "limit", 8)
    lines = ask(plain, "/completion", prompt="def f(", stream=True, **body).text.splitlines()
    events = [read(Infilled, json.loads(line[6:])) for line in lines if line]
    assert ("".join(event.content for event in events), events[-1].tokens_predicted) == (found.content, 8)
    ids = plain.llm.tokenizer.encode("def f(")
    assert ask(plain, "/completion", prompt=ids, **body).json()["content"] == found.content
    several = read(list[Infilled], ask(plain, "/completion", prompt=["a", "def f("], **body).json())
    assert [(one.index, one.content) for one in several] == [(0, expected("a")), (1, expected("def f("))]
    held = ask(plain, "/completion", prompt="a", grammar='root ::= "yes" | "no"', **body).json()
    assert (held["content"] in ("yes", "no"), held["stop_type"]) == (True, "eos")
    for more in (
        {"prompt": ["a", "b"], "stream": True},
        {"prompt": "a", "grammar": "x", "json_schema": {"type": "null"}},
    ):
        assert ask(plain, "/completion", **body | more).status_code == 400
    short = ask(plain, "/v1/completions", model="tiny", prompt="def f(", n_predict=3, **GREEDY).json()
    assert short["usage"]["completion_tokens"] == 3


def test_a_stop_string_is_named(server: Live) -> None:
    text = filled(server, "a", "b", tokens=16)
    stop = next(text[at] for at in range(3, len(text)) if text[at] not in text[:at] and text[at] != "\ufffd")
    body = {"input_prefix": "a", "input_suffix": "b", "n_predict": 16, "stop": [stop]} | GREEDY
    reply = ask(server, "/infill", **body).json()
    assert (reply["content"], reply["stop_type"], reply["stopping_word"]) == (text.partition(stop)[0], "word", stop)


def test_a_token_of_the_form_ends_the_gap(server: Live) -> None:
    end = server.llm.tokenizer.control.ids["<|fim_pad|>"]
    body = {"model": "tiny", "prompt": "a", "suffix": "b", "max_tokens": 4, "logit_bias": {str(end): 100}} | GREEDY
    [choice] = ask(server, "/v1/completions", **body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    [on] = ask(server, "/v1/completions", ignore_eos=True, **body).json()["choices"]
    assert on["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": [5, 6], "suffix": "b"}, "suffix"),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "suffix": "b", "echo": True}, "echo"),
        ("/infill", {"input_prefix": "a" * 9000}, "too long"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b" * 9000}, "too long"),
        ("/infill", {"input_prefix": "a", "n_probs": 3, "post_sampling_probs": True}, "post_sampling_probs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Live, path: str, body: dict[str, Any], named: str) -> None:
    reply = ask(server, path, **body)
    assert reply.status_code == 400
    assert named in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "a", "suffix": "b"}),
        ("/api/generate", {"model": "tiny", "prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ],
)
def test_a_model_without_the_tokens_says_so(plain: Live, path: str, body: dict[str, Any]) -> None:
    reply = ask(plain, path, **body)
    assert reply.status_code == 400
    assert "the vocabulary of this model has no tokens to fill a gap with" in reply.text
