"""Read a SentencePiece model (tokenizer.model, a protocol buffer) as untrusted input, and build its tokenizer."""

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from tokenizers import AddedToken, Tokenizer, models, normalizers

from tokenwright.errors import CheckpointError, fetch_again
from tokenwright.regular_file import read_regular
from tokenwright.text.bpe import USER, sentencepiece, spaces_restored, with_added

_LARGEST = 1 << 28  # bytes of a file; a vocabulary of 256,000 pieces takes some 4 MiB
_UNIGRAM, _BPE = 1, 2
_NORMAL = 1
_WORDS = {3: "word", 4: "char"}
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # wire types
_SPECIAL = (("unknown", 40, 0), ("bos", 41, 1), ("eos", 42, 2))  # numbers of the trainer's fields, and defaults
Fields = dict[int, list[int | bytes]]  # of a message: floats as four bytes
Value = TypeVar("Value", int, bytes)


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    pieces: list[str]
    scores: list[float]
    kinds: list[int]  # 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
    algorithm: int
    byte_fallback: bool
    special: dict[str, int]
    charsmap: bytes
    prefix: bool  # a space before the text
    squeeze: bool  # several spaces are one, and none stand at the ends

    def named(self, kind: str) -> tuple[str, ...]:
        at = self.special[kind]
        return (self.pieces[at],) if 0 <= at < len(self.pieces) else ()

    @property
    def adds_bos(self) -> bool:
        """Whether a text begins with BOS unless a config says otherwise."""
        return self.algorithm == _BPE


def read_model(file: Path) -> SentencePieceModel:
    try:
        if file.stat().st_size > _LARGEST:
            raise CheckpointError(f"{file} is too large for a tokenizer; {fetch_again(file)}")
        data = read_regular(file)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    if re.match(rb"[\w+/]+=* \d+\n", data):
        raise CheckpointError(f"{file} is tiktoken's, without the rules for cutting text; add tokenizer.json")
    try:
        model = _model(data)
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{file} is no SentencePiece model ({error}); {fetch_again(file)}") from error
    if model.algorithm in _WORDS:
        raise CheckpointError(f"{file} is a {_WORDS[model.algorithm]} model; Tokenwright reads BPE and unigram models")
    return model


def build(model: SentencePieceModel) -> Tokenizer:
    """The tokenizer of a model. Raises CheckpointError."""
    unknown = model.special["unknown"]
    if len(set(model.pieces)) < len(model.pieces):
        raise CheckpointError("it has the same piece twice, so that one of them could not be written")
    if not 0 <= unknown < len(model.pieces):
        raise CheckpointError(f"its unknown piece {unknown} is none of its {len(model.pieces):,} pieces")
    if model.algorithm == _BPE:
        library = sentencepiece(model.pieces, model.scores, model.kinds, unknown, prefix=model.prefix)
    else:
        library = Tokenizer(models.Unigram(_scored(model), unknown, model.byte_fallback))
        library.decoder = spaces_restored(prefix=model.prefix)
    library.normalizer = None  # `Normalizer` does it
    return with_added(library, model.pieces, model.kinds)


def _scored(model: SentencePieceModel) -> list[tuple[str, float]]:
    """The pieces with scores by which those that no text has, such as bytes, come last."""
    given = list(zip(model.pieces, model.scores, model.kinds, strict=True))
    least = min((score for _, score, kind in given if kind == _NORMAL), default=0.0)
    return [(piece, score if kind == _NORMAL else 7 * least - 70) for piece, score, kind in given]


class Normalizer:
    """SentencePiece's normalizer. A user-defined symbol is part of a text; other control tokens stand between texts."""

    def __init__(self, model: SentencePieceModel, added: Mapping[int, AddedToken]) -> None:
        self._model, self._added = model, added
        self._charsmap = normalizers.Precompiled(model.charsmap) if model.charsmap else None

    def __call__(self, parts: Sequence[str | int], split: Callable[[str], list[str | int]]) -> list[str | int]:
        """The normal form of strings, which are `split` at added tokens, and of tokens among them (ids)."""
        cut: list[str | int] = []
        for kind, group in groupby(parts, type):
            some = list(group)
            cut += split("".join(map(str, some))) if kind is str else some
        texts = groupby(self._stripped(cut), self._is_text)
        return [one for is_text, some in texts for one in (self._text(list(some)) if is_text else some)]

    def _is_text(self, part: str | int) -> bool:
        return isinstance(part, str) or (part < len(self._model.kinds) and self._model.kinds[part] == USER)

    def _stripped(self, parts: Sequence[str | int]) -> Iterator[str | int]:
        """The parts without the spaces that tokens take with them."""
        for before, part, after in zip([None, *parts], parts, [*parts[1:], None], strict=False):
            if isinstance(part, str) and isinstance(before, int) and self._added[before].rstrip:
                part = part.lstrip()
            if isinstance(part, str) and isinstance(after, int) and self._added[after].lstrip:
                part = part.rstrip()
            yield part

    def _text(self, parts: Sequence[str | int]) -> list[str | int]:
        normal = [self._mapped(part) if isinstance(part, str) else part for part in parts]
        if self._model.squeeze and isinstance(first := normal[0], str):
            normal[0] = first.lstrip(" ")
        if self._model.squeeze and isinstance(last := normal[-1], str):
            normal[-1] = last.rstrip(" ▁")
        if set(normal) == {""}:
            return []
        spaced = [part.replace(" ", "▁") if isinstance(part, str) else part for part in normal]
        return ["▁", *spaced] if self._model.prefix else spaced

    def _mapped(self, text: str) -> str:
        if self._charsmap is not None:  # which takes a line break of Windows for one character
            text = "".join(map(self._charsmap.normalize_str, re.split(r"(?<=\r)", text)))
        return re.sub(" {2,}", " ", text) if self._model.squeeze else text


def _model(data: bytes) -> SentencePieceModel:
    whole = _fields(data)
    pieces = [_fields(one) for one in _all(whole, 1)]
    trainer, normalizer = (_fields(b"".join(_all(whole, at))) for at in (2, 3))
    if not pieces:
        raise ValueError("it has no pieces")
    if _last(trainer, 24, 0):
        raise CheckpointError("tokenizer.model has spaces behind words, not before them; add its tokenizer.json")
    special = {name: _last(trainer, at, default) for name, at, default in _SPECIAL}
    return SentencePieceModel(
        pieces=[_last(one, 1, b"").decode("utf-8") for one in pieces],
        scores=[struct.unpack("<f", _last(one, 2, bytes(4)))[0] for one in pieces],
        kinds=[_last(one, 3, _NORMAL) for one in pieces],
        algorithm=_last(trainer, 3, _UNIGRAM),
        byte_fallback=bool(_last(trainer, 35, 0)),
        special={name: at - (1 << 64) if at >= 1 << 63 else at for name, at in special.items()},
        charsmap=_last(normalizer, 2, b""),
        prefix=bool(_last(normalizer, 3, 1)),
        squeeze=bool(_last(normalizer, 4, 1)),
    )


def _fields(data: bytes) -> Fields:
    found: Fields = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        size = {_VARINT: 0, _EIGHT: 8, _FOUR: 4}.get(kind)
        if kind in (_VARINT, _BYTES):
            number, at = _varint(data, at)
            size = number if kind == _BYTES else 0
        if size is None or at + size > len(data):
            raise ValueError(f"byte {at} begins a field of an unknown type, or one beyond the end")
        found.setdefault(key >> 3, []).append(number if kind == _VARINT else data[at : at + size])
        at += size
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError(f"byte {at} ends no number")


def _all(fields: Fields, number: int) -> list[bytes]:
    return [_last({number: [one]}, number, b"") for one in fields.get(number, ())]


def _last(fields: Fields, number: int, default: Value) -> Value:
    value = fields.get(number, [default])[-1]
    if not isinstance(value, type(default)):
        raise ValueError("a number stands where bytes belong, or bytes where a number belongs")
    return value
