"""What was said: answers keep their ids and their exact text, whatever the template; turns are added and removed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.text import kinds
from tests.text.templates import KINDS, TEMPLATES
from tokenwright.cli.chat.conversation import Conversation, answer_text, load, save
from tokenwright.errors import RequestError
from tokenwright.text import ChatTemplate

# Mistral-7B-Instruct-v0.2 writes no space before an answer: its model's answers begin with one.
OLD_MISTRAL = """\
{{ bos_token }}{% for turn in messages %}{% if turn.role == 'user' %}
{{ '[INST] ' + turn.content + ' [/INST]' }}{% else %}{{ turn.content + eos_token }}{% endif %}{% endfor %}"""
SOURCES = {name: source for name, (source, _) in TEMPLATES.items()} | {"old mistral": OLD_MISTRAL}


@dataclass
class Done:
    """A completion, as far as a conversation reads it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str = "eos"
    usage: Any = field(default=None)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def promised(chat: ChatTemplate, question: str, answer: str) -> bool:
    """Whether the template only appends: an answer of this text stands behind the prompt as it was written."""
    before = chat.render([turn("user", question)]).text
    talk = [turn("user", question), turn("assistant", answer), turn("user", "b")]
    after = chat.render(talk).text
    if not after.startswith(before + answer):
        return False
    follows = chat._tokenizer.control.split(after[len(before + answer) :])[:1]
    return bool(follows) and isinstance(follows[0], int)


@pytest.mark.parametrize("name", SOURCES)
def test_the_next_prompt_begins_with_prompt_and_answer_where_the_template_appends(name: str) -> None:
    """Over all tokenizers; the answer is written in ids that its text alone would not give again."""
    kept = 0
    for kind, library in KINDS.items():
        tokenizer = kinds.wrap(library(), bos="<s>", eos=("</s>",), chat_template=SOURCES[name])
        with ChatTemplate(tokenizer) as chat:
            for answer in (" a b", "ab", "a\n\nab ", " a"):
                ids = [token for char in answer for token in letter(tokenizer, char)]
                exact = "".join((tokenizer.token_bytes(token) or b"").decode() for token in ids)
                if kind == "wordpiece" or not exact.strip() or not promised(chat, "ab", exact):
                    continue
                done: Any = Done(tokenizer.decode(ids), tuple(ids))
                prompt = chat.render([turn("user", "ab")]).ids
                talk = Conversation().with_turn("ab", answer_text(done, tokenizer), done.token_ids, 0)
                after = chat.render([*talk.messages, turn("user", "b")], answers=talk.answers).ids
                assert after[: len(prompt) + len(ids)] == (*prompt, *ids), (kind, answer)
                kept += 1
    assert kept or name in ("json", "plain", "llama2", "zephyr", "phi"), "templates that promise it are tried"


def letter(tokenizer: Any, char: str) -> list[int]:
    """The ids of one character in the middle of a text."""
    whole = tokenizer.encode_parts(["a" + char])
    return whole[len(tokenizer.encode_parts(["a"])) :] or tokenizer.encode_parts([char])


def test_an_answer_that_a_stop_string_ended_is_what_was_shown() -> None:
    tokenizer = kinds.wrap(KINDS["byte_fallback"]())
    ids = tuple(tokenizer.encode("ab b"))
    assert answer_text(Done("ab", ids), tokenizer) == "ab"  # type: ignore[arg-type]
    assert answer_text(Done("ab b", ids), tokenizer) == " ab b"  # type: ignore[arg-type]


TALK = (
    Conversation()
    .with_system("s")
    .with_turn("a", "A", (1,), 0)
    .with_turn("b", "B", (2,), 0)
    .with_turn("c", "C", (3,), 9)
)


def said(talk: Conversation | None) -> tuple[str, dict[str, tuple[int, ...]]]:
    """The contents in one word, and the ids by the answer that they belong to."""
    assert talk is not None
    contents = [message["content"] for message in talk.messages]
    return "".join(contents), {contents[at]: ids for at, ids in talk.answers.items()}


def test_turns_are_removed_with_their_ids_and_others_keep_theirs() -> None:
    assert said(TALK) == ("saAbBcC", {"A": (1,), "B": (2,), "C": (3,)})
    assert said(TALK.without_last_turn()) == ("saAbB", {"A": (1,), "B": (2,)})
    assert said(TALK.without_first_turn()) == ("sbBcC", {"B": (2,), "C": (3,)})
    assert said(TALK.with_system("")) == ("aAbBcC", {"A": (1,), "B": (2,), "C": (3,)})
    assert said(TALK.with_system("").with_system("t")) == ("taAbBcC", {"A": (1,), "B": (2,), "C": (3,)})
    assert said(TALK.cleared()) == ("s", {})
    assert TALK.last_question == "c"


def test_nothing_is_removed_from_an_empty_conversation() -> None:
    assert TALK.cleared().without_first_turn() is None
    assert TALK.cleared().last_question is None
    with pytest.raises(RequestError, match="there is no message yet"):
        TALK.cleared().without_last_turn()


def test_a_saved_picture_is_loaded_again(tmp_path: Path) -> None:
    shown = [{"type": "image", "image": str(tmp_path / "a.png")}, {"type": "text", "text": "what?"}]
    talk = Conversation([{"role": "user", "content": shown}, {"role": "assistant", "content": "a cat"}])
    save(talk, tmp_path / "talk.json")
    assert load(tmp_path / "talk.json").messages == talk.messages
    (tmp_path / "talk.json").write_text('[{"role": "user", "content": [{"type": "input_audio"}]}]')
    with pytest.raises(RequestError, match="no text"):
        load(tmp_path / "talk.json")


def test_a_loaded_conversation_without_an_answer_loses_its_question_alone() -> None:
    talk = Conversation([turn("user", "a"), turn("assistant", "A"), turn("user", "b")])
    assert [one["content"] for one in talk.without_last_turn().messages] == ["a", "A"]
