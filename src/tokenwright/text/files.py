"""Reads and checks the tokenizer files of a checkpoint's folder."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tokenwright.errors import CheckpointError, TokenwrightError, fetch_again
from tokenwright.regular_file import read_regular_text
from tokenwright.text.bpe import byte_level
from tokenwright.text.sentencepiece import Normalizer, SentencePieceModel, build, read_model

log = logging.getLogger(__name__)

_END_OF_TEXT = "<|endoftext|>"  # GPT-2's only special token, which its config does not name
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")  # of an added token
# {class of transformers: name in bpe.SPLITS}; None: not named.
_SPLIT_AS: dict[str | None, str] = {
    None: "gpt-2",
    **dict.fromkeys(("GPT2Tokenizer", "GPT2TokenizerFast"), "gpt-2"),
    **dict.fromkeys(("Qwen2Tokenizer", "Qwen2TokenizerFast"), "qwen2"),
}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    library: Tokenizer
    bos: str | None
    eos: tuple[str, ...]
    add_bos: bool | None  # None: as the post-processor does
    chat_template: str | None
    tool_template: str | None = None
    variables: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)  # of templates: tokens by their keys
    normalizer: Normalizer | None = None  # None: the library's


def read_folder(folder: Path) -> TokenizerFiles:
    """Read the tokenizer: tokenizer.json, tokenizer.model, or vocab.json with merges.txt. Raises CheckpointError."""
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    with library_errors(f"the tokenizer in {folder} cannot be used", CheckpointError):
        library, model = _read_library(folder, config)
        library.no_truncation()
        library.no_padding()
        _add_tokens(library, config, folder)
        bos, eos = _names(config, "bos_token"), _names(config, "eos_token")
        if model is not None:
            bos, eos = bos or model.named("bos"), eos or model.named("eos")
        if not bos and not eos and library.token_to_id(_END_OF_TEXT) is not None:
            bos = eos = (_END_OF_TEXT,)
        known = [name for name in (*bos[:1], *eos) if library.token_to_id(name) is not None]
        if unknown := [name for name in eos if name not in known]:
            log.warning(
                "eos_token %s in %s is no token of its vocabulary, so it ends no text; correct tokenizer_config.json",
                " and ".join(map(repr, unknown)),
                folder,
            )
        library.add_special_tokens(known)
        template, for_tools = _chat_templates(folder, config)
    add_bos = config.get("add_bos_token", None if model is None else model.adds_bos)
    return TokenizerFiles(
        library=library,
        bos=next((name for name in bos[:1] if name in known), None),
        eos=tuple(name for name in eos if name in known),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        chat_template=template,
        tool_template=for_tools,
        variables=_variables(config),
        normalizer=None if model is None else Normalizer(model, library.get_added_tokens_decoder()),
    )


@contextmanager
def library_errors(what: str, kind: type[TokenwrightError]) -> Iterator[None]:
    """Convert exceptions of the tokenizers library (bare Exceptions, Rust panics) to an error of `kind`."""
    try:
        yield
    except TokenwrightError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {error}") from error


def _read_library(folder: Path, config: Mapping[str, Any]) -> tuple[Tokenizer, SentencePieceModel | None]:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
    whole, pieces, vocab, merges = (folder / name for name in names)
    if whole.exists():
        return Tokenizer.from_str(_read_text(whole)), None
    if pieces.exists():
        model = read_model(pieces)
        return build(model), model
    if not (vocab.exists() and merges.exists()):
        raise CheckpointError(
            f"{folder} has no tokenizer.json, tokenizer.model, nor vocab.json and merges.txt; copy the tokenizer's "
            "files into the model's folder"
        )
    kind = config.get("tokenizer_class")
    if kind not in _SPLIT_AS:
        raise CheckpointError(
            f"{folder} has vocab.json and merges.txt of a {kind}, of whose rules for cutting text Tokenwright knows "
            "nothing; add its tokenizer.json"
        )
    found = _read_json(vocab)
    prefix = bool(config.get("add_prefix_space"))
    library = byte_level(_SPLIT_AS[kind], found, _merges(_read_text(merges)), prefix=prefix)
    if _END_OF_TEXT in found:
        library.add_special_tokens([_END_OF_TEXT])
    return library, None


def _merges(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.split("\n") if line.strip() and not line.startswith("#version")]
    pairs = [tuple(line.rstrip("\r").split(" ")) for line in lines]
    for number, pair in enumerate(pairs, 1):
        if len(pair) != 2:
            raise CheckpointError(f"merge {number} of merges.txt is not two tokens: {lines[number - 1]!r}")
    return [(pair[0], pair[1]) for pair in pairs]


def _add_tokens(library: Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    tokens = {int(at): spec for at, spec in config.get("added_tokens_decoder", {}).items()}
    for text, at in _read_json(folder / "added_tokens.json").items():
        tokens.setdefault(int(at), {"content": text, "normalized": False})
    known: dict[bool, list[AddedToken]] = {False: [], True: []}
    new: list[AddedToken] = []
    for _, spec in sorted(tokens.items()):
        there = library.token_to_id(spec["content"]) is not None
        if "special" in spec or not there:
            flags = {name: spec[name] for name in _FLAGS if name in spec}
            token = AddedToken(spec["content"], special=bool(spec.get("special")), **flags)
            (known[token.special] if there else new).append(token)
    _add(library, [*known[False], *known[True], *new])
    for at, spec in sorted(tokens.items()):
        text = spec["content"]
        if library.token_to_id(text) != at:
            raise CheckpointError(
                f"the added token {text!r} has id {at} in {folder}, but {library.token_to_id(text)} by the "
                "vocabulary: the tokenizer's files do not belong together"
            )


def _add(library: Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add tokens in order, in few calls: each takes time that grows with all tokens added so far."""
    for special, some in groupby(tokens, key=lambda token: token.special):
        (library.add_special_tokens if special else library.add_tokens)(list(some))


def _names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key)
    values = value if isinstance(value, list) else [value]
    names = [item.get("content") if isinstance(item, dict) else item for item in values if item is not None]
    for name in names:
        if not isinstance(name, str):
            raise CheckpointError(f"{key} must be the text of a token, not {name!r}; correct tokenizer_config.json")
    return tuple(name for name in names if name)


def _variables(config: Mapping[str, Any]) -> dict[str, str | tuple[str, ...]]:
    extra = config.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **config}
    found: dict[str, str | tuple[str, ...]] = {}
    for key, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    if isinstance(listed := config.get("additional_special_tokens"), list):
        texts = [one.get("content") if isinstance(one, dict) else one for one in listed]
        found["additional_special_tokens"] = tuple(text for text in texts if isinstance(text, str))
    return found


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The template of conversations, and the one named "tool_use"; as in transformers, files come before the config."""
    file, tools = folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"
    value = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        value = {item["name"]: item["template"] for item in value}
    named = value if isinstance(value, dict) else {"default": value}
    if file.exists():
        named = {"default": _read_text(file)}
    if tools.exists():
        named = {**named, "tool_use": _read_text(tools)}
    first, for_tools = named.get("default", next(iter(named.values()), None)), named.get("tool_use")
    return first if isinstance(first, str) else None, for_tools if isinstance(for_tools, str) else None


def _read_text(path: Path) -> str:
    try:
        text = read_regular_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {fetch_again(path)}") from error
    if text.startswith("version https://git-lfs"):
        raise CheckpointError(f"{path} is a git-lfs pointer, not the file; run `git lfs pull` in its folder")
    return text


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON (truncated?): {error}; {fetch_again(path)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object; {fetch_again(path)}")
    return value
