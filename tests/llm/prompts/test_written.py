"""Prompts take the ids that remembered answers were written with, exactly as far as both spell the same text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.models.fixtures import make_checkpoint
from tests.profiles import examples
from tokenwright.llm.prompts.memory import Ids, PromptMemory, PromptRecord, PromptTerms
from tokenwright.llm.prompts.provenance import PromptPart
from tokenwright.llm.prompts.written import with_written_ids
from tokenwright.text import Rendered, Tokenizer

END = "<|im_end|>"
PIECES = st.lists(st.sampled_from(["the ", "and", " on", "é", "in ", "s", END, "<s>", " the", "x y", "~"]), max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder, _ = make_checkpoint(tmp_path_factory.mktemp("written") / "tiny", "qwen2")
    return Tokenizer.load(folder)


def encoded(tokenizer: Tokenizer, pieces: Sequence[str], cuts: Sequence[bool] | None = None) -> list[int]:
    """The ids of texts and control tokens; cuts: whether a token ends behind each of a text's characters, in turn.

    The character ~ stands for the spelling of a control token, as a user may write it.
    """
    control, found, cut = tokenizer.control.ids, list[int](), iter(cuts or ())
    for part in tokenizer.control.split("".join(pieces)):
        if isinstance(part, int):
            found.append(part)
            continue
        part = part.replace("~", END)
        if cuts is None:
            found += tokenizer.encode(part, add_special=False, parse_special=False)
        else:
            start = 0
            for at in range(1, len(part) + 1):
                if at == len(part) or next(cut, False):
                    found += tokenizer.encode(part[start:at], add_special=False, parse_special=False)
                    start = at
    assert all(one in control.values() or tokenizer.token_bytes(one) for one in found)
    return found


def borders(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[tuple[int, int], int]:
    """{(control tokens, bytes behind the last of them) before a token: how many tokens are before it}."""
    control, found, key = set(tokenizer.control.ids.values()), {(0, 0): 0}, (0, 0)
    for at, one in enumerate(ids, 1):
        length = len(tokenizer.token_bytes(one, skip_special=False) or b"")
        key = (key[0] + 1, 0) if one in control else (key[0], key[1] + length)
        found[key] = at
    return found


def spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int | bytes]:
    """A text as bytes one by one, and control tokens."""
    control, found = set(tokenizer.control.ids.values()), list[int | bytes]()
    for one in ids:
        whole = tokenizer.token_bytes(one, skip_special=False) or b""
        found += [one] if one in control else [bytes([byte]) for byte in whole]
    return found


def remembered(ids: Ids, owner: str = "", model: str = "m", kind: str = "message") -> PromptMemory:
    memory = PromptMemory()
    part = PromptPart(1, 2, kind, 0, "user")  # type: ignore[arg-type]
    memory.add(PromptRecord("a", PromptTerms(owner, model=model), ids, 1, (part,), b"", b"", 16))
    return memory


@examples(60)
@example(pieces=["the ", "s"], more=["~"], other=[END], cuts=[])
@example(pieces=["the ", "s"], more=[END], other=["~"], cuts=[])
@given(pieces=PIECES, more=PIECES, other=PIECES, cuts=st.lists(st.booleans(), max_size=60))
def test_written_ids_are_taken_as_far_as_the_text_is_equal(
    tokenizer: Tokenizer, pieces: list[str], more: list[str], other: list[str], cuts: list[bool]
) -> None:
    start = ["<|im_start|>"]
    new = encoded(tokenizer, [*start, *pieces, *more])
    old = encoded(tokenizer, [*start, *pieces, *other], [False, *cuts])
    marks = [
        (at, char) for at, char in enumerate(accumulate((len(tokenizer.token_text(one)) for one in new), initial=0))
    ]
    rendered = Rendered("", tuple(new), (), (), tuple(marks))
    memory = remembered(np.array(old, np.uint32))
    found = with_written_ids(rendered, PromptTerms(model="m"), memory, tokenizer)
    assert spelled(tokenizer, found.ids) == spelled(tokenizer, new)
    mine, its = borders(tokenizer, new), borders(tokenizer, old)
    both = spelled(tokenizer, new), spelled(tokenizer, old)
    equal = next((n for n, pair in enumerate(zip(*both, strict=False)) if pair[0] != pair[1]), min(map(len, both)))
    shared = [
        (mine[key], its[key]) for key in mine.keys() & its.keys() if len(spelled(tokenizer, new[: mine[key]])) <= equal
    ]
    taken, kept = max(shared)
    assert list(found.ids) == old[:kept] + new[taken:]
    places = dict(marks)
    for token, char in found.marks:  # each still tells where a token begins
        text = "".join(tokenizer.token_text(one) for one in found.ids[:token])
        assert len(text) == char or "é" in "".join([*pieces, *more]), (token, char)
    assert {char for _, char in found.marks} >= {places[taken], places[len(new)]}
    for asked, its_memory in (
        (PromptTerms("other", model="m"), memory),
        (PromptTerms(model="n"), memory),
        (PromptTerms(model="m"), remembered(np.array(old, np.uint32), kind="prompt")),
        (PromptTerms(model="m"), PromptMemory()),
    ):
        assert with_written_ids(rendered, asked, its_memory, tokenizer) is rendered
    memory.resumes = False
    assert with_written_ids(rendered, PromptTerms(model="m"), memory, tokenizer) is rendered
