"""Renders chat templates without a process, of which a page has none: in the place of text/renderer.py's Renderer.

The sandbox of jinja2 and the limit of characters hold; the limits of time and memory are the browser's own. A template
that never ends keeps the worker of the one page that opened it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenwright.text import chat_template
from tokenwright.text.messages import Message
from tokenwright.text.renderer import TextSpan, question, read
from tokenwright.text.template_process import answered, compiled, complaint


class RendererHere:
    """A template; there is no limit of seconds."""

    def __init__(self, source: str, values: Mapping[str, str | tuple[str, ...]], _: float) -> None:
        self._source, self._values = source, values

    def start(self) -> None:
        """Nothing to start."""

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool, more: Mapping[str, Any] | None = None
    ) -> tuple[str, list[TextSpan]]:
        """As Renderer.render."""
        ask = json.loads(json.dumps(question(messages, add_generation_prompt, more or {})))
        try:
            answer = answered(compiled(self._source), self._values, ask)
        except Exception as error:
            answer = {"error": complaint(error)}
        return read(answer)

    def close(self) -> None:
        """Nothing to close."""


def install() -> None:
    vars(chat_template)["Renderer"] = RendererHere
