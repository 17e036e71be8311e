"""The memory of prompts stays within its bytes, and an engine's own completions say what its cache found."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.models.fixtures import make_checkpoint
from tests.profiles import share
from tests.serve.talking import TEMPLATE
from tokenwright import LLM
from tokenwright.engine.prefix_index import PrefixHashes
from tokenwright.llm.prompts.memory import (
    PromptMemory,
    PromptRecord,
    PromptTerms,
    common_tokens,
    kept_ids,
    short_hashes,
)
from tokenwright.llm.prompts.report import Cause

PAGE = 16


def record(memory: PromptMemory, ids: list[int], owner: str = "", session: str = "", name: str = "") -> PromptRecord:
    """Remember a text as the watch does."""
    hashes = PrefixHashes(b"root", PAGE)
    hashes.extend(ids)
    asked = PromptTerms(owner=owner, session=session)
    tried = [(one, common_tokens(one, ids, hashes)) for one in memory.recent(asked)]
    before, common = max(tried, key=lambda pair: pair[1], default=(None, 0))
    own = kept_ids(ids, common, before)
    assert own.tolist() == ids
    found = PromptRecord(name or str(len(ids)), asked, own, len(ids), (), b"root", short_hashes(hashes), PAGE)
    memory.add(found, before if before is not None and common >= before.computed else None)
    return found


def test_it_stays_within_its_bytes() -> None:
    memory, draw = PromptMemory(300_000), random.Random(1)
    texts = {session: [draw.randrange(1000) for _ in range(200)] for session in range(20)}
    for turn in range(share(10_000)):
        session = draw.randrange(20)
        texts[session] = texts[session][: draw.randrange(150, 4000)] + [draw.randrange(1000) for _ in range(30)]
        record(memory, texts[session], f"key {session % 3}", str(session), str(turn))
        assert memory.nbytes <= memory.most
    every = [one for records in memory._records.values() for one in records.values()]
    assert memory.nbytes == sum(one.nbytes for one in every) and len(memory) == len(every) > 20
    assert sum(one.ids.nbytes for one in every if not one.shared) <= memory.most
    bases = {id(one.ids if one.ids.base is None else one.ids.base) for one in every}
    assert len(bases) <= sum(not one.shared for one in every), "an array that nothing counts is kept"
    assert all(memory.named(one.asked.owner, one.name) is one for one in every)


def test_the_owner_of_most_bytes_makes_room() -> None:
    """One key's long prompts push out no other key's many short ones."""
    memory = PromptMemory(400_000)
    for number in range(100):
        record(memory, [number, *range(30)], "short", str(number), f"short {number}")
    for number in range(30):
        record(memory, [number, *range(20_000)], "long", str(number), f"long {number}")
        assert memory.nbytes == sum(one.nbytes for owner in ("short", "long") for one in memory.records(owner))
    assert len(memory.records("short")) == 100 and 1 <= len(memory.records("long")) <= 4
    assert memory.nbytes <= memory.most


def test_a_conversation_costs_its_last_prompt() -> None:
    memory, ids = PromptMemory(), list(range(1000))
    for turn in range(100):
        ids = [*ids, *range(turn, turn + 50)]
        record(memory, ids)
    assert memory.nbytes < 100 * 1024 + 5 * len(ids)
    assert [len(one.ids) for one in memory.recent(PromptTerms(), 100)] == [
        1000 + 50 * turn for turn in range(100, 0, -1)
    ]
    assert all((one.ids == np.array(ids[: len(one.ids)], np.uint32)).all() for one in memory.recent(PromptTerms(), 100))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, _ = make_checkpoint(tmp_path_factory.mktemp("memory") / "tiny", "llama3")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def test_completions_say_what_the_cache_found(folder: Path) -> None:
    talk = [{"role": "user", "content": "Tell me of the sea, and of the ships on it, and of all that is in them."}]
    with LLM(folder, pages=24) as llm:
        first = llm.chat(talk, max_tokens=4, seed=1).cache
        assert first is not None and (first.cause, first.reused) == (Cause.NOTHING_TO_COMPARE, 0)
        again = llm.chat(talk, max_tokens=4, seed=1).cache
        assert again is not None and again.cause in (None, Cause.PLACE) and again.again < PAGE
        llm.generate("z" * 370, max_tokens=1)  # takes all pages
        report = llm.chat(
            [*talk, {"role": "assistant", "content": "x"}, {"role": "user", "content": "Go on."}], max_tokens=2
        ).cache
        assert report is not None and report.cause is Cause.EVICTED, report
        assert report.by_others > 250 and report.evicted_s is not None and report.seconds > 0
        whole = llm.generate("A text of its own kind, which is long enough for pages.", max_tokens=1)[0].cache
        assert whole is not None and whole.cause is Cause.NOTHING_TO_COMPARE
        assert llm.generate("A text of its own kind, which is long enough for pages.", cache=False)[0].cache.reused == 0  # type: ignore[union-attr]


def test_a_prompt_that_was_given_up_before_its_first_step_is_no_earlier_prompt(folder: Path) -> None:
    text = "Of all the ships on the sea, and of the fish below them, there is much to be told."
    with LLM(folder, pages=24) as llm:
        inbox = llm.llm_engine.inbox()
        [handle] = llm.llm_engine.submit([llm.prepare(text, llm.sampling(max_tokens=4))], inbox, paused=True)
        transcript = llm.transcript(handle)
        handle.cancel()
        while not transcript.ended:
            for delivery in inbox.get():
                transcript.add(delivery)
        report = llm.generate(text, max_tokens=1)[0].cache
        assert report is not None and (report.cause, report.again) == (Cause.NOTHING_TO_COMPARE, 0), report


def test_short_prompts_that_differ_are_not_of_one_conversation(folder: Path) -> None:
    with LLM(folder, pages=24) as llm:
        for text in ("A cat", "Of dogs", "What then?", "What thus?"):
            report = llm.generate(text, max_tokens=1)[0].cache
            assert report is not None and report.cause is Cause.NOTHING_TO_COMPARE, report
