"""Strings in many scripts, the same ones at every run: what the tokenizers of the world cut in wrong places.

Each is a handful of *clusters*: what a reader takes for one character and an encoder for up to a dozen code points.
U+FFFD, and the signs that tokenizers write for spaces and continuation (▁ and #), are left out: there the text of a
token is another one than its characters.
"""

import random
from collections.abc import Callable

_JOINER, _COLOURED, _KEYCAP = "\u200d", "\ufe0f", "\u20e3"
_SKINS = [chr(0x1F3FB + i) for i in range(5)]


def _family(dice: random.Random) -> str:
    """People joined into one emoji, some with a colour of skin, some with a profession, a heart or a sex."""
    people = [dice.choice("👨👩🧑👦👧👶") + dice.choice(["", *_SKINS]) for _ in range(dice.randint(1, 4))]
    return _JOINER.join([*people, *dice.choice([[], ["❤" + _COLOURED], ["💻"], ["♀" + _COLOURED], ["🏳" + _COLOURED]])])


def _flag(dice: random.Random) -> str:
    """Two regional indicators; or a black flag spelled in tags; or half a flag."""
    kind = dice.randrange(6)
    if kind == 0:
        return "🏴" + "".join(chr(0xE0000 + ord(c)) for c in dice.choice(["gbeng", "gbsct", "usca"])) + "\U000e007f"
    return "".join(chr(0x1F1E6 + dice.randrange(26)) for _ in range(1 if kind == 1 else 2))


def _jamo(dice: random.Random) -> str:
    """A Hangul syllable from its letters: leading, vowel, perhaps trailing; or ready made."""
    if dice.random() < 0.3:
        return chr(dice.randint(0xAC00, 0xD7A3))
    tail = chr(dice.randint(0x11A8, 0x11C2)) if dice.random() < 0.5 else ""
    return chr(dice.randint(0x1100, 0x1112)) + chr(dice.randint(0x1161, 0x1175)) + tail


def _stack(dice: random.Random) -> str:
    """A letter under a pile of combining marks."""
    return dice.choice("aeoKzΩж") + "".join(chr(dice.randint(0x300, 0x36F)) for _ in range(dice.randint(1, 6)))


def _marked(bases: tuple[int, int], marks: str) -> Callable[[random.Random], str]:
    """Letters of a range, each with up to two of its script's marks."""

    def write(dice: random.Random) -> str:
        letters = range(dice.randint(1, 3))
        return "".join(chr(dice.randint(*bases)) + "".join(dice.choices(marks, k=dice.randrange(3))) for _ in letters)

    return write


def _one_of(first: int, last: int) -> Callable[[random.Random], str]:
    return lambda dice: chr(dice.randint(first, last))


CLUSTERS: dict[str, Callable[[random.Random], str]] = {
    "family": _family,
    "skin": lambda dice: dice.choice("👍👋🖐✊🤝") + dice.choice(_SKINS),
    "flag": _flag,
    "keycap": lambda dice: dice.choice("0123456789*") + dice.choice(["", _COLOURED]) + _KEYCAP,
    "emoji": _one_of(0x1F600, 0x1F64F),
    "han": lambda dice: "".join(chr(dice.randint(0x4E00, 0x9FFF)) for _ in range(dice.randint(1, 3))),
    "kana": _marked((0x3041, 0x3093), "\u3099\u309a"),
    "jamo": _jamo,
    "devanagari": _marked((0x0915, 0x0939), "\u094d\u093e\u093f\u0940\u0902\u093c"),
    "thai": _marked((0x0E01, 0x0E2E), "\u0e31\u0e34\u0e38\u0e48\u0e49\u0e4c"),
    "arabic": _marked((0x0627, 0x064A), "\u064b\u064e\u064f\u0650\u0651\u0652"),
    "hebrew": _marked((0x05D0, 0x05EA), "\u05b0\u05b4\u05b7\u05b8\u05bc\u05c1"),
    "stack": _stack,
    "direction": lambda dice: dice.choice("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"),
    "invisible": lambda dice: dice.choice("\ufeff\0\u200b\u200c\u200d\u2060\u00ad\u034f\ufe0f\ufe0e"),
    "private": lambda dice: chr(dice.choice([0xE000, 0xF8C0, 0xF0000, 0x10FFBE]) + dice.randrange(64)),
    "astral": lambda dice: chr(dice.choice([0x10000, 0x12000, 0x1D400, 0x20000, 0x30000]) + dice.randrange(64)),
    "edge": lambda dice: dice.choice("\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff"),
    "latin": lambda dice: dice.choice(["a", "The", "end", "é", "ß", "ﬁ", "Å", "I", "x2"]),
}  # fmt: skip
GAPS = ["", "", "", " ", " ", "  ", "\n"]


def strings(count: int = 2000, seed: int = 0) -> list[str]:
    """`count` different strings of one to eight clusters: two thirds are of one script with intruders."""
    dice, names = random.Random(seed), sorted(CLUSTERS)
    found: dict[str, None] = {}
    while len(found) < count:
        found[_string(dice, names[len(found) % len(names)], names)] = None
    return list(found)


def _string(dice: random.Random, main: str, names: list[str]) -> str:
    mixed = dice.random() < 1 / 3
    kinds = [dice.choice(names) if mixed or dice.random() < 0.2 else main for _ in range(dice.randint(1, 8))]
    return dice.choice(GAPS) + "".join(CLUSTERS[kind](dice) + dice.choice(GAPS) for kind in kinds)


def stops(text: str, dice: random.Random) -> list[str]:
    """One to six stop strings that are near to `text`: parts of it, prefixes of each other, parts that go on otherwise.

    Parts are cut between code points, so they lie inside emoji, syllables and stacks: a joiner, a colour, a mark.
    """
    found: list[str] = []
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(text))
        part = text[at : at + dice.choice([1, 1, 1, 2, 3, 5, 9])]
        change = dice.randrange(6)
        if change == 0 and found:
            part = dice.choice(found) + part
        elif change == 1:
            part += dice.choice(text)
        elif change == 2:
            part = part + part
        elif change == 3:
            part = dice.choice([_JOINER, _COLOURED, _KEYCAP, "\u0301", "\u094d", "\ufeff", "\0", " "])
        found.append(part)
    return found
