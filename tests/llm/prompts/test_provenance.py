"""Who wrote which tokens of a prompt: over templates and tokenizers of all kinds, from one rendering."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import examples
from tests.text.templates import KINDS, SYSTEMLESS, TEMPLATES
from tests.text.test_chat import assistant, ended, open_template, talk, template, user
from tokenwright.llm.prompts.provenance import part_at, parts_of, token_after

__all__ = ["ended"]  # a fixture
WORDS = ("a", "user", "is", "im_start|>", "<|im_end|>", "think", "b\nc", " \n", "\u00e9", "Hi")
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)


@examples(8)
@given(contents=st.lists(texts, min_size=1, max_size=5), system=st.none() | texts, data=st.data())
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "json"])
def test_a_message_has_the_tokens_that_it_wrote(name: str, contents: list[str], system: str | None, data: Any) -> None:
    """Also where its text stands elsewhere in the prompt, such as in the template's own."""
    chat = template(name, kind := data.draw(st.sampled_from(sorted(KINDS))))
    messages = talk(*contents, system=None if name in SYSTEMLESS else system)
    rendered = chat.render(messages)
    found = ["" for _ in messages]
    for start, stop, at, _, _ in rendered.spans:
        found[at] += rendered.text[start:stop]
    assert [one.strip() for one in found] == [message["content"].strip() for message in messages]
    parts = parts_of(chat._tokenizer, rendered, messages)
    assert all(one.stop <= other.start and one.message < other.message for one, other in pairwise(parts))
    for part in parts if kind == "byte_level" else ():  # its tokens are the text, byte by byte
        decoded = chat._tokenizer.decode(rendered.ids[part.start : part.stop], skip_special=False)
        core = messages[part.message]["content"].strip()
        assert core in decoded and len(decoded.strip()) <= len(core) + 2, (core, decoded)


def test_strings_keep_their_marks_on_the_way() -> None:
    source = (
        "{% macro turn(one) %}[{{ one.role }}] {{ one.content | trim }}{% endmacro %}"
        "{% set head %}{{ messages[0].content[2:] }}{% endset %}{{ head ~ '|' }}"
        "{% for one in messages[1:] %}{{ turn(one).replace('b', 'BB') ~ '|' }}{% endfor %}"
        "{% for tool in tools or [] %}{{ tool.function.name + ':' }}{{ tool.function.parameters | tojson(indent=1) }}"
        "{% endfor %}"
    )
    with open_template(source, "byte_level") as chat:
        messages = [user("a cab"), assistant(" abc "), user("cc")]
        tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
        rendered = chat.render(messages, tools=tools)
    assert rendered.text.startswith("cab|[assistant] aBBc|[user] cc|f:{")
    own = [(rendered.text[start:stop], at, field) for start, stop, at, field, _ in rendered.spans]
    assert own[:4] == [("cab", 0, "content"), ("a", 1, "content"), ("c", 1, "content"), ("cc", 2, "content")]
    assert {field for _, _, field in own[4:]} == {"tools"}
    written = "".join(text for text, _, _ in own[4:])
    assert written == rendered.text.removeprefix("cab|[assistant] aBBc|[user] cc|").replace(":", "", 1)


def test_thoughts_are_a_part_and_a_place_is_a_token() -> None:
    chat = template("thinking")
    messages: list[Any] = talk("q", "<think>\nab\n</think>\n\nyes")
    rendered = chat.render(messages, False)
    parts = parts_of(chat._tokenizer, rendered, messages, "</think>")
    assert [(part.kind, part.message) for part in parts] == [("message", 0), ("thoughts", 1), ("message", 1)]
    behind = token_after(chat._tokenizer, rendered, 0)
    assert behind == parts[0].stop
    assert part_at(parts, behind).kind == "template"
    assert token_after(chat._tokenizer, rendered, 5) is None
