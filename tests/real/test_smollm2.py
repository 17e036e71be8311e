"""A pretrained model: SmolLM2-135M-Instruct, which `scripts/real_model` fetches; without it the suite is skipped.

The losses are means over a text of the repository, in nats a token. Their bounds are what each format may add to the
loss with native weights and a native cache; they were measured with some room, and random weights would not show them.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from tokenwright import LLM, Completion, Grammar
from tokenwright.environment import Environment

MODEL = Environment.read().cache_folder("real") / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
TOKENS = 768
GREEDY = {"temperature": 0.0, "max_tokens": 40}

pytestmark = [pytest.mark.real, pytest.mark.skipif(not MODEL.exists(), reason="scripts/real_model fetches the model")]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL) as found:
        yield found


def loss(llm: LLM) -> float:
    """The mean loss of a token, which does not depend on the cache's page size or on earlier texts."""
    ids = llm.render([{"role": "user", "content": TEXT}]).ids[:TOKENS]
    return -float(llm.score(ids).mean())


@pytest.fixture(scope="module")
def native(llm: LLM) -> float:
    return loss(llm)


def test_a_known_sentence_goes_on_as_it_should(llm: LLM) -> None:
    assert llm.generate("The capital of France is", max_tokens=4, temperature=0.0)[0].text.startswith(" Paris")


@pytest.mark.parametrize(
    ("options", "most"),
    [
        pytest.param({"kv": "float32", "dtype": "float32"}, 0.01, marks=pytest.mark.sweep),
        ({"kv": "int8"}, 0.01),
        pytest.param({"kv": "fp8"}, 0.03, marks=pytest.mark.sweep),
        ({"kv": "int4"}, 0.08),
        pytest.param({"weights": "int8"}, 0.03, marks=pytest.mark.sweep),
        ({"weights": "int4"}, 0.4),
    ],
    ids=str,
)
def test_a_format_adds_no_more_than_its_bound_to_the_loss(native: float, options: dict[str, Any], most: float) -> None:
    assert 1 < native < 4, "it reads English"
    with LLM(MODEL, **options) as other:
        assert abs(loss(other) - native) <= most


def test_json_by_a_schema_is_valid(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    asked = [{"role": "user", "content": "Describe a person as JSON with a name and an age."}]
    done = llm.chat(asked, grammar=Grammar.json_schema(schema), **GREEDY)
    found = json.loads(done.text)
    assert done.complete and found.keys() == {"name", "age"} and isinstance(found["age"], int)


def test_texts_with_one_meaning_have_near_embeddings(llm: LLM) -> None:
    texts = ["A cat sits on the mat.", "A kitten is lying on a rug.", "The stock market fell sharply on Monday."]
    rows = llm.embed(texts, pooling="mean", normalize=True)
    assert rows[0] @ rows[1] > max(rows[0] @ rows[2], rows[1] @ rows[2]) + 0.1


@pytest.mark.parametrize("kv", [pytest.param("native", marks=pytest.mark.sweep), "int4"])
def test_a_chat_goes_on_from_the_disk_with_the_same_bits(tmp_path: Path, kv: str) -> None:
    talk = [{"role": "user", "content": f"{TEXT[:300]}\n\nWhat is this text about?"}]
    turns = []
    for _ in range(2):
        with LLM(MODEL, kv=kv, kv_disk=tmp_path) as llm:
            turns.append(llm.chat(talk, **GREEDY))
    computed, restored = turns
    assert (restored.token_ids, restored.logprobs) == (computed.token_ids, computed.logprobs)
    usage = restored.usage
    assert (computed.usage.disk_tokens, usage.disk_tokens) == (0, (usage.prompt_tokens - 1) // 16 * 16)


class Address(BaseModel):
    street: str
    city: str
    zip: str | None = None


class Item(BaseModel):
    name: str
    price: float
    tags: list[str]


class Order(BaseModel):
    customer: str
    address: Address
    items: list[Item]


def together(llm: LLM, questions: list[str], options: list[dict[str, Any]]) -> list[Completion]:
    """The answers to questions, in one batch."""

    async def all_of_them() -> list[Completion]:
        asked = zip(questions, options, strict=True)
        return await asyncio.gather(*(llm.achat([{"role": "user", "content": text}], **own) for text, own in asked))

    return asyncio.run(all_of_them())


def calls_of(one: Completion) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in one.tool_calls]


@pytest.mark.parametrize(("seeds", "most"), [(range(6), 200), pytest.param(range(20), 300, marks=pytest.mark.sweep)])
def test_json_of_a_pydantic_model_is_whole_or_said_to_be_cut(llm: LLM, seeds: range, most: int) -> None:
    """The model repeats itself in strings and adds items, so that some texts take all tokens."""
    options = [{"response_format": Order, "max_tokens": most, "temperature": 0.8, "seed": seed} for seed in seeds]
    found = together(llm, ["Give me an order of a customer as JSON."] * len(seeds), options)
    print(f"{sum(len(one.token_ids) == most for one in found)} of {len(found)} took all {most} tokens")
    for one in found:
        assert (one.finish_reason, one.complete) in (("grammar", True), ("length", False))
        if one.complete:
            Order.model_validate_json(one.text)
    assert any(one.complete for one in found)


NUMBER, TEXT_ARGUMENT = {"type": "number"}, {"type": "string"}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": what, "parameters": {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}}}
    for name, what, properties in (
        ("get_weather", "The weather of a city.", {"city": TEXT_ARGUMENT}),
        ("add", "The sum of two numbers.", {"a": NUMBER, "b": NUMBER}),
        ("translate", "Translates a text.", {"text": TEXT_ARGUMENT, "language": {"enum": ["French", "German"]}}),
        ("set_alarm", "Sets an alarm.", {"hour": {"type": "integer", "minimum": 0, "maximum": 23}}),
    )
]  # fmt: skip
QUESTIONS = {
    "get_weather": [f"How is the weather in {city}?" for city in ("Oslo", "Paris", "Rome", "Lima", "Cairo")],
    "add": [f"What is {a} plus {b}?" for a, b in ((1, 2), (17, 4), (250, 250), (3.5, 1), (99, 1))],
    "translate": [f"Translate '{text}' to French." for text in ("good day", "a cat", "the sea", "thanks", "I sing")],
    "set_alarm": [f"Set an alarm for {hour} o'clock." for hour in (6, 7, 9, 12, 20)],
}


@pytest.mark.parametrize("tool_choice", ["required", "auto"])
@pytest.mark.parametrize("each", [1, pytest.param(5, marks=pytest.mark.sweep)])
def test_calls_by_the_generic_form_are_valid(llm: LLM, tool_choice: str, each: int) -> None:
    """Whole and streamed; the share of right tools is printed, for the model is small."""
    asked = [(name, question) for name, questions in QUESTIONS.items() for question in questions[:each]]
    options = {"tools": TOOLS, "tool_choice": tool_choice, "temperature": 0.0, "max_tokens": 80}

    streams = [llm.chat_stream([{"role": "user", "content": question}], **options) for _, question in asked]
    assert "<tool_call>" not in "".join(piece.content for stream in streams for piece in stream)
    found = together(llm, [question for _, question in asked], [options] * len(asked))
    assert [calls_of(stream.completion) for stream in streams] == [calls_of(one) for one in found]
    right = came = 0
    for (name, _), one in zip(asked, found, strict=True):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        whole = one.tool_calls if one.complete else one.tool_calls[:-1]  # a call that begins too late is cut
        assert whole or tool_choice == "auto"
        for call in whole:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        came += bool(one.tool_calls)
        right += bool(one.tool_calls) and one.tool_calls[0].name == name
    print(f"{tool_choice}: calls for {came} of {len(asked)} questions, the right tool first for {right}")
