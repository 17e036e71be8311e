"""A following turn computes its own message's tokens and the template's, and nothing of what is known already."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.talking import Talker, make_talker, talking
from tokenwright.serve.app import Served

TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
KEYS = ("alpha-0123456789abcdef", "beta-0123456789abcdef")
TURNS = 4


def asked(talker: Talker, path: str, body: dict[str, Any], key: str = KEYS[0]) -> Any:
    headers = {"Authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}
    reply = httpx.post(f"{talker.url}{path}", json=body, headers=headers, timeout=100)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    folder = make_talker(tmp_path_factory.mktemp("turns"), template=TEMPLATE)
    with talking(folder, served=Served((), timings=True), keys=KEYS) as running:
        yield running


def letters(talker: Talker) -> list[int]:
    """Tokens of letters and spaces: a random model writes them in another way than the tokenizer would."""
    tokenizer = talker.llm.tokenizer
    texts = {at: tokenizer.token_text(at) for at in range(5, tokenizer.vocab_size)}
    return [at for at, text in texts.items() if text.isascii() and text.replace(" ", "").isalpha()]


def test_a_chat_goes_on_from_the_ids_that_were_written(talker: Talker) -> None:
    draw, few = random.Random(5), letters(talker)
    others = 0
    for chat in range(6):
        talk: list[dict[str, Any]] = []
        known = 0
        for turn in range(TURNS):
            talk.append({"role": "user", "content": f"Tell me of {draw.randrange(10**6)} and of it in chat {chat}."})
            more = {"allowed_token_ids": few, "ignore_eos": True, "max_tokens": draw.randrange(3, 40), "seed": chat}
            count = asked(talker, "/v1/messages/count_tokens", {"model": "tiny", "messages": talk})["input_tokens"]
            ids = asked(talker, "/tokenize", {"messages": talk})["tokens"]
            done = asked(talker, "/v1/chat/completions", {"messages": talk, **more})
            usage = done["usage"]
            assert usage["prompt_tokens"] == count == len(ids)
            plain = talker.llm.template.render(talk).ids
            assert talker.llm.tokenizer.decode(ids, skip_special=False) == talker.llm.tokenizer.decode(
                plain, skip_special=False
            )
            other = asked(talker, "/tokenize", {"messages": talk}, KEYS[1])["tokens"]
            assert other == list(plain), "another key's prompt has the tokenizer's ids"
            if turn:
                others += list(plain) != ids
                assert usage["prompt_tokens_details"]["cached_tokens"] == known, done["timings"]["cache"]
            known = count + usage["completion_tokens"] - 1  # the last one was never computed
            talk.append({"role": "assistant", "content": done["choices"][0]["message"]["content"]})
    assert others > 6, "the tokenizer would have given other ids"
