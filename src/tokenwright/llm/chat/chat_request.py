"""A conversation as it is asked for: its messages, the tools that the model may call, and whether it reasons."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenwright.errors import RequestError

SWITCHES = ("enable_thinking", "thinking")  # variables of templates that switch reasoning on and off
ToolMode = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments, an object.

    strict: a schema that cannot be enforced whole is refused. sent: as the client sent it, for the chat template.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False
    sent: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation, and how it is to be answered.

    messages: a conversation, each message with "role" (system, developer, user, assistant
        or tool) and "content" (text, parts, or None beside tool calls); an assistant's may have "tool_calls", a list of
        {"id", "type": "function", "function": {"name", "arguments": an object or text}}, and "reasoning_content"; a
        tool's has the "tool_call_id" and the "name" of a call before it. Other fields are the template's.
    tools: functions that the model may call. tool_choice: whether it may, must not or must call any. allowed_tools: the
        names of those that it may call; None: all. parallel_tool_calls: whether it may call several in one answer.
    thinking: whether the model reasons first, if it can; None leaves it to the template. thinking_budget: the most
        tokens of reasoning; then the thoughts are closed, and the answer begins. variables: of the template.
        reasoning: split the text between the model's own think tags off as reasoning.
    continue_last: the last message is the assistant's, and the answer goes on from its text. generation_prompt false:
        the prompt has nothing of the answer's beginning.
    markup: encode control tokens that are written in the messages as control tokens.
    reads_calls false: calls are text. shows_special: the text has special tokens as they are spelled.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Tool] = ()
    tool_choice: ToolMode = "auto"
    allowed_tools: Sequence[str] | None = None
    parallel_tool_calls: bool = True
    thinking: bool | None = None
    thinking_budget: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning: bool = True
    continue_last: bool = False
    generation_prompt: bool = True
    markup: bool = False
    reads_calls: bool = True
    shows_special: bool = False

    @property
    def thinks_not(self) -> bool:
        return self.thinking is False or any(self.variables.get(name) is False for name in SWITCHES)

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


def distinct(tools: Sequence[Tool]) -> list[Tool]:
    """The tools without repetitions: clients put a tool twice into a list that they collect from several places."""
    found: dict[str, list[Tool]] = {}
    for tool in tools:
        its = found.setdefault(tool.name, [])
        if tool not in its:
            its.append(tool)
    return [tool for its in found.values() for tool in its]


def check_chat(wanted: ChatRequest) -> None:
    """Raises RequestError for tools that contradict each other, and for an answer that cannot be continued."""
    names = Counter(tool.name for tool in wanted.tools)
    if twice := next((name for name, times in names.items() if times > 1), ""):
        raise RequestError(f"tools has two functions of the same name, {twice!r}; rename one of them")
    if missing := [name for name in wanted.allowed_tools or () if name not in names]:
        raise RequestError(f"tool_choice names {missing[0]!r}, which is not among the tools")
    if wanted.continue_last and (not wanted.messages or wanted.messages[-1].get("role") != "assistant"):
        raise RequestError("messages: to continue the last message, it must be the assistant's")
    if wanted.tool_choice == "required" and not names:
        raise RequestError("tool_choice is required, but there are no tools")
