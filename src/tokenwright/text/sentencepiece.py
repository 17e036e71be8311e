"""Read a SentencePiece model (tokenizer.model, a protocol buffer) as untrusted input, and build its tokenizer."""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers

from tokenwright.errors import CheckpointError, fetch_again
from tokenwright.regular_file import read_regular
from tokenwright.text.bpe import sentencepiece, spaces_restored, with_added

_LARGEST = 1 << 28  # bytes of a file; a vocabulary of 256,000 pieces takes some 4 MiB
_UNIGRAM, _BPE = 1, 2
_WORDS = {3: "word", 4: "char"}
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # wire types


@dataclass(slots=True)
class SentencePieceModel:
    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)  # 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
    algorithm: int = _UNIGRAM
    byte_fallback: bool = False
    special: dict[str, int] = field(default_factory=lambda: {"unknown": 0, "bos": 1, "eos": 2})
    charsmap: bytes = b""
    prefix: bool = True  # a space before the text
    squeeze: bool = True  # several spaces are one, and none stand at the ends

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
        library = _unigram(model)
    before = [] if library.normalizer is None else [library.normalizer]
    composed = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    squeezed = ((r"\A +| +\z", ""), (" {2,}", " ")) if model.squeeze else ()
    spaces = [normalizers.Replace(Regex(pattern), new) for pattern, new in squeezed]
    library.normalizer = normalizers.Sequence([*composed, *spaces, *before])
    return with_added(library, model.pieces, model.kinds)


def _unigram(model: SentencePieceModel) -> Tokenizer:
    unknown = model.special["unknown"]
    vocab = list(zip(model.pieces, model.scores, strict=True))
    library = Tokenizer(models.Unigram(vocab, unknown, model.byte_fallback))
    first = [normalizers.Prepend("▁")] if model.prefix else []
    library.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    library.decoder = spaces_restored(prefix=model.prefix)
    return library


def _model(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == 1:
            piece, score, kind = _piece(_message(value))
            model.pieces.append(piece)
            model.scores.append(score)
            model.kinds.append(kind)
        elif number == 2:
            _trainer(model, _message(value))
        elif number == 3:
            _normaliser(model, _message(value))
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = b"", 0.0, 1
    for number, value in _fields(data):
        if number == 1:
            text = _message(value)
        elif number == 2:
            [score] = struct.unpack("<f", _message(value))
        elif number == 3:
            kind = _whole(value)
    return text.decode("utf-8"), score, kind


def _trainer(model: SentencePieceModel, data: bytes) -> None:
    specials = {40: "unknown", 41: "bos", 42: "eos"}
    for number, value in _fields(data):
        if number == 3:
            model.algorithm = _whole(value)
        elif number == 35:
            model.byte_fallback = bool(_whole(value))
        elif number == 24 and _whole(value):
            raise CheckpointError("tokenizer.model has spaces behind words, not before them; add its tokenizer.json")
        elif number in specials:
            signed = _whole(value)
            model.special[specials[number]] = signed - (1 << 64) if signed >= 1 << 63 else signed


def _normaliser(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 2:
            model.charsmap = _message(value)
        elif number == 3:
            model.prefix = bool(_whole(value))
        elif number == 4:
            model.squeeze = bool(_whole(value))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: their numbers, and integers or bytes (a float's are four)."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {_EIGHT: 8, _FOUR: 4}.get(kind)
        if kind == _BYTES:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError(f"byte {at} begins a field of an unknown type, or one beyond the end")
        yield key >> 3, data[at : at + size]
        at += size


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


def _message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number stands where bytes belong")
    return value


def _whole(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes stand where a number belongs")
    return value
