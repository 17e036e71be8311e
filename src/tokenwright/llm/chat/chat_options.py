"""Turns the options of `LLM.chat`, in the forms of other libraries, into a ChatRequest and an answer's grammar."""

import inspect
import json
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from tokenwright.checks import check_bool, shown
from tokenwright.errors import RequestError
from tokenwright.llm.chat.seen_pictures import with_pictures
from tokenwright.llm.outputs import ToolCall
from tokenwright.sampling_params import Grammar, is_pydantic

SWITCHES = ("enable_thinking", "thinking")  # variables of templates that switch reasoning on and off
ToolMode = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments, an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # refuse a schema of which a grammar enforces only a part
    sent: Mapping[str, Any] | None = None  # the client's own form, for the chat template


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation and how to answer it.

    A message has "role" (system, developer, user, assistant or tool) and "content" (text, parts, or None beside tool
    calls); an assistant's may have "reasoning_content" and "tool_calls", a list of {"id", "type": "function",
    "function": {"name", "arguments": an object or text}}; a tool's has the "tool_call_id" and "name" of its call.
    """

    messages: Sequence[Mapping[str, Any]] | None = None  # other fields of messages are for the template
    tools: Sequence[Tool] = ()
    tool_choice: ToolMode = "auto"
    allowed_tools: Sequence[str] | None = None  # names that the model may call; None: all
    parallel_tool_calls: bool = True
    thinking: bool | None = None  # whether the model reasons first, if it can; None leaves it to the template
    thinking_budget: int | None = None  # the most tokens of reasoning; then the answer begins
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template
    reasoning: bool = True  # separate reasoning from the text
    continue_last: bool = False  # the answer goes on from the last message, the assistant's
    generation_prompt: bool = True  # end the prompt with the template's beginning of an answer
    markup: bool = False  # encode control tokens that are written in the messages as such
    reads_calls: bool = True  # False: calls are text
    shows_special: bool = False  # special tokens are shown in the text

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


def distinct(tools: Sequence[Tool]) -> list[Tool]:
    """The tools without repetitions, which some clients send; of a name at most two."""
    found: dict[str, list[Tool]] = {}
    for tool in tools:
        same = found.setdefault(tool.name, [])
        if len(same) < 2 and tool not in same:  # two of a name are refused, so no more need be compared
            same.append(tool)
    return [tool for same in found.values() for tool in same]


def check_chat(wanted: ChatRequest) -> None:
    """Raises RequestError for two tools of one name, and for an answer that cannot be continued."""
    names = Counter(tool.name for tool in wanted.tools)
    if twice := next((name for name, times in names.items() if times > 1), ""):
        raise RequestError(f"tools has two functions of the same name, {twice!r}; rename one of them")
    if missing := [name for name in wanted.allowed_tools or () if name not in names]:
        raise RequestError(f"tool_choice names {missing[0]!r}, which is not among the tools")
    if wanted.continue_last and (not wanted.messages or wanted.messages[-1].get("role") != "assistant"):
        raise RequestError("messages: to continue the last message, it must be the assistant's")
    if wanted.tool_choice == "required" and not names:
        raise RequestError("tool_choice is required, but there are no tools")


Parse = Callable[[str], Any]  # the value of an answer's text; raises ValueError for one that has none

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedOptions:
    tools: Sequence[Any] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    response_format: Any = None
    continue_final_message: bool = False
    markup: bool = False
    answers: Mapping[int, Sequence[int]] | None = None
    cache: bool = True
    salt: str = ""
    adapter: str | None = None

    @classmethod
    def split(cls, given: Mapping[str, Any]) -> "tuple[AskedOptions, dict[str, Any]]":
        own = {field.name for field in fields(cls)}
        options = {name: value for name, value in given.items() if name in own}
        return cls(**options), {name: value for name, value in given.items() if name not in own}

    def request(self, messages: Any) -> ChatRequest:
        """The conversation for the model's processor. Raises RequestError for a malformed option."""
        for name in ("parallel_tool_calls", "continue_final_message", "markup"):
            check_bool(name, getattr(self, name))
        if self.enable_thinking is not None:
            check_bool("enable_thinking", self.enable_thinking)
        mode, allowed = _choice(self.tool_choice)
        wanted = ChatRequest(
            messages=_messages(messages),
            tools=tools_of(self.tools),
            tool_choice=mode,
            allowed_tools=allowed,
            parallel_tool_calls=self.parallel_tool_calls,
            thinking=self.enable_thinking,
            thinking_budget=self.thinking_budget,
            variables=_object("chat_template_kwargs", self.chat_template_kwargs or {}),
            continue_last=self.continue_final_message,
            markup=self.markup,
        )
        check_chat(wanted)
        return wanted


def tools_of(given: Any) -> tuple[Tool, ...]:
    """Tools from OpenAI's objects, functions with a docstring, or Tools. Raises RequestError."""
    if given is None:
        return ()
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise RequestError(f"tools must be a list of tools, not {type(given).__name__}", "tools")
    return tuple(distinct(list(map(_tool, given))))


def _tool(given: Any) -> Tool:
    if isinstance(given, Tool):
        return given
    if isinstance(given, Mapping):
        about = given.get("function", given)
        if isinstance(about, Mapping) and isinstance(about.get("name"), str):
            about = {"parameters" if name == "input_schema" else name: one for name, one in about.items()}
            known = about.get("parameters") or {"type": "object", "properties": {}}
            parameters = _object(f"the parameters of the tool {about['name']}", known)
            sent = given if "function" in given else {"type": "function", "function": about}
            return Tool(about["name"], about.get("description") or "", parameters, bool(about.get("strict")), sent)
    elif inspect.isroutine(given):
        return _tool_of_function(given)
    form = '{"type": "function", "function": {"name", "description", "parameters"}}'
    raise RequestError(f"a tool is {form}, or a Python function, not {shown(given)}", "tools")


def _tool_of_function(function: Callable[..., Any]) -> Tool:
    hints, properties, required = typing.get_type_hints(function), {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        properties[name] = _schema_of(hints.get(name, str))
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    return Tool(function.__name__, inspect.getdoc(function) or "", schema)


def _schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of an annotation; {} for a type that JSON lacks."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of(one) for one in inner]}
    if origin is list:
        return {"type": "array", "items": _schema_of(inner[0])}
    if kind is type(None):
        return {"type": "null"}
    name = _JSON_TYPES.get(origin or kind)
    return {} if name is None else {"type": name}


def _choice(given: Any) -> tuple[Any, tuple[str, ...] | None]:
    if isinstance(given, Mapping):
        about = given.get("function", given)
        name = about.get("name") if isinstance(about, Mapping) else None
        given = name if isinstance(name, str) else {"any": "required"}.get(str(given.get("type")), given.get("type"))
    if given in ("auto", "none", "required"):
        return given, None
    if isinstance(given, str):
        return "required", (given,)
    raise RequestError(f"tool_choice is auto, none, required or the name of a tool, not {shown(given)}", "tool_choice")


def form_of(given: Any) -> tuple[Grammar | None, Parse | None]:
    """The grammar of a `response_format` and the function that reads the answer. Raises RequestError."""
    if given is None:
        return None, None
    if is_pydantic(given):
        return _schema(given.model_json_schema()), given.model_validate_json
    if isinstance(given, Grammar):
        return given, json.loads if given.kind == "json_schema" else None
    if isinstance(given, Mapping):
        kind = given.get("type")
        if kind == "text":
            return None, None
        if kind in ("json_object", "json_schema"):
            inner = given.get("json_schema", given)
            found = inner.get("schema", {"type": "object"}) if isinstance(inner, Mapping) else {"type": "object"}
            return _schema(_object("response_format", found)), json.loads
        if kind in _JSON_TYPES.values() or "$ref" in given or "anyOf" in given:  # a bare schema, as ollama takes it
            return _schema(given), json.loads
    raise RequestError(
        f"response_format must be a Pydantic model, a Grammar, {{'type': 'json_object'}} or {{'type': 'json_schema', "
        f"'json_schema': {{'schema': ...}}}}, not {shown(given)}",
        "response_format",
    )


def _schema(given: Mapping[str, Any]) -> Grammar:
    return replace(Grammar.json_schema(given), client=True)


def _messages(given: Any) -> Any:
    """The messages, with calls as templates read them. `check_messages` refuses anything but a list."""
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        return given
    names: dict[str, str] = {}
    return [_message(with_pictures(one), names) if isinstance(one, Mapping) else one for one in given]


def _message(message: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if value is not None or name == "content"}
    if found.get("tool_calls"):
        found["tool_calls"] = [_call(at, call) for at, call in enumerate(found["tool_calls"])]
        names.update({call["id"]: call["function"]["name"] for call in found["tool_calls"]})
    elif "tool_calls" in found:
        del found["tool_calls"]
    if found.get("role") == "tool":
        found.setdefault("tool_call_id", next(reversed(names), "call_0"))
        if name := names.get(str(found["tool_call_id"])):
            found.setdefault("name", name)
    return found


def _call(at: int, call: Any) -> dict[str, Any]:
    if isinstance(call, ToolCall):
        call = {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
    about = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(about, Mapping) or not isinstance(about.get("name"), str):
        form = '{"id", "type": "function", "function": {"name", "arguments"}}'
        raise RequestError(f"a call in tool_calls is {form}, or a ToolCall, not {shown(call)}", "messages")
    others = call if "function" in call else {}
    identity, function = str(call.get("id") or f"call_{at}"), {"arguments": about.get("arguments", {})}
    return {"id": "", "type": "function", **others} | {"id": identity, "function": {**about, **function}}


def read_arguments(given: Any) -> Any:
    """An earlier call's arguments as an object, or as their text if it is not JSON of one."""
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(whole_escapes(given) or "{}")
    except (ValueError, RecursionError):
        return given
    return found if isinstance(found, dict) else given


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object, not {shown(value)}")
    return value


def read_json(text: str) -> Any:
    """A value that a model wrote; huge numbers become the largest double. Raises ValueError, RecursionError."""
    return json.loads(whole_escapes(text), parse_float=_finite, parse_constant=_refuse)


def whole_escapes(text: str) -> str:
    """JSON text with U+FFFD for each escape of half a surrogate pair, which is not valid Unicode."""
    return _ESCAPE.sub(lambda found: r"\ufffd" if found["half"] else found[0], text) if "\\u" in text else text


_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


_Open: TypeAlias = "tuple[str, _Open] | None"  # the brackets that are still open, the innermost first
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


def read_begun(text: str) -> Any:
    """The value at the start of cut-off JSON text, without its incomplete end; None: there is none.

    >>> read_begun('{"city": "Oslo", "days": 1')
    {'city': 'Oslo'}
    """
    closing: _Open = None
    end, ending, key = 0, closing, False  # up to where it is whole, and what is open there
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in "{[":
            closing = ("}" if token == "{" else "]", closing)
            key = token == "{"
        elif token in "}]" and closing:
            closing = closing[1]
        elif token in ",:":
            key = token == "," and closing is not None and closing[0] == "}"
            continue
        elif key or (token[0] != '"' and match.end() == len(text)):
            continue  # the name of a field, or a number that may have more digits
        end, ending = match.end(), closing
    parts = [text[:end]]
    while ending is not None:
        parts.append(ending[0])
        ending = ending[1]
    try:
        return read_json("".join(parts))
    except (ValueError, RecursionError):
        return None


def _finite(number: str) -> float:
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no value of JSON")
