"""The tokenizer without control tokens, for texts in which they are plain text."""

import json
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

from tokenwright.errors import CheckpointError
from tokenwright.text.control import ControlTokens
from tokenwright.text.files import library_errors


class PlainTokenizer:
    """A tokenizer whose control tokens have secret names, so that no text contains one; all ids are the same."""

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
    """Rename control tokens. encode_special_tokens does not suffice: a Unigram or `ignore_merges` model finds them."""
    for token in state["added_tokens"]:
        if token["content"] in names:  # match it anywhere, before any normalizer
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
