"""The tokenizer, streamed text and chat templates. It imports only `tokenwright.errors`."""

from tokenwright.text.chat_template import ChatTemplate, PictureTexts, Rendered
from tokenwright.text.messages import Message
from tokenwright.text.stream import TextStream
from tokenwright.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Message", "PictureTexts", "Rendered", "TextStream", "Tokenizer"]
