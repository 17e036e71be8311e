"""A tokenizer as the metadata of a GGUF file: the inverse of `metadata.py`, checked against it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tokenwright.errors import CheckpointError
from tokenwright.text.bpe import SPLITS, byte_level, splits_of
from tokenwright.text.files import TokenizerFiles
from tokenwright.text.metadata import WHOLE, read_metadata
from tokenwright.text.tokenizer import Tokenizer

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_FLAGS = ("lstrip", "rstrip", "single_word")  # of an added token, which the metadata cannot say
_ENDS = ("eos", "eot", "eom")
_LINE = 200  # tokens of the vocabulary that are encoded as one text
_MOST_OTHERS = 0.1  # of the texts may have other ids by the nearest name
_TEXTS = (
    "Hello, world! It's 1234567 o'clock; we'LL see.  Two  spaces,\tand\n\n three   \n lines.\r\n",
    "    def f(x):\n\treturn {'a': [1, 2.5e-3], \"b\": x ** 2}  # ok?\n",
    "  5  55 x5 5x Zürich, e\u0301te\u0301, naïve — “quoted”… 東京 Привет مرحبا हिन्दी 한국어",
    "🙂👩👩 \u00a0\u200b\u2028 ½ ² ﬁ",
    "",
    " ",
)


class Nearest(NamedTuple):
    """A named pre-tokenizer that splits nearly as the tokenizer does, and the texts that it splits otherwise."""

    name: str
    texts: tuple[str, ...]


def tokenizer_metadata(
    files: TokenizerFiles, ends: tuple[int, ...], vocab_size: int
) -> tuple[dict[str, Any], Nearest | None]:
    """The metadata of a tokenizer, with a whole tokenizer.json and the nearest name if its pre-tokenizer has no name.

    ends: the ids that end a text. Raises CheckpointError for a tokenizer that would differ when it is read back.
    """
    ours, state = Tokenizer(files, vocab_size), json.loads(files.library.to_str())
    if state["model"]["type"] != "BPE":
        raise _unfit(f"it is a {state['model']['type']} model, and GGUF files have BPE")
    if odd := [one["content"] for one in state["added_tokens"] if any(one[flag] for flag in _FLAGS)]:
        raise _unfit(f"its token {odd[0]!r} takes spaces beside it, which the metadata cannot say")
    if not state["model"]["merges"]:
        raise _unfit("it has no merges, and GGUF files list them")
    if len(ends) > len(_ENDS):
        raise _unfit(f"{len(ends)} tokens end a text, and the metadata name {len(_ENDS)}")
    is_pieces = state["model"].get("byte_fallback") is True
    tokens, kinds = _tokens(state, vocab_size, is_pieces)
    with_special, bare = ours.encode("a"), ours.encode("a", add_special=False)
    name = None if is_pieces else _name_of(state)
    nearest = None if is_pieces or name else _nearest(ours, state)
    model = _pieces(state, tokens) if is_pieces else _bytes(state, nearest.name if nearest else name)
    found = {"tokens": tokens, "token_type": kinds, **model}
    found["add_bos_token"] = with_special[:1] == [ours.bos_id] and bare[:1] != [ours.bos_id]
    found["add_eos_token"] = bool(ends) and with_special[-1:] == [ends[0]] and bare[-1:] != [ends[0]]
    specials = {"bos": ours.bos_id, "unknown": files.library.token_to_id(state["model"].get("unk_token") or "")}
    specials |= dict(zip(_ENDS, ends, strict=False))
    found |= {f"{name}_token_id": at for name, at in specials.items() if at is not None}
    metadata = {_KEY + key: value for key, value in found.items()}
    if nearest is not None:
        metadata[WHOLE] = files.library.to_str()
    if files.chat_template is not None:
        metadata["tokenizer.chat_template"] = files.chat_template
    _check(ours, Tokenizer(read_metadata(metadata, "the file"), vocab_size))
    return metadata, nearest


def _unfit(why: str) -> CheckpointError:
    return CheckpointError(f"the tokenizer cannot be written into a GGUF file: {why}; write a folder instead")


def _tokens(state: Mapping[str, Any], vocab_size: int, is_pieces: bool) -> tuple[list[str], list[int]]:
    names = {at: token for token, at in state["model"]["vocab"].items()}
    added = {one["id"]: one for one in state["added_tokens"]}
    names |= {at: one["content"] for at, one in added.items()}
    unknown = state["model"].get("unk_token")

    def kind(at: int) -> int:
        if at not in names:
            return _UNUSED
        if names[at] == unknown and is_pieces:
            return _UNKNOWN
        if at in added:
            return _CONTROL if added[at]["special"] else _USER
        is_byte = is_pieces and len(names[at]) == 6 and names[at].startswith("<0x")
        return _BYTE if is_byte else _NORMAL

    return [names.get(at, f"[PAD{at}]") for at in range(vocab_size)], [kind(at) for at in range(vocab_size)]


def _pairs(state: Mapping[str, Any]) -> list[list[str]]:
    return [one.split(" ") if isinstance(one, str) else one for one in state["model"]["merges"]]


def _name_of(state: Mapping[str, Any]) -> str | None:
    wanted = splits_of(state)
    return next((one for one in SPLITS if splits_of(json.loads(byte_level(one, {}, []).to_str())) == wanted), None)


def _nearest(ours: Tokenizer, state: Mapping[str, Any]) -> Nearest:
    """The name that gives other ids for the fewest texts. Raises CheckpointError if these are many."""
    vocab, merges = state["model"]["vocab"], [(pair[0], pair[1]) for pair in _pairs(state)]
    texts, found = list(_texts(ours)), []
    expected = [ours.encode(text, add_special=False, parse_special=False) for text in texts]
    for name in sorted({SPLITS[one]: one for one in reversed([*SPLITS])}.values(), key=[*SPLITS].index):
        library = byte_level(name, vocab, merges)
        pairs = zip(texts, expected, strict=True)
        found.append(Nearest(name, tuple(text for text, ids in pairs if library.encode(text).ids != ids)))
    nearest = min(found, key=lambda one: len(one.texts))
    if len(nearest.texts) > _MOST_OTHERS * len(texts):
        raise _unfit(f"it splits text in a way that has no name among {', '.join(SPLITS)}, nor nearly")
    return nearest


def _bytes(state: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    return {"model": "gpt2", "pre": name, "merges": [" ".join(pair) for pair in _pairs(state)]}


def _pieces(state: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """SentencePiece's BPE: a token has the higher a score, the earlier it is merged."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(_pairs(state)):
        ranks.setdefault("".join(pair), rank)
    scores = [-float(ranks.get(token, len(ranks) + 1)) for token in tokens]
    before = json.dumps([state.get("normalizer"), state.get("pre_tokenizer")])
    return {"model": "llama", "scores": scores, "add_space_prefix": '"Prepend"' in before or '"first"' in before}


def _check(ours: Tokenizer, theirs: Tokenizer) -> None:
    """Raises CheckpointError unless both give the same ids for texts with all tokens of the vocabulary."""
    if (ours.bos_id, ours.special_ids) != (theirs.bos_id, theirs.special_ids):
        raise _unfit("its special tokens would be others")
    for text in _texts(ours):
        if ours.encode(text) != theirs.encode(text):
            raise _unfit(f"{text[:40]!r} would have other ids")


def _texts(tokenizer: Tokenizer) -> Iterator[str]:
    yield from _TEXTS
    for at in sorted(tokenizer.special_ids)[:_LINE]:
        yield f"a {tokenizer.token_text(at)} b{tokenizer.token_text(at)}\n"
    for first in range(0, tokenizer.vocab_size, _LINE):
        yield tokenizer.decode(range(first, min(first + _LINE, tokenizer.vocab_size)))
