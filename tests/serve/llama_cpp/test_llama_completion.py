"""/completion and its neighbours as clients of llama.cpp's server ask them: forms of prompts, biases, probabilities."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.declared import read
from tests.serve.live import Live, live, make_chat_model, settled
from tokenwright.serve.llama_cpp.replies import Infilled

GREEDY: dict[str, Any] = {"temperature": 0.0, "n_predict": 6}
TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(make_chat_model(tmp_path_factory.mktemp("llama") / "model")) as running:
        yield running
        settled(running)


def ask(server: Live, path: str = "/completion", /, **body: Any) -> Any:
    reply = httpx.post(f"{server.url}{path}", json=GREEDY | body if path == "/completion" else body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(server: Live, **body: Any) -> str:
    reply = httpx.post(f"{server.url}/completion", json=GREEDY | body, timeout=60)
    assert reply.status_code == 400, reply.text
    return str(reply.json()["error"]["message"])


def test_forms_of_a_prompt_are_the_same_text(server: Live) -> None:
    ids = server.llm.tokenizer.encode(TEXT)
    expected = ask(server, prompt=TEXT)["content"]
    for one in (ids, {"prompt_string": TEXT}, {"content": [{"type": "text", "text": TEXT}]}, [ids[0], *ids[1:]]):
        assert ask(server, prompt=one)["content"] == expected, one
    replies = ask(server, prompt=[TEXT, ids, {"prompt_string": TEXT}])
    assert [one["content"] for one in replies] == [expected] * 3
    head, tail = server.llm.tokenizer.encode("Once"), server.llm.tokenizer.encode(" upon", add_special=False)
    rest = server.llm.tokenizer.encode(" a time", add_special=False)
    mixed, same = (ask(server, prompt=one) for one in (["Once", *tail, " a time"], [*head, *tail, *rest]))
    assert [mixed[name] for name in ("content", "tokens_evaluated", "prompt")] == [
        same[name] for name in ("content", "tokens_evaluated", "prompt")
    ]
    assert len(ask(server, prompt=["Once"])) == 1, "a list of one text is several prompts"
    assert "multimodal_data" in refused(server, prompt={"prompt_string": TEXT, "multimodal_data": ["aGk="]})
    assert "prompt_string" in refused(server, prompt={})
    assert "ids" in refused(server, prompt=[5, {"prompt_string": "a"}])
    vectors = [
        ask(server, "/v1/embeddings", input=one)["data"][0]["embedding"] for one in (TEXT, {"prompt_string": TEXT})
    ]
    assert vectors[0] == vectors[1]


def test_the_likeliest_tokens_are_those_of_the_model(server: Live) -> None:
    whole = read(Infilled, ask(server, prompt=TEXT, n_probs=3, return_tokens=True))
    [known] = server.llm.generate([TEXT], server.llm.sampling(temperature=0.0, max_tokens=6, logprobs=3))
    assert whole.tokens == list(known.token_ids)
    assert [one.id for one in whole.completion_probabilities] == whole.tokens
    for one, logprob, top in zip(whole.completion_probabilities, known.logprobs, known.top_logprobs, strict=True):
        assert one.logprob == pytest.approx(logprob)
        assert [each.id for each in one.top_logprobs] == [each.token for each in top]
        assert bytes(one.bytes) == (server.llm.tokenizer.token_bytes(one.id, skip_special=False) or b"")
    assert "completion_probabilities" not in ask(server, prompt=TEXT)
    assert ask(server, prompt=TEXT)["tokens"] == []
    lines = httpx.post(f"{server.url}/completion", json=GREEDY | {"prompt": TEXT, "stream": True, "n_probs": 3}).text
    *events, last = [read(Infilled, line[6:]) for line in lines.splitlines() if line]
    assert [token for event in events for token in event.tokens] == whole.tokens
    assert [each for event in events for each in event.completion_probabilities] == whole.completion_probabilities
    plain = httpx.post(f"{server.url}/completion", json=GREEDY | {"prompt": TEXT, "stream": True}).text
    assert [token for line in plain.splitlines() if line for token in json.loads(line[6:])["tokens"]] == whole.tokens
    assert (last.has_new_line, last.truncated, last.prompt) == (whole.has_new_line, False, TEXT)


@pytest.mark.parametrize("listed", [False, True])
def test_biases_name_ids_and_texts(server: Live, listed: bool) -> None:
    first = server.llm.tokenizer.encode(TEXT, add_special=False)[0]
    name = server.llm.tokenizer.token_text(first)
    for what in (first, name) if listed else (str(first), name):
        for bias, count in ((100, 6), (-100, 0), (False, 0)):
            given: Any = [[what, bias]] if listed else {what: bias}
            tokens = ask(server, prompt=TEXT, logit_bias=given, return_tokens=True, ignore_eos=True)["tokens"]
            ids = server.llm.tokenizer.encode(name, add_special=False, parse_special=False)
            assert sum(token in ids for token in tokens) == count, (what, bias)
    assert "logit_bias" in refused(server, prompt=TEXT, logit_bias=[[5, True]])


def test_a_reply_says_with_what_it_was_written(server: Live) -> None:
    reply = ask(server, prompt=TEXT, seed=7, top_k=3, ignore_eos=True, n_predict=4)
    settings = reply["generation_settings"]
    assert (settings["seed"], settings["top_k"], settings["n_predict"]) == (7, 3, 4)
    assert settings["logit_bias"] == [{"token": token, "bias": None} for token in sorted(server.llm.eos_ids)]
    some = ask(server, prompt=TEXT, response_fields=["content", "generation_settings/n_predict", "nothing/here"])
    assert some == {"content": ask(server, prompt=TEXT)["content"], "generation_settings/n_predict": 6}
    times = reply["timings"]
    assert times["predicted_per_second"] == pytest.approx(1e3 * 3 / times["predicted_ms"])
    assert ask(server, prompt=TEXT, n_predict=1)["timings"]["predicted_per_second"] == 0.0
    end = ask(server, prompt="a" * 2000, n_predict=-1, ignore_eos=True)
    assert (end["truncated"], end["tokens_evaluated"] + end["tokens_predicted"]) == (True, server.llm.context)


def test_neighbours_of_completion(server: Live) -> None:
    [one] = ask(server, "/embedding", content=TEXT)
    assert one["embedding"] == [ask(server, "/v1/embeddings", input=TEXT)["data"][0]["embedding"]]
    assert ask(server, "/embedding", input=[TEXT, "b"])[0] == one
    both = httpx.post(f"{server.url}/embedding", json={"content": "a", "input": "b"})
    assert both.status_code == 400 and "content" in both.text
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
    reply = ask(server, "/v1/chat/completions", timings_per_token=True, **chat)
    counted = ask(server, "/chat/completions/input_tokens", **chat)["input_tokens"]
    assert counted == reply["usage"]["prompt_tokens"] == reply["timings"]["prompt_n"] + reply["timings"]["cache_n"]
    lines = httpx.post(f"{server.url}/v1/chat/completions", json=chat | {"stream": True}, timeout=60).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {chunk["system_fingerprint"] for chunk in chunks} == {reply["system_fingerprint"]}
    assert reply["system_fingerprint"].startswith("b")
    assert httpx.get(f"{server.url}/lora-adapters").json() == []
    assert httpx.get(f"{server.url}/v1/health").json() == httpx.get(f"{server.url}/health").json()
    assert "seed" in httpx.get(f"{server.url}/props").json()["default_generation_settings"]["params"]
