"""The bytes of each token, whose concatenation is the text.

The library's decoder returns a string, which loses the bytes of characters that several tokens share. This module has
one byte string per token, *middle* or *first* (at the start of a text, where Llama 2 drops a space), so that

    text = utf8(first(t0) + middle(t1) + middle(t2) + ...)

A decoder may drop a character behind another one, such as a space at the start of a line: then the bytes of a token
depend on whether the text before it ends in `before` (`following`). Of consecutive byte tokens that are not UTF-8 the
library replaces all; we replace the invalid bytes.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from tokenwright.errors import CheckpointError

_ANCHOR = "a"  # decoded before a token to get its middle form
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes: visible Latin-1 maps to itself, the rest to U+0100 and up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return alphabet


BYTE_ALPHABET: Mapping[str, int] = _byte_alphabet()


class Pieces:
    """Maps a token string to its bytes, as one tokenizer's decoder does. Raises CheckpointError if it cannot.

    `decoder`: None if tokens are joined by spaces. `byte_level`: token strings are in GPT-2's byte alphabet.
    """

    def __init__(self, decoder: Any) -> None:
        kinds, dropped = ((), "") if decoder is None else _kinds(json.loads(decoder.__getstate__()))
        self._decoder = decoder
        self._anchor = self._decode([_ANCHOR])
        self.byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self.before, self._dropped = dropped[:1].encode(), dropped[1:].encode()

    def first(self, token: str) -> bytes:
        raw = self._raw(token)
        return self._decode([token]) if raw is None else raw

    def middle(self, token: str) -> bytes:
        raw = self._raw(token)
        return self._decode([_ANCHOR, token]).removeprefix(self._anchor) if raw is None else raw

    def following(self, token: str) -> bytes:
        return self.middle(token).removeprefix(self._dropped)

    def _raw(self, token: str) -> bytes | None:
        """None for a token that is a string."""
        if self.byte_level:
            if all(char in BYTE_ALPHABET for char in token):
                return bytes(BYTE_ALPHABET[char] for char in token)
            return token.encode()
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if match is not None and int(match[1], 16) >= 0x80:
            return bytes([int(match[1], 16)])
        return None  # ASCII byte tokens are whole characters: the library's decoder handles them

    def _decode(self, tokens: list[str]) -> bytes:
        text: str = " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)
        return text.encode()


def _kinds(spec: Mapping[str, Any]) -> tuple[Collection[str], str]:
    """The kinds in `spec` (as in tokenizer.json); a character and the one dropped behind it. Raises CheckpointError."""
    chain = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = {str(step["type"]) for step in chain}
    fused, dropped = False, ""
    for step in chain:
        if (
            not _by_token(step, fused)
            or (dropped and step["type"] == "Replace")
            or ("ByteLevel" in kinds and step["type"] not in ("ByteLevel", "Fuse"))
        ):
            raise CheckpointError(
                f"tokenizer.json has the decoder {step}, which cannot be applied token by token, as streams "
                "need; supported are ByteLevel, Metaspace, WordPiece, and sequences of Replace, "
                "ByteFallback, Fuse and Strip"
            )
        fused = fused or step["type"] == "Fuse"
        dropped = step["pattern"]["String"] if fused and _drops(step) else dropped
    return kinds, dropped


def _drops(step: Mapping[str, Any]) -> bool:
    pattern = step["pattern"].get("String", "") if step["type"] == "Replace" else ""
    return len(pattern) == 2 and pattern[0] == step["content"] != pattern[1]


def _by_token(step: Mapping[str, Any], fused: bool) -> bool:
    """Whether a decoder maps token by token, the first token aside; `fused`: it works on the joined text."""
    kind = step["type"]
    if kind == "Replace":
        return not fused or len(step["pattern"].get("String", "")) == 1 or _drops(step)
    if kind == "Strip":
        return not fused or (step["start"] <= 1 and step["stop"] == 0)
    if kind in ("Metaspace", "WordPiece"):
        return not fused
    return kind in ("ByteLevel", "ByteFallback", "Fuse")
