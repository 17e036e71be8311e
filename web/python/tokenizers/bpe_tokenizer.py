"""Byte-pair encoding in plain Python, behind as much of the `tokenizers` library's interface as this package uses.

A word's pairs wait in a heap, so that n characters take n log n steps.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any, Self

from tokenwright.errors import CheckpointError

from .parts import TokenizerPart, normalised, post_processed, refusal, words_of
from .unicode_patterns import SPACE

_WORDS = 1 << 14  # whose ids are kept
_LONG = 64  # characters; longer words are not


@dataclass(slots=True)
class AddedToken:
    """A token that texts are cut at before anything else; `normalized`: in their normalised form."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None  # None: unless it is special
    special: bool = False

    def __post_init__(self) -> None:
        if self.normalized is None:
            self.normalized = not self.special


@dataclass(frozen=True, slots=True)
class Encoding:
    ids: list[int]


class Merger:
    """A BPE model: the ids of a word. Raises CheckpointError or KeyError for a model that is damaged, or another."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if model["type"] != "BPE" or any(model.get(name) for name in odd):
            raise refusal("model", model["type"])
        self.vocab: dict[str, int] = model["vocab"]
        self._whole = model.get("ignore_merges", False)
        self._fuse = model.get("fuse_unk", False)
        unknown = model.get("unk_token")
        self._unknown = None if unknown is None else self.vocab.get(unknown)
        fallback = [self.vocab.get(f"<0x{byte:02X}>") for byte in range(256)] if model.get("byte_fallback") else []
        self._bytes = fallback
        vocab, merges = self.vocab, model["merges"]
        pairs = (one.split(" ") if isinstance(one, str) else one for one in merges)
        try:
            self._merges = {(vocab[a], vocab[b]): (rank, vocab[a + b]) for rank, (a, b) in enumerate(pairs)}
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"a merge is of no two tokens, or makes none: {error}") from error
        self._kept = lru_cache(_WORDS)(self._ids)

    def __call__(self, word: str) -> Sequence[int]:
        return self._kept(word) if len(word) <= _LONG else self._ids(word)

    def _ids(self, word: str) -> tuple[int, ...]:
        if self._whole and (at := self.vocab.get(word)) is not None:
            return (at,)
        return tuple(self._merged(list(self._characters(word))))

    def _characters(self, word: str) -> Iterator[int]:
        """The ids of single characters, those of their bytes, or the unknown one."""
        vocab, unknown, after_unknown = self.vocab, self._unknown, False
        for char in word:
            at = vocab.get(char)
            if at is None and self._bytes:
                found = [self._bytes[byte] for byte in char.encode()]
                if None not in found:
                    yield from (one for one in found if one is not None)
                    after_unknown = False
                    continue
            if at is None and unknown is not None and not (self._fuse and after_unknown):
                yield unknown
            elif at is not None:
                yield at
            after_unknown = at is None

    def _merged(self, ids: list[int]) -> Iterator[int]:
        """Ids after all merges: the pair of the lowest rank first, the first one among equals."""
        count, merges = len(ids), self._merges
        after, before = list(range(1, count + 1)), list(range(-1, count - 1))
        pairs = enumerate(pairwise(ids))
        heap = [(found[0], at, found[1]) for at, pair in pairs if (found := merges.get(pair)) is not None]
        heapify(heap)
        while heap:
            rank, at, joined = heappop(heap)
            right = after[at]
            if ids[at] < 0 or right >= count or merges.get((ids[at], ids[right])) != (rank, joined):
                continue
            ids[at], ids[right], after[at] = joined, -1, after[right]
            if after[at] < count:
                before[after[at]] = at
            for left in (before[at], at):
                if left >= 0 and after[left] < count:
                    found = merges.get((ids[left], ids[after[left]]))
                    if found is not None:
                        heappush(heap, (found[0], left, found[1]))
        return (at for at in ids if at >= 0)


class BPETokenizer:
    def __init__(self, model: TokenizerPart) -> None:
        self._model = model
        self._merger = Merger(model)
        self._added: dict[int, AddedToken] = {}
        self._ids: dict[str, int] = {}  # of added tokens
        self._names: dict[int, str] | None = None
        self._next = len(model["vocab"])
        self.normalizer: TokenizerPart | None = None
        self.pre_tokenizer: TokenizerPart | None = None
        self.post_processor: TokenizerPart | None = None
        self.decoder: TokenizerPart | None = None

    @classmethod
    def from_str(cls, text: str) -> Self:
        state = json.loads(text)
        made = cls(TokenizerPart(state["model"]))
        for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            setattr(made, name, None if state[name] is None else TokenizerPart(state[name]))
        made._add(
            [
                AddedToken(**{name: value for name, value in one.items() if name != "id"})
                for one in state["added_tokens"]
            ]
        )
        return made

    def to_str(self) -> str:
        added = [{"id": at, **asdict(token)} for at, token in sorted(self._added.items())]
        parts = {name: getattr(self, name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")}
        plain = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
        merges = [one.split(" ") if isinstance(one, str) else list(one) for one in self._model["merges"]]
        model = {**plain, **self._model, "merges": merges}
        return json.dumps(
            {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts, "model": model}
        )

    def no_truncation(self) -> None:
        """Texts are never cut."""

    def no_padding(self) -> None:
        """Texts are never filled up."""

    def add_tokens(self, tokens: Sequence[AddedToken]) -> None:
        """Add tokens, the new ones behind all others."""
        self._add(tokens)

    def add_special_tokens(self, tokens: Sequence[AddedToken | str]) -> None:
        """Add control tokens, the new ones behind all others."""
        each = (AddedToken(one, normalized=False) if isinstance(one, str) else one for one in tokens)
        self._add([AddedToken(**{**asdict(one), "special": True}) for one in each])

    def _add(self, tokens: Sequence[AddedToken]) -> None:
        for token in tokens:
            if not token.content:
                continue
            at = self.token_to_id(token.content)
            if at is None:
                at = self._next = max(self._next, max(self._added, default=-1) + 1)
            self._added[at], self._ids[token.content] = token, at
        self._names = None
        self.__dict__.pop("_tags", None)

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(sorted(self._added.items()))

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return {**self._merger.vocab, **(self._ids if with_added_tokens else {})}

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token, self._merger.vocab.get(token))

    def id_to_token(self, at: int) -> str | None:
        if self._names is None:
            self._names = {number: token for token, number in self.get_vocab().items()}
        return self._names.get(at)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Encoding:
        """The ids of a text, without those that the post-processor adds."""
        assert not add_special_tokens, "post_process adds them"
        return Encoding(list(self._encoded(text)))

    def encode_batch_fast(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[Encoding]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def post_process(self, encoding: Encoding) -> Encoding:
        return Encoding(post_processed(self.post_processor, encoding.ids))

    def _encoded(self, text: str) -> Iterator[int]:
        raw, normal = self._tags
        for start, part in _cut_at(raw, text):
            if isinstance(part, int):
                yield part
                continue
            for at, piece in _cut_at(normal, normalised(self.normalizer, part)):
                if isinstance(piece, int):
                    yield piece
                    continue
                for word in words_of(self.pre_tokenizer, [piece], opens=start + at == 0):
                    yield from self._merger(word)

    @cached_property
    def _tags(self) -> "tuple[_Tags, _Tags]":
        """The added tokens that are cut out of a text as it is, and those of its normalised form."""
        both: tuple[dict[str, tuple[int, AddedToken]], ...] = ({}, {})
        for at, token in self._added.items():
            name = normalised(self.normalizer, token.content) if token.normalized else token.content
            both[bool(token.normalized)][name] = (at, token)
        first, second = (_Tags(_pattern_of(names), names) for names in both)
        return first, second


@dataclass(frozen=True, slots=True)
class _Tags:
    """Added tokens, and a pattern of their names; None: there are none."""

    pattern: "re.Pattern[str] | None"
    tokens: Mapping[str, tuple[int, AddedToken]]


def _pattern_of(names: Mapping[str, object]) -> "re.Pattern[str] | None":
    """The longest of the names at a place."""
    longest = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest))) if longest else None


def _cut_at(tags: _Tags, text: str) -> Iterator[tuple[int, int | str]]:
    """The parts of a text with their places: ids of added tokens, and text between them."""
    done = 0
    for match in tags.pattern.finditer(text) if tags.pattern else ():
        at, token = tags.tokens[match[0]]
        start, stop = match.span()
        if start < done or (token.single_word and (_is_word(text, start - 1) or _is_word(text, stop))):
            continue
        if token.lstrip:
            start = max(done, len(text[:start].rstrip(SPACE)))
        if token.rstrip:
            stop = len(text) - len(text[stop:].lstrip(SPACE))
        if start > done:
            yield done, text[done:start]
        yield start, at
        done = stop
    if done < len(text):
        yield done, text[done:]


def _is_word(text: str, at: int) -> bool:
    return 0 <= at < len(text) and re.match(r"\w", text[at]) is not None
