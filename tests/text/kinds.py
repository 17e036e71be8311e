"""Small tokenizers of every kind, made in the test, and hostile texts.

`of_tokens` makes a tokenizer out of a list of token strings and one of the decoders that real checkpoints
have: so a text can be cut into tokens in any way at all, not only in those that a trained vocabulary allows.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

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
