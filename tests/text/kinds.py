"""Small tokenizers of every kind, made in the test, and hostile texts.

`of_tokens` makes a tokenizer out of a list of token strings and one of the decoders that real checkpoints
have: so a text can be cut into tokens in any way at all, not only in those that a trained vocabulary allows.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tokenwright.text import Tokenizer
from tokenwright.text.files import TokenizerFiles
from tokenwright.text.tokenizer import BYTE_ALPHABET

LETTER = {byte: letter for letter, byte in BYTE_ALPHABET.items()}


def byte_level() -> Any:
    """GPT-2, Llama 3, Qwen."""
    return decoders.ByteLevel()


def byte_fallback() -> Any:
    """Llama 2, Mistral, TinyLlama."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def unstripped() -> Any:
    """Gemma."""
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def lines() -> Any:
    """Lucie: a line's first space is dropped."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence([*steps, decoders.Replace("\n ", "\n")])


def metaspace() -> Any:
    """T5 and other Unigram models."""
    return decoders.Metaspace()


def wordpiece() -> Any:
    """BERT."""
    return decoders.WordPiece()


def joined() -> Any:
    """No decoder: the library joins the tokens by spaces."""
    return None


def wrap(library: Library, **config: Any) -> Tokenizer:
    """Our tokenizer around one of the library."""
    values: dict[str, Any] = {"bos": None, "eos": (), "add_bos": None, "chat_template": None} | config
    return Tokenizer(TokenizerFiles(library=library, **values))


def of_tokens(tokens: Sequence[str], decoder: Any, special: Sequence[str] = ()) -> tuple[Tokenizer, list[int]]:
    """A tokenizer of exactly these tokens, and their ids in the order given."""
    vocab: dict[str, int] = {}
    for token in (*special, *tokens):
        vocab.setdefault(token, len(vocab))
    library = Library(models.WordLevel(vocab, unk_token="?"))
    library.decoder = decoder
    library.add_special_tokens(list(special))
    return wrap(library), [vocab[token] for token in tokens]


def byte_token(data: bytes) -> str:
    """A token of a byte-level vocabulary."""
    return "".join(LETTER[byte] for byte in data)


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    """`data` in pieces, cut at the places `at` (modulo its length)."""
    places = [0, *sorted({place % len(data) for place in at} - {0}), len(data)] if data else []
    return [data[a:b] for a, b in pairwise(places)]


def letters() -> Library:
    """A byte-level BPE of single bytes with GPT-2's special token."""
    vocab = dict(BYTE_ALPHABET)
    library = Library(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    return library


def trained_byte_level(texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE with merges learned from `texts`: they end inside characters."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = byte_level()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return wrap(library)


def trained_byte_fallback(texts: Sequence[str]) -> Tokenizer:
    """A BPE of characters learned from `texts`; the rarer ones are written in byte tokens."""
    library = Library(models.BPE(byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = byte_fallback()
    trainer = trainers.BpeTrainer(vocab_size=600, limit_alphabet=250, special_tokens=["<unk>"], show_progress=False)
    library.train_from_iterator(texts, trainer)
    spec = json.loads(library.to_str())
    vocab = spec["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    return wrap(Library.from_str(json.dumps(spec)))


def trained_wordpiece(texts: Sequence[str]) -> Tokenizer:
    """BERT's kind, learned from `texts`: spaces are lost, and words of which it lacks a part are unknown."""
    library = Library(models.WordPiece(unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = wordpiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=1500, limit_alphabet=600, special_tokens=["[UNK]"], show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    return wrap(library)


def counted_unigram(texts: Sequence[str]) -> Tokenizer:
    """T5's kind, of the parts of one to three characters that are frequent in `texts`; the others are unknown."""
    written = ["▁" + text.replace(" ", "▁") for text in texts]
    parts = Counter(
        text[at : at + size] for text in written for size in (1, 2, 3) for at in range(len(text) - size + 1)
    )
    vocab = [("<unk>", 0.0), *((part, math.log(count / parts.total())) for part, count in parts.most_common(1500))]
    library = Library(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = metaspace()
    return wrap(library)


SNIPPETS = (
    *(
        "👨‍👩‍👧‍👦",
        "🇩🇪",
        "👍🏽",
        "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
        "日本語",
        "中",
        "नमस्ते",
        "क्षि",
        "e\u0301\u0323",
        "שלום",
        "مرحبا",
        "\u202eabc\u202c",
    ),
    *(" ", "  ", "\n", "\0", "\ufeff", "a", "The", " end", ".", "'s", "\ufffd", "é", "Ω", "𝔘", "�?"),
)
texts = st.one_of(
    st.lists(st.sampled_from(SNIPPETS), max_size=8).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
cuts = st.lists(st.integers(0, 200), max_size=30)
