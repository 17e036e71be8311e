"""Chunks of streams: none carries thoughts and an answer both, as many clients read only one field of a chunk."""

import json

from tokenwright import LLM
from tokenwright.serve.ollama.replies import Lines
from tokenwright.serve.openai.replies import Chunks, Names, Tokens
from tokenwright.serve.service.types import Delta, ToolCallDelta

CALL = ToolCallDelta(0, "call_1", "clock", "{}")


def test_thoughts_have_chunks_of_their_own() -> None:
    with LLM("stories", pages=4) as llm:
        tokens = Tokens(llm.tokenizer)
        for delta in (
            Delta(0, "said", "thought"),
            Delta(0, "", "thought", [CALL]),
            Delta(0, "said", "thought", [CALL]),
        ):
            lines = Chunks(Names("chat.completion", "m", "b1"), False).chat(delta, tokens, True).split("data: ")[1:]
            found = [json.loads(line)["choices"][0]["delta"] for line in lines]
            assert [one["reasoning_content"] for one in found if "reasoning_content" in one] == ["thought"]
            assert not any("reasoning_content" in one and len(one) > 1 for one in found)
            assert "".join(one.get("content") or "" for one in found) == delta.text
        lines = list(Lines("m", chat=True, tokens=lambda: tokens).take(Delta(0, "said", "thought")))
        messages = [line["message"] for line in lines]
        assert [(one.get("thinking", ""), one["content"]) for one in messages] == [("thought", ""), ("", "said")]
