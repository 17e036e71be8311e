"""Control tokens: tokens that steer a model, and that the text of a message must not produce.

They are the special tokens, and added tokens written like tags (`<think>`, `[INST]`), which many checkpoints forget to
flag. A *marker* breaks one: a private-use character behind its first character.
"""

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

from tokenwright.errors import CheckpointError, RequestError
from tokenwright.text.files import library_errors

_TAG = re.compile(r"<\S+>|\[\S+\]")
_ESCAPE = re.compile(r"\\u([0-9A-Fa-f]{4})")
_PRIVATE = range(0xE000, 0xF900)


def written_like_a_tag(text: str) -> bool:
    return _TAG.fullmatch(text) is not None


def unused_characters(texts: Iterable[str], count: int) -> list[str]:
    """`count` private-use characters that no text contains, literally or JSON-escaped. Raises RequestError."""
    used: set[str] = set()
    for text in texts:
        used |= set(text) | {chr(int(digits, 16)) for digits in _ESCAPE.findall(text)}
    free = [char for char in map(chr, _PRIVATE) if char not in used][:count]
    if len(free) < count:
        raise RequestError("the messages use every private-use character of Unicode (U+E000 to U+F8FF); remove some")
    return free


class ControlTokens:
    """The control tokens of a vocabulary: their ids by name, and their places in a text.

    >>> tokens = ControlTokens({"<s>": 1, "</s>": 2})
    >>> tokens.split("<s>a<b></s>"), tokens.broken("a</s>b<", "|")
    ([1, 'a<b>', 2], 'a<|/s>b<|')
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        self._lengths = sorted({len(name) for name in ids}, reverse=True)
        firsts = "".join(sorted(re.escape(char) for char in {name[0] for name in ids if name}))
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    def split(self, text: str, marker: str = "") -> list[str | int]:
        """The text in parts, control tokens as ids: the leftmost, then the longest, none with the marker inside."""
        parts: list[str | int] = []
        done = 0
        for at, name in self._found(text):
            broken = len(name) == 1 and marker != "" and text[at + 1 : at + 2] == marker
            if at < done or broken:
                continue
            parts += [text[done:at], self.ids[name]]
            done = at + len(name)
        return [part for part in (*parts, text[done:]) if part != ""]

    def broken(self, text: str, marker: str) -> str:
        """Insert markers, so that the text contains no control token and completes none with any text around it.

        It also breaks "<|", with which a template may write tokens that the vocabulary lacks.
        """
        places = {at + 1 for at, _ in self._found(text)} | {match.end() - 1 for match in re.finditer(r"<\|", text)}
        core, longest = text.rstrip(), max(self._lengths, default=0)
        for match in self._first.finditer(core, max(0, len(core) - longest)):
            if core[match.start() :] in self._heads:
                places.add(match.start() + 1)
        core = core.lstrip()
        if any(core[:length] in self._tails for length in range(1, min(len(core), longest) + 1)) or self._inside(core):
            places.add(text.index(core))
        cuts = sorted(places)
        return marker.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))

    def _found(self, text: str) -> Iterator[tuple[int, str]]:
        """The offset and name of each control token in a text, the longest at an offset; they may overlap."""
        for match in self._first.finditer(text):
            at = match.start()
            name = next((name for length in self._lengths if (name := text[at : at + length]) in self.ids), None)
            if name is not None:
                yield at, name

    def _inside(self, text: str) -> bool:
        """Whether a text is part of a control token, so that text around it could complete one."""
        return 0 < len(text) < max(self._lengths, default=0) and any(text in name for name in self.ids)

    @cached_property
    def _heads(self) -> frozenset[str]:
        return frozenset(name[:at] for name in self.ids for at in range(1, len(name)))

    @cached_property
    def _tails(self) -> frozenset[str]:
        return frozenset(name[at:] for name in self.ids for at in range(1, len(name)))


class PlainTokenizer:
    """A tokenizer whose control tokens have secret names, so that no text contains one; ids do not change."""

    def __init__(self, library: Tokenizer, control: ControlTokens) -> None:
        self._whole = library
        self._control = control
        self._secret = secrets.token_hex(16)
        self._lock = Lock()

    @property
    def library(self) -> Tokenizer:
        """The library's tokenizer; made on first use, since it doubles the memory."""
        with self._lock:
            return self._made

    def renamed(self, parts: Sequence[str | int]) -> str:
        """The parts as one text for `library`; control tokens, given as ids, get their secret names."""
        secret = self._secret
        return "".join(part if isinstance(part, str) else f"<{secret}:{part}>" for part in parts)

    @cached_property
    def _made(self) -> Tokenizer:
        names = {name: f"<{self._secret}:{at}>" for name, at in self._control.ids.items()}
        with library_errors("a tokenizer without control tokens cannot be made", CheckpointError):
            plain = _with_names(json.loads(self._whole.to_str()), names)
        added = {names.get(t.content, t.content): at for at, t in self._whole.get_added_tokens_decoder().items()}
        assert all(plain.token_to_id(text) == at for text, at in added.items()), "renaming moved an id"
        return plain


def _with_names(state: dict[str, Any], names: Mapping[str, str]) -> Tokenizer:
    """The same tokenizer, with its control tokens renamed to strings that no text contains.

    encode_special_tokens does not suffice: a Unigram or `ignore_merges` model finds them in its vocabulary.
    """
    for token in state["added_tokens"]:
        if token["content"] in names:  # match it anywhere in the text, before any normalizer
            token |= {"content": names[token["content"]], "normalized": False, "single_word": False}
    model = state["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): at for token, at in vocab.items()}
    else:  # Unigram: a list of (token, score)
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "merges" in model:
        model["merges"] = [(a, b) for a, b in model["merges"] if names.keys().isdisjoint((a, b, a + b))]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return Tokenizer.from_str(json.dumps(state))
