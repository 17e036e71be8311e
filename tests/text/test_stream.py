"""Streamed text: whatever the cuts, the pieces are the whole, and a stop string never leaks."""

import random
import tracemalloc
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.profiles import examples, some
from tests.text import kinds, scripts
from tokenwright.errors import RequestError
from tokenwright.text import TextStream, Tokenizer
from tokenwright.text.stream import STOP_CHARACTERS, StopStrings

light = examples(150)
thorough = examples(600)

byte_runs = st.lists(st.integers(0, 255), max_size=24)
BYTES = kinds.wrap(kinds.letters())


def run(stream: TextStream, ids: Sequence[int]) -> list[str]:
    """Every piece, the last one from finish()."""
    return [*(stream.push(token) for token in ids), stream.finish()]


@cache
def openings(stops: tuple[str, ...]) -> frozenset[str]:
    """Everything that opens a stop string without being the whole of it."""
    return frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))


Shown = tuple[str, str | None]


def oracle(text: str, stops: Sequence[str], *, include: bool = False, deaf: int = 0) -> list[Shown]:
    """What is to be shown of each beginning of `text`, of 0 characters and more, and the stop that ended it.

    By the definitions alone, with everything in hand: the earliest match wins, the shorter of two that begin together;
    it is told as soon as nothing can win any more that began before it; what a stop may still claim is not shown.
    Matches that are whole within the first `deaf` characters do not count.
    """
    known, sizes, answers = frozenset(stops), sorted({len(stop) for stop in stops}), []
    for size in range(len(text) + 1):
        begun = text[:size]
        parts = ((at, at + long) for at in range(size) for long in sizes if deaf < at + long <= size)
        found = next((part for part in parts if begun[slice(*part)] in known), None)
        open_at = next((at for at in range(size) if begun[at:] in openings(tuple(stops))), size)
        if found and found[0] <= open_at:
            last = (begun[: found[include]], begun[slice(*found)])
            return answers + [last] * (len(text) + 1 - size)
        safe = (found[1] if found else size) if include else open_at
        answers.append((begun[:safe], None))
    return answers


def end(text: str, stops: Sequence[str], *, include: bool = False, deaf: int = 0) -> Shown:
    """The whole text as it is shown, when it is over."""
    found = [(at, len(stop), stop) for stop in set(stops) for at in range(len(text)) if text.startswith(stop, at)]
    counted = sorted((at, size, stop) for at, size, stop in found if at + size > deaf)
    return (text[: sum(counted[0][: 1 + include])], counted[0][2]) if counted else (text, None)


def whole_characters(data: bytes) -> int:
    return len(data.decode(errors="ignore"))


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
    "<0x0A>",
    "\n",
    "x\n▁\n",
    "[SEP]",
]
ALL = [kinds.byte_fallback, kinds.lines, kinds.unstripped, kinds.metaspace, kinds.wordpiece, kinds.joined]


@pytest.mark.parametrize("decoder", ALL)
@light
@given(st.lists(st.sampled_from(PARTS), max_size=8), st.booleans())
def test_every_kind_decodes_as_the_library_does(decoder: Any, tokens: list[str], skip: bool) -> None:
    tokenizer, ids = kinds.of_tokens([token for token in tokens if token], decoder(), special=["[SEP]"])
    whole = tokenizer._library.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special=skip) == whole
    assert "".join(run(TextStream(tokenizer, skip_special=skip), ids)) == whole


@light
@given(st.lists(st.sampled_from(PARTS), max_size=8), st.lists(st.sampled_from(PARTS), max_size=8))
def test_a_line_that_goes_on_from_a_prompt_loses_its_space(before: list[str], after: list[str]) -> None:
    tokens = [["x", *filter(None, some)] for some in (before, after)]
    tokenizer, ids = kinds.of_tokens([*tokens[0], *tokens[1][1:]], kinds.lines(), special=["[SEP]"])
    prompt, rest = ids[: len(tokens[0])], ids[len(tokens[0]) :]
    assert tokenizer.decode(prompt) + "".join(run(TextStream(tokenizer, prompt=prompt), rest)) == tokenizer.decode(ids)


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
@given(stoppable, st.lists(hostile, max_size=4), kinds.cuts, st.booleans(), st.integers(0, 5))
@example("abce", ["abcd", "bc"], [1, 2, 3], False, 0)
@example("abc", ["abcd", "bc"], [1, 2], True, 0)
@example("xabc", ["abcd", "bc"], [], False, 0)
@example("xabce", ["abcd", "bc"], [4], True, 0)
@example("abcd", ["abcd", "bc"], [1, 2, 3], False, 0)
@example("abcd", ["abcd", "bc"], [1, 2, 3], True, 3)
@example("aab", ["ab", "aab", "a"], [1], False, 0)
@example("abab", ["ab"], [1, 2, 3], False, 2)
@example("ababc", ["ab", "abc"], [1, 2, 3, 4], False, 4)
@example("aba", ["aba", "b"], [1, 2], False, 2)
def test_what_is_shown_is_what_the_definition_says(
    text: str, stops: list[str], at: list[int], include: bool, unarmed: int
) -> None:
    """After every token of every cut: the earliest match ends the text; only what a stop may claim waits."""
    data = kinds.cut(text.encode(), at)
    tokenizer, ids = kinds.of_tokens([kinds.byte_token(piece) for piece in data], kinds.byte_level())
    deaf = whole_characters(b"".join(data[:unarmed]))
    answers = oracle(text, stops, include=include, deaf=deaf)
    stream = TextStream(tokenizer, stops, include_stop=include)
    pieces = []
    for i, token in enumerate(ids):
        pieces.append(stream.push(token, i >= unarmed))
        assert (stream.text, stream.stopped) == answers[whole_characters(b"".join(data[: i + 1]))]
    pieces.append(stream.finish())
    assert ("".join(pieces), stream.stopped) == end(text, stops, include=include, deaf=deaf)
    assert stream.text == "".join(pieces)


@light
@given(stoppable, stoppable, stoppable, st.lists(hostile, max_size=4), st.booleans())
def test_a_fork_goes_on_by_itself(before: str, one: str, other: str, stops: list[str], include: bool) -> None:
    def fresh(text: str) -> tuple[str, str | None]:
        stream = TextStream(BYTES, stops, include_stop=include)
        run(stream, text.encode())
        return stream.text, stream.stopped

    stream = TextStream(BYTES, stops, include_stop=include)
    for byte in before.encode():
        stream.push(byte)
    fork = stream.fork()
    for byte in one.encode():  # in turns: neither disturbs the other
        stream.push(byte)
    run(fork, other.encode())
    stream.finish()
    assert (stream.text, stream.stopped) == fresh(before + one)
    assert (fork.text, fork.stopped) == fresh(before + other)


def test_a_fork_costs_the_same_after_any_text() -> None:
    """Counted: the bytes that it takes, the least of five (another thread's may be among them).

    A copy of the text would take 20,000.
    """

    def cost(tokens: int) -> int:
        stream = TextStream(BYTES, ["zz"])
        for _ in range(tokens):
            stream.push(97)
        taken = []
        for _ in range(5):
            tracemalloc.start()
            fork = stream.fork()
            taken.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert fork.text == "a" * tokens
        return min(taken)

    assert cost(20_000) <= cost(10) + 1_000


def test_nothing_comes_after_a_stop() -> None:
    stream = TextStream(BYTES, ["END"])
    assert "".join(stream.push(byte) for byte in b"so END and on") == "so "
    assert stream.stopped == "END"
    assert stream.push(65) == stream.finish() == stream.finish() == ""
    assert stream.text == "so "


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


# Strings in many scripts, cut in every way.

STRINGS = scripts.strings()
LONGEST = 8  # bytes of a token
Way = list[tuple[int, int]]  # from one place in a text: the id of a token, and the place where it ends


def byte_level_ways(text: str) -> tuple[Tokenizer, list[Way]]:
    """All tokens of up to LONGEST bytes, from every byte on."""
    data = text.encode()
    spans = [(a, b) for a in range(len(data)) for b in range(a + 1, min(len(data), a + LONGEST) + 1)]
    tokenizer, ids = kinds.of_tokens([kinds.byte_token(data[a:b]) for a, b in spans], kinds.byte_level())
    return tokenizer, ways(len(data), spans, ids)


def byte_fallback_ways(text: str) -> tuple[Tokenizer, list[Way]]:
    """From every character on the tokens of whole characters, and every byte as a token of its own."""
    data = text.encode()
    places = [len(text[:i].encode()) for i in range(len(text) + 1)]
    spans = [(a, b) for i, a in enumerate(places) for b in places[i + 1 :] if b - a <= LONGEST]
    tokens = [data[a:b].decode().replace(" ", "▁") for a, b in spans]
    spans += [(a, a + 1) for a in range(len(data))]
    tokens += [f"<0x{byte:02X}>" for byte in data]
    tokenizer, ids = kinds.of_tokens(tokens, kinds.unstripped())
    return tokenizer, ways(len(data), spans, ids)


def ways(size: int, spans: list[tuple[int, int]], ids: list[int]) -> list[Way]:
    found: list[Way] = [[] for _ in range(size)]
    for (start, stop), token in zip(spans, ids, strict=True):
        found[start].append((token, stop))
    return found


def state(stream: TextStream) -> dict[str, Any]:
    """All that decides what a stream does next."""
    return {name: value for name, value in vars(stream).items() if name != "_released"}


@pytest.mark.parametrize("of", [byte_level_ways, byte_fallback_ways])
@pytest.mark.parametrize("stopping", ["no stops", "stops", "stops included"])
def test_every_split_of_every_string(of: Callable[[str], tuple[Tokenizer, list[Way]]], stopping: str) -> None:
    """Every token is pushed at every place where it fits. All the ways to a place are seen to meet in one state, so
    that what holds for each single step holds for each of the 2^(bytes - 1) splits.
    """
    dice = random.Random(stopping)
    for text in some(STRINGS, 17):
        tokenizer, steps = of(text)
        stops = () if stopping == "no stops" else scripts.stops(text, dice)
        include = stopping == "stops included"
        answers = oracle(text, stops, include=include)
        shown = [answers[whole_characters(text.encode()[:at])] for at in range(len(steps) + 1)]
        streams = {0: TextStream(tokenizer, stops, include_stop=include)}
        for at, step in enumerate(steps):
            for token, after in step:
                stream = streams[at].fork()
                assert (shown[at][0] + stream.push(token), stream.stopped) == shown[after], (text, stops, at, after)
                met = streams.setdefault(after, stream)
                assert stream.stopped or state(stream) == state(met), (text, stops, at, after)
        last = streams[len(steps)]
        whole = shown[-1][0] + last.finish()
        assert (whole, last.stopped) == end(text, stops, include=include), (text, stops)
        assert last.text == whole


def byte_level_cut(text: str, dice: random.Random) -> list[str]:
    data = text.encode()
    return [kinds.byte_token(piece) for piece in kinds.cut(data, [dice.randrange(999) for _ in range(len(data) // 3)])]


def byte_fallback_cut(text: str, dice: random.Random) -> list[str]:
    tokens = ["▁"]
    for part in merged(text, dice):
        if dice.random() < 0.3:
            tokens += [f"<0x{byte:02X}>" for byte in part.encode()]
        else:
            tokens.append(part.replace(" ", "▁"))
    return tokens


def wordpiece_cut(text: str, dice: random.Random) -> list[str]:
    cut = [merged(word, dice) for word in text.split(" ") if word]
    return [f"##{part}" if i else part for parts in cut for i, part in enumerate(parts)]


def unigram_cut(text: str, dice: random.Random) -> list[str]:
    return merged(f"▁{text.replace(' ', '▁')}", dice)


def merged(text: str, dice: random.Random) -> list[str]:
    """The characters of `text`, some of them merged with what comes before."""
    tokens = [text[0]]
    for char in text[1:]:
        if dice.random() < 0.5:
            tokens.append(char)
        else:
            tokens[-1] += char
    return tokens


@pytest.mark.parametrize(
    ("decoder", "cut"),
    [
        (kinds.byte_level, byte_level_cut),
        (kinds.byte_fallback, byte_fallback_cut),
        (kinds.wordpiece, wordpiece_cut),
        (kinds.metaspace, unigram_cut),
    ],
)
def test_every_string_cut_at_random(decoder: Any, cut: Callable[[str, random.Random], list[str]]) -> None:
    dice = random.Random(7)
    lists = [cut(text, dice) for text in STRINGS for _ in range(3)]
    tokenizer, ids = kinds.of_tokens([token for tokens in lists for token in tokens], decoder())
    at = 0
    for i, tokens in enumerate(lists):
        held_to_the_library(tokenizer, ids[at : at + len(tokens)])
        at += len(tokens)
        if decoder in (kinds.byte_level, kinds.byte_fallback):  # the other kinds lose spaces
            assert tokenizer.decode(ids[at - len(tokens) : at]) == STRINGS[i // 3]


def held_to_the_library(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The pieces make the whole decode, ours and the library's, and have no U+FFFD, as the strings have none."""
    pieces = run(TextStream(tokenizer, skip_special=False), ids)
    whole = "".join(pieces)
    assert whole == tokenizer.decode(ids, skip_special=False)
    assert whole == tokenizer._library.decode(ids, skip_special_tokens=False)
    assert "\ufffd" not in whole
    return whole


FALLBACK, _ = kinds.of_tokens([*(f"<0x{byte:02X}>" for byte in range(256)), "▁"], kinds.byte_fallback())


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte-level", "byte-fallback"])
def test_a_prompt_may_end_at_any_byte_of_every_string(tokenizer: Tokenizer) -> None:
    """A character that the prompt began is the completion's; nothing else of the prompt is."""
    opening = [256] if tokenizer is FALLBACK else []  # the space that the decoder takes away again
    for text in some(STRINGS):
        data = list(text.encode())
        for at in range(len(data) + 1):
            known = whole_characters(bytes(data[:at]))
            more = data[at : at + 8]
            written = bytes(data[: at + 8]).decode(errors="ignore")[known:]
            pieces = [
                stream.push(byte) for stream in [TextStream(tokenizer, prompt=opening + data[:at])] for byte in more
            ]
            assert "".join(pieces) == written, (text, at)


def test_ten_thousand_stops() -> None:
    """Parts of the strings, half of them with another end; all that they open is open at once."""
    dice = random.Random(5)
    stops: dict[str, None] = {}
    while len(stops) < 10_000:
        text = dice.choice(STRINGS)
        at = dice.randrange(len(text))
        part = text[at : at + dice.randint(4, 8)]
        stops[part[:-1] + dice.choice(dice.choice(STRINGS)) if dice.random() < 0.9 else part] = None
    automaton, ended = StopStrings([stop for stop in stops if len(stop) > 2]), 0
    many = [stop for stop in stops if len(stop) > 2]
    texts = some(STRINGS[:200])
    for text in texts:
        answers, stream, done = oracle(text, many), TextStream(BYTES, automaton), b""
        for byte in text.encode():
            done += bytes([byte])
            stream.push(byte)
            assert (stream.text, stream.stopped) == answers[whole_characters(done)], text
        ended += stream.stopped is not None
    assert 0.1 < ended / len(texts) < 0.9


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_as_long_as_may_be(include: bool) -> None:
    """(ab)^32767 c and a lone joiner: of an endless (ab)^n all but the last 65,534 characters is free at any time."""
    long = "ab" * (STOP_CHARACTERS // 2 - 1) + "c"
    step = "ab" * 450
    tokenizer, (more, a, c) = kinds.of_tokens([step, "a", "c"], kinds.byte_level())
    stream, size = TextStream(tokenizer, [long, "\u200d"], include_stop=include), 0
    for _ in range(90):
        stream.push(more)
        size += len(step)
        assert len(stream.text) == (size if include else max(0, size - len(long) + 1))
    other = stream.fork()
    other.push(a)
    assert len(other.text) == (size + 1 if include else size - len(long) + 3)
    other.finish()
    assert (other.text, other.stopped) == (step * 90 + "a", None)
    stream.push(c)
    assert stream.stopped == long
    assert stream.text == (step * 90 + "c" if include else "ab" * ((size - len(long) + 1) // 2))


@pytest.mark.parametrize(("skip", "kept", "stopped"), [(True, "ab", None), (False, "a", "<|endoftext|>")])
def test_a_stop_that_is_the_end_token_s_text(skip: bool, kept: str, stopped: str | None) -> None:
    """The token has text only where special tokens do; the same characters, spelled out, always stop."""
    name = "<|endoftext|>"
    end_token = BYTES._library.token_to_id(name)
    stream = TextStream(BYTES, [name], skip_special=skip)
    assert ("".join(run(stream, [97, end_token, 98])), stream.stopped) == (kept, stopped)
    assert "".join(run(TextStream(BYTES, [name], skip_special=skip), list(f"a{name}b".encode()))) == "a"
