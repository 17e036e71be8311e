"""DRY, XTC, top-n-sigma and Mirostat by HTTP, under the names that clients of other servers send."""

import json
from typing import Any

import httpx
import pytest

from tests.serve.talking import Talker
from tokenwright.sampling_params import SamplingParams
from tokenwright.serve.http.request_parts import Samplers, sampling_of

REPEATING = [7, 8, 9, 10] * 12
LIKELY = {7: 9.0, 8: 9.0, 9: 9.0, 10: 9.0, 11: 8.0}  # so that the text repeats itself
DRY = {"dry_multiplier": 50.0, "dry_allowed_length": 1}


BREAKERS = ["&", "'"]


def sampled(talker: Talker, **params: Any) -> str:
    [one] = talker.llm.generate([REPEATING], SamplingParams(max_tokens=24, seed=7, logit_bias=LIKELY, **params))
    return one.text


BIAS = {str(token): bias for token, bias in LIKELY.items()}
SENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"top_n_sigma": 1.0}, {"top_n_sigma": 1.0}),
    ({"top_n_sigma": -1.0}, {}),
    (DRY, DRY),
    (DRY | {"dry_base": 2.5, "dry_penalty_last_n": 3}, DRY | {"dry_base": 2.5, "dry_window": 3}),
    (DRY | {"dry_penalty_last_n": -1}, DRY),
    (DRY | {"dry_penalty_last_n": 0}, {}),
    (DRY | {"dry_sequence_breakers": BREAKERS}, DRY | {"dry_breakers": tuple(BREAKERS)}),
    (DRY | {"dry_sequence_breakers": json.dumps(BREAKERS)[1:-1]}, DRY | {"dry_breakers": tuple(BREAKERS)}),
    ({"xtc_probability": 0.7, "xtc_threshold": 0.002}, {"xtc_probability": 0.7, "xtc_threshold": 0.002}),
    ({"mirostat": 2, "mirostat_tau": 2.0}, {"mirostat": 2, "mirostat_tau": 2.0}),
    ({"mirostat_mode": 1, "mirostat_eta": 0.9}, {"mirostat": 1, "mirostat_eta": 0.9}),
    ({"allowed_token_ids": [9, 10, 11]}, {"allowed_ids": (9, 10, 11)}),
    ({"bad_words": ["the"], "allowed_token_ids": []}, {"bad_words": ("the",)}),
]


@pytest.mark.parametrize(("sent", "params"), SENT, ids=[" ".join(map(str, sent.values())) for sent, _ in SENT])
def test_a_completion_is_drawn_as_asked(talker: Talker, sent: dict[str, Any], params: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": REPEATING, "max_tokens": 24, "seed": 7, "logit_bias": BIAS} | sent
    reply = httpx.post(f"{talker.url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    text = reply.json()["choices"][0]["text"]
    assert text == sampled(talker, **params)
    assert (text == sampled(talker)) is not bool(params)


def test_ollama_has_them_among_its_options(talker: Talker) -> None:
    def said(**options: Any) -> str:
        asked = {"num_predict": 12, "seed": 7} | options
        body = {"model": "tiny", "prompt": "Hello", "raw": True, "stream": False, "options": asked}
        reply = httpx.post(f"{talker.url}/api/generate", json=body)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["response"])

    params = talker.llm.sampling(max_tokens=12, seed=7, mirostat=2, mirostat_tau=1.0, mirostat_eta=0.2)
    [expected] = talker.llm.generate(["Hello"], params)
    assert said(mirostat=2, mirostat_tau=1.0, mirostat_eta=0.2) == expected.text != said()
    assert said(mirostat=0) == said(top_n_sigma=-1) == said()
    assert said(top_n_sigma=0.5) != said()


@pytest.mark.parametrize("given", ["a,", '["a", 1]', "[", '{"a": 1}'])
def test_breakers_that_are_no_list_are_refused(talker: Talker, given: str) -> None:
    body = {"model": "tiny", "prompt": "a", "dry_sequence_breakers": given}
    reply = httpx.post(f"{talker.url}/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "dry_sequence_breakers")


@pytest.mark.parametrize("stream", [False, True])
def test_constraints_that_leave_no_token_are_the_requests_fault(
    talker: Talker, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Said to the client, and no fault in the server's log."""
    body = {"model": "tiny", "prompt": "H", "allowed_token_ids": [6], "guided_choice": ["H"], "stream": stream}
    reply = httpx.post(f"{talker.url}/v1/completions", json=body)
    assert stream or reply.status_code == 400
    assert "nothing is left to choose" in reply.text
    assert not [one for one in caplog.records if one.exc_info]


def test_what_is_not_said_keeps_the_models_own() -> None:
    assert {value for value in sampling_of(Samplers()).values() if value is not None} == set()
