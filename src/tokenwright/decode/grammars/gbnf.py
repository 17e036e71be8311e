"""llama.cpp's grammar notation (GBNF), translated to llguidance's variant of Lark."""

import json
import re

from tokenwright.errors import RequestError

_TOKENS = re.compile(
    r"""(?P<space>[ \t]+|\#[^\n]*)|(?P<line>\r?\n)|(?P<is>::=)|(?P<name>[A-Za-z_][\w-]*)"""
    r"""|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<letters>\[\^?(?:[^\]\\]|\\.)*\])|(?P<any>\.)|(?P<times>[*+?]|\{\d+(?:,\d*)?\})|(?P<mark>[|()])""",
    re.ASCII,
)
_ESCAPES = re.compile(r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<one>.))")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}


def is_gbnf(grammar: str) -> bool:
    return "::=" in grammar


def lark_of(grammar: str) -> str:
    """The Lark grammar of a GBNF grammar, whose rule `root` becomes `start`. Raises RequestError."""
    tokens = list(_scan(grammar))
    heads = [at for at, (kind, _) in enumerate(tokens) if kind == "is"]
    if not heads or any(at == 0 or tokens[at - 1][0] != "name" for at in heads):
        raise RequestError("the grammar has a rule without a name; a rule is written as: name ::= items")
    names = [tokens[at - 1][1] for at in heads]
    if "root" not in names:
        raise RequestError("the grammar has no rule root, with which a text begins; add one: root ::= items")
    ends = [*(at - 1 for at in heads[1:]), len(tokens)]
    rules = [_rule(name, tokens[at + 1 : end]) for name, at, end in zip(names, heads, ends, strict=True)]
    return "\n".join(["start: " + _named("root"), *rules])


def _scan(grammar: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(grammar):
        match = _TOKENS.match(grammar, at)
        if match is None:
            line = grammar.count("\n", 0, at) + 1
            raise RequestError(f"the grammar has something unknown in line {line}: {grammar[at : at + 20]!r}")
        kind = str(match.lastgroup)
        if kind not in ("space", "line"):
            found.append((kind, match.group()))
        at = match.end()
    return found


def _rule(name: str, tokens: list[tuple[str, str]]) -> str:
    items = " ".join(_item(kind, text) for kind, text in tokens)
    return f"{_named(name)}: {re.sub(r' (?=[*+?{])', '', items)}"


def _item(kind: str, text: str) -> str:
    match kind:
        case "name":
            return _named(text)
        case "text":
            return json.dumps(_ESCAPES.sub(_letter, text[1:-1]), ensure_ascii=False) if text != '""' else '""'
        case "letters":
            return f"/{text.replace('/', chr(92) + '/')}/" if text not in ("[]", "[^]") else _empty(text)
        case "any":
            return "/(?s:.)/"
        case _:
            return text


def _empty(text: str) -> str:
    raise RequestError(f"the grammar has the empty class {text}; write the letters that it allows")


def _named(name: str) -> str:
    return "r_" + "".join(letter if letter.islower() or letter.isdigit() else f"_{ord(letter)}_" for letter in name)


def _letter(match: re.Match[str]) -> str:
    code = match["x"] or match["u"] or match["U"]
    return chr(int(code, 16)) if code else _LETTERS.get(match["one"], match["one"])
