"""Grammars: the mask is exactly what may come next, whatever the tokens are; and nothing hostile gets through."""

import gc
import json
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decode import schemas
from tests.profiles import examples
from tests.text import kinds
from tokenwright.decode.grammars import grammar, grammar_trials, grammar_worker
from tokenwright.decode.grammars.grammar import Grammars, GrammarState
from tokenwright.decode.grammars.grammar_trials import CPU_SECONDS, REQUEST_SECONDS, Budget
from tokenwright.engine import Grammar
from tokenwright.errors import EngineError, GrammarError, RequestError
from tokenwright.sampling_params import Whitespace
from tokenwright.text import Tokenizer

ENDS = ("<end>", "<stop>")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["a", "b", "ab", "ba", "abc", "c", "é", "▁", "▁a", "▁b", "a▁b", "##a", "##b", "##é", "aé", "}", '"']
KINDS: dict[str, tuple[Sequence[str], Any]] = {
    "byte level": (
        [kinds.byte_token(piece) for piece in [bytes([byte]) for byte in range(256)]]
        + [
            kinds.byte_token(piece.encode())
            for piece in ("ab", "ba", " a", "aé", '":', "{}", '"a', "\n  ", "true", "中")
        ]
        + [kinds.byte_token("é".encode()[1:] + b"a"), kinds.byte_token("😀".encode()[:2])],
        kinds.byte_level(),
    ),
    "byte fallback": ([*BYTES, *WORDS], kinds.byte_fallback()),
    "unstripped": ([*BYTES, *WORDS], kinds.unstripped()),
    "metaspace": (WORDS, kinds.metaspace()),
    "wordpiece": (WORDS, kinds.wordpiece()),
    "joined": (WORDS, kinds.joined()),
}
SURPLUS = 5  # rows of the model that the tokenizer has no tokens for


def made(kind: str) -> tuple[Tokenizer, Grammars, frozenset[int]]:
    """A tokenizer of a kind, the grammars over it, and its end ids. The model has a few ids more."""
    tokens, decoder = KINDS[kind]
    tokenizer, _ = kinds.of_tokens(tokens, decoder, special=("<unk>", *ENDS))

    def token_bytes(token: int, first: bool) -> bytes | None:
        return tokenizer.token_bytes(token, first=first) if token < tokenizer.vocab_size else None

    return tokenizer, Grammars(token_bytes, tokenizer.vocab_size + SURPLUS, (1, 2)), frozenset((1, 2))


MADE = {kind: made(kind) for kind in KINDS}


def cut(text: str) -> list[int]:
    return list(text.encode())


def test_what_a_grammar_leaves_is_told_and_binds_nothing() -> None:
    """The forced bytes come in the tokenizer's tokens; the text may take others of the same bytes."""
    grammars = Grammars(lambda token, first: bytes([token]) if token < 256 else b"ab", 257, (), cut)
    constraint = grammars.compile(Grammar.regex("xy(abab|ab)z"))
    assert bytes(constraint.forced()) == b"xyab"
    for token in b"xy":
        constraint.advance(token)
    constraint.advance(256)
    assert bytes(constraint.forced()) == b"", "z or more"
    constraint.advance(ord("z"))
    assert constraint.forced() == ()
    assert bytes(grammars.compile(Grammar.regex("x{500}")).forced()) == b"x" * grammar.MOST_FORCED
    assert MADE["byte level"][1].compile(Grammar.choice(["yes"])).forced() == (), "the tokenizer is not known"
    grammars.close()


BYTE_LEVEL = MADE["byte level"]


def allowed(constraint: GrammarState, vocab_size: int) -> set[int]:
    mask = constraint.mask()
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-vocab_size // 32),)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def expected(tokenizer: Tokenizer, ends: frozenset[int], texts: set[bytes], so_far: bytes, first: bool) -> set[int]:
    """The oracle: each id whose bytes go on towards one of `texts`, and the ends where the text is one of them."""
    going = {
        token
        for token in range(tokenizer.vocab_size)
        if (piece := tokenizer.token_bytes(token, first=first)) and any(t.startswith(so_far + piece) for t in texts)
    }
    return going | (ends if so_far in texts else set())


def walk(kind: str, source: Grammar, texts: set[str], rng: random.Random, opens: bool) -> bytes | None:
    """Follow a grammar of which all `texts` are known, each mask against the oracle; None: it came to a dead end.

    That is an end of the vocabulary, not of the grammar: no token spells what must follow.
    """
    tokenizer, grammars, ends = MADE[kind]
    whole = {text.encode() for text in texts}
    so_far, first = b"", opens
    try:
        constraint = grammars.compile(source, opens=opens)
    except RequestError:
        assert not expected(tokenizer, ends, whole, b"", first)
        return None
    while True:
        wanted = expected(tokenizer, ends, whole, so_far, first)
        if not wanted:
            with pytest.raises(EngineError, match=r"can spell|neither end nor go on"):
                constraint.mask()
            return None
        assert allowed(constraint, tokenizer.vocab_size + SURPLUS) == wanted
        token = rng.choice(sorted(wanted))
        complete = constraint.advance(token)
        if token in ends:
            assert complete
            return so_far
        so_far += tokenizer.token_bytes(token, first=first) or b""
        first = False
        assert complete == (so_far in whole and not any(t != so_far and t.startswith(so_far) for t in whole))
        if complete:
            assert allowed(constraint, tokenizer.vocab_size + SURPLUS) == set(ends)
            return so_far


CHOICES = st.lists(st.text(st.sampled_from('ab é"\\x4{|/n\n'), min_size=1, max_size=5), min_size=1, max_size=5)
LETTERS = {"a": "a", "b": "b", "[ab]": "a b", "é": "é", "(ab|c)": "ab c", "(?:a|bc?)": "a b bc", "[abcé]": "a b c é"}


def times(language: set[str], suffix: str) -> set[str]:
    twice = {one + other for one in language for other in language}
    return language | {"": set[str](), "?": {""}, "{1,2}": twice}[suffix]


def joined(atoms: list[tuple[str, str]]) -> tuple[str, set[str]]:
    """A pattern of atoms, and all that it matches."""
    texts = {""}
    for atom, suffix in atoms:
        texts = {text + more for text in texts for more in times(set(LETTERS[atom].split(" ")), suffix)}
    return "".join(map("".join, atoms)), texts


ATOMS = st.tuples(st.sampled_from(sorted(LETTERS)), st.sampled_from(["", "?", "{1,2}"]))
REGEXES = st.lists(ATOMS, min_size=1, max_size=3).map(joined)


@pytest.mark.parametrize("kind", KINDS)
@examples(40)
@given(CHOICES, st.booleans(), st.randoms(use_true_random=False))
def test_a_choice_allows_exactly_what_goes_on(kind: str, texts: list[str], opens: bool, rng: random.Random) -> None:
    found = walk(kind, Grammar.choice(texts), set(texts), rng, opens)
    assert found is None or found.decode() in texts


@pytest.mark.parametrize("kind", KINDS)
@examples(25)
@given(REGEXES, st.booleans(), st.randoms(use_true_random=False))
def test_a_regex_allows_exactly_what_goes_on(
    kind: str, regex: tuple[str, set[str]], opens: bool, rng: random.Random
) -> None:
    pattern, texts = regex
    assert all(re.fullmatch(pattern, text) for text in texts)
    found = walk(kind, Grammar.regex(pattern), texts, rng, opens)
    assert found is None or found.decode() in texts


def spelled(tokenizer: Tokenizer, text: bytes, rng: random.Random) -> list[int]:
    """The text in tokens, cut anyhow."""
    by_bytes = {piece: t for t in range(tokenizer.vocab_size) if t > 2 and (piece := tokenizer.token_bytes(t))}
    longest = max(map(len, by_bytes))
    ids = []
    while text:
        sizes = [size for size in range(1, min(longest, len(text)) + 1) if text[:size] in by_bytes]
        size = rng.choice(sizes)
        ids.append(by_bytes[text[:size]])
        text = text[size:]
    return ids


WRITTEN: dict[Whitespace, tuple[dict[str, Any], ...]] = {  # the forms of json.dumps that each allows
    "spaced": ({},),
    "compact": ({"separators": (",", ":")},),
    "any": ({}, {"separators": (",", ":")}, {"indent": 2}),
}


@pytest.mark.parametrize(("whitespace", "form"), [(one, form) for one in WRITTEN for form in WRITTEN[one]])
@pytest.mark.parametrize("kind", ["byte level", "unstripped"])
def test_every_instance_of_a_schema_can_be_written(kind: str, whitespace: Whitespace, form: dict[str, Any]) -> None:
    """Whatever JSON follows the schema, in the order of its properties: no token of it is forbidden."""
    tokenizer, grammars, ends = MADE[kind]
    rng = random.Random(6)
    for _ in range(60):
        schema = schemas.whole(schemas.schema(rng))
        value = schemas.instance(rng, schema)
        jsonschema.validate(value, schema)
        text = json.dumps(value, ensure_ascii=False, **form)
        constraint = grammars.compile(Grammar.json_schema(schema, whitespace))
        for token in spelled(tokenizer, text.encode(), rng):
            assert token in allowed(constraint, tokenizer.vocab_size + SURPLUS), (schema, text)
            constraint.advance(token)
        assert ends <= allowed(constraint, tokenizer.vocab_size + SURPLUS), (schema, text)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_whatever_is_written_follows_the_schema(kind: str) -> None:
    """A walk that takes any allowed token: it ends, and the text validates."""
    tokenizer, grammars, ends = MADE[kind]
    rng = random.Random(7)
    ended = 0
    for _ in range(60):
        schema = schemas.whole(schemas.schema(rng))
        constraint = grammars.compile(Grammar.json_schema(schema))
        text = b""
        for _ in range(1500):
            choices = allowed(constraint, tokenizer.vocab_size + SURPLUS)
            token = rng.choice(sorted(choices & ends or choices))
            complete = constraint.advance(token)
            text += b"" if token in ends else tokenizer.token_bytes(token) or b""
            if complete:
                jsonschema.validate(json.loads(text), schema)
                outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", text)
                assert not re.search(rb"\s", re.sub(rb"[:,] ", b"", outside)), "a space behind colons and commas"
                ended += 1
                break
    assert ended >= 57


def test_forks_go_their_own_ways() -> None:
    tokenizer, grammars, ends = BYTE_LEVEL
    [a], [b], [c] = (spelled(tokenizer, letter, random.Random(0)) for letter in (b"a", b"b", b"c"))
    trunk = grammars.compile(Grammar.regex("a(b|c)c?"))
    trunk.advance(a)
    before = allowed(trunk, tokenizer.vocab_size + SURPLUS)
    left, right = trunk.fork(), trunk.fork()
    assert not left.advance(b)
    assert allowed(right, tokenizer.vocab_size + SURPLUS) == before
    assert not right.advance(c)
    assert left.advance(c)
    assert allowed(right, tokenizer.vocab_size + SURPLUS) == {c, *ends}
    assert allowed(trunk, tokenizer.vocab_size + SURPLUS) == before
    with pytest.raises(EngineError, match="cannot be followed"):
        trunk.advance(a)
    assert right.advance(c), "another's error is not its own"


def test_the_end_is_refused_where_the_text_may_not_end() -> None:
    _, grammars, ends = BYTE_LEVEL
    constraint = grammars.compile(Grammar.choice(["ab"]))
    with pytest.raises(EngineError, match="lets no text end"):
        constraint.advance(min(ends))


def test_blanks_do_not_go_on_for_ever() -> None:
    tokenizer, grammars, _ = BYTE_LEVEL
    constraint = grammars.compile(Grammar.json_schema({"type": "array", "items": {"type": "null"}}, "any"))
    [bracket], [newline], [blank] = (spelled(tokenizer, text, random.Random(0)) for text in (b"[", b"\n", b" "))
    written = 0
    constraint.advance(bracket)
    constraint.advance(newline)
    while blank in allowed(constraint, tokenizer.vocab_size + SURPLUS):
        constraint.advance(blank)
        written += 1
        assert written < 100
    assert written == 16


def nested(depth: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{depth}": {"type": "integer"}}
    for level in range(depth):
        deeper = {"$ref": f"#/$defs/d{level + 1}"}
        definitions[f"d{level}"] = {"oneOf": [deeper, {"type": "array", "items": deeper}]}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def words(count: int, size: int = 12) -> list[str]:
    rng = random.Random(count)
    return ["".join(rng.choices("abcdefghijklmnop", k=size)) for _ in range(count)]


def string(pattern: str) -> Grammar:
    return Grammar.json_schema({"type": "string", "pattern": pattern})


def chain(rules: int, name: str) -> Grammar:
    lines = [f"start: {name}0", *(f"{name}{i}: {name}{i + 1}" for i in range(rules)), f'{name}{rules}: "x"']
    return Grammar.lark("\n".join(lines))


REFUSED = {
    "remote ref": (Grammar.json_schema({"$ref": "https://example.com/schema.json"}), r"\$defs"),
    "ref to itself": (Grammar.json_schema({"$ref": "#"}), "no text"),
    "refs in a ring": (
        Grammar.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        "no text",
    ),
    "oneOf, 30 deep": (Grammar.json_schema(nested(30)), "use anyOf"),
    "a keyword we lack": (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "a format we lack": (Grammar.json_schema({"type": "string", "format": "iri"}), "iri"),
    "an option inside": (Grammar.json_schema({"x-guidance": {"lenient": True}, "uniqueItems": True}), "x-guidance"),
    "false": (Grammar.json_schema(False), "false allows no text"),
    "no JSON": (Grammar.json_schema('{"type": "string"'), "not JSON"),
    "NaN": (Grammar.json_schema('{"minimum": NaN}'), "NaN"),
    "JSON in JSON": (Grammar.json_schema('{}}], "max_tokens": 3, "x": [{"y": {}'), "not JSON"),
    "JSON, deep": (Grammar.json_schema('{"not": ' * 50_000), "not JSON|nested"),
    "no type": (Grammar.json_schema({"type": "strnig"}), "strnig"),
    "wide objects": (
        Grammar.json_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}}),
        "takes more than|too many",
    ),
    "pattern properties": (
        Grammar.json_schema({"patternProperties": {f"^{w}.*z$": {} for w in words(600, 5)}}),
        "takes more than",
    ),
    "multipleOf a great number": (Grammar.json_schema({"type": "integer", "multipleOf": 999_983}), "more than 0.8 s"),
    "look-behind in a schema": (string("(?<=x)*"), "look-behind"),
    "look-behind": (Grammar.regex("(?<=x)*"), "look-behind"),
    "open bracket": (Grammar.regex("a[b"), "regex"),
    "backreference": (Grammar.regex(r"(a)\1"), "backreference"),
    "nothing matches": (Grammar.regex(r"[^\s\S]"), "no text"),
    "many optional letters": (Grammar.regex("a?" * 160_000), "too large"),
    "parentheses": (Grammar.regex("(" * 100_000 + ")" * 100_000), "regex"),
    "half a character": (Grammar.regex("a\ud800"), "surrogate"),
    "endless left recursion": (Grammar.lark('start: start "a"'), "no text"),
    "no start": (Grammar.lark('a: "x"'), "no start rule"),
    "unknown rule": (Grammar.lark("start: foo"), "foo"),
    "open string": (Grammar.lark('start: "a'), "1\\(10\\)"),
    "a chain of rules": (chain(20_000, "r"), "nested too deeply"),
    "a chain of terminals": (chain(20_000, "R"), "nested too deeply"),
    "doubling terminals": (
        Grammar.lark("start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "x"'),
        "too large|takes more than",
    ),
    "many optional terminals": (  # memory ends first in one of several places
        Grammar.lark("start: " + '"a"? ' * 80_000),
        "takes more than|too large|fails on it; make it simpler",
    ),
    "Lark parentheses": (Grammar.lark("start: " + "(" * 100_000 + '"a"' + ")" * 100_000), "nested"),
    "a special token": (Grammar.lark("start: <[0]>"), "neither end nor go on"),
    "no list": (Grammar("choice", '{"a": 1}'), "JSON list"),
    "half a megabyte of nothing": (Grammar.lark("%" * 500_000), "lexer error"),
}
TAKEN = {
    "recursive ref": Grammar.json_schema(
        {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}
    ),
    "true": Grammar.json_schema(True),
    "an enum of 10,000": Grammar.json_schema({"enum": words(10_000)}),
    "a choice of 10,000": Grammar.choice(words(10_000)),
    "(a+)+$ in a schema": string("(a+)+$"),
    "a{1,100000} in a schema": string("a{1,100000}"),
    "(a+)+$": Grammar.regex("(a+)+$"),
    "a{1,100000}": Grammar.regex("a{1,100000}"),
    "nested bounds": Grammar.regex("((a{1,100}){1,100}){1,100}"),
    "exponential": Grammar.regex("(a|b)*a(a|b){200}"),
    "left recursion": Grammar.lark('start: start "a" | "b"'),
    "ambiguous": Grammar.lark('start: start start | "a" | ""'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_grammars_are_refused_in_words(name: str) -> None:
    source, told = REFUSED[name]
    with pytest.raises(RequestError, match=told) as raised:
        BYTE_LEVEL[1].compile(source)
    assert len(str(raised.value)) < 500
    assert "backtrace" not in str(raised.value)


@pytest.mark.parametrize("name", TAKEN)
def test_fearsome_grammars_that_are_harmless_are_followed(name: str) -> None:
    tokenizer, grammars, _ = BYTE_LEVEL
    constraint = grammars.compile(TAKEN[name])
    rng = random.Random(8)
    for _ in range(60):
        token = rng.choice(sorted(allowed(constraint, tokenizer.vocab_size + SURPLUS)))
        if constraint.advance(token):
            break


def test_the_largest_texts_are_too_large() -> None:
    with pytest.raises(RequestError, match="500,000 are allowed"):
        Grammar.lark("a" * 500_001)


def test_a_grammar_that_ends_its_trial_harms_no_other() -> None:
    """Valid, then deadly, then valid again; and a worker that somebody kills is replaced."""
    _, grammars, _ = BYTE_LEVEL
    grammars.compile(Grammar.regex("[ab]+"))
    with pytest.raises(RequestError, match="nested too deeply"):
        grammars.compile(chain(20_000, "r"))
    grammars.compile(Grammar.regex("[ab]+"))
    workers = grammars._workers
    assert workers is not None
    worker = workers._idle.get()
    workers._idle.put(worker)
    worker.kill()
    worker.wait()
    grammars.compile(Grammar.regex("[ab]+"))


def test_a_request_has_one_budget_for_all_its_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty that each take a worker's whole time take that of two or three; of a client that has gone none is begun."""
    _, grammars, _ = BYTE_LEVEL
    slow, asked = REFUSED["multipleOf a great number"][0], []
    ask = grammar_trials._ask
    monkeypatch.setattr(grammar_trials, "_ask", lambda *given: asked.append(given) or ask(*given))
    budget = Budget()
    for _ in range(60):
        assert "takes more than" in grammars.complaint(slow, budget)
    assert len(asked) <= 2 + REQUEST_SECONDS / CPU_SECONDS  # a busy machine ends one before its time is up
    with pytest.raises(RequestError, match="takes more than"):
        grammars.compile(slow, budget=budget)
    assert len(asked) <= 3 + REQUEST_SECONDS / CPU_SECONDS, "the last compilation has what was kept for it"
    begun, budget = len(asked), Budget(cancelled=True)
    with pytest.raises(RequestError, match="the client has disconnected"):
        grammars.compile(slow, budget=budget)
    assert grammars.complaint(slow, budget)
    assert len(asked) == begun


def test_a_worker_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "trial.py"
    broken.write_text("raise SystemExit(3)")
    monkeypatch.setattr(grammar_worker, "__file__", str(broken))
    _, grammars, _ = made("metaspace")
    with pytest.raises(EngineError, match="does not start"):
        grammars.compile(Grammar.regex("a"))


def test_a_step_that_takes_too_long_ends_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = BYTE_LEVEL[1].compile(Grammar.regex("[ab]+"))
    monkeypatch.setattr(grammar, "STEP_SECONDS", 0.0)
    [letter] = spelled(BYTE_LEVEL[0], b"a", random.Random(0))
    with pytest.raises(GrammarError, match="one step of the grammar took"):
        constraint.advance(letter)


@pytest.fixture
def longest_pause() -> Iterator[list[float]]:
    """The longest time, in seconds, that another thread of the process was kept from running."""
    paused, over = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not over.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            paused[0] = max(paused[0], now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    yield paused
    over.set()
    thread.join()


def test_other_threads_go_on_while_a_grammar_is_compiled(longest_pause: list[float]) -> None:
    start = time.perf_counter()
    with pytest.raises(RequestError):
        BYTE_LEVEL[1].compile(REFUSED["multipleOf a great number"][0])
    took = time.perf_counter() - start
    assert longest_pause[0] < took / 2, f"paused {longest_pause[0]:.2f} s of {took:.2f}"


def private_memory() -> int:
    """RssAnon of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the memory")
def test_nothing_is_left_of_grammars_that_are_done() -> None:
    tokenizer, grammars, _ = BYTE_LEVEL
    rng = random.Random(9)

    def use(count: int) -> None:
        for _ in range(count):
            constraint = grammars.compile(Grammar.json_schema(schemas.whole(schemas.schema(rng))))
            constraint.advance(rng.choice(sorted(allowed(constraint, tokenizer.vocab_size + SURPLUS))))
        gc.collect()

    use(100)
    before = private_memory()
    use(250)
    grown = private_memory() - before
    assert grown < 4 * 2**20, f"250 grammars have left {grown / 2**20:.1f} MiB"
