"""Each cause planted alone, in conversations rendered by a template, over a cache that is simulated by its rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.fixtures import make_checkpoint
from tests.profiles import examples
from tokenwright import LLM
from tokenwright.engine import Request, Thoughts
from tokenwright.engine.page_events import EvictionLog
from tokenwright.engine.pins import Mark, Retention
from tokenwright.engine.prefix_index import PrefixHashes
from tokenwright.engine.request import SequenceCounts
from tokenwright.llm.chat.chat_options import ChatRequest, Tool
from tokenwright.llm.chat.chat_processor import ChatProcessor
from tokenwright.llm.prompts.cause import _messages
from tokenwright.llm.prompts.memory import PromptMemory, PromptTerms
from tokenwright.llm.prompts.provenance import PromptPart
from tokenwright.llm.prompts.report import CacheReport, Cause
from tokenwright.llm.prompts.watch import PromptOrigin, PromptWatch, Watching

PAGE = 16
TEMPLATE = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if effort is defined %}<|im_start|>system
Effort: {{ effort }}.<|im_end|>
{% endif %}
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %} To call one, write <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINKS = Thoughts("<think>", "</think>")
TOOL = Tool("weather", "What the sky does in a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
Message = dict[str, Any]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder, _ = make_checkpoint(tmp_path_factory.mktemp("cause") / "tiny", "llama3")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(folder, pages=64) as model:
        yield model


@dataclass
class Desk:
    """Asks as a server does. texts: what is cached, by salt and model, as tokens whose K and V are there."""

    chat: ChatProcessor
    tokenizer: Any
    memory: PromptMemory = field(default_factory=PromptMemory)
    log: EvictionLog = field(default_factory=EvictionLog)
    texts: list[tuple[bytes, int, list[int]]] = field(default_factory=list)
    states: bool = False
    apart: bool = False
    asked: int = 0

    def reused(self, root: tuple[bytes, int], ids: Sequence[int]) -> int:
        """All of a text that is the beginning of these ids, else full pages."""
        best = 0
        for *own, text in self.texts:
            if tuple(own) == root:
                common = next(
                    (at for at, (a, b) in enumerate(zip(text, ids, strict=False)) if a != b), min(len(text), len(ids))
                )
                best = max(best, common if common == len(text) < len(ids) else common // PAGE * PAGE)
        return min(best, len(ids) - 1)

    def ask(
        self,
        messages: Sequence[Message],
        answer: str | Sequence[int] = "Fine.",
        *,
        tools: Sequence[Tool] = (),
        variables: dict[str, Any] | None = None,
        salt: bytes = b"",
        adapter: int = 0,
        lost: int | None = None,
        declined: int = 0,
        meanwhile: Callable[[], object] = lambda: None,
        pinned: tuple[float, int] | None = None,
        **asked: Any,
    ) -> CacheReport:
        """What the report of a prompt says. lost: the cache has only this many of its first tokens.

        pinned: the seconds of a breakpoint, and how many tokens are pinned before it.
        """
        self.asked += 1
        wanted = ChatRequest(messages=messages, tools=tools, variables=variables or {})
        rendered = self.chat.rendered(wanted)
        retention = Retention(() if pinned is None else (Mark(1, pinned[0]),))
        request = Request(prompt=rendered.ids, salt=salt, adapter=adapter, thoughts=THINKS, retention=retention)
        hashes = PrefixHashes(b"root" + salt + bytes([adapter]), PAGE)
        hashes.extend(rendered.ids)
        reused = self.reused((salt, adapter), rendered.ids)
        counts = SequenceCounts(prefix_hit=reused if lost is None else min(reused, lost), declined=declined)
        counts.pinned += () if pinned is None else pinned[1:]
        sequence = SimpleNamespace(request=request, prefix_hashes=hashes, counts=counts, cacheable=lambda stop: stop)
        handle = cast("Any", SimpleNamespace(sequence=sequence, started=0.0))
        watching = Watching(self.memory, self.tokenizer, "model", self.states, self.log.when, self.apart)
        parts, settings = partial(self.chat.parts, wanted, rendered), self.chat.settings(wanted)
        origin = PromptOrigin(PromptTerms(settings=settings, **asked), parts, f"answer {self.asked}")
        watch = PromptWatch(watching, handle, origin)
        meanwhile()
        report = watch.report
        end = self.tokenizer.control.ids["<|im_end|>"]
        written = [*self.tokenizer.encode(answer, add_special=False), end] if isinstance(answer, str) else list(answer)
        whole = [*rendered.ids, *written]
        hashes.extend(whole[:-1])
        self.texts.append((salt, adapter, whole[:-1]))
        watch.ended(written, False)
        return report

    def token_of(self, messages: Sequence[Message], text: str, **options: Any) -> int:
        """The first token of a rendered prompt that reaches into a text."""
        rendered = self.chat.rendered(ChatRequest(messages=messages, **options))
        ends = accumulate(len(self.tokenizer.token_text(token)) for token in rendered.ids)
        return next(at for at, end in enumerate(ends) if end > rendered.text.index(text))


@pytest.fixture
def desk(llm: LLM) -> Desk:
    return Desk(llm.conversations, llm.tokenizer)


def turns(count: int, *, system: bool = True) -> list[Message]:
    """A conversation of distinct messages, which ends with the user's."""
    roles = ("user", "assistant")
    found = [
        {"role": roles[at % 2], "content": f"This is text {at}, number {at * 37} of them all."} for at in range(count)
    ]
    return [*([{"role": "system", "content": "Be brief, and say what you know."}] if system else []), *found]


def follow(
    messages: Sequence[Message], answer: str = "Fine.", question: str = "And then what came of it?"
) -> list[Message]:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def edited(messages: Sequence[Message], at: int, content: str) -> list[Message]:
    return [*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :]]


def test_a_conversation_that_goes_on_is_found_whole(desk: Desk) -> None:
    talk = turns(1)
    first = desk.ask(talk)
    assert (first.cause, first.reused, first.again) == (Cause.NOTHING_TO_COMPARE, 0, 0)
    for turn in range(200):
        talk = (
            follow(talk, "Fine.", f"Go on with {turn}.")[-9:]
            if turn % 50 == 49
            else follow(talk, "Fine.", f"Go {turn}.")
        )
        if turn % 50 == 49:  # another conversation begins
            talk = turns(1)
            talk[-1]["content"] = f"Another subject, the number {turn}, please."
        report = desk.ask(talk)
        assert not report.known, report
        assert report.again == 0 and report.reused + report.computed == report.prompt


@examples(20)
@given(
    count=st.sampled_from((3, 5, 7, 9)),
    place=st.integers(0, 100),
    system=st.booleans(),
    named=st.booleans(),
    goes_on=st.booleans(),
)
def test_a_message_that_changes_is_named(
    llm: LLM, count: int, place: int, system: bool, named: bool, goes_on: bool
) -> None:
    talk = turns(count, system=system)
    first = 1 if system else 0
    at = first + 1 + place % (len(talk) - first - 1)  # not the first one, by which a conversation is known
    for change in ("edited", "dropped", "reordered", "inserted"):
        desk = Desk(llm.conversations, llm.tokenizer)
        desk.ask(talk, session="s" if named else "")
        new = follow(talk)
        if change == "edited":
            new[at] = {**new[at], "content": "Quite another text stands here now."}
        elif change == "dropped" and at + 2 <= len(talk):  # else it is the last question that is another
            del new[at : at + 2]
        elif change == "inserted":
            new[at:at] = [
                {"role": new[at]["role"], "content": "Zwischen allem."},
                {"role": new[at - 1]["role"], "content": "Da."},
            ]
        elif change == "reordered" and at + 2 < len(talk):
            new[at], new[at + 2] = new[at + 2], new[at]
        else:
            continue
        new = new if goes_on or change != "edited" else new[: len(talk)]
        report = desk.ask(new, session="s" if named else "", previous="answer 1" if named else "")
        assert (report.cause, report.message, report.change) == (Cause.MESSAGE, at, change), report
        if change == "edited":
            assert report.at == desk.token_of(new, new[at]["content"])
            assert report.now.startswith("Quite another") and report.before.startswith("This is"), report
        assert report.at is not None and report.reused == report.at // PAGE * PAGE
        assert report.again == min(report.prompt - 1, desk_length(desk, talk)) - report.reused


def desk_length(desk: Desk, talk: Sequence[Message]) -> int:
    """Tokens of a conversation and its answer that were computed."""
    wanted = ChatRequest(messages=talk)
    return len(desk.chat.rendered(wanted).ids) + len(desk.tokenizer.encode("Fine.", add_special=False))


def test_system_and_tools_and_settings(desk: Desk) -> None:
    talk = turns(5)
    desk.ask(talk, tools=[TOOL], variables={"effort": "low"})
    new = follow(talk)
    report = desk.ask(edited(new, 0, "Be verbose, and say what you know."), tools=[TOOL], variables={"effort": "low"})
    assert (report.cause, report.part) == (Cause.SYSTEM, "system"), report
    other = Tool("time", "What a clock says.")
    for tools in ([other, TOOL], [TOOL, other], [], [Tool("weather", "What the sky does.", TOOL.parameters)]):
        fresh = Desk(desk.chat, desk.tokenizer)
        fresh.ask(talk, tools=[TOOL], variables={"effort": "low"})
        report = fresh.ask(new, tools=tools, variables={"effort": "low"})
        assert (report.cause, report.part) == (Cause.TOOLS, "tools"), report
    fresh = Desk(desk.chat, desk.tokenizer)
    fresh.ask(talk, tools=[TOOL], variables={"effort": "low"})
    report = fresh.ask(new, tools=[TOOL], variables={"effort": "high"})
    assert report.cause is Cause.FORMAT, report
    assert report.again > 0 and "low" in report.before and "high" in report.now


def test_another_model_and_another_salt(desk: Desk) -> None:
    talk = turns(3)
    desk.ask(talk, session="s")
    report = desk.ask(follow(talk), adapter=1, session="s")
    assert (report.cause, report.at, report.before, report.now) == (Cause.MODEL, 0, "", "")
    assert report.again == desk_length(desk, talk)
    desk.ask(turns(3), session="t")
    report = desk.ask(follow(turns(3)), salt=b"other", session="t")
    assert (report.cause, report.before, report.now) == (Cause.KEY, "", "")


def test_a_context_that_was_compacted(desk: Desk) -> None:
    talk = turns(11)
    desk.ask(talk)
    kept = [talk[0], {"role": "user", "content": "A summary of all that was said."}, *follow(talk)[9:]]
    report = desk.ask([*kept[:2], {"role": "assistant", "content": "Thanks."}, *kept[3:]])
    assert report.cause is Cause.COMPACTED, report
    fresh = Desk(desk.chat, desk.tokenizer)
    fresh.ask(talk)
    report = fresh.ask([talk[0], *follow(talk)[7:]])  # the oldest are left out
    assert report.cause is Cause.COMPACTED, report
    fresh = Desk(desk.chat, desk.tokenizer)
    fresh.ask(talk, session="s")
    report = fresh.ask([talk[0], {"role": "user", "content": "This goes on from a summary: all is well."}], session="s")
    assert report.cause is Cause.COMPACTED, report
    for new, cause in (([talk[0], talk[1]], None), ([talk[0], {"role": "user", "content": "Of ships."}], "new")):
        fresh = Desk(desk.chat, desk.tokenizer)
        fresh.ask(talk, session="a key of the cache", shared=True)
        report = fresh.ask(new, session="a key of the cache", shared=True)
        assert (report.cause is Cause.NOTHING_TO_COMPARE) is (cause == "new"), report
    fresh = Desk(desk.chat, desk.tokenizer)
    fresh.ask(talk)
    report = fresh.ask(edited(follow(talk), 5, "[cleared]"), edited=True)
    assert (report.cause, report.message) == (Cause.COMPACTED, 5), report


def test_thoughts_that_the_template_drops(desk: Desk) -> None:
    talk = turns(3)
    desk.ask(talk, "<think>It is a long story, and hard to tell.</think>Fine.")
    report = desk.ask(follow(talk))
    assert report.cause is Cause.THOUGHTS, report
    assert report.at == len(desk.chat.rendered(ChatRequest(messages=talk)).ids)
    # In a loop of calls they stay, and go with the user's next message.
    fresh = Desk(desk.chat, desk.tokenizer)
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    asked = {"role": "assistant", "content": "", "reasoning_content": "I must look.", "tool_calls": [call]}
    wrote = '<think>I must look.</think><tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    fresh.ask(talk, wrote, tools=[TOOL])
    loop = [*talk, asked, {"role": "tool", "tool_call_id": "c", "name": "weather", "content": "It rains in Rome."}]
    assert not (report := fresh.ask(loop, tools=[TOOL])).known, report
    report = fresh.ask(follow(loop), tools=[TOOL])
    assert (report.cause, report.message) == (Cause.THOUGHTS, len(talk)), report


def test_an_answer_that_comes_back_as_other_tokens(desk: Desk) -> None:
    talk, encode = turns(3), desk.tokenizer.encode
    end = desk.tokenizer.control.ids["<|im_end|>"]
    text = next(t for at in range(258, 500) if len(t := desk.tokenizer.token_text(at)) > 1 and t.isalpha()) * 3
    apart = [token for char in text for token in encode(char, add_special=False)]
    assert apart != encode(text, add_special=False)
    desk.ask(talk, [*apart, end])
    report = desk.ask(follow(talk, text))
    assert report.cause is Cause.RETOKENISED, report
    fresh = Desk(desk.chat, desk.tokenizer)
    fresh.ask(talk, '<tool_call>{"name":"weather","arguments":{"city":"Rome"}}</tool_call>', tools=[TOOL])
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    loop = [*talk, {"role": "assistant", "content": "", "tool_calls": [call]}]
    report = fresh.ask(
        [*loop, {"role": "tool", "tool_call_id": "c", "name": "weather", "content": "Rain."}], tools=[TOOL]
    )
    assert report.cause is Cause.RETOKENISED, report
    fresh = Desk(desk.chat, desk.tokenizer)
    fresh.ask(talk, "This is it.")
    report = fresh.ask(follow(talk, "This was never said."))
    assert (report.cause, report.message, report.change) == (Cause.MESSAGE, len(talk), "edited"), report


def test_what_the_cache_lost(desk: Desk) -> None:
    talk = turns(9)
    desk.ask(talk, session="s")
    desk.ask([{"role": "user", "content": "Something else."}], session="other")
    record = desk.memory.named("", "answer 1")
    assert record is not None
    for page in (3, 4, 5):
        desk.log.add(bytes(record.hashes[8 * page : 8 * page + 8]))
    new = follow(talk)
    report = desk.ask(new, lost=3 * PAGE, session="s")
    assert (report.cause, report.at, report.reused) == (Cause.EVICTED, 3 * PAGE, 3 * PAGE)
    assert report.evicted_s is not None and 0 <= report.evicted_s < 60
    assert report.by_others > 0 and report.by_session == 0
    for granted, cause in ((1, Cause.EXPIRED), (0, Cause.EVICTED)):
        expired = Desk(desk.chat, desk.tokenizer, log=desk.log)
        expired.ask(talk, pinned=(1e-9, granted))
        time.sleep(0.001)
        for page in (3, 4, 5):
            desk.log.add(bytes(record.hashes[8 * page : 8 * page + 8]))
        assert expired.ask(new, lost=3 * PAGE).cause is cause
    for options, cause in (({"declined": 5 * PAGE}, Cause.DISK), ({}, Cause.EVICTED)):
        fresh = Desk(desk.chat, desk.tokenizer)
        fresh.ask(talk)
        assert fresh.ask(new, lost=PAGE, **options).cause is cause
    fresh = Desk(desk.chat, desk.tokenizer)
    fresh.ask(talk)
    length = desk_length(fresh, talk)
    report = fresh.ask(new, lost=length // PAGE * PAGE)
    assert (report.cause, report.again) == ((Cause.PLACE, length % PAGE) if length % PAGE else (None, 0)), report
    for known, cause in ((EvictionLog(), Cause.ELSEWHERE), (desk.log, Cause.EVICTED)):
        apart = Desk(desk.chat, desk.tokenizer, log=known, apart=True)
        apart.ask(talk)
        assert apart.ask(new, lost=3 * PAGE).cause is cause
    states = Desk(desk.chat, desk.tokenizer, states=True)
    states.ask(talk)
    assert states.ask(new, lost=2 * PAGE).cause is Cause.PLACE


def test_of_two_models_with_one_text_the_own_one_lost_it(desk: Desk) -> None:
    talk = turns(3)
    for adapter in (0, 1):
        desk.ask(talk, adapter=adapter)
    assert desk.ask(follow(talk), lost=0).cause is Cause.EVICTED
    assert desk.ask(follow(talk), adapter=1, lost=0).cause is Cause.EVICTED
    longer = talk
    for _ in range(16):
        longer = follow(longer)
    desk.ask(longer)
    assert desk.ask(follow(longer), adapter=1).cause is Cause.MODEL, "most of it was only the other's"


def test_a_text_that_ends_meanwhile_could_not_be_found(desk: Desk) -> None:
    talk = turns(5)
    report = desk.ask(talk, lost=0, meanwhile=lambda: desk.ask(talk))
    assert report.cause is Cause.NOTHING_TO_COMPARE, report


def test_a_message_of_many_parts_is_read_in_linear_time() -> None:
    parts = tuple(PromptPart(at, at + 1, "calls", 0, "assistant") for at in range(200_000))
    began = time.process_time()
    assert len(_messages(parts, np.arange(200_000, dtype=np.uint32), 0)[0]) == 800_000
    assert time.process_time() - began < 2


def test_a_named_answer_that_is_not_known(desk: Desk) -> None:
    talk = turns(3)
    desk.ask(talk, owner="a")
    report = desk.ask(follow(talk), owner="b", salt=b"b", previous="answer 1")
    assert report.missing and report.cause is Cause.NOTHING_TO_COMPARE
    assert (report.before, report.now, report.compared, report.common) == ("", "", "", 0)
    assert not desk.ask(follow(talk), owner="a", previous="answer 1").missing


def test_a_short_prompt_after_another_one_is_compared_with_nothing(llm: LLM) -> None:
    """A page is the least that is found again; what shares less is another text, not an edited one."""

    def cause(prompt: str) -> tuple[Cause | None, str]:
        report = llm.generate(prompt, max_tokens=12, temperature=0)[0].cache
        return report.cause, report.change

    new, edited = (Cause.NOTHING_TO_COMPARE, ""), (Cause.MESSAGE, "edited")
    assert [cause(one) for one in ("The sea is", "The sea was", "The sea", "The sea is an")] == [new] * 4
    long = "A tale of a hen and of the pond where all of her ducks swim in the rain. " * 3
    assert cause(long) == new
    assert cause(f"{long}And a fox came by.") == (None, ""), "it has no answer in it that was changed"
    assert cause(f"{long}And a fox came up, and all of the ducks went.") == edited


def test_another_first_message_of_a_session(desk: Desk) -> None:
    """A client that names a session for all of its chats begins new ones."""
    system = {"role": "system", "content": "You are a brief helper, and say only what you know."}
    desk.ask([system, {"role": "user", "content": "Tell me of the sea and of the ships on it."}], session="s")
    report = desk.ask([system, {"role": "user", "content": "What is a good name for two cats?"}], session="s")
    assert report.cause is Cause.NOTHING_TO_COMPARE, report
    report = desk.ask([system, {"role": "user", "content": "What is a good name for two dogs?"}], session="s")
    assert (report.cause, report.change) == (Cause.MESSAGE, "edited"), report
