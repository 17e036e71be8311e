"""What a server says of its cache, warm-ups and the panel included, is the same over two replicas as in one process."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines import until
from tests.models.fixtures import make_checkpoint
from tests.serve.service.test_following_turns import KEYS, TEMPLATE, TOOL, letters, words_begin
from tests.serve.talking import Talker, running
from tokenwright import LLM
from tokenwright.cluster.processes import open_cluster
from tokenwright.serve.app import Served, make_app
from tokenwright.serve.service.model_host import ModelHost
from tokenwright.serve.service.service import ServiceLimits
from tokenwright.serve.transport.guard import Policy

pytestmark = pytest.mark.slow
KV = 16 << 20
SYSTEM = {"role": "system", "content": "You say in few words what you know of the sea and of the ships that are on it."}


@contextmanager
def served(folder: Path, replicas: int) -> Iterator[Talker]:
    options: dict[str, Any] = {"kv_memory": KV * max(1, replicas), "kv_disk": "auto"}
    host = ModelHost(
        "tiny",
        lambda report: open_cluster(str(folder), replicas, options) if replicas else LLM(folder, **options),
    )
    app = make_app(host, Policy.of(None, KEYS), None, Served((), ServiceLimits(warm="on"), timings=True))
    with running(app, app.state.service) as talker:
        until(lambda: host.loading.phase == "ready" and host.llm.llm_engine.replicas == max(1, replicas))
        yield talker


class Session:
    """Asks a server, and keeps all that it says; names of answers become numbers, and times are left out."""

    def __init__(self, talker: Talker, rest: Callable[[Talker], None]) -> None:
        self.talker, self.rest = talker, rest
        self.said: list[Any] = []
        self._names: dict[str, str] = {}
        self._numbers = count()

    def named(self, value: Any) -> Any:
        if isinstance(value, dict):
            kept = {name: one for name, one in value.items() if not name.endswith(("_ms", "ms_ago"))}
            return {name: one > 0 if name == "left_s" else self.named(one) for name, one in kept.items()}
        if isinstance(value, list):
            return [self.named(one) for one in value]
        if isinstance(value, str) and value.startswith("chatcmpl-"):
            return self._names.setdefault(value, f"answer {next(self._numbers)}")
        return value

    def ask(self, talk: list[dict[str, Any]], key: str = KEYS[0], **more: Any) -> dict[str, Any]:
        few = letters(self.talker)
        body = {"messages": talk, "allowed_token_ids": few, "ignore_eos": True, "max_tokens": 30, "seed": 5} | more
        headers = {"Authorization": f"Bearer {key}"}
        reply = httpx.post(f"{self.talker.url}/v1/chat/completions", json=body, headers=headers, timeout=100)
        assert reply.status_code == 200, reply.text
        done: dict[str, Any] = reply.json()
        told = (
            done["id"],
            done["choices"],
            done["usage"],
            done["timings"]["cache"],
            reply.headers["x-tokenwright-cache"],
        )
        self.said.append(self.named(list(told)))
        self.rest(self.talker)
        return done

    def pins(self) -> Any:
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        return httpx.get(f"{self.talker.url}/conversations", headers=headers, timeout=100).json()["pins"]

    def look(self, key: str = KEYS[0]) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        card = httpx.get(f"{self.talker.url}/conversations", headers=headers, timeout=100).json()
        self.said.append(self.named(card))
        metrics = httpx.get(f"{self.talker.url}/metrics", headers=headers, timeout=100).text
        of_cache = r"^tokenwright_(?:recomputed_tokens|warm_tokens|\w*tokens)_total.*$"
        self.said.append(re.findall(of_cache, metrics, re.MULTILINE))
        return card


def play(session: Session) -> list[dict[str, Any]]:
    talk = [SYSTEM, {"role": "user", "content": "Tell me of the ships, and of all that is under them, one by one."}]
    for turn in range(3):
        done = session.ask(talk, prompt_cache_key="own")
        found = done["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert not turn or found == words_begin(session.talker, talk, False), "the next turn was ready"
        answer = done["choices"][0]["message"]["content"]
        talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"Say more of it, {turn}."}]
    edited = [{**talk[1], "content": talk[1]["content"].replace("under", "over")}, *talk[2:]]
    for more, said in (({}, [SYSTEM, *edited]), ({"tools": [TOOL], "tool_choice": "none"}, talk), ({}, talk[:2])):
        session.ask(said, prompt_cache_key="own", **more)
    part = {"type": "text", "text": talk[1]["content"], "cache_control": {"type": "ephemeral"}}
    session.ask([SYSTEM, {"role": "user", "content": [part]}], prompt_cache_key="own")
    card = session.look()
    [pin] = card["pins"]
    assert (pin["session"], pin["tokens"] > 40) == ("own", True) and card["conversations"][0]["in_memory"] > 40
    session.ask(talk, KEYS[1])
    assert session.said[-1][3]["cause"] == "nothing_to_compare", "another key's"
    assert session.look(KEYS[1])["pins"] == []
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    gone = httpx.delete(f"{session.talker.url}/v1/cache/sessions/own", headers=headers, timeout=100)
    session.said.append(gone.json())
    until(lambda: session.pins() == [])
    session.look()
    return talk


def go_on(session: Session, talk: list[dict[str, Any]], *rests: Callable[[Talker], None]) -> list[tuple[str, int]]:
    """The answers of further turns, and how much of each prompt was found. rests: what comes after each turn."""
    said, found = list(talk), []
    for rest in rests:
        session.rest = rest
        done = session.ask(said, prompt_cache_key="own")
        answer = done["choices"][0]["message"]["content"]
        found.append((answer, done["usage"]["prompt_tokens_details"]["cached_tokens"]))
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And more of it."}]
    assert found[-1][1] == words_begin(session.talker, said[:-2], False), "the next turn was ready"
    return found


def test_two_replicas_say_what_one_engine_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path / "cache"))
    folder, _ = make_checkpoint(tmp_path / "talker", "qwen2", changes={"max_position_embeddings": 4096})
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    warmed: list[int] = []  # after each turn

    def alone(talker: Talker) -> None:
        turns = talker.service._next_turns
        until(lambda: turns._task is None and not turns._answered)
        until(lambda: not talker.llm.inspect(lambda engine: engine.due))
        warmed.append(talker.llm.llm_engine.prompts.warmed)

    with served(folder, 0) as talker:
        one = Session(talker, alone)
        talk, said = play(one), list(one.said)
        undisturbed = go_on(one, talk, *[alone] * 4)
    expected = iter(warmed)

    def replicated(talker: Talker) -> None:
        wanted = next(expected)
        until(lambda: talker.llm.llm_engine.prompts.warmed == wanted)

    with served(folder, 2) as talker:
        two = Session(talker, replicated)
        assert play(two) == talk
        assert warmed[0] > 0
        for mine, its in zip(two.said, said, strict=True):
            assert mine == its
        prompts, dispatcher = talker.llm.llm_engine.prompts, talker.llm.llm_engine.loop.dispatcher
        at_death: list[int] = []

        def dies(_: Talker) -> None:
            """The replica that computes the next turn is killed at it."""
            until(lambda: prompts.warmed > warmed[-4])
            home = max(dispatcher.members, key=lambda one: len(one.routed.pages.reported[0]))
            os.kill(int(home.routed.name), signal.SIGKILL)
            until(lambda: home not in dispatcher.members)
            at_death.append(prompts.warmed)

        def ready(_: Talker) -> None:
            until(lambda: prompts.warmed == at_death[0] + warmed[-2] - warmed[-3])

        lost, again = go_on(two, talk, lambda _: None, dies, ready, lambda _: None)[2:]
        assert lost == (undisturbed[2][0], 0) and again == undisturbed[3], "another replica computes it, and the next"
