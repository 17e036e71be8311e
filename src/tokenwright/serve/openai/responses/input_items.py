"""Translates the input of OpenAI's Responses API into messages and tools."""

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_options import read_arguments
from tokenwright.serve.http.api import About, wrong_field
from tokenwright.serve.http.complaints import complaint
from tokenwright.serve.http.request_parts import InputImage, leave_out, marked
from tokenwright.serve.openai.custom_tools import arguments_of_input, custom_tool, is_described_only
from tokenwright.serve.openai.message_bodies import RefusalPart
from tokenwright.serve.openai.responses import bodies
from tokenwright.serve.service.types import Tool
from tokenwright.text.messages import PICTURE, called

SEALED = "tw1."  # the prefix of opaque reasoning
SUMMARY = "A summary of our conversation so far:"
COMPACT = (
    "Summarise our conversation so far, so that another assistant can go on from the summary alone: what I want, what "
    "was done and found, what was decided, the names of files and commands that matter, and what is open. Write the "
    "summary only."
)


@dataclass(slots=True)
class Tools:
    tools: list[Tool] = field(default_factory=list)
    customs: set[str] = field(default_factory=set)  # names of tools whose input is text
    namespaces: dict[str, str] = field(default_factory=dict)  # by function name


def tools_of(given: Sequence[bodies.ResponseFunctionTool], about: About) -> Tools:
    """The tools that the model may call, without hosted ones. Raises RefusedRequest, RequestError."""
    leave_out(about, [tool.type for tool in given], bodies.TYPES)
    found = Tools()
    for at, tool in enumerate(given):
        _add(found, tool, f"tools.{at}", about)
    return found


def _add(found: Tools, tool: bodies.ResponseFunctionTool, place: str, about: About) -> None:
    if tool.type == "namespace":
        for at, inner in enumerate(tool.tools or ()):
            where = f"{place}.tools.{at}"
            try:
                one = bodies.ResponseFunctionTool.model_validate(inner)
            except ValidationError as error:
                raise RequestError(f"{where}.{complaint(error, inner).message}") from None
            if one.type != "namespace":
                _add(found, one, where, about)
                found.namespaces[one.name] = tool.name
    elif not tool.name and tool.type in bodies.TYPES:
        raise RequestError(f"{place}.name: this field is required")
    elif tool.type == "custom":
        if is_described_only(tool.format):
            about.ignored.append("tools.format.definition")
        found.tools.append(custom_tool(tool.name, tool.description, tool.format))
        found.customs.add(tool.name)
    elif tool.type == "function":
        parameters = tool.parameters or {"type": "object", "properties": {}}
        found.tools.append(Tool(tool.name, tool.description or "", parameters, bool(tool.strict)))


def sealed(reasoning: str) -> str:
    return SEALED + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unsealed(text: str | None) -> str | None:
    """The reasoning in an opaque text; None if this server did not write it."""
    if text is None or not text.startswith(SEALED):
        return None
    try:
        return base64.b64decode(text.removeprefix(SEALED), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def messages_of(items: Iterable[bodies.Item], instructions: str | None, about: About) -> list[dict[str, Any]]:
    """The messages of a request. An output whose call is missing has no name."""
    found: list[dict[str, Any]] = []
    if instructions is not None:
        found.append({"role": "system", "content": instructions})
    turn = _Turn(found)
    names: dict[str, str] = {}  # of the functions, by call id
    for at, item in enumerate(items):
        match item:
            case bodies.ResponseMessage(role="assistant"):
                turn.says(text_of(item.content))
            case bodies.ResponseMessage():
                named = {"name": item.name} if item.name else {}
                turn.add(marked({"role": item.role, "content": text_of(item.content), **named}, item.content, _text))
            case bodies.Reasoning():
                texts = [part.text for part in item.content] or [part.text for part in item.summary]
                turn.thinks(unsealed(item.encrypted_content) or "\n".join(texts))
            case bodies.FunctionCall():
                names[item.call_id] = item.name
                turn.calls(item.call_id, item.name, item.arguments)
            case bodies.CustomCall():
                names[item.call_id] = item.name
                turn.calls(item.call_id, item.name, arguments_of_input(item.input))
            case bodies.FunctionOutput():
                about_call = {"tool_call_id": item.call_id, "name": names.get(item.call_id, "")}
                turn.add(marked({"role": "tool", **about_call, "content": text_of(item.output)}, item.output, _text))
            case bodies.ItemReference():
                why = f"input.{at}.id: no item {item.id[:100]!r} is stored here; send the item itself"
                raise wrong_field(f"input.{at}.id", why)
            case bodies.Compaction():
                if (summary := unsealed(item.encrypted_content)) is None:
                    about.ignored.append(f"input.{item.type}")
                else:
                    turn.add({"role": "user", "content": f"{SUMMARY}\n{summary}"})
            case bodies.HostedItem():
                about.ignored.append(f"input.{item.type}")
    return found


class _Turn:
    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._own: dict[str, Any] | None = None  # the answer to which the next item may belong

    def add(self, message: dict[str, Any]) -> None:
        self._own = None
        self._messages.append(message)

    def thinks(self, text: str) -> None:
        self._own = None
        if text:
            self._answer()["reasoning_content"] = text

    def says(self, text: str) -> None:
        if self._own is not None and (self._own["content"] or "tool_calls" in self._own):
            self._own = None
        self._answer()["content"] = text

    def calls(self, identity: str, name: str, arguments: str) -> None:
        self._answer().setdefault("tool_calls", []).append(called(identity, name, read_arguments(arguments)))

    def _answer(self) -> dict[str, Any]:
        if self._own is None:
            self._own = {"role": "assistant", "content": None}
            self._messages.append(self._own)
        return self._own


def _text(part: bodies.InputText | InputImage | bodies.OutputText | RefusalPart) -> str:
    if isinstance(part, InputImage):
        return PICTURE
    return part.refusal if isinstance(part, RefusalPart) else part.text


def text_of(content: str | Iterable[bodies.InputText | InputImage | bodies.OutputText | RefusalPart]) -> str:
    return content if isinstance(content, str) else "\n".join(map(_text, content))
