"""Streamed text: whatever the cuts, the pieces are the whole, and a stop string never leaks."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.text import kinds
from tokenwright.errors import RequestError
from tokenwright.text import TextStream, Tokenizer
from tokenwright.text.stream import STOP_CHARACTERS, StopStrings

light = settings(max_examples=150, deadline=None)
thorough = settings(max_examples=600, deadline=None)

byte_runs = st.lists(st.integers(0, 255), max_size=24)
BYTES = kinds.wrap(kinds.letters())


def run(stream: TextStream, ids: Sequence[int]) -> list[str]:
    """Every piece, the last one from finish()."""
    return [*(stream.push(token) for token in ids), stream.finish()]


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The oracle: the whole text, cut at the earliest match; of several there, the shortest stop is named."""
    found = sorted((text.find(stop), len(stop), stop) for stop in stops if stop in text)
    return (text[: found[0][0]], found[0][2]) if found else (text, None)


def holdable(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that a stop string may still claim, the slow way."""
    opens = (size for stop in stops for size in range(len(stop)) if size and text.endswith(stop[:size]))
    return max(opens, default=0)


@light
@given(kinds.texts, kinds.cuts)
def test_byte_level_text_survives_every_cut(text: str, at: list[int]) -> None:
    tokens = [kinds.byte_token(piece) for piece in kinds.cut(text.encode(), at)]
    tokenizer, ids = kinds.of_tokens(tokens, kinds.byte_level())
    stream = TextStream(tokenizer)
    pieces = run(stream, ids)
    assert "".join(pieces) == stream.text == text == tokenizer.decode(ids)
    assert all(piece.count("\ufffd") <= text.count("\ufffd") for piece in pieces)


@light
@given(byte_runs)
@example([0xF0, 0x80, 0xED, 0xA0, 0xE2, 0x82])
def test_bytes_that_are_no_text_stream_as_they_decode(ids: list[int]) -> None:
    assert "".join(run(TextStream(BYTES), ids)) == BYTES.decode(ids) == kinds.letters().decode(ids)


@light
@given(
    kinds.texts,
    kinds.cuts,
    st.sets(st.integers(0, 60)),
    st.sampled_from([kinds.byte_fallback, kinds.unstripped]),
)
def test_byte_fallback_text_survives_every_cut(text: str, at: list[int], raw: set[int], decoder: Any) -> None:
    """Sentencepiece's pieces hold whole characters; those in `raw` are written as byte tokens instead."""
    text = text.replace("▁", " ")
    tokens: list[str] = ["▁"] if decoder is kinds.byte_fallback else []
    for i, char in enumerate(text):
        if i in raw:
            tokens += [f"<0x{byte:02X}>" for byte in char.encode()]
        elif i in at or not tokens or tokens[-1].startswith("<0x"):
            tokens.append(char.replace(" ", "▁"))
        else:
            tokens[-1] += char.replace(" ", "▁")
    tokenizer, ids = kinds.of_tokens(tokens, decoder())
    assert "".join(run(TextStream(tokenizer), ids)) == tokenizer.decode(ids) == text
    assert tokenizer._library.decode(ids) == text


PARTS = [
    "▁",
    "▁▁",
    "▁The",
    "cat",
    "##ing",
    "##",
    ".",
    "▁'",
    "'s",
    "n't",
    " ",
    "",
    "日本",
    "e\u0301",
    "<0x41>",
    "<0x20>",
    "[SEP]",
]
ALL = [kinds.byte_fallback, kinds.unstripped, kinds.metaspace, kinds.wordpiece, kinds.joined]


@pytest.mark.parametrize("decoder", ALL)
@light
@given(st.lists(st.sampled_from(PARTS), max_size=8), st.booleans())
def test_every_kind_decodes_as_the_library_does(decoder: Any, tokens: list[str], skip: bool) -> None:
    tokenizer, ids = kinds.of_tokens([token for token in tokens if token], decoder(), special=["[SEP]"])
    whole = tokenizer._library.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special=skip) == whole
    assert "".join(run(TextStream(tokenizer, skip_special=skip), ids)) == whole


def test_a_bad_byte_spoils_only_itself() -> None:
    """The library replaces the whole run of byte tokens, and thereby a character that was shown already."""
    tokenizer, ids = kinds.of_tokens([f"<0x{byte:02X}>" for byte in b"\xe2\x82\xac\xe2"], kinds.byte_fallback())
    assert run(TextStream(tokenizer), ids) == ["", "", "€", "", "\ufffd"]
    assert tokenizer.decode(ids) == "€\ufffd"


@light
@given(kinds.texts, kinds.texts, st.integers(0, 40))
@example("a€", "€b", 2)
@example("a👍", "", 4)
def test_the_text_is_what_follows_the_prompt(before: str, after: str, split: int) -> None:
    """Also where the prompt ends inside a character, which is then the completion's if it gets whole."""
    data = list((before + after).encode())
    split = min(split, len(data))
    prompt, ids = data[:split], data[split:]
    shown = BYTES.decode(prompt)
    whole = BYTES.decode(data)
    if not whole.startswith(shown):
        shown = bytes(prompt).decode(errors="ignore")
    assert "".join(run(TextStream(BYTES, prompt=prompt), ids)) == whole.removeprefix(shown)


@light
@given(byte_runs, byte_runs)
@example([0xE2, 0x82], [0xAC])
@example([0xE2], [0x41])
@example([0xE2], [0x82])
@example([0xE2, 0x82], [])
@example([0xF0], [0x80, 0x80])
def test_no_prompt_leaks_into_the_text(prompt: list[int], ids: list[int]) -> None:
    text = "".join(run(TextStream(BYTES, prompt=prompt), ids))
    shown, whole = BYTES.decode(prompt), BYTES.decode([*prompt, *ids])
    if whole.startswith(shown):
        assert text == whole.removeprefix(shown)
    else:  # the character that the prompt began got whole: it alone is the completion's
        assert whole == shown.removesuffix("\ufffd") + text


def test_a_completion_keeps_the_space_of_its_first_word() -> None:
    tokenizer, ids = kinds.of_tokens(["<s>", "▁Once", "▁upon", "▁a"], kinds.byte_fallback(), special=["<s>"])
    assert run(TextStream(tokenizer, prompt=ids[:2]), ids[2:]) == [" upon", " a", ""]
    assert run(TextStream(tokenizer, prompt=ids[:1]), ids[1:]) == ["Once", " upon", " a", ""]
    assert run(TextStream(tokenizer), ids) == ["", "Once", " upon", " a", ""]
    assert run(TextStream(tokenizer, skip_special=False), ids[:2]) == ["<s>", " Once", ""]


words = st.text("ab", min_size=1, max_size=5)
hostile = st.one_of(words, st.sampled_from(["👩", "\u200d", "👩‍👧", "é", "\ufffd", " ", "日本"]))
stoppable = st.one_of(
    st.text("ab", max_size=16),
    st.lists(st.sampled_from(["👩‍👧", "👩", "a", "b", "日本", "日", " ", "é"]), max_size=8).map("".join),
)


@thorough
@given(stoppable, st.lists(hostile, max_size=4), kinds.cuts)
@example("abce", ["abcd", "bc"], [1, 2, 3])
@example("abc", ["abcd", "bc"], [1, 2])
@example("xabc", ["abcd", "bc"], [])
@example("xabce", ["abcd", "bc"], [4])
@example("abcd", ["abcd", "bc"], [1, 2, 3])
@example("aab", ["ab", "aab", "a"], [1])
def test_stops_cut_at_the_earliest_match_for_every_cut(text: str, stops: list[str], at: list[int]) -> None:
    tokens = [kinds.byte_token(piece) for piece in kinds.cut(text.encode(), at)]
    tokenizer, ids = kinds.of_tokens(tokens, kinds.byte_level())
    stream = TextStream(tokenizer, stops)
    assert ("".join(run(stream, ids)), stream.stopped) == first_stop(text, stops)
    assert stream.text == first_stop(text, stops)[0]


@thorough
@given(stoppable, st.lists(hostile, max_size=4))
def test_nothing_is_held_longer_than_a_stop_may_claim_it(text: str, stops: list[str]) -> None:
    """After each byte all that is whole is shown, less the longest open stop; a stop is told at once."""
    stream, data = TextStream(BYTES, stops), text.encode()
    for i, byte in enumerate(data, 1):
        stream.push(byte)
        whole = data[:i].decode(errors="ignore")
        kept, stop = first_stop(whole, stops)
        held = holdable(whole, stops)
        if stop is not None and len(whole) - held >= len(kept):
            assert (stream.text, stream.stopped) == (kept, stop)
            return
        assert (stream.text, stream.stopped) == (whole[: len(whole) - held], None)


def test_nothing_comes_after_a_stop() -> None:
    stream = TextStream(BYTES, ["END"])
    assert "".join(stream.push(byte) for byte in b"so END and on") == "so "
    assert stream.stopped == "END"
    assert stream.push(65) == stream.finish() == stream.finish() == ""
    assert stream.text == "so "


def test_a_stop_that_waits_for_a_longer_one_is_settled_at_the_end() -> None:
    stream = TextStream(BYTES, ["abcd", "bc"])
    assert [stream.push(byte) for byte in b"abc"] == ["", "", ""]
    assert stream.stopped is None
    assert stream.finish() == "a"
    assert stream.stopped == "bc"


def test_a_stop_may_lie_in_the_unfinished_end() -> None:
    stream = TextStream(BYTES, ["\ufffd"])
    assert run(stream, [65, 0xE2]) == ["A", "", ""]
    assert stream.stopped == "\ufffd"


def test_special_tokens_are_no_text_and_stops_span_them() -> None:
    tokenizer, ids = kinds.of_tokens(["EN", "<|e|>", "D"], kinds.byte_level(), special=["<|e|>"])
    stream = TextStream(tokenizer, ["END"])
    assert run(stream, ids) == ["", "", "", ""]
    assert stream.stopped == "END"


@pytest.mark.parametrize("stops", [[""], ["a", ""], [7], [b"a"], "stop", ["a" * (STOP_CHARACTERS + 1)]])
def test_stops_that_are_no_text_are_refused(stops: Any) -> None:
    with pytest.raises(RequestError, match="stop string"):
        TextStream(BYTES, stops)


def test_ids_out_of_range_are_refused() -> None:
    with pytest.raises(RequestError, match="out of range"):
        TextStream(BYTES).push(257)


def test_the_work_per_token_does_not_grow() -> None:
    """Counted: characters that the automaton reads, and text that is kept back."""
    stops = StopStrings(["a" * 1000 + "b", "zz"])
    stream = TextStream(BYTES, stops)
    steps = 0

    def advance(state: int, char: str, follow: Any = stops.advance) -> int:
        nonlocal steps
        steps += 1
        return int(follow(state, char))

    stops.advance = advance  # type: ignore[method-assign]
    for _ in range(5000):
        stream.push(97)
        assert len(stream._held) <= 1000
    assert steps == 5000
    assert len(stream.text) == 4000


def test_many_stops_are_one_automaton() -> None:
    stops = StopStrings([f"stop {i}." for i in range(5000)])
    for number in (0, 77, 4999):
        stream = TextStream(BYTES, stops)
        run(stream, f"we stop {number}. here".encode())
        assert (stream.text, stream.stopped) == ("we ", f"stop {number}.")


def test_a_stream_reads_its_tokenizer_only() -> None:
    """Two streams over one tokenizer do not meet."""
    one, two = TextStream(BYTES), TextStream(BYTES)
    assert (one.push(0xE2), two.push(65), one.push(0x82), one.push(0xAC)) == ("", "A", "", "€")
    assert isinstance(BYTES, Tokenizer)
