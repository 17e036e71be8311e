"""Sessions of seven agents, in each of which one cause after another is planted: cause, place and counts are right."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_bytes
from typing import Any
from unittest import mock

import httpx
import pytest

from tests.clients.scripted import Forced
from tests.llm.prompts.test_cause import TEMPLATE
from tests.llm.test_lora import make_adapter
from tests.profiles import share
from tests.serve.service.agent_sessions import AGENTS, REMINDER, Agent, Call, Said, Talk
from tests.serve.talking import Talker, make_talker, running
from tokenwright import LLM
from tokenwright.decode import TextStopChecker
from tokenwright.decode.grammars.grammar_trials import Budget
from tokenwright.llm.prompts.report import Cause
from tokenwright.serve.app import Served, make_app
from tokenwright.serve.http import request_parts
from tokenwright.serve.service import service
from tokenwright.serve.service.model_host import ModelHost
from tokenwright.serve.service.preprocess import Prepared, Preprocessor
from tokenwright.serve.service.types import GenerationRequest
from tokenwright.serve.transport.guard import Policy

PAGE, PAGES = 16, 100
KEYS = ("alpha-0123456789abcdef", "beta-0123456789abcdef")


@dataclass
class Desk:
    """A server whose model writes `answer`, or the text in a call's own form. texts: ids so far, without the last."""

    answer: list[int] | str | tuple[str, dict[str, Any]] = "Fine."
    asked: GenerationRequest | None = None
    ids: tuple[int, ...] = ()
    written: list[int] = field(default_factory=list)
    texts: list[tuple[str, list[int]]] = field(default_factory=list)
    talker: Talker = None  # type: ignore[assignment]
    tier: Any = None

    def preprocessor(self) -> type[Preprocessor]:
        desk = self

        class Told(Preprocessor):
            def prepare(self, wanted: GenerationRequest, budget: Budget | None = None) -> Prepared:
                prepared = super().prepare(wanted, budget)
                checker = prepared.request.stop_checker
                if wanted.messages is not None and isinstance(checker, TextStopChecker):
                    answer, tokenizer = desk.answer, self._tokenizer
                    if isinstance(answer, tuple):
                        assert self.chat.tools is not None, "the template has tools"
                        answer = self.chat.tools.form.written([answer])
                    if isinstance(answer, str):
                        answer = tokenizer.encode(answer, add_special=False)
                    desk.written = [*answer, tokenizer.control.ids["<|im_end|>"]]
                    checker.constraint = Forced(desk.written, self._engine.facts.config.vocab_size)
                    desk.asked, desk.ids = wanted, prepared.request.prompt
                return prepared

        return Told

    def turn(self, agent: Agent, talk: Talk, answer: Any = "Fine.", key: str = KEYS[0]) -> tuple[Any, dict[str, Any]]:
        """Ask, and check what all replies must say; returns the client's reply and the report in it."""
        self.answer = answer
        reply = agent.ask(self.talker.url, key, talk)
        report = reply.timings if isinstance(reply.timings, dict) else reply.timings.to_dict()
        found = report["cache"]
        assert found["reused"] + found["computed"] == len(self.ids)
        assert found["reused"] == self.expected(key + talk.model), (found, self.expected(key + talk.model))
        usage = reply.usage.to_dict()
        if agent.api == "messages":
            prompt = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
            assert (prompt, usage["cache_read_input_tokens"]) == (len(self.ids), found["reused"])
            assert sum(usage["cache_creation"].values()) == usage["cache_creation_input_tokens"]
        else:
            name = {"responses": "input_tokens", "chat": "prompt_tokens"}[agent.api]
            details = usage[f"{name}_details"]
            assert (usage[name], details["cached_tokens"]) == (len(self.ids), found["reused"])
            assert details["cache_write_tokens"] == found["computed"]
        self.texts.append((key + talk.model, [*self.ids, *self.written]))
        return reply, found

    def expected(self, root: str) -> int:
        """The tokens of this prompt that the cache must have: full pages, a whole text's, or up to a breakpoint."""
        places = self.talker.llm.inspect(lambda engine: [pin.tokens for pin in engine.scheduler.kv.pins])
        best = 0
        for its, text in self.texts:
            if its == root:
                both = same(text[:-1], self.ids[:-1])
                marks = (place for place in places if place <= both)
                best = max(best, both if both == len(text) - 1 else both // PAGE * PAGE, *marks)
        return best

    def flood(self) -> None:
        """Other prompts, in all more than the pool holds."""
        for number in range(2):
            body = {"prompt": [(number * 31 + at) % 200 + 40 for at in range(PAGE * PAGES - 9)], "max_tokens": 1}
            headers = {"Authorization": f"Bearer {KEYS[0]}"}
            reply = httpx.post(f"{self.talker.url}/v1/completions", json=body, headers=headers, timeout=100)
            assert reply.status_code == 200, reply.text
        self.texts = []


def same(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    place = tmp_path_factory.mktemp("agents")
    folder = make_talker(place, template=TEMPLATE.replace("effort", "reasoning_effort"))
    with warnings.catch_warnings():  # PEFT asks for a property of the model that will go
        warnings.simplefilter("ignore")
        adapter, _ = make_adapter(folder, place / "adapter", target_modules=["q_proj"], r=2)
    made = Desk()
    options: dict[str, Any] = {"pages": PAGES, "adapters": {"tuned": adapter}, "kv_disk": "auto", "pinned": 0.9}
    host = ModelHost("tiny", lambda report: LLM(folder, report=report, **options))
    served = Served((), timings=True, adapters=("tuned",))
    app = make_app(host, Policy.of(None, KEYS), None, served)
    with (
        mock.patch.dict("os.environ", {"TOKENWRIGHT_CACHE": str(place / "cache")}),
        mock.patch.object(service, "Preprocessor", made.preprocessor()),
        running(app, app.state.service) as made.talker,
    ):
        yield made


@pytest.fixture(autouse=True)
def fresh(desk: Desk) -> Iterator[None]:
    """A cache and a memory that know nothing of other tests, without a disk."""
    llm, prompts = desk.talker.llm, desk.talker.llm.llm_engine.prompts

    def renew(engine: Any) -> Any:
        tier, engine.prefixes.tier, engine.prefixes.secret = engine.prefixes.tier, None, token_bytes(32)
        return tier

    tier = llm.inspect(renew)
    while prompts.nbytes:
        prompts._drop_oldest()
    desk.texts, desk.tier = [], tier
    yield
    while llm.inspect(lambda engine: engine.scheduler.kv.pins.end_oldest(None)):
        pass
    llm.inspect(lambda engine: setattr(engine.prefixes, "tier", tier))


def begun(desk: Desk, agent: Agent, name: str, *, marks: bool = False) -> Talk:
    """A session of two turns, of which the second's answer is the one that was forced last."""
    system = f"You are a brief helper in case {name}, and you say only what you know."
    roles, words = ("user", "assistant"), "with the number"
    earlier = (Said(roles[at % 2], f"This is text {at} of {name}, {words} {at * 37}.") for at in range(4))
    talk = Talk(name, system, agent.tools, (*earlier, Said("user", f"Look at the sky of {name}.")), marks=marks)
    reply, found = desk.turn(agent, talk, ("Bash", {"command": "look"}) if agent.tools else "I look.")
    assert (found["cause"], found["recomputed"]) == ("nothing_to_compare", 0), found
    call = Call("call_1", "Bash", {"command": "look"})
    more = (
        (Said("assistant", "", calls=(call,)), Said("result", "It is blue.", call="call_1"))
        if agent.tools
        else (Said("assistant", "I look."), Said("user", "It is blue."))
    )
    return replace(talk.said(*more), previous=reply.id)


Plant = Callable[[tuple[Said, ...]], tuple[Said, ...]]
CHANGES: dict[str, tuple[Cause, int, str, Plant]] = {
    "edited": (Cause.MESSAGE, 2, "edited", lambda m: (*m[:2], Said("user", "Quite another text."), *m[3:])),
    "dropped": (Cause.MESSAGE, 1, "dropped", lambda m: (m[0], *m[3:])),
    "inserted": (
        Cause.MESSAGE,
        2,
        "inserted",
        lambda m: (*m[:2], Said("user", "Between."), Said("assistant", "Yes."), *m[2:]),
    ),
    "reordered": (Cause.MESSAGE, 0, "reordered", lambda m: (m[2], m[1], m[0], *m[3:])),
    "compacted": (Cause.COMPACTED, 0, "", lambda m: (Said("user", "A summary: all was said."), *m[4:])),
}
TALKS: dict[str, tuple[Cause, Callable[[Talk], Talk]]] = {
    "tools": (Cause.TOOLS, lambda talk: replace(talk, tools=("Write", *talk.tools))),
    "system": (Cause.SYSTEM, lambda talk: replace(talk, system=talk.system.replace("brief", "verbose"))),
    "effort": (Cause.FORMAT, lambda talk: replace(talk, effort="high")),
    "model": (Cause.MODEL, lambda talk: replace(talk, model="tuned")),
}
LOST = {"evicted": Cause.EVICTED, "expired": Cause.EXPIRED, "disk": Cause.DISK}
PLANTED = (*CHANGES, *TALKS, *LOST, "key", "thoughts", "retokenised", "place")
EVERY = [(agent, plant) for agent in AGENTS for plant in PLANTED]  # each seventh: each cause, by some agent


@pytest.mark.parametrize(("name", "plant"), EVERY[::7])
def test_a_planted_cause_is_named_with_its_place_and_counts(desk: Desk, name: str, plant: str) -> None:
    check(desk, name, plant)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "plant"), EVERY)
def test_every_planted_cause(desk: Desk, name: str, plant: str) -> None:
    check(desk, name, plant)


def check(desk: Desk, name: str, plant: str) -> None:
    agent, llm = replace(AGENTS[name], reminder=False), desk.talker.llm
    llm.inspect(lambda engine: setattr(engine.prefixes, "tier", desk.tier if plant == "disk" else None))
    prompts = llm.llm_engine.prompts
    with (
        mock.patch.dict(
            request_parts.SECONDS, dict.fromkeys(request_parts.SECONDS, 0.3 if plant == "expired" else 300.0)
        ),
        mock.patch.object(prompts, "resumes", plant != "retokenised"),
    ):
        talk = begun(desk, agent, f"{name} {plant}", marks=plant == "expired")
        answer: Any = "It is as blue as it can be."
        if plant == "thoughts":
            answer = f"<think>I ponder it at length.</think>{answer}"
        if plant == "retokenised":
            answer = [token for char in "theandthe" for token in llm.tokenizer.encode(char, add_special=False)]
        reply, found = desk.turn(agent, talk, answer)
        assert found["cause"] is None and not found["recomputed"], found
        old, before = [*desk.ids, *desk.written], len(desk.ids)
        said = {"retokenised": "theandthe"}.get(plant, "It is as blue as it can be.")
        thoughts = "I ponder it at length." if plant == "thoughts" else ""
        talk = replace(talk.said(Said("assistant", said, thoughts), Said("user", "And the sea?")), previous=reply.id)
        lose(desk, plant)
        cause, message, change = None, None, ""
        if plant in CHANGES:
            cause, message, change, edit = CHANGES[plant]
            talk = replace(talk, messages=edit(talk.messages))
        if plant in TALKS:
            cause, turned = TALKS[plant]
            talk = turned(talk)
        if plant == "place":
            talk = replace(talk, messages=talk.messages[:-2])
        cause = cause or LOST.get(plant) or {"thoughts": Cause.THOUGHTS, "retokenised": Cause.RETOKENISED}.get(plant)
        reply, found = desk.turn(agent, talk, key=KEYS[plant == "key"])
    both, most = same(old, desk.ids), min(len(old) - 1, len(desk.ids) - 1)
    if plant == "key":
        assert (found["cause"], found["reused"], found["before"], found["now"]) == ("nothing_to_compare", 0, None, None)
        return
    if plant == "place":
        cause = Cause.PLACE if found["reused"] < most else None
    if plant == "tools" and not agent.tools:  # the template's text for tools comes in anew
        assert found["at"] == both
    assert found["cause"] == cause, found
    assert found["recomputed"] == (min(both, most) if plant == "model" else most) - found["reused"], found
    if cause is None:
        return
    at = 0 if plant == "model" else found["reused"] if plant in (*LOST, "place") else both
    assert found["at"] == at, (found, both)
    if plant in CHANGES:
        assert desk.asked is not None and desk.asked.messages is not None
        first = int(desk.asked.messages[0]["role"] in ("system", "developer"))
        assert (found["message"], found["change"] or "") == (
            message + first if message is not None else None,
            change,
        ), found
    if plant in ("thoughts", "retokenised"):
        assert before <= found["at"] <= before + 2, "in the answer"
    if plant == "evicted":
        assert found["computed_since_by_others"] >= PAGE * PAGES and found["evicted_ms_ago"] > 0
    unsaid = agent.api == "chat" or plant in (*LOST, "place") or (agent.api == "messages" and plant == "effort")
    behind = len(desk.ids) - at if agent.api == "responses" else found["recomputed"]
    assert diagnosed(agent, reply) == (None if unsaid else behind)


def lose(desk: Desk, plant: str) -> None:
    if plant == "expired":
        time.sleep(0.4)
    if plant in LOST:
        desk.flood()
    if plant == "disk":
        desk.talker.llm.inspect(lambda engine: setattr(engine.prefixes.tier, "worth_reading", lambda *_: False))


def diagnosed(agent: Agent, reply: Any) -> int | None:
    """The tokens that the API's own diagnostics count; None: it has none."""
    if agent.api == "messages":
        told, name = reply.diagnostics and reply.diagnostics.cache_miss_reason, "cache_missed_input_tokens"
    else:
        told, name = getattr(reply, "prompt_cache_diagnostics", None), "cache_missed_tokens"
    return None if told is None else told.to_dict().get(name)


def test_two_hundred_clean_turns_raise_no_alarm(desk: Desk) -> None:
    for name, agent in AGENTS.items():
        agent = replace(agent, reminder=False)
        talk = begun(desk, agent, f"clean {name}")
        for turn in range(share(16)):
            answer = f"Answer {turn}."
            reply, found = desk.turn(agent, talk, answer)
            assert found["cause"] is None and not found["recomputed"], (name, turn, found)
            assert not diagnosed(agent, reply)
            talk = replace(talk.said(Said("assistant", answer), Said("user", f"Go on, {turn}.")), previous=reply.id)
            if len(desk.ids) > 1000:
                talk = begun(desk, agent, f"clean {name} {turn}")


def test_a_reminder_that_moves_is_an_edited_message(desk: Desk) -> None:
    """Aider's last message ends with words that it leaves out in the next turn."""
    agent = AGENTS["aider"]
    talk = Talk("", "You edit files.", (), (Said("user", "Edit the file of the sea."),))
    for turn in range(3):
        _, found = desk.turn(agent, talk, f"Done {turn}.")
        if turn:
            assert (found["cause"], found["message"], found["change"]) == ("message_changed", 2 * turn - 1, "edited"), (
                found
            )
            assert found["before"].startswith(f"\n{REMINDER}"[:8]), found
        talk = talk.said(Said("assistant", f"Done {turn}."), Said("user", f"Edit it again, {turn}."))


@pytest.mark.parametrize("name", ["claude-code", "codex", "opencode"])
def test_nothing_of_another_key_is_shown_whatever_adapter_wrote_it(desk: Desk, name: str) -> None:
    """Two keys with equal texts, by the model and its adapter; one names the other's answers and session."""
    agent, answer, secret = AGENTS[name], "Rumpel it is.", "Nobody may know of it."
    asked = Said("user", "My name is Rumpelstiltskin, whatever the others think, so call me by a short one.")
    talk = Talk(f"{name} secret", "You keep what you are told.", (), (asked,))
    next_turn, theirs = talk.said(Said("assistant", answer), Said("user", "And now?")), []
    for model in ("tuned", "tiny"):
        for said, written in ((talk, answer), (next_turn, secret)):
            theirs.append(desk.turn(agent, replace(said, model=model), written)[0].id)
    told, turns = "", 0
    for previous in ("", *theirs):
        for model in ("tiny", "tuned"):
            for said in (talk, next_turn, replace(talk, messages=(replace(asked, text="My name is Heinz."),))):
                reply, found = desk.turn(agent, replace(said, model=model, previous=previous), "Mine.", KEYS[1])
                assert turns or (found["cause"], found["reused"]) == ("nothing_to_compare", 0), found
                told, turns = told + reply.to_json() + json.dumps(found), turns + 1
    headers = {"Authorization": f"Bearer {KEYS[1]}"}
    card = httpx.get(f"{desk.talker.url}/conversations", headers=headers, timeout=100)
    assert card.status_code == 200 and sum(len(one["turns"]) for one in card.json()["conversations"]) == turns
    assert not any(one in told + card.text for one in (*theirs, secret[:6]))
