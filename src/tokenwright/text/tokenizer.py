"""A checkpoint's tokenizer: text to ids, ids to text; thread-safe.

The `tokenizers` library splits text into tokens. Decoding is ours (`Pieces`): a text is the concatenation of its
tokens' bytes, so `decode` and the stream agree by construction.
"""

import json
import logging
import re
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Library

from tokenwright.errors import CheckpointError, RequestError
from tokenwright.text.control import ControlTokens, PlainTokenizer, written_like_a_tag
from tokenwright.text.files import TokenizerFiles, library_errors, read_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    """Maps the string of a token to its bytes, as one tokenizer's decoder does. Raises CheckpointError if it cannot.

    A decoder of the library maps a list of tokens to a string, which loses the bytes of characters that several tokens
    share. Here a token has one byte string after other text (`middle`), and one at the start of a text (`first`), where
    Llama 2 drops a space. Some decoders also drop a character after `before`, such as a space at the start of a line:
    there a token has a third one (`following`). Only the invalid bytes of byte tokens are replaced.

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
        """The bytes of a token that follows `before`."""
        return self.middle(token).removeprefix(self._dropped)

    def _raw(self, token: str) -> bytes | None:
        """The bytes of a token that encodes bytes; None for a token that is a string."""
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
    """The kinds in `spec` (as in tokenizer.json); a character and the one dropped after it. Raises CheckpointError."""
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
    """Whether a decoder maps token by token, except the first token. fused: it works on the joined text."""
    kind = step["type"]
    if kind == "Replace":
        return not fused or len(step["pattern"].get("String", "")) == 1 or _drops(step)
    if kind == "Strip":
        return not fused or (step["start"] <= 1 and step["stop"] == 0)
    return not fused if kind in ("Metaspace", "WordPiece") else kind in ("ByteLevel", "ByteFallback", "Fuse")


log = logging.getLogger(__name__)

_LONG = 4096  # characters; other threads run while a longer text is tokenised
_KEEPING = {"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"}  # pre-tokenizers that drop nothing
Encoded = TypeVar("Encoded", Encoding, list[Encoding])


def _encoded(library: Library, text: str) -> Encoding:
    """The encoding of `text` without special tokens. A long text is a batch, for which the library releases the GIL."""
    if len(text) <= _LONG:
        return _called(library.encode, text, add_special_tokens=False)
    [encoding] = _called(library.encode_batch_fast, [text], add_special_tokens=False)
    return encoding


def _called(function: Callable[..., Encoded], *given: object, **options: bool) -> Encoded:
    try:
        return function(*given, **options)
    except BaseException:  # the library's panics are no Exceptions
        with library_errors("the tokenizer failed on this text", RequestError):
            raise


def _steers(token: AddedToken) -> bool:
    return token.special or written_like_a_tag(token.content)


class Tokenizer:
    """The tokenizer of one checkpoint; `Tokenizer.load(folder)` reads it.

    `vocab_size`: number of ids, by default the tokenizer's; text with further tokens is refused.
    """

    def __init__(self, files: TokenizerFiles, vocab_size: int | None = None) -> None:
        self._library = files.library
        self._added = files.library.get_added_tokens_decoder()
        self._files = files
        self._pieces = Pieces(files.library.decoder)
        ids = files.library.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1 if vocab_size is None else vocab_size
        self.byte_tables = self._tables(False), self._tables(True)
        surplus = len([at for at in ids if at >= self.vocab_size])
        if surplus:
            log.warning(
                "the tokenizer has %d tokens beyond the model's %d rows, such as %r: texts with one are refused",
                surplus,
                self.vocab_size,
                files.library.id_to_token(max(ids)),
            )
        self.special_ids = frozenset(at for at, one in self._added.items() if one.special and at < self.vocab_size)
        self.control, self._words = self._those(_steers), self._those(lambda token: not _steers(token))
        self._plain = PlainTokenizer(files.library, self.control)
        self.bos_id = None if files.bos is None else self._with_row(files.bos)
        self.eos_ids = tuple(at for name in files.eos if (at := self._with_row(name)) is not None)

    @property
    def chat_template(self) -> str | None:
        return self._files.chat_template

    @property
    def tool_template(self) -> str | None:
        return self._files.tool_template

    @property
    def template_variables(self) -> Mapping[str, str | tuple[str, ...]]:
        return self._files.variables

    def first_other(self, other: "Tokenizer") -> int | None:
        """The first id of both tokenizers whose token differs in `other`; None: there is none."""
        here, there = (one._library.get_vocab(with_added_tokens=True) for one in (self, other))
        if here == there:
            return None
        least = min(self.vocab_size, other.vocab_size)
        return min((at for _, at in here.items() ^ there.items() if at < least), default=None)

    @classmethod
    def load(cls, folder: Path, *, vocab_size: int | None = None) -> "Tokenizer":
        """Read the tokenizer of a folder; `vocab_size`: rows of the model's embedding. Raises CheckpointError."""
        return cls(read_folder(folder), vocab_size)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of `text`.

        `add_special`: add the tokens of the checkpoint's post-processor or `add_bos_token`, but no second BOS token.
        `parse_special=False`: special tokens written in the text are text. Raises RequestError.
        """
        check_text(text)
        if parse_special:
            encoding = _encoded(self._library, "".join(map(str, self._normal([text], self._written))))
        else:
            encoding = self._encoded_plain(self._tags.split(text))
        if not add_special:
            return self._in_model(encoding.ids)
        return self._in_model(self._with_bos(encoding.ids, _called(self._library.post_process, encoding).ids))

    def least_tokens(self, text: str) -> int:
        """A lower bound of the tokens of `text`, from its length and the longest token; 0: unknown."""
        return 0 if self._longest is None else len(text) // 4 // self._longest

    @cached_property
    def _longest(self) -> int | None:
        """Characters of the longest token, or None if the length of a text says nothing about its tokens.

        Composing characters (NFC, NFKC) joins at most four; other normalizers may join more.
        """
        state = json.loads(self._library.to_str())
        if self._files.normalizer is not None:
            return None
        if not _keeps_length(state) or any(token.lstrip or token.rstrip for token in self._added.values()):
            return None
        return max(map(len, self._library.get_vocab(with_added_tokens=True)), default=1)

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """The ids of a text; its control tokens are given as ids, and ones in strings are text. Raises RequestError."""
        ids = self._encoded_plain(parts).ids
        steering = set(self.control.ids.values()) - {self._unknown}  # an unknown character is no control token
        wanted = [part for part in parts if part in steering]
        assert [token for token in ids if token in steering] == wanted, "a text brought in, or lost, a control token"
        return self._in_model(ids)

    def _encoded_plain(self, parts: Sequence[str | int]) -> Encoding:
        return _encoded(self._plain.library, self._plain.renamed(self._normal(parts, self._words)))

    def _normal(self, parts: Sequence[str | int], tokens: ControlTokens) -> Sequence[str | int]:
        """The parts as the library takes them. `tokens`: added tokens that are written in strings, and remain so."""
        if self._files.normalizer is None:
            return parts
        names: dict[str | int, str] = {at: name for name, at in tokens.ids.items()}
        return [names.get(part, part) for part in self._files.normalizer(parts, tokens.split)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD. Raises RequestError."""
        tables, pieces = self.byte_tables[skip_special], list[bytes]()
        table = tables.first
        for token in ids:
            piece = table[token]
            if piece is not None:
                pieces.append(piece)
                table = tables.behind(piece)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self, token: int, *, first: bool = False, skip_special: bool = True) -> bytes | None:
        """The bytes that a token adds to a text, `first` if it opens it; None if it has none. Raises RequestError."""
        return self.bytes_table(first=first, skip_special=skip_special)[token]

    def bytes_table(self, *, first: bool = False, skip_special: bool = True) -> "TokenBytes":
        """{token: its bytes}, as in `token_bytes`: for code that looks up a token per step."""
        tables = self.byte_tables[skip_special]
        return tables.first if first else tables.middle

    def token_text(self, token: int) -> str:
        """A token for display: its text, bytes of an incomplete character as <0xE2>, special tokens by name."""
        piece = self.token_bytes(token, skip_special=False)
        if piece is None:
            return f"<unused {token}>"
        if token in self.special_ids:
            return self._added[token].content
        escaped = piece.decode("utf-8", errors="surrogateescape")
        return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if "\udc80" <= c <= "\udcff" else c for c in escaped)

    def _tables(self, skip_special: bool) -> "ByteTables":
        ways = (self._pieces.middle, self._pieces.first, self._pieces.following)
        each = (TokenBytes(partial(self._bytes, way, skip_special), self.vocab_size) for way in ways)
        middle, first, following = each
        return ByteTables(middle, first, following, self._pieces.before)

    def _bytes(self, way: Callable[[str], bytes], skip_special: bool, token: int) -> bytes | None:
        if not 0 <= token < self.vocab_size:
            raise RequestError(f"token id {token} is out of range: ids are 0 to {self.vocab_size - 1}")
        text = self._library.id_to_token(token)
        if text is None or (skip_special and token in self.special_ids):
            return None
        if token in self._added and self._pieces.byte_level:
            return text.encode()  # an added token is its own text; "é" is not the byte 0xE9
        return way(text)

    def _with_row(self, name: str) -> int | None:
        at = self._library.token_to_id(name)
        return None if at is None or at >= self.vocab_size else at

    def _in_model(self, ids: list[int]) -> list[int]:
        if (most := max(ids, default=0)) >= self.vocab_size:
            raise RequestError(
                f"the token {self._library.id_to_token(most)!r} has the id {most}, and the model has rows for "
                f"{self.vocab_size}; leave it out, or give a model whose embedding was resized for this tokenizer"
            )
        return ids

    def _with_bos(self, ids: list[int], processed: list[int]) -> list[int]:
        if self.bos_id is None:
            return processed
        added = processed[: len(ids) + 1] == [self.bos_id, *ids]
        wanted = (added if self._files.add_bos is None else self._files.add_bos) and ids[:1] != [self.bos_id]
        if added and not wanted:
            return processed[1:]
        return [self.bos_id, *processed] if wanted and not added else processed

    @cached_property
    def special_control(self) -> ControlTokens:
        """The control tokens without tags such as <think>, which answers contain and templates search for."""
        return self._those(lambda token: token.special)

    @cached_property
    def _tags(self) -> ControlTokens:
        return self._those(lambda token: _steers(token) and not token.special)

    @cached_property
    def _written(self) -> ControlTokens:
        return self._those(lambda _: True)

    def _those(self, wanted: Callable[[AddedToken], bool]) -> ControlTokens:
        return ControlTokens({token.content: at for at, token in self._added.items() if wanted(token)})

    @cached_property
    def _unknown(self) -> int | None:
        model = json.loads(self._library.to_str())["model"]
        return model["unk_id"] if "unk_id" in model else self._library.token_to_id(model.get("unk_token") or "")


class TokenBytes(dict[int, bytes | None]):
    """{token: the bytes that it adds to a text, or None}, computed on first use, so that a hit calls no code."""

    def __init__(self, compute: Callable[[int], bytes | None], size: int) -> None:
        super().__init__()
        self._compute, self._size = compute, size

    def __missing__(self, token: int) -> bytes | None:
        found = self[token] = self._compute(token)
        return found

    def lengths(self, ids: Sequence[int]) -> "NDArray[np.int64]":
        each = np.frombuffer(array("i", ids), np.int32)
        for token in set(each[self._lengths[each] < 0].tolist()):
            self._lengths[token] = len(self[token] or b"")
        return self._lengths[each]

    @cached_property
    def _lengths(self) -> "NDArray[np.int64]":
        return np.full(self._size, -1, np.int64)


class ByteTables(NamedTuple):
    """The tables of tokens behind others, of the first, and of those behind `before`, which may lose a character."""

    middle: TokenBytes
    first: TokenBytes
    following: TokenBytes
    before: bytes

    def behind(self, piece: bytes) -> TokenBytes:
        return self.following if self.before and piece.endswith(self.before) else self.middle


def _keeps_length(state: Mapping[str, Any]) -> bool:
    """Whether no part of a tokenizer, given as its JSON, joins more than four characters of a text or drops any."""
    model, normalizer, splitter = state["model"], state["normalizer"], state["pre_tokenizer"]
    if model["type"] != "BPE" or (model.get("fuse_unk") and not model.get("byte_fallback")):
        return False
    if splitter is not None and "Removed" in json.dumps(splitter):
        return False
    splits = [] if splitter is None else splitter.get("pretokenizers", [splitter])
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    return {one["type"] for one in splits} <= _KEEPING and all(
        one["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Prepend")
        or (one["type"] == "Replace" and len(one["content"]) >= len(one["pattern"].get("String", "0" * 99)))
        for one in steps
    )


def check_text(text: str) -> None:
    """Raises RequestError for a value that is not a str, or not valid Unicode."""
    if not isinstance(text, str):
        raise RequestError(f"a prompt must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if "\udc80" <= text[error.start] <= "\udcff":  # Python's mark of a byte that it could not decode
            raise RequestError(f"character {error.start} of the text is a byte that is not UTF-8; remove it") from None
        raise RequestError(
            f"character {error.start} of the text is half of a surrogate pair ({text[error.start]!r}); "
            "remove it, or decode the input as UTF-16 where it came from"
        ) from None
