"""The routes of the chat page: the model's card, and prompts whose ids are those that the public API computes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.fixtures import plain_stories
from tests.serve.conftest import served

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <|end|> to me."},
]


@pytest.fixture(scope="module")
def stories() -> Iterator[Any]:
    with served("stories", pages=128) as running:
        yield running


def test_the_card_says_whom_one_talks_to(stories: Any, tmp_path: Path) -> None:
    client, explorer = stories
    card = client.get("/chat/model").json()
    usual = explorer.llm.sampling()
    assert (card["name"], card["template"], card["traced"]) == ("stories", True, True)
    assert (card["temperature"], card["top_k"], card["top_p"]) == (
        usual.temperature,
        usual.top_k,
        usual.top_p,
    )
    assert card["context"] == explorer.llm.context
    with served(plain_stories(tmp_path), pages=32) as (plain, _):
        assert plain.get("/chat/model").json()["template"] is False
        refused = plain.post("/chat/prompt", json={"messages": CONVERSATION})
        assert refused.status_code == 400
        assert "no chat template" in refused.json()["error"]["message"]
        assert plain.post("/chat/prompt", json={"prompt": "Once"}).json()["text"] == "Once"


def test_a_run_of_a_prompts_ids_is_what_the_api_answers(stories: Any) -> None:
    """A control token that was typed is text in both; by its text alone the prompt would be read otherwise."""
    client, explorer = stories
    found = client.post("/chat/prompt", json={"messages": CONVERSATION}).json()
    ids = [token["id"] for token in found["tokens"]]
    assert ids == list(explorer.llm.render(CONVERSATION).ids)
    assert explorer.llm.tokenizer.encode(found["text"]) != ids
    asked = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "seed": 11, "max_tokens": 12}
    reply = client.post("/v1/chat/completions", json={"model": "stories", "messages": CONVERSATION, **asked}).json()
    card = client.post("/runs", json={"prompt": found["text"], "ids": ids, **asked}).json()
    assert [token["id"] for token in card["tokens"]] == ids
    assert card["prompt"] == found["text"]
    with client.websocket_connect(f"ws://127.0.0.1:8321/runs/{card['run']}/stream") as socket:
        socket.send_json({"op": "play", "pace": None})
        explorer.player(card["run"]).join()
    [answer] = explorer.llm.generate([ids], explorer.llm.sampling(**asked))
    assert explorer.player(card["run"]).run.tokens == (*ids, *answer.token_ids)
    assert reply["choices"][0]["message"]["content"] == answer.text
