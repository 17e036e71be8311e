"""A following turn computes its own message's tokens and the template's, and nothing of what is known already."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines import settled, until
from tests.models.fixtures import make_checkpoint
from tests.profiles import share
from tests.serve.talking import PAGES, SCHEMA, Talker, running
from tokenwright import LLM
from tokenwright.errors import RequestError
from tokenwright.serve.app import Served, make_app
from tokenwright.serve.service.model_host import ModelHost
from tokenwright.serve.service.next_turns import NextTurns, Warm
from tokenwright.serve.service.service import ServiceLimits
from tokenwright.serve.transport.guard import Policy

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %} Call:
<tool_call>
{"name": ..., "arguments": ...}
</tool_call>{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.content %}{{ message.content.split('</think>')[-1].strip() }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\\n' }}
{{- '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson ~ '}' }}
{{- '\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"""
KEYS = ("alpha-0123456789abcdef", "beta-0123456789abcdef")
TOOL = {"type": "function", "function": {"name": "weather", "description": "The sky.", "parameters": SCHEMA}}
TURNS = 4


def asked(talker: Talker, path: str, body: dict[str, Any], key: str = KEYS[0]) -> Any:
    headers = {"Authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}
    reply = httpx.post(f"{talker.url}{path}", json=body, headers=headers, timeout=100)
    assert reply.status_code == 200, reply.text
    return reply.json()


@contextmanager
def served(folder: Path, warm: Warm, kind: str = "qwen2", **options: Any) -> Iterator[Talker]:
    made, _ = make_checkpoint(folder / "talker", kind, changes={"max_position_embeddings": 4096})
    (made / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    host = ModelHost("tiny", lambda report: LLM(made, pages=PAGES, report=report, **options))
    app = make_app(host, Policy.of(None, KEYS), None, Served((), ServiceLimits(warm=warm), timings=True))
    with running(app, app.state.service) as talker:
        yield talker


def letters(talker: Talker) -> list[int]:
    """Tokens of letters and spaces: a random model writes them in another way than the tokenizer would."""
    tokenizer = talker.llm.tokenizer
    texts = {at: tokenizer.token_text(at) for at in range(5, tokenizer.vocab_size)}
    return [at for at, text in texts.items() if text.isascii() and text.replace(" ", "").isalpha()]


def test_a_chat_goes_on_from_the_ids_that_were_written(tmp_path: Path) -> None:
    draw, others = random.Random(5), 0
    with served(tmp_path, "off") as talker:
        few, decode = letters(talker), talker.llm.tokenizer.decode
        for chat in range(6):
            talk: list[dict[str, Any]] = []
            known = 0
            for turn in range(TURNS):
                talk.append(
                    {"role": "user", "content": f"Tell me of {draw.randrange(10**6)} and of it in chat {chat}."}
                )
                more = {"allowed_token_ids": few, "ignore_eos": True, "max_tokens": draw.randrange(3, 40), "seed": chat}
                count = asked(talker, "/v1/messages/count_tokens", {"model": "tiny", "messages": talk})["input_tokens"]
                ids = asked(talker, "/tokenize", {"messages": talk})["tokens"]
                done = asked(talker, "/v1/chat/completions", {"messages": talk, **more})
                usage = done["usage"]
                assert usage["prompt_tokens"] == count == len(ids)
                plain = list(talker.llm.template.render(talk).ids)
                assert decode(ids, skip_special=False) == decode(plain, skip_special=False)
                others += plain != ids
                assert asked(talker, "/tokenize", {"messages": talk}, KEYS[1])["tokens"] == plain, "another key's"
                if turn:
                    assert usage["prompt_tokens_details"]["cached_tokens"] == known, done["timings"]["cache"]
                known = count + usage["completion_tokens"] - 1  # the last one was never computed
                content = done["choices"][0]["message"]["content"]
                talk.append({"role": "assistant", "content": content})
                if content != content.strip():  # the template strips it
                    known = 0
                    break
    assert others > 6, "the tokenizer would have given other ids"


def test_a_turn_that_cannot_be_prepared_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    done, busy = list[int](), [False]

    def follow(number: int) -> Callable[[], None]:
        def prepare() -> None:
            done.append(number)
            if number == 1:
                raise RequestError("the template refuses this")
            busy[0] = number == 3  # a request comes

        return prepare

    async def run(function: Callable[[], None]) -> None:
        function()

    async def answered() -> None:
        turns = NextTurns(lambda: busy[0], run)
        for number in range(6):
            turns.ended(follow(number))
        await asyncio.sleep(0.05)
        assert done == [0, 1, 2, 3], "none is prepared while there is a request"
        busy[0] = False
        turns.ended(None)
        await asyncio.sleep(0.05)

    asyncio.run(answered())
    assert done == [0, 1, 2, 3, 4, 5] and not caplog.records


def words_begin(talker: Talker, talk: list[dict[str, Any]], tools: bool) -> int:
    """The tokens of a prompt before the words of its last message, or before the token that they share."""
    strings = asked(
        talker, "/tokenize", {"messages": talk, "return_token_strs": True} | ({"tools": [TOOL]} if tools else {})
    )
    text, last = "", talk[-1]["content"]
    before = "".join(strings["token_strs"]).rindex(last)
    for at, one in enumerate(strings["token_strs"]):
        if len(text) + len(one) > before:
            return at
        text += one
    raise AssertionError("the words are there")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-next"])
def test_a_following_turn_computes_its_own_words(tmp_path: Path, kind: str) -> None:
    follow_turns(tmp_path, kind, share(12))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["qwen2", "qwen3-next"])
def test_three_hundred_conversations_compute_their_own_words(tmp_path: Path, kind: str) -> None:
    follow_turns(tmp_path, kind, 150)


def follow_turns(tmp_path: Path, kind: str, chats: int) -> None:
    draw = random.Random(kind)
    with served(tmp_path, "on", kind) as talker:
        few, engine = letters(talker), talker.llm.llm_engine
        turns = talker.service._next_turns
        for chat in range(chats):
            form = ("plain", "thoughts", "tools")[chat % 3]
            talk: list[dict[str, Any]] = [{"role": "user", "content": f"Chat {draw.randrange(10**6)} of it."}]
            for turn in range(3):
                more: dict[str, Any] = {"max_tokens": draw.randrange(20, 60), "seed": draw.randrange(100)}
                if form == "tools":
                    more |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
                else:
                    more |= {"allowed_token_ids": few, "ignore_eos": True}
                if form == "thoughts":
                    closing = talker.llm.tokenizer.encode("\n</think>\n\n", add_special=False)
                    more |= {"enable_thinking": True, "thinking_budget": 8, "allowed_token_ids": [*few, *closing]}
                done = asked(talker, "/v1/chat/completions", {"messages": talk, **more})
                if turn:
                    found = done["usage"]["prompt_tokens_details"]["cached_tokens"]
                    assert found == words_begin(talker, talk, form == "tools"), (form, turn, done)
                until(lambda: turns._task is None and not turns._answered)
                until(lambda: not settled(talker.llm).due)
                message = done["choices"][0]["message"]
                calls = message.get("tool_calls") or []
                talk.append({"role": "assistant", "content": message["content"] or "", "tool_calls": calls})
                assert bool(calls) is (form == "tools") and "</think>" not in talk[-1]["content"]
                next_words = f"Word {draw.randrange(10**6)} and so on."
                more = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
                talk.append({**more, "content": next_words})
        prompts = engine.prompts
        assert prompts.used > 0 and prompts.used + prompts.wasted <= prompts.warmed
