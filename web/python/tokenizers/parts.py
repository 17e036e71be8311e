"""The parts of a tokenizer around its model, as tokenizer.json has them: text to words, tokens to text.

The constructors are those of the `tokenizers` library; a part that is not done here is refused.
"""

import json
import re
import unicodedata
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from tokenwright.errors import CheckpointError

from .unicode_patterns import SPACE, compiled

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Regex(str):
    """A text that is a pattern."""


class TokenizerPart(dict[str, Any]):
    """A part of a tokenizer, as tokenizer.json has it."""

    def __getstate__(self) -> bytes:  # as the library's parts have it
        return json.dumps(self).encode()

    def decode(self, tokens: Sequence[str]) -> str:
        """The text of tokens, of a decoder."""
        return "".join(_decoded(self, list(tokens)))


def _of(kind: str, *names: str, **fixed: Any) -> Any:
    """A constructor of parts. names: of its arguments."""

    def make(*given: Any, **more: Any) -> TokenizerPart:
        values = dict(zip(names, given, strict=False)) | more
        if "pattern" in values:
            values["pattern"] = {"Regex" if isinstance(values["pattern"], Regex) else "String": str(values["pattern"])}
        if "behavior" in values:
            values["behavior"] = values["behavior"].title()
        return TokenizerPart({"type": kind, **fixed, **values})

    return make


def _template(single: str, special_tokens: Iterable[tuple[str, int]]) -> TokenizerPart:
    """single: "$A" and special tokens, with spaces between."""
    known = {name: {"id": name, "ids": [at], "tokens": [name]} for name, at in special_tokens}
    parts = [
        {"Sequence": {"id": "A", "type_id": 0}} if part == "$A" else {"SpecialToken": {"id": part, "type_id": 0}}
        for part in single.split(" ")
    ]
    return TokenizerPart(type="TemplateProcessing", single=parts, pair=parts, special_tokens=known)


normalizers = SimpleNamespace(
    NFC=_of("NFC"),
    Prepend=_of("Prepend", "prepend"),
    Replace=_of("Replace", "pattern", "content"),
    Strip=_of("Strip", strip_left=True, strip_right=True),
    Precompiled=lambda charsmap: TokenizerPart(type="Precompiled", precompiled_charsmap=b64encode(charsmap).decode()),
    Sequence=_of("Sequence", "normalizers"),
)
pre_tokenizers = SimpleNamespace(
    ByteLevel=_of("ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True),
    Split=_of("Split", "pattern", "behavior", invert=False),
    Metaspace=_of("Metaspace"),
    Sequence=_of("Sequence", "pretokenizers"),
)
decoders = SimpleNamespace(
    ByteLevel=_of("ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True),
    Replace=_of("Replace", "pattern", "content"),
    ByteFallback=_of("ByteFallback"),
    Fuse=_of("Fuse"),
    Strip=_of("Strip", "content", "start", "stop"),
    Sequence=_of("Sequence", "decoders"),
    Decoder=TokenizerPart,
)
models = SimpleNamespace(BPE=_of("BPE"), Unigram=_of("Unigram", "vocab", "unk_id", "byte_fallback"))
processors = SimpleNamespace(TemplateProcessing=_template)


def refusal(what: str, part: object) -> CheckpointError:
    return CheckpointError(f"this tokenizer has the {what} {part}, which needs a package; run: pip install tokenizers")


def _pattern(part: Mapping[str, Any]) -> "re.Pattern[str]":
    found = part["pattern"]
    return compiled(found["Regex"]) if "Regex" in found else re.compile(re.escape(found["String"]))


def normalised(part: Mapping[str, Any] | None, text: str) -> str:
    match part:
        case None:
            return text
        case {"type": "Sequence", "normalizers": steps}:
            for step in steps:
                text = normalised(step, text)
            return text
        case {"type": "NFC" | "NFD" | "NFKC" | "NFKD" as form}:
            return unicodedata.normalize(form, text)
        case {"type": "Replace", "content": content}:
            return _pattern(part).sub(lambda _: content, text)
        case {"type": "Prepend", "prepend": before}:
            return before + text if text else text
        case {"type": "Strip", "strip_left": left, "strip_right": right}:
            text = text.lstrip(SPACE) if left else text
            return text.rstrip(SPACE) if right else text
        case {"type": "Lowercase"}:
            return text.lower()
    raise refusal("normalizer", part["type"])


def words_of(part: Mapping[str, Any] | None, words: list[str], *, opens: bool) -> list[str]:
    """The words of a text, from the pre-tokenizer. opens: whether the text begins with them."""
    match part:
        case None:
            return words
        case {"type": "Sequence", "pretokenizers": steps}:
            for step in steps:
                words = words_of(step, words, opens=opens)
            return words
        case {"type": "ByteLevel", "add_prefix_space": prefix}:
            if prefix:
                words = [word if word.startswith(" ") else " " + word for word in words]
            if part.get("use_regex", True):
                words = [piece for word in words for piece in _cut(compiled(_GPT2), word, "Isolated")]
            return ["".join(map(_letters().__getitem__, word.encode())) for word in words]
        case {"type": "Split", "behavior": behavior, "invert": False}:
            return [piece for word in words for piece in _cut(_pattern(part), word, behavior)]
        case {"type": "Digits", "individual_digits": each}:
            pattern = compiled(r"\p{N}" if each else r"\p{N}+")
            return [piece for word in words for piece in _cut(pattern, word, "Isolated")]
        case {"type": "Metaspace", "replacement": mark}:
            words = [word.replace(" ", mark) for word in words]
            scheme = part.get("prepend_scheme", "always")
            if words and (scheme == "always" or (scheme == "first" and opens)):
                count = len(words) if scheme == "always" else 1
                words[:count] = [word if word.startswith(mark) else mark + word for word in words[:count]]
            if not part.get("split", True):
                return words
            return [piece for word in words for piece in _cut(re.compile(re.escape(mark)), word, "MergedWithNext")]
    raise refusal("pre-tokenizer", part["type"])


def _cut(pattern: "re.Pattern[str]", text: str, behavior: str) -> list[str]:
    """The pieces of a text: the matches of a pattern, and what lies between them."""
    places = [match.span() for match in pattern.finditer(text) if match.end() > match.start()]
    match behavior:
        case "Isolated" | "Removed":
            cuts = {0, len(text), *(place for span in places for place in span)}
        case "MergedWithPrevious":
            cuts = {0, len(text), *(end for _, end in places)}
        case "MergedWithNext":
            cuts = {0, len(text), *(start for start, _ in places)}
        case _:
            raise refusal("behavior of a split", behavior)
    ends, removed = sorted(cuts), set(places) if behavior == "Removed" else ()
    return [text[a:b] for a, b in pairwise(ends) if (a, b) not in removed]


def post_processed(part: Mapping[str, Any] | None, ids: list[int]) -> list[int]:
    match part:
        case None | {"type": "ByteLevel"}:
            return ids
        case {"type": "Sequence", "processors": steps}:
            for step in steps:
                ids = post_processed(step, ids)
            return ids
        case {"type": "TemplateProcessing", "single": single, "special_tokens": known}:
            each = (ids if "Sequence" in one else known[one["SpecialToken"]["id"]]["ids"] for one in single)
            return [at for some in each for at in some]
        case {"type": "RobertaProcessing" | "BertProcessing", "cls": [_, first], "sep": [_, last]}:
            return [first, *ids, last]
    raise refusal("post-processor", part["type"])


def _decoded(part: Mapping[str, Any], tokens: list[str]) -> list[str]:
    """Tokens after a step of a decoder; together they are the text."""
    match part:
        case {"type": "Sequence", "decoders": steps}:
            for step in steps:
                tokens = _decoded(step, tokens)
            return tokens
        case {"type": "ByteLevel"}:
            whole = b"".join(_bytes_of(token) for token in tokens)
            return [whole.decode("utf-8", "replace")]
        case {"type": "Replace", "content": content}:
            return [_pattern(part).sub(lambda _: content, token) for token in tokens]
        case {"type": "Fuse"}:
            return ["".join(tokens)]
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return [_stripped(token, content, start, stop) for token in tokens]
        case {"type": "Metaspace", "replacement": mark}:
            prefix = part.get("prepend_scheme", "always") != "never"
            texts = [token.replace(mark, " ") for token in tokens]
            return [texts[0].removeprefix(" "), *texts[1:]] if texts and prefix else texts
        case {"type": "ByteFallback"}:
            return list(_with_bytes(tokens))
    raise refusal("decoder", part["type"])


def _alphabet() -> Mapping[str, int]:
    from tokenwright.text.tokenizer import BYTE_ALPHABET  # here: that module imports this package

    return BYTE_ALPHABET


@cache
def _letters() -> Mapping[int, str]:
    return {byte: char for char, byte in _alphabet().items()}


def _bytes_of(token: str) -> bytes:
    alphabet = _alphabet()
    known = all(char in alphabet for char in token)
    return bytes(map(alphabet.__getitem__, token)) if known else token.encode()


def _stripped(token: str, content: str, start: int, stop: int) -> str:
    for _ in range(start):
        token = token.removeprefix(content)
    for _ in range(stop):
        token = token.removesuffix(content)
    return token


def _with_bytes(tokens: Sequence[str]) -> Iterator[str]:
    """Tokens of bytes as their characters; each byte of what is none becomes U+FFFD."""
    held = bytearray()
    for token in (*tokens, None):
        match = None if token is None else _BYTE.fullmatch(token)
        if match is not None:
            held.append(int(match[1], 16))
            continue
        if held:
            try:
                yield held.decode()
            except UnicodeDecodeError:
                yield "\ufffd" * len(held)
            held = bytearray()
        if token is not None:
            yield token
