"""Text and calls keep their order, however many steps a reader takes at a time."""

import json
from collections.abc import Iterable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

from tokenwright.llm.chat.output_parser import SortingReader
from tokenwright.llm.chat.tool_forms.known_forms import HERMES
from tokenwright.llm.chat.tool_forms.reading import FormReader
from tokenwright.llm.outputs import Piece
from tokenwright.sampling_params import SamplingParams
from tokenwright.serve.anthropic.replies import Events
from tokenwright.serve.openai.responses.bodies import Create
from tokenwright.serve.openai.responses.output_items import Envelope, ResponseOutput
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.types import Delta, TokenCounts, Tool

WRITTEN = (  # by the model; each is a step
    "Look",
    ' it up. <tool_call>\n{"name": "find", "arguments": {"a"',
    ": 1",
    "}}\n</tool_call>\nThen",
    "ce on.",
    '<tool_call>\n{"name": "find", "arguments": {"b": 2',
    "}}\n</tool_call>",
    "Done.",
)
SAID = ["Look it up.", {"a": 1}, "Thence on.", {"b": 2}, "Done."]


def taken(*steps: int) -> Iterator[Delta]:
    """The deltas of WRITTEN for a reader that takes so many steps at a time."""
    calls = FormReader(HERMES, [Tool("find")])
    prepared: Any = SimpleNamespace(
        request=SimpleNamespace(prompt=(1,), params=SamplingParams()),
        text="",
        at_end=False,
        reader=lambda: SortingReader(None, calls, {}),
    )
    transcript: Any = SimpleNamespace(add=lambda delivery: [delivery.piece])
    handle: Any = SimpleNamespace()
    generation = Generation(handle, transcript, prepared, 0.0)
    pieces = iter(WRITTEN)
    for count in steps:
        for _ in range(count):
            step: Any = SimpleNamespace(events=(), ended=False, piece=Piece(next(pieces), 1, 0.0))
            generation.feed(step)
        yield from generation._read_deliveries()


def ways(steps: int) -> Iterator[list[int]]:
    """All ways to cut so many steps into parts."""
    for cuts in product([False, True], repeat=steps - 1):
        ends = [at for at, cut in enumerate([*cuts, True], 1) if cut]
        yield [end - before for before, end in zip([0, *ends], ends, strict=False)]


def as_responses(deltas: Iterable[Delta]) -> list[Any]:
    output = ResponseOutput(
        Envelope("resp_1", Create(model="tiny", input="Hello"), "tiny", SamplingParams()), lambda _: []
    )
    for delta in deltas:
        list(output.take(delta))
    list(output.take(Delta(0, finish="stop")))
    items = output.response(TokenCounts(1, 1, 0))["output"]
    texts = [one["content"][0]["text"].strip() if "content" in one else one["arguments"] for one in items]
    return [json.loads(one) if one.startswith("{") else one for one in texts]


def as_anthropic(deltas: Iterable[Delta]) -> list[Any]:
    events, blocks = Events("msg_1", "tiny", True, lambda: TokenCounts(1, 1, 0)), list[str]()
    for event in (event for delta in deltas for event in events.take(delta)):
        if event["type"] == "content_block_start":
            blocks.append("")
        elif event["type"] == "content_block_delta":
            blocks[event["index"]] += event["delta"].get("text") or event["delta"]["partial_json"]
    return [json.loads(one) if one.startswith("{") else one.strip() for one in blocks]


def test_text_and_calls_keep_their_order() -> None:
    for steps in ways(len(WRITTEN)):
        assert as_responses(taken(*steps)) == SAID, steps
        assert as_anthropic(taken(*steps)) == SAID, steps
