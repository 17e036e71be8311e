"""The tokenizer in the metadata of a GGUF file.

`tokenizer.ggml.model`: llama (SentencePiece's BPE with scores), gemma4 (the same with merges), or gpt2 (byte-level BPE
with a named pre-tokenizer). A whole tokenizer.json in the file comes first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, processors

from tokenwright.errors import CheckpointError
from tokenwright.text.bpe import SPLITS, WHOLE_WORDS, byte_level, sentencepiece, spaced, with_added
from tokenwright.text.files import TokenizerFiles, library_errors

_KEY = "tokenizer.ggml."
WHOLE = "tokenizer.huggingface.json"
_NORMAL, _CONTROL = 1, 3


def read_metadata(metadata: Mapping[str, Any], where: str) -> TokenizerFiles:
    """The tokenizer of a GGUF file's metadata. Raises CheckpointError."""
    facts = _Facts(metadata, where)
    tokens, kinds = facts.tokens()
    kind, is_whole = facts.text("model"), WHOLE in metadata
    with library_errors(f"the tokenizer in {where} cannot be used", CheckpointError):
        if is_whole:
            library = _whole(facts, tokens, kinds)
        elif kind == "llama":
            library = with_added(_sentencepiece(facts, tokens, kinds), tokens, kinds)
        elif kind == "gemma4":
            library = with_added(_merged(facts, tokens), tokens, kinds)
        elif kind == "gpt2":
            library = with_added(_byte_level(facts, tokens), tokens, kinds)
        else:
            raise facts.error(f"{_KEY}model is {kind[:40]!r}; Tokenwright reads llama, gemma4 and gpt2")
        ends = [at for name in ("eos", "eot", "eom") if (at := facts.token(name, len(tokens))) is not None]
        if facts.flag("add_eos_token", False) and ends and not is_whole:
            end = (tokens[ends[0]], ends[0])
            library.post_processor = processors.TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    bos, pre = facts.token("bos", len(tokens)), facts.text("pre", "default")
    says_nothing = f"{_KEY}add_bos_token" not in metadata
    return TokenizerFiles(
        library=library,
        bos=None if bos is None else tokens[bos],
        eos=tuple(tokens[at] for at in dict.fromkeys(ends)),
        add_bos=None
        if is_whole and says_nothing
        else facts.flag("add_bos_token", kind in ("llama", "gemma4") or pre in WHOLE_WORDS),
        chat_template=facts.template("chat_template"),
        tool_template=facts.template("chat_template.tool_use"),
    )


class _Facts:
    """The metadata under tokenizer.ggml; `where` names the file in messages."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self._where = where

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {message}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(_KEY + key, default)
        if not isinstance(value, str):
            raise self.error(f"{_KEY}{key} is missing" if value is None else f"{_KEY}{key} must be a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_KEY + key, default)
        if not isinstance(value, bool):
            raise self.error(f"{_KEY}{key} must be true or false")
        return value

    def token(self, name: str, count: int) -> int | None:
        value = self._metadata.get(f"{_KEY}{name}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < count):
            raise self.error(f"{_KEY}{name}_token_id is none of the {count:,} tokens")
        return value

    def template(self, name: str) -> str | None:
        value = self._metadata.get(f"tokenizer.{name}")
        if value is not None and not isinstance(value, str):
            raise self.error(f"tokenizer.{name} must be a text")
        return value

    def listed(self, key: str, kind: type, count: int | None = None) -> list[Any]:
        values = self._metadata.get(_KEY + key)
        if not isinstance(values, list) or set(map(type, values)) - {kind}:
            raise self.error(f"{_KEY}{key} must be a list of type {kind.__name__}")
        if count is not None and len(values) != count:
            raise self.error(f"{_KEY}{key} has {len(values):,} values for {count:,} tokens")
        return values

    def tokens(self) -> tuple[list[str], list[int]]:
        tokens = self.listed("tokens", str)
        if len(set(tokens)) < len(tokens):
            raise self.error(f"{_KEY}tokens has the same token twice, so that one of them could not be written")
        has_types = f"{_KEY}token_type" in self._metadata
        return tokens, self.listed("token_type", int, len(tokens)) if has_types else [1] * len(tokens)


def _whole(facts: _Facts, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    """The tokenizer.json in the metadata. Raises CheckpointError unless it has the file's tokens at their ids."""
    library = Tokenizer.from_str(facts.template("huggingface.json") or "")
    library.no_truncation()
    library.no_padding()
    for at, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (_NORMAL, _CONTROL) and library.id_to_token(at) != token:
            raise facts.error(f"token {at:,} is {token[:40]!r}, but {library.id_to_token(at)!r} by its {WHOLE}")
    return library


def _sentencepiece(facts: _Facts, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    unknown, prefix = facts.token("unknown", len(tokens)), facts.flag("add_space_prefix", True)
    return sentencepiece(tokens, facts.listed("scores", float, len(tokens)), kinds, unknown, prefix=prefix)


def _byte_level(facts: _Facts, tokens: Sequence[str]) -> Tokenizer:
    name = facts.text("pre")
    if name not in SPLITS:
        raise facts.error(f"{_KEY}pre is {name[:40]!r}; Tokenwright has {', '.join(SPLITS)}")
    return byte_level(name, {token: at for at, token in enumerate(tokens)}, _merges(facts))


def _merged(facts: _Facts, tokens: Sequence[str]) -> Tokenizer:
    unknown, prefix = facts.token("unknown", len(tokens)), facts.flag("add_space_prefix", False)
    return spaced({token: at for at, token in enumerate(tokens)}, _merges(facts), unknown, prefix=prefix)


def _merges(facts: _Facts) -> list[tuple[str, str]]:
    merges = facts.listed("merges", str)
    cuts = [one.find(" ", 1) for one in merges]
    if -1 in cuts:
        raise facts.error(f"{_KEY}merges must be pairs of tokens, with a space between")
    return [(one[:at], one[at + 1 :]) for one, at in zip(merges, cuts, strict=True)]
