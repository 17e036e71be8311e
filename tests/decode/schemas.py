"""Seeded JSON schemas of every kind that people write, and instances of them.

Everything is bounded, so that a text that follows a schema comes to its end: strings and arrays have a most length,
integers a range. Optional properties stand after required ones or among them.
"""

import random
import string
from typing import Any

Schema = dict[str, Any]

KEYS = ("name", "age", "color", "größe", "名前", "is it?", 'a "b"', "back\\slash", "tab\there", "emoji 😀", "x", "")
TEXTS = ("red", "dark green", "größer", "日本", "😀", 'say "hi"', "a\\b", "two\nlines", "", "null", "1")
LETTERS = string.ascii_letters + ' éñ中😀"\\\n'


def schema(rng: random.Random, depth: int = 3) -> Schema:
    """A schema, nested at most `depth` deep."""
    leaves = (text, pattern, integer, number, enum, const, boolean, null)
    nested = (obj, obj, array, any_of, ref)
    made: Schema = rng.choice(leaves if depth == 0 else nested)(rng, depth - 1)
    if rng.random() < 0.1:
        made["description"] = "what it is for"
    return made


def document(rng: random.Random, depth: int = 3) -> Schema:
    """A schema whose root is an object."""
    return obj(rng, depth - 1)


def text(rng: random.Random, depth: int) -> Schema:
    least = rng.choice((0, 0, 1, 3))
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def pattern(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": rng.choice((r"^[A-Z][a-z]{1,8}$", r"^\d{3}-\d{4}$", "^(yes|no|maybe)$"))}


def integer(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(-1000, 1000)
    made: Schema = {"type": "integer", "minimum": least, "maximum": least + rng.choice((0, 1, 50, 100_000))}
    if rng.random() < 0.2:
        made = {"type": "integer", "exclusiveMinimum": 0, "maximum": 1000, "multipleOf": rng.choice((2, 5, 7))}
    return made


def number(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(-100, 100) / 4
    return {"type": "number", "minimum": least, "maximum": least + rng.choice((0.5, 10, 1e6))}


def enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample((*TEXTS, 1, 2.5, True, None, [1, "é"], {"k": "v"}), rng.randint(1, 6))}


def const(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice((*TEXTS, 0, False, None, ["a", 1], {"größe": 1}))}


def boolean(rng: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}


def null(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(("null", ["null", "boolean"]))}


def obj(rng: random.Random, depth: int) -> Schema:
    keys = rng.sample(KEYS, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {key: schema(rng, rng.randint(0, max(depth, 0))) for key in keys},
        "required": [key for key in keys if rng.random() < 0.6],
        "additionalProperties": False,
    }


def array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    made: Schema = {"type": "array", "minItems": least, "maxItems": least + rng.randint(0, 3)}
    made["items"] = schema(rng, max(depth, 0) and depth - 1)
    return made


def any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [schema(rng, rng.randint(0, max(depth, 0))) for _ in range(rng.randint(1, 3))]}


def ref(rng: random.Random, depth: int) -> Schema:
    """A place that another one is like: `$defs` and `$ref` are put together by `whole`."""
    return {"$ref": rng.choice(("#/$defs/size", "#/$defs/tag"))}


DEFINITIONS: Schema = {
    "size": {"type": "object", "properties": {"w": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["w"],
             "additionalProperties": False},
    "tag": {"type": "string", "maxLength": 5},
}  # fmt: skip


def whole(made: Schema) -> Schema:
    """A schema with the definitions that it may refer to."""
    return made | {"$defs": DEFINITIONS}


def instance(rng: random.Random, made: Schema) -> Any:
    """A value that follows a schema of this generator."""
    if "$ref" in made:
        return instance(rng, DEFINITIONS[made["$ref"].rpartition("/")[2]])
    if "anyOf" in made:
        return instance(rng, rng.choice(made["anyOf"]))
    if "enum" in made or "const" in made:
        return rng.choice(made.get("enum") or [made.get("const")])
    kind = made["type"] if isinstance(made["type"], str) else rng.choice(made["type"])
    return _INSTANCES[kind](rng, made)


def _string(rng: random.Random, made: Schema) -> str:
    if "pattern" in made:
        return {"^[A": "Abc", r"^\d": "123-4567", "^(y": "maybe"}[made["pattern"][:3]]
    return "".join(rng.choices(LETTERS, k=rng.randint(made.get("minLength", 0), made["maxLength"])))


def _integer(rng: random.Random, made: Schema) -> int:
    if "multipleOf" in made:
        return rng.randint(1, made["maximum"] // made["multipleOf"]) * int(made["multipleOf"])
    return rng.randint(made["minimum"], made["maximum"])


def _number(rng: random.Random, made: Schema) -> float:
    return min(made["maximum"], made["minimum"] + rng.randint(0, 8) / 8)


def _object(rng: random.Random, made: Schema) -> dict[str, Any]:
    kept = [key for key in made["properties"] if key in made["required"] or rng.random() < 0.5]
    return {key: instance(rng, made["properties"][key]) for key in kept}


def _array(rng: random.Random, made: Schema) -> list[Any]:
    return [instance(rng, made["items"]) for _ in range(rng.randint(made["minItems"], made["maxItems"]))]


_INSTANCES = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "object": _object,
    "array": _array,
    "boolean": lambda rng, made: rng.random() < 0.5,
    "null": lambda rng, made: None,
}
