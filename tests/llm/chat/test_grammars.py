"""Grammars through the inside model: its texts follow schemas of every kind, and a hostile one stops nobody."""

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from tests.decode import schemas
from tokenwright import LLM, EngineError, RequestError, SamplingParams
from tokenwright.engine import FinishReason, Grammar

PROMPT = "Once upon a time there was a"
HOSTILE = Grammar.json_schema({"type": "integer", "multipleOf": 999_983})  # ten seconds, were it not stopped
ENDED = (FinishReason.GRAMMAR, FinishReason.EOS)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("stories", dtype="float32", device="cpu") as model:
        yield model


def documents(llm: LLM, count: int, seed: int, batch: int = 50) -> tuple[Counter[str], list[str]]:
    """Write a text for each of `count` schemas; how they ended, and what is wrong with those that the grammar ended."""
    rng = random.Random(seed)
    made = [schemas.whole(schemas.document(rng)) for _ in range(count)]
    ends: Counter[str] = Counter()
    wrong = []
    for start in range(0, count, batch):
        some = made[start : start + batch]
        params = [
            SamplingParams(grammar=Grammar.json_schema(schema), temperature=0.7, max_tokens=300, seed=start + i)
            for i, schema in enumerate(some)
        ]
        for schema, done in zip(some, llm.generate([PROMPT] * len(some), params), strict=True):
            ends[str(done.finish_reason)] += 1
            if done.finish_reason in ENDED:
                wrong += complaints(done.text, schema)
    return ends, wrong


def complaints(text: str, schema: dict[str, Any]) -> list[str]:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return [f"{text!r}: {error}"]
    return []


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.sweep)])
def test_texts_follow_their_schemas(llm: LLM, count: int, record_property: Any) -> None:
    ends, wrong = documents(llm, count, seed=5)
    share = sum(ends[str(reason)] for reason in ENDED) / count
    record_property("ended by the grammar", share)
    assert not wrong, "\n".join(wrong)
    assert share >= 0.5


def test_a_text_is_the_same_however_much_room_it_has(llm: LLM) -> None:
    """One that fits ends by itself; one that does not is its beginning, and says that it was cut."""
    rng, asked, wanted = random.Random(7), list[SamplingParams](), list[tuple[list[int], FinishReason | None]]()
    for seed in range(25):
        grammar = Grammar.json_schema(schemas.whole(schemas.document(rng)))
        params = SamplingParams(grammar=grammar, temperature=0.7, max_tokens=300, seed=seed)
        [whole] = llm.generate(PROMPT, params)
        ids = list(whole.token_ids)
        if whole.finish_reason is FinishReason.GRAMMAR:
            for most in (len(ids) + more for more in range(9)):
                asked.append(replace(params, max_tokens=most))
                wanted.append((ids, whole.finish_reason))
        for most in {1, len(ids) // 2, len(ids) - 1} - {0}:
            asked.append(replace(params, max_tokens=most))
            wanted.append((ids[:most], FinishReason.LENGTH))
    found = llm.generate([PROMPT] * len(asked), asked)
    assert [(list(one.token_ids), one.finish_reason) for one in found] == wanted
    assert Counter(reason for _, reason in wanted)[FinishReason.GRAMMAR] >= 90


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.regex(r"(Tom|Lily) is [0-9]{1,2} years old\."), r"(Tom|Lily) is [0-9]{1,2} years old\."),
        (Grammar.choice(["yes", "no", "perhaps"]), "yes|no|perhaps"),
        (Grammar.lark('start: "(" (WORD " "){0,3} WORD ")"\nWORD: /[a-z]{1,5}/'), r"\(([a-z]{1,5} ){0,3}[a-z]{1,5}\)"),
    ],
)
def test_every_text_of_a_request_follows_its_grammar(llm: LLM, grammar: Grammar, pattern: str) -> None:
    """Four forks, and four beams; a text that the length cuts off is at least not wrong so far."""
    for params in (
        SamplingParams(grammar=grammar, n=4, seed=1, max_tokens=80),
        SamplingParams(grammar=grammar, beams=4, n=4, max_tokens=80),
    ):
        texts = [done for done in llm.generate(PROMPT, params) if done.finish_reason in ENDED]
        assert texts, params
        for done in texts:
            assert re.fullmatch(pattern, done.text), done.text


def test_a_grammar_does_not_change_its_neighbours(llm: LLM) -> None:
    plain = SamplingParams(seed=3, max_tokens=30)
    bound = SamplingParams(seed=3, max_tokens=30, grammar=Grammar.choice(["yes", "no"]))
    [alone] = llm.generate(PROMPT, plain)
    beside = llm.generate([PROMPT] * 3, [bound, plain, bound])
    assert beside[1].text == alone.text
    assert beside[0].text == beside[2].text
    assert beside[0].text in ("yes", "no")


def test_the_text_is_the_likeliest_that_is_allowed(llm: LLM) -> None:
    """Greedy: at each place the highest logit among the allowed ids, against the model asked by hand."""
    digits = [token for token in range(4096) if re.fullmatch(rb"[0-9]+", llm.tokenizer.token_bytes(token) or b"")]
    [done] = llm.generate(PROMPT, SamplingParams(grammar=Grammar.regex("[0-9]{1,100}"), temperature=0.0, max_tokens=6))
    ids = llm.tokenizer.encode(PROMPT)
    allowed = [*digits]
    for token in done.token_ids:
        logits = llm.model(ids)[0][-1]
        assert token == max(allowed, key=lambda at: float(logits[at]))
        ids = [*ids, token]
        allowed = [*digits, *llm.eos_ids]


def test_a_grammar_that_nothing_may_follow_fails_alone(llm: LLM) -> None:
    """The grammar wants a digit, allowed_ids has none: that request fails, its neighbour is written."""
    letters = tuple(llm.tokenizer.encode("word", add_special=False))
    stuck = SamplingParams(grammar=Grammar.regex("[0-9]+"), allowed_ids=letters, max_tokens=5)
    with pytest.raises(EngineError, match="nothing is left to choose") as raised:
        llm.generate([PROMPT] * 2, [stuck, SamplingParams(max_tokens=5, seed=1)])
    assert raised.value.completions[0] is None
    assert len(raised.value.completions[1].token_ids) == 5
    assert llm.generate(PROMPT, SamplingParams(grammar=Grammar.choice(["yes"])))[0].text == "yes"


def test_others_go_on_while_a_hostile_grammar_is_tried(llm: LLM) -> None:
    """A stream counts its tokens while the hostile grammar is refused."""
    counted, begun, over = [0], threading.Event(), threading.Event()

    def read() -> None:
        while not over.is_set():
            for _ in llm.stream(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True, seed=1)):
                counted[0] += 1
                begun.set()
                if over.is_set():
                    break

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert begun.wait(60)
        before = counted[0]
        with pytest.raises(RequestError, match="takes more than"):
            llm.generate(PROMPT, SamplingParams(grammar=HOSTILE))
        during = counted[0] - before
    finally:
        over.set()
        reader.join()
    assert during >= 5
