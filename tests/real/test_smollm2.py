"""A pretrained model: SmolLM2-135M-Instruct, which `scripts/real_model` fetches; without it the suite is skipped.

The losses are means over a text of the repository, in nats a token. Their bounds are what each format may add to the
loss with native weights and a native cache; they were measured with some room, and random weights would not show them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenwright import LLM, Grammar
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
        ({"kv": "float32", "dtype": "float32"}, 0.01),
        ({"kv": "int8"}, 0.01),
        ({"kv": "fp8"}, 0.03),
        ({"kv": "int4"}, 0.08),
        ({"weights": "int8"}, 0.03),
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


@pytest.mark.parametrize("kv", ["native", "int4"])
def test_a_chat_goes_on_from_the_disk_with_the_same_bits(tmp_path: Path, kv: str) -> None:
    talk = [{"role": "user", "content": f"{TEXT[:1500]}\n\nWhat is this text about?"}]
    with LLM(MODEL, kv=kv) as plain:
        expected = plain.chat(talk, **GREEDY)
    for turn in range(2):
        with LLM(MODEL, kv=kv, kv_disk=tmp_path) as again:
            done = again.chat(talk, **GREEDY)
        assert (done.token_ids, done.logprobs) == (expected.token_ids, expected.logprobs)
        usage = done.usage
        assert usage.disk_tokens == (0 if turn == 0 else (usage.prompt_tokens - 1) // 16 * 16)
