"""Steering: a text whose tokens run out comes to a valid end wherever one fits, and is left alone before."""

import json
import random
from collections import Counter
from itertools import cycle
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.decode import schemas
from tests.decode.test_grammar import MADE, SURPLUS, allowed
from tokenwright.decode import closing
from tokenwright.decode.closers import Ahead, TextPlace
from tokenwright.decode.grammar import Grammars, Matched
from tokenwright.engine import Grammar

ENDLESS: dict[str, dict[str, Any]] = {
    "a string": {"type": "string"},
    "items": {"type": "array", "items": {"type": "integer"}},
    "objects": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "price": {"type": "number"}, "is it good": {"type": "boolean"}},
            "required": ["name", "price", "is it good"],
            "additionalProperties": False,
        },
    },
    "nests": {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
    "a child before its name": {
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"child": {"$ref": "#/$defs/n"}, "name": {"type": "string"}},
                "required": ["name"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/n",
    },
    "any names": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}},
    "a pattern with an end": {"type": "string", "pattern": "^(\\{[a-z]+\\})|([a-z]+)$"},
    "digits": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]},
}


def compiled(kind: str, schema: dict[str, Any]) -> tuple[Matched, int]:
    """A steered constraint, and how many tokens its end needs at least, as far as steering knows."""
    _, grammars, _ = MADE[kind]
    found = grammars.compile(Grammar.json_schema(schema), steered=True)
    least = found._steering.steps_to_end(found._state.matcher)
    assert least is not None, schema
    return found, least


def written(kind: str, constraint: Matched, most: int, rng: random.Random) -> bytes | None:
    """A text that goes on as long as it may, by random tokens, of which those in a row are often alike; None: cut."""
    tokenizer, _, ends = MADE[kind]
    text, last = b"", -1
    for left in range(most, 0, -1):
        choices = sorted(token for token in np.flatnonzero(bits(constraint.mask(left))).tolist() if token not in ends)
        if not choices:
            return text
        last = last if last in choices and rng.random() < 0.7 else rng.choice(choices)
        text += tokenizer.token_bytes(last) or b""
        if constraint.advance(last):
            return text
    return text if constraint.accepting else None


def bits(mask: Any) -> Any:
    return np.unpackbits(mask.view(np.uint8), bitorder="little")


@pytest.mark.parametrize("name", ENDLESS)
def test_a_text_that_would_go_on_for_ever_ends_within_its_tokens(name: str) -> None:
    rng = random.Random(3)
    for most in (0, 20, 80):
        constraint, least = compiled("byte level", ENDLESS[name])
        text = written("byte level", constraint, least + most, rng)
        assert text is not None
        jsonschema.validate(json.loads(text), ENDLESS[name])


def test_texts_of_all_schemas_end_within_their_tokens() -> None:
    rng = random.Random(4)
    for _ in range(10):
        schema = schemas.whole(schemas.schema(rng))
        constraint, least = compiled("byte level", schema)
        text = written("byte level", constraint, least + rng.randint(0, 40), rng)
        assert text is not None, schema
        jsonschema.validate(json.loads(text), schema)


def test_masks_follow_from_the_text_and_what_is_left_alone() -> None:
    """However often masks were asked for, and by which copies: as the engine resumes, drafts and forks."""
    rng = random.Random(5)
    constraint, least = compiled("byte level", ENDLESS["objects"])
    start, tokens = constraint.fork(), []
    for left in range(least + 60, 0, -1):
        replayed = start.fork()
        for token in tokens:
            replayed.advance(token)
        found = bits(constraint.mask(left))
        assert np.array_equal(found, bits(replayed.mask(left)))
        token = rng.choice(np.flatnonzero(found).tolist())
        tokens.append(token)
        if constraint.advance(token):
            break
        replayed.advance(token)
        constraint = rng.choice([constraint, constraint.fork(), replayed])
    else:
        assert constraint.accepting


class Plain(closing.Steering):
    """Walks each way anew, on a matcher that computes the mask of each place."""

    def _walked(self, here: Any, way: Any, most: int) -> int | None:
        matcher, quoted = here.matcher.deep_copy(), False
        for steps in range(most + 1):
            if matcher.is_accepting():
                return steps
            self._work = min(self._work + 1, closing.MOST_WORK + 1)
            if steps == most or self._work > closing.MOST_WORK:
                return None
            ahead = Ahead(matcher, TextPlace())
            if not ahead.bits() or matcher.is_error():
                return None
            token = next(self._closers.cut(matcher.deep_copy().compute_ff_bytes()), None)
            if token is None:
                token = self._closers.next(way, ahead, self._special)
            free = token == self._closers.quote and self._closers.free(ahead)
            if token < 0 or (free and quoted):
                return None
            quoted = free
            matcher.consume_token(token)
        return None


NAMED = 0  # a special token that a grammar names
GRAMMARS = {name: Grammar.json_schema(schema) for name, schema in ENDLESS.items()} | {
    "ways that end nowhere": Grammar.lark(r'start: ("(" start ")" | "[" /[ab]+/ "]" | "x")+ "!"'),
    "quotes that are letters": Grammar.regex("a|x[^!]*!"),
    "special tokens": Grammar.lark(f'start: "a"* <[{NAMED}]> "b" "[" "a"* "]"', special={NAMED}),
}


@pytest.mark.parametrize(("name", "kind"), list(zip(GRAMMARS, cycle(["byte level", "byte fallback"]), strict=False)))
def test_what_walks_have_found_changes_no_mask(name: str, kind: str) -> None:
    """Against ways that are walked anew: the same masks, the same steps counted, with copies that share places."""
    rng = random.Random(7)
    for most in (12, 40):
        found = MADE[kind][1].compile(GRAMMARS[name], steered=True)
        steering, state = found._steering, found._state
        assert steering is not None
        plain = Plain(steering._closers, steering._special, state.matcher)
        for left in range(most, 0, -1):
            wanted, mask = state.allowed(), found.mask(left)
            assert steering._gate == plain._gate
            if not state.opens:
                assert np.array_equal(mask, plain.mask(state.matcher, wanted, left))
                assert steering._work == plain._work
            token = int(rng.choice(np.flatnonzero(bits(mask))))
            aside = found.fork()
            aside.mask(left - 1)
            if found.advance(token):
                break
            assert aside.advance(int(rng.choice(np.flatnonzero(bits(mask))))) in (False, True)
            plain.advanced(state.matcher, None)


WORDS = (b'{"', b"first", b"last", b"_name", b'": "', b", ", b'"}', b'"s', b'"l', b"Lily")


def words(schema: dict[str, Any]) -> Matched:
    """A steered constraint over a vocabulary of bytes and words."""
    pieces = [bytes([byte]) for byte in range(256)] + [*WORDS, b""]
    grammars = Grammars(lambda token, first: pieces[token], len(pieces), [len(pieces) - 1])
    return grammars.compile(Grammar.json_schema(schema), steered=True)


class Counted:
    """A matcher whose calls are counted, with those of its copies."""

    def __init__(self, matcher: Any, calls: Counter[str]) -> None:
        self._matcher, self._calls = matcher, calls

    def __getattr__(self, name: str) -> Any:
        self._calls[name] += 1
        if name == "deep_copy":
            return lambda: Counted(self._matcher.deep_copy(), self._calls)
        return getattr(self._matcher, name)


def test_a_way_takes_what_is_forced_in_long_tokens_and_few_calls() -> None:
    names = ["first_name", "last_name"]
    properties = {name: {"type": "string", "maxLength": 40} for name in names}
    constraint = words({"type": "object", "properties": properties, "required": names, "additionalProperties": False})
    steering, calls = constraint._steering, Counter[str]()
    assert steering is not None
    assert steering.steps_to_end(constraint._state.matcher) == len(
        ['{"', "first", "_name", '": "', '"', ", ", '"l', "a", "s", "t", "_name", '": "', '"', "}"]
    )
    text = [256, 257, 259, 260, *[265] * 6, ord('"')]
    for place, token in enumerate(text):
        steering.mask(Counted(constraint._state.matcher, calls), constraint._state.allowed(), 26 - place)
        constraint.advance(token)
    assert calls.total() < 60 * len(text), calls


def test_a_token_that_opens_a_string_stands_only_for_those_in_free_text() -> None:
    constraint = words({"enum": ["s", "l" + 20 * "o"]})
    opened = set(np.flatnonzero(bits(constraint.mask(4))).tolist())
    assert opened == {ord('"'), 256 + WORDS.index(b'"s')}
    free = words({"type": "array", "items": {"type": "string"}})
    free.advance(ord("["))
    for left, fit in ((4, True), (2, False)):
        assert bits(free.mask(left))[256 + WORDS.index(b'"s')] == fit


def test_a_text_with_many_tokens_left_is_left_alone() -> None:
    _, grammars, _ = MADE["byte level"]
    rng = random.Random(6)
    size = MADE["byte level"][0].vocab_size + SURPLUS
    steered, _ = compiled("byte level", ENDLESS["objects"])
    plain = grammars.compile(Grammar.json_schema(ENDLESS["objects"]))
    for _ in range(100):
        wanted = allowed(plain, size)
        assert allowed(steered, size) == wanted
        assert set(np.flatnonzero(bits(steered.mask(400))).tolist()) == wanted
        token = rng.choice(sorted(wanted))
        if plain.advance(token) | steered.advance(token):
            break


def test_free_text_is_never_steered() -> None:
    grammars = MADE["byte level"][1]
    constraint = grammars.compile(Grammar.lark("start: TEXT\nTEXT: /(.|\\n)*/"), steered=True)
    for left in range(40, 0, -1):
        assert np.array_equal(constraint.mask(left), constraint.mask())
        constraint.advance(100)


def test_a_text_whose_end_does_not_fit_is_cut() -> None:
    constraint, _ = compiled("byte level", ENDLESS["digits"])
    assert written("byte level", constraint, 2, random.Random(0)) is None
