"""Options of conversations: whether the model reasons, and the tools that it may call."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenwright.errors import RequestError
from tokenwright.regular_file import read_regular

if TYPE_CHECKING:
    from tokenwright.llm.outputs import Completion, Piece

ThinkingOption = Annotated[
    str | None,
    typer.Option(
        "--thinking", help="Whether the model reasons before it answers: on, off, or hide to reason without showing it."
    ),
]
ToolsFile = Annotated[
    Path | None, typer.Option("--tools", help="A JSON file of functions that the model may call, in OpenAI's format.")
]


@dataclass(frozen=True, slots=True)
class Talking:
    thinking: str | None = None  # on, off, hide; None: the template decides
    tools: tuple[Any, ...] = ()  # OpenAI's objects

    @classmethod
    def read(cls, thinking: str | None, tools: Path | None) -> "Talking":
        if thinking not in (None, "on", "off", "hide"):
            raise RequestError(f"--thinking must be on, off or hide, not {thinking[:40]!r}")
        return cls(thinking, () if tools is None else _tools(tools))

    @property
    def options(self) -> dict[str, Any]:
        return {"tools": self.tools, "enable_thinking": None if self.thinking is None else self.thinking != "off"}

    def shown(self, piece: "Piece") -> str:
        return piece.content if self.thinking == "hide" or self.tools else piece.text

    def text(self, done: "Completion") -> str:
        text = done.content if self.thinking == "hide" or self.tools else done.text
        return text + calls_of(done)


def calls_of(done: "Completion") -> str:
    return "".join(f"{'' if done.content == '' and n == 0 else chr(10)}{call.name}({call.arguments})"
                   for n, call in enumerate(done.tool_calls))  # fmt: skip


def _tools(path: Path) -> tuple[Any, ...]:
    try:
        found = json.loads(read_regular(path))
    except OSError as error:
        raise RequestError(f"--tools {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--tools {path} is not JSON: {error}") from error
    return tuple(found) if isinstance(found, list) else (found,)


class CompactJson:
    """Drops white space between JSON values while the text streams."""

    def __init__(self) -> None:
        self._quoted = self._escaped = False

    def __call__(self, text: str) -> str:
        kept = []
        for one in text:
            if self._quoted:
                self._quoted = one != '"' or self._escaped
                self._escaped = one == "\\" and not self._escaped
            elif one in " \n\r\t":
                continue
            else:
                self._quoted = one == '"'
            kept.append(one)
        return "".join(kept)


def seen_by(pictures: Sequence[Path], text: str) -> Any:
    each = [{"type": "image", "image": str(one)} for one in pictures]
    return [*each, {"type": "text", "text": text}] if each else text
