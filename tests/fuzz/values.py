"""Values that break servers, drawn from a seed: numbers, texts, patterns, schemas, grammars, conversations.

A seed gives the same values on every machine. Sizes are drawn on a logarithmic scale: most values are small, and some
fill a body.
"""

import math
import random
from collections.abc import Callable
from typing import Any

NEAR = "a" * 40 + "!"  # nearly matches many patterns that backtrack
# Patterns on which a backtracking engine takes exponential or quadratic time, or a compiler much memory.
EVIL = (
    *("^(a+)+$", "^(a+)+$", "^(a|a)*$", "^(a*)*b$", "^(.*.*)*x$", "^([a-zA-Z]+)*$", "((a|b|ab)+)+c", "(x+x+)+y"),
    *("(a?){40}a{40}", "(a{1,1000}){1,1000}", "^(\\w+\\s?)*$", "^\\s+|\\s+$", "(?=a)*", "(a)\\1+", "\\p{L}+"),
)
NUMBERS = (0, -1, 0.0, -0.0, 0.5, 1e308, -1e308, 1e-320, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**400)
NO_NUMBERS = (math.nan, math.inf, -math.inf, True, False, "1", "NaN", "1e999", "", None, [1], {"a": 1})
SPECIAL = ("<|im_start|>", "<|im_end|>", "</s>", "<think>", "</think>", "<tool_call>", "{{ 7 * 7 }}", "{% for %}")
ALPHABETS = ("a b", "ab\n", "0123456789", "aé\u4e2d\U0001f600", "\ud800", "\0", "e\u0301\u0301", '"\\', " \t\u2028")
ATOMS = ("a", "b", ".", "\\d", "\\w", "[a-z]", "[^a]", "\\s", "é", "\\u00e9", "^", "$", "\\b", "\\")
TYPES = ("string", "integer", "number", "boolean", "null", ["string", "null"], "odd", 3)
DEEP = ("items", "not", "additionalProperties", "oneOf", "anyOf", "allOf", "properties", "if")
PLAIN = {"role": "user", "content": "Hello"}


class Draw(random.Random):
    """Random numbers of a seed, and the draws that the generators share."""

    def size(self, most: int) -> int:
        """A whole number from 0 to `most`, on a logarithmic scale."""
        return int(math.exp(self.uniform(0, math.log(most + 1)))) - self.randrange(2)

    def chance(self, share: float) -> bool:
        return self.random() < share

    def some(self, make: Callable[["Draw"], Any], most: int) -> list[Any]:
        """A list of drawn values; a long one repeats a few, as a hundred thousand draws would take long."""
        size = self.size(most)
        few = [make(self) for _ in range(min(size, 8))]
        return [few[at % len(few)] for at in range(size)]


def number(draw: Draw) -> Any:
    return draw.choice(NUMBERS + NO_NUMBERS) if draw.chance(0.5) else draw.randrange(-5, 300)


def text(draw: Draw, most: int = 200_000) -> str:
    """A text: words, one repeated character, characters of an odd alphabet, special tokens, or nearly a match."""
    size, letters = draw.size(most), draw.choice(ALPHABETS)
    match draw.randrange(6):
        case 0:
            return " ".join(draw.choices(("the", "cat", "sat", "on", "a", "mat"), k=min(size, 40)))
        case 1:
            return "".join(draw.choices(letters, k=min(size, 2000)))
        case 2:
            return letters[0] * size
        case 3:
            return draw.choice(SPECIAL) * min(size, 3000)
    return draw.choice((NEAR, letters))


def name(draw: Draw) -> str:
    return draw.choice(("a", "b", "aa", NEAR, f"p{draw.randrange(200)}")) if draw.chance(0.9) else text(draw, 300)


def duration(draw: Draw) -> Any:
    """A duration as Go writes them, or nearly one."""
    part = draw.choice(("1", ".5", "1.", "1.5", "9" * draw.size(20_000))) + draw.choice(("ns", "s", "m", "h", "x", ""))
    long = draw.choice(("1", "1.", "1s", "300ms")) * draw.size(20_000) + draw.choice(("", "x", "s"))
    return draw.choice((number(draw), part * draw.randrange(1, 4), f"-{part}", long, long, "0", "5m"))


def pattern(draw: Draw, depth: int = 4) -> str:
    """A pattern: one that is known to be hard, or nested groups, alternations, classes and repeats."""
    if draw.chance(0.3):
        return draw.choice(EVIL)
    if draw.chance(0.03):
        return draw.choice(("(" * 500 + "a" + ")" * 500, "a|" * draw.size(5000), "(a*)*" * draw.size(500)))
    if depth == 0:
        return draw.choice(ATOMS)
    joined = draw.choice(("", "|")).join(pattern(draw, depth - 1) for _ in range(draw.randrange(1, 4)))
    low = draw.size(5000)
    repeat = draw.choice(("", "*", "+", "?", "*?", f"{{{low}}}", f"{{{low},}}", f"{{0,{low}}}"))
    return f"{draw.choice(('(', '(?:', '(?=', '(?!', '(?<n>', '('))}{joined}){repeat}" if draw.chance(0.8) else joined


def schema(draw: Draw, depth: int = 3) -> Any:
    """A JSON schema: a tree of all keywords, or one keyword very deep, very wide or recursive."""
    if depth == 3 and draw.chance(0.3):
        return draw.choice((_wide_schema, _deep_schema))(draw)
    if depth == 0 or draw.chance(0.3):
        return _simple_schema(draw)
    below = [schema(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
    first, maps = below[0], {pattern(draw): one for one in below}
    whole = {"type": "object", "properties": {name(draw): one for one in below}, "required": [name(draw), "a"]}
    listed = {"type": "array", "minItems": draw.size(10**6), draw.choice(("items", "contains")): first}
    more = (
        *({"patternProperties": maps}, {"propertyNames": first}, {"additionalProperties": first}, {}),
        *({"dependentSchemas": {"a": first}}, {"dependencies": {"a": ["b"], "b": first}}, {"minProperties": 99}),
        *({"uniqueItems": True}, {"prefixItems": below}, {"if": first, "then": below[-1], "else": False}),
    )
    forms = ({draw.choice(("oneOf", "anyOf", "allOf")): below}, {"not": first}, listed, whole, whole)
    return draw.choice(forms) | draw.choice(more) | draw.choice(more)


def _simple_schema(draw: Draw) -> Any:
    values, low = [NEAR, name(draw), number(draw), None, [], {"a": NEAR}], number(draw)
    forms = (
        *({"type": draw.choice(TYPES)}, {"enum": values, "pattern": pattern(draw)}, {"const": draw.choice(values)}),
        *({"enum": values[: draw.randrange(7)]}, {"type": "string", "format": draw.choice(("uuid", "regex"))}),
        {"type": "string", "pattern": pattern(draw), "maxLength": draw.size(100_000)},
        {"type": "integer", "minimum": low, "maximum": number(draw), "multipleOf": number(draw)},
        {"$ref": draw.choice(("#", "#/$defs/a", "#/$defs/none", "http://x/y", "#/properties/a"))},
        draw.choice((True, False, {})),
    )
    return draw.choice(forms)


def _wide_schema(draw: Draw) -> Any:
    """One keyword with so many parts that work for each pair of them shows."""
    forms: tuple[Callable[[int], Any], ...] = (
        lambda at: {"type": "string", "pattern": f"^{pattern(draw, 2)}{at}$"},
        lambda at: {"enum": [f"{at} {n}" for n in range(20)]},
        lambda at: {"$ref": f"#/$defs/{'ab'[at % 2]}"},
        lambda _: _simple_schema(draw),
    )
    make, size = draw.choice(forms), draw.size(300)
    parts, two = [make(at) for at in range(size)], {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}
    enum = {"enum": [f"{at}{NEAR}" for at in range(20 * size)], "pattern": draw.choice(EVIL)}
    wide = {"type": "object", "properties": {f"p{at}": one for at, one in enumerate(parts)}}
    return draw.choice(({"oneOf": parts}, {"anyOf": parts}, {"allOf": parts}, enum, wide)) | {
        "$defs": {"a": two, "b": two}
    }


def _deep_schema(draw: Draw) -> Any:
    key, found = draw.choice(DEEP), {"type": "string"}
    for _ in range(draw.size(400)):
        found = {key: [found, {"const": 1}] if key.endswith("Of") else {"a": found} if key == "properties" else found}
    return found


def grammar(draw: Draw) -> str:
    """A grammar of llama.cpp's or Lark's form, often with a rule that is left-recursive, huge or absent."""
    arrow, first = draw.choice((("::=", "root"), (":", "start")))
    rules = [first, "b", *(f"r{at}" for at in range(draw.size(200)))]
    huge = (f'"a"{{1,{draw.size(10**6)}}}', "(" * draw.size(2000) + '"a"')
    words = ('"a"', "[a-z]", '""', "b", *huge, *rules)
    lines = [" ".join((rule, arrow, *(draw.choice(words) + draw.choice("*+?| ") for _ in "abc"))) for rule in rules]
    return "\n".join(lines) if draw.chance(0.8) else f"{first} {arrow} /{pattern(draw)}/"


def tool(draw: Draw) -> Any:
    about = {"name": draw.choice(("f", "g", "a.b", "x" * 64, name(draw))), "description": text(draw, 500)}
    about |= {draw.choice(("parameters", "input_schema")): schema(draw)} | draw.choice(({}, {"strict": True}))
    return draw.choice(({"type": "function", "function": about}, {"type": "function", **about}, about))


def message(draw: Draw) -> Any:
    """A message of a conversation in the words of any API, sometimes of a role or a form that none has."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": draw.choice(('{"a": 1}', "{", {}))}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * draw.size(100_000)}}
    parts = [{"type": "text", "text": text(draw, 500)}, draw.choice((image, {}))]
    role = draw.choice(("user", "user", "assistant", "system", "tool", "developer", "odd", ""))
    found = {"role": role, "content": draw.choice((text(draw, 5000), text(draw, 5000), parts, None, number(draw)))}
    return found | draw.choice(({}, {"tool_calls": [call]}, {"tool_call_id": "c1"}))


def conversation(draw: Draw) -> list[Any]:
    few, many = draw.some(message, 8), draw.some(message, 3000)
    return draw.choice((few, few, [PLAIN, *many], [PLAIN] * draw.size(20_000)))


def biases(draw: Draw) -> Any:
    ids = range(draw.size(50_000))
    return draw.choice(({str(one): 1 + one % 9 for one in ids}, [[one, 1] for one in ids], [[text(draw, 50), 1]]))


def tree(draw: Draw) -> Any:
    """A value of any JSON type: small, deep or wide."""
    deep: Any = number(draw)
    for _ in range(draw.size(300)):
        deep = [deep] if draw.chance(0.5) else {"a": deep}
    wide = {f"k{at}": at for at in range(draw.size(5000))}
    return draw.choice((number(draw), text(draw), deep, wide, draw.some(number, 100_000), draw.some(text, 30)))
