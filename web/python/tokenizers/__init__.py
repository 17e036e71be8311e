"""Stands in for the `tokenizers` library, of which there is no build for a page: byte-pair encoding in plain Python."""

from .bpe_tokenizer import AddedToken, Encoding
from .bpe_tokenizer import BPETokenizer as Tokenizer
from .parts import Regex, decoders, models, normalizers, pre_tokenizers, processors

__all__ = [
    "AddedToken", "Encoding", "Regex", "Tokenizer", "decoders", "models", "normalizers", "pre_tokenizers", "processors",
]  # fmt: skip
