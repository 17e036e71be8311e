"""Text to tokens and back: the tokenizer, and text that streams. Stands on `tokenwright.errors` alone."""

from tokenwright.text.stream import TextStream
from tokenwright.text.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
