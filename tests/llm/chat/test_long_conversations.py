"""The work of arranging a conversation for its template grows as its length does: clients may send 100,000 messages."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenwright.errors import RequestError
from tokenwright.llm.chat import template_messages
from tokenwright.llm.chat.template_messages import TemplateOrder
from tokenwright.llm.chat.tool_forms import probing
from tokenwright.llm.prompts.provenance import PLACES, numbered
from tokenwright.text.messages import text_of

COUNT = 400
Message = Mapping[str, Any]


class Looked(dict[str, Any]):
    """A message that counts how often its fields are read."""

    looks = 0

    def __getitem__(self, name: str) -> Any:
        Looked.looks += 1
        return super().__getitem__(name)

    def get(self, name: str, other: Any = None) -> Any:
        Looked.looks += 1
        return super().get(name, other)


def said(*roles: str) -> list[Message]:
    return [Looked(one) for one in numbered({"role": role, "content": f"text {at}"} for at, role in enumerate(roles))]


def printed(refused: Callable[[Sequence[str]], bool], counts: list[int]) -> Callable[[Sequence[Message]], str]:
    def render(messages: Sequence[Message]) -> str:
        counts[0] += 1
        if refused([one["role"] for one in messages]):
            raise RequestError("these roles are not taken in this order")
        return " ".join(str(one["content"]) for one in messages)

    return render


def in_a_row(roles: Sequence[str]) -> bool:
    return any(one == other for one, other in pairwise(roles))


def after_a_result(roles: Sequence[str]) -> bool:
    return "tool" in roles and roles[-1] == "user"


@pytest.mark.parametrize(
    ("roles", "refused", "left"),
    [
        (("system",) * COUNT, lambda _: False, COUNT),
        (("system",) * COUNT, in_a_row, 1),
        (("user",) * COUNT, in_a_row, 1),
        (("tool", "user") * (COUNT // 2), lambda _: False, COUNT),
        (("user", "assistant", *("tool", "user") * (COUNT // 2)), after_a_result, COUNT + 2),
    ],
    ids=["systems", "joined systems", "joined users", "results without calls", "results that no turn may follow"],
)
def test_a_long_conversation_is_arranged_by_a_few_looks_at_each_message(
    roles: Sequence[str], refused: Callable[[Sequence[str]], bool], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, read = [0], [0]

    def reading(content: Any) -> str:
        read[0] += len(text_of(content))
        return text_of(content)

    monkeypatch.setattr(template_messages, "text_of", reading)
    messages = said(*roles)
    if "assistant" in roles:
        cast("Any", messages[1])["tool_calls"] = [{"id": "c"}]
    Looked.looks = 0
    found = TemplateOrder(printed(refused, counts)).arranged(messages)
    assert Looked.looks < 20 * len(roles) and counts[0] < 20 and read[0] <= sum(len(one["content"]) for one in messages)
    assert len(found) == left
    if left == 1:
        [whole] = found
        assert whole["content"] == "\n\n".join(f"text {at}" for at in range(COUNT))
        assert [(whole["content"][start:].split()[1], number) for start, number in whole[PLACES]] == [
            (str(at), at) for at in range(COUNT)
        ]


def test_results_that_become_text_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = [0]

    def reading(content: Any) -> str:
        read[0] += len(text_of(content))
        return text_of(content)

    monkeypatch.setattr(probing, "text_of", reading)
    facts = cast("Any", SimpleNamespace(results=False, declares=True))
    messages = said(*("tool",) * COUNT)
    [found] = probing.as_template_reads(messages, facts, ())
    assert read[0] <= sum(len(one["content"]) for one in messages)
    assert found["content"].count("<tool_response>") == COUNT
    for start, number in found[PLACES]:
        assert found["content"][start:].startswith("<tool_response>") and f"text {number}" in found["content"][start:]
