"""Build byte-pair tokenizers: SentencePiece's (scores, byte tokens, ▁ for a space) and byte-level ones (merges)."""

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tokenwright.errors import CheckpointError

_UNKNOWN, _CONTROL, USER, _BYTE = 2, 3, 4, 6  # token types; 1 is normal, 5 unused
_MOST_SPLITS = 1 << 27

_ENGLISH = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = _ENGLISH + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = r"(?i:" + _ENGLISH + r")|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Words that begin with capitals or have only capitals; %s: what may follow a word, and the digits of a number token.
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = r"(?i:" + _ENGLISH + r")?"
# Chinese characters are split from other letters; no slash follows symbols.
_HAN_APART = r"\p{Han}+|" + (_CASED % (_SUFFIX, _SUFFIX, "{1,3}")).replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(
    r"\n/]", r"\n]"
)

# Words with marks on their letters, the first one also with ASCII punctuation before it; numbers come first.
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKED = (_CL100K % "").replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}", r" ?[^\s\p{L}\p{M}")

# {name: patterns that split the text one after the other}
SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "mpt", "phi-2", "olmo", "exaone4"), (_GPT2,)),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), (_CL100K % "{1,3}",)),
    **dict.fromkeys(("falcon-h1", "lfm2", "midm-2.0"), (_CL100K % "{1,3}",)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_CL100K % "{1,3}",)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open"), (_CL100K % "",)),
    "qwen35": (_MARKED,),
    "tekken": (_CASED % ("", "", ""),),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_CASED % (_SUFFIX, _SUFFIX, "{1,3}"),)),
    "kimi-k2": (_HAN_APART,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u30ff]+", _PUNCTUATED)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), ((_CL100K % "").replace(r"\s*[\r\n]+|", r"\s*[\r\n]|"),)),
    "seed-coder": ((_CL100K % "").replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),),
}
# Whole words of the vocabulary are not merged, and texts begin with BOS unless the file says otherwise.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken", "falcon-h1", "lfm2", "midm-2.0")
# Text is composed (NFC) first.
_COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen", "command-r")


def sentencepiece(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], unknown: int | None, *, prefix: bool
) -> Tokenizer:
    """SentencePiece's BPE, which first merges the pair whose token has the highest score.

    kinds: 1 to 6, as SentencePiece numbers them. prefix: a space goes before the text.
    """
    vocab = {token: at for at, token in enumerate(tokens)}
    if unknown is None:
        unknown = next((at for at, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    if sum(len(token) ** 2 for token in tokens) > _MOST_SPLITS:
        raise CheckpointError("the tokenizer's tokens are too long; fetch its file again")
    joined = [at for at, kind in enumerate(kinds) if kind not in (_UNKNOWN, _CONTROL, _BYTE)]
    merges: list[tuple[str, str]] = []
    for at in sorted(joined, key=lambda at: -scores[at]):
        token = tokens[at]
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        halves = [(left, right) for left, right in pairs if left in vocab and right in vocab]
        merges += sorted(halves, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return spaced(vocab, merges, unknown, prefix=prefix)


def spaced(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], unknown: int | None, *, prefix: bool
) -> Tokenizer:
    """BPE with ▁ for a space, and byte tokens for what has none. prefix: as for `sentencepiece`."""
    library = Tokenizer(
        models.BPE(
            vocab=dict(vocab),
            merges=list(merges),
            unk_token=None if unknown is None else next(token for token, at in vocab.items() if at == unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    first = [normalizers.Prepend("▁")] if prefix else []
    library.normalizer = normalizers.Sequence([*first, spaces])
    library.decoder = spaces_restored(prefix=prefix)
    return library


def spaces_restored(*, prefix: bool) -> decoders.Decoder:
    """prefix: whether to remove the space before the text."""
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def byte_level(
    name: str, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], *, prefix: bool = False
) -> Tokenizer:
    """Byte-level BPE with a pre-tokenizer of `SPLITS`. prefix: as for `sentencepiece`."""
    library = Tokenizer(models.BPE(vocab=dict(vocab), merges=list(merges), ignore_merges=name in WHOLE_WORDS))
    if SPLITS[name] == (_GPT2,):
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    elif prefix:
        raise CheckpointError(f"add_prefix_space is for GPT-2's tokenizer, and this one splits as {name} does")
    else:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    if name in _COMPOSED:
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    return library


def with_added(library: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    added = [(token, kinds[at]) for at, token in enumerate(tokens) if kinds[at] in (_UNKNOWN, _CONTROL, USER)]
    library.add_tokens([AddedToken(token, normalized=False) for token, one in added if one == USER and token])
    library.add_special_tokens([AddedToken(token, special=True) for token, one in added if one != USER and token])
    return library
