"""The parts of tokenizers: from the `tokenizers` library, or ours where it cannot be imported."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import (
        AddedToken,
        Encoding,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )
else:
    try:
        from tokenizers import (
            AddedToken,
            Encoding,
            Regex,
            Tokenizer,
            decoders,
            models,
            normalizers,
            pre_tokenizers,
            processors,
        )
    except ImportError:
        from tokenwright.text.library.bpe_tokenizer import AddedToken, Encoding
        from tokenwright.text.library.bpe_tokenizer import BPETokenizer as Tokenizer
        from tokenwright.text.library.parts import Regex, decoders, models, normalizers, pre_tokenizers, processors

__all__ = [
    "AddedToken",
    "Encoding",
    "Regex",
    "Tokenizer",
    "decoders",
    "models",
    "normalizers",
    "pre_tokenizers",
    "processors",
]
