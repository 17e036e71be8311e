"""Tools: the forms in which models call functions, as grammars and as text that is being written.

The chat template tells the form: Hermes and Qwen (<tool_call>{"name", "arguments"}</tool_call>), Llama 3 (an answer
that is {"name", "parameters"}), Mistral ([TOOL_CALLS] and a list). A grammar has the arguments follow the schema of
their tool, from the first character of a call on. Where the mark of a form is a special token, the prompt ends with it
if a call is required, and otherwise the grammar names the token. An answer that must follow a schema as well is either
text that does, or calls.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenwright.decode.grammar import json_rule
from tokenwright.decode.schemas import enforceable
from tokenwright.engine import Grammar
from tokenwright.errors import RequestError
from tokenwright.serve.service.ids import new_hex
from tokenwright.serve.service.output_parser import CallReader, held_back, stand_ins
from tokenwright.serve.service.types import Delta, Tool, ToolCallDelta, ToolMode

_SYMBOLS = re.compile(r'"[^"]*"|.')  # of JSON whose strings have no escapes
_TEXT = "\nTEXT: /(.|\\n)*/"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One form of calls: `mark` {"name": ..., `key`: {...}} `end`; `listed` ones stand in a list after one mark.

    mark "": a call is the whole answer, and `tag` may stand before it. before, after: what stands between mark and
    object, and object and end.
    """

    mark: str
    end: str = ""
    key: str = "arguments"
    before: str = ""
    after: str = ""
    listed: bool = False
    id_length: int = 29
    tag: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The strings that steer the reading, which may be special tokens."""
        return tuple(filter(None, (self.mark, self.end, self.tag)))

    def reader(self, tools: Sequence[Tool], opened: bool, marks: Mapping[int, str]) -> CallReader:
        """Reads the calls of one text. opened: the prompt ends with the mark. marks: those that are special tokens."""
        stands = stand_ins(marks)
        mark, end, tag = (stands.get(one, one) for one in (self.mark, self.end, self.tag))
        return _Calls(replace(self, mark=mark, end=end, tag=tag), frozenset(tool.name for tool in tools), opened)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
        answer: str | None = None,
    ) -> Grammar:
        """The grammar of an answer that may (choice "auto") or must (choice "required") call tools.

        special: the ids of those marks that are special tokens. answer: a rule that text must follow where it is not
        calls; None: it is free. Raises RequestError for a schema that cannot be written as JSON.
        """
        special = special or {}
        rules = "".join(
            self._rule(n, tool, beside_json=answer is not None and not self.mark) for n, tool in enumerate(tools)
        )
        if choice != "auto":
            start = self._calls(parallel, special, given=self.mark in special)
        elif answer is not None:
            start = f"answer | {self._calls(parallel, special)}\nanswer: {answer}"
        else:
            start = self._among_text(parallel, special)
        calls = " | ".join(re.findall(r"^call_\d+", rules, re.MULTILINE))
        return Grammar.lark(f"start: {start}\ncall: {calls}\n{rules}", special=list(special.values()))

    def _rule(self, number: int, tool: Tool, beside_json: bool) -> str:
        """A call of a tool. beside_json: JSON may stand in its place; then its symbols are those of JSON, because the
        lexer prefers longer symbols.
        """
        head = f'{{"name": {json.dumps(tool.name)}, "{self.key}": '
        symbols = _SYMBOLS.findall(head) if beside_json else [head]
        return f"call_{number}: {' '.join(map(json.dumps, symbols))} {json_rule(enforced(tool))} {json.dumps('}')}\n"

    def _calls(self, parallel: bool, special: Mapping[str, int], given: bool = False) -> str:
        """An answer that is calls alone. given: the first mark is not part of it."""
        opening = "" if given else _written(self.mark, special)
        if self.listed:
            return f"{opening} {_listed(parallel)}"
        if not self.mark:
            return "call"
        one = f"{_text(self.before)} call {_text(self.after)} {_written(self.end, special)}"
        again = f'("\\n" {_written(self.mark, special)} {one})*' if parallel else ""
        return f"{opening} {one} {again}"

    def _among_text(self, parallel: bool, special: Mapping[str, int]) -> str:
        """An answer that is any text, calls among it."""
        if not self.mark:
            tagged = f" | {_written(self.tag, special)} call" if self.tag in special else ""
            return f"OTHER | call{tagged}\nOTHER: /([^{{](.|\\n)*)?/"
        lazy = "" if self.mark in special else "[lazy]"  # a text's mark ends the text at its first appearance
        opening = f"\nopening{lazy}: TEXT {_written(self.mark, special)}{_TEXT}"
        if self.listed:
            return f"TEXT | opening {_listed(parallel)}{opening}"
        one = f"opening {_text(self.before)} call {_text(self.after)} {_written(self.end, special)}"
        return (f"({one})* TEXT" if parallel else f"TEXT | {one}") + opening


def _text(text: str) -> str:
    """A text as a symbol of a rule; nothing for none."""
    return json.dumps(text) if text else ""


def _written(mark: str, special: Mapping[str, int]) -> str:
    """A mark as a symbol of a rule."""
    return f"<[{special[mark]}]>" if mark in special else _text(mark)


def _listed(parallel: bool) -> str:
    """The rule of a list of calls."""
    return '"[" call (", " call)* "]"' if parallel else '"[" call "]"'


HERMES = ToolFormat("<tool_call>", "</tool_call>", before="\n", after="\n")
LLAMA = ToolFormat("", key="parameters", tag="<|python_tag|>")
MISTRAL = ToolFormat("[TOOL_CALLS]", listed=True, id_length=9)


def tool_format(template: str) -> ToolFormat | None:
    """The form that a chat template shows to the model; None: none, or one that is not known."""
    if "tools" not in template or "<function=" in template or "[ARGS]" in template:
        return None
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA if '"parameters"' in template else None


def enforced(tool: Tool) -> dict[str, Any]:
    """The schema that a tool's arguments follow. Raises RequestError where it is strict and cannot be enforced."""
    schema, places = enforceable(tool.parameters)
    if places and tool.strict:
        raise RequestError(
            f"tools: {tool.name} is strict, and {places[0]} of its parameters cannot be enforced here; leave it out or "
            "set strict to false"
        )
    return schema


def unenforced(tools: Sequence[Tool]) -> list[str]:
    """The keywords of the tools' schemas that are not enforced, such as "tools.search.uniqueItems"."""
    places = ((tool.name, place) for tool in tools for place in enforceable(tool.parameters)[1])
    return [f"tools.{name}.{place.rpartition('.')[2]}" for name, place in places]


class _Scan:
    """Finds the end of a JSON object whose text comes in parts."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._string = self._escaped = False

    def end(self, text: str) -> int | None:
        """The index after the brace that closes the object, if it is in `text`, which follows the texts before."""
        for at, char in enumerate(text):
            if self._string:
                self._string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


class _CallParser:
    """Reads one call from its opening brace on. `raw`: what was read before the name was known."""

    def __init__(self, form: ToolFormat, names: frozenset[str], index: int) -> None:
        self.raw = ""
        self.phase = "head"
        self._names = names
        self._key = form.key
        self._scan = _Scan()
        self.index = index
        self._first = ToolCallDelta(index, f"call_{new_hex(12)}"[-form.id_length :])

    def feed(self, text: str, delta: Delta) -> str:
        """Read on. Returns what follows the call: phase "done"; "bad": this is no call, and `raw` is text."""
        if self.phase == "head":
            text = self._head(text, delta)
        if self.phase == "arguments":
            end = self._scan.end(text)
            self._emit(delta, text[:end])
            text = "" if end is None else text[end:]
            if end is not None:
                self.phase, self._scan = "tail", _Scan(depth=1)
        if self.phase == "tail" and (end := self._scan.end(text)) is not None:
            self.phase = "done"
            return text[end:]
        return text if self.phase == "done" else ""

    def cut(self, delta: Delta) -> bool:
        """The text has ended before the arguments: give the call without them. False if it has no name yet."""
        match = _NAMED.match(self.raw)
        return match is not None and not self._begin(match, delta) and self.phase == "arguments"

    def _head(self, text: str, delta: Delta) -> str:
        self.raw += text
        if match := _HEAD.match(self.raw):
            return self._begin(match, delta)
        end = self._scan.end(text)
        if end is None:
            return ""
        rest = text[end:]
        self.raw = self.raw[: len(self.raw) - len(rest)]
        try:
            name, arguments = _call_of(read_json(self.raw))
        except (ValueError, RecursionError):
            name, arguments = "", ""
        if name not in self._names:
            self.phase = "bad"
        else:
            self._first.name = name
            self._emit(delta, arguments)
            self.phase = "done"
        return rest

    def _begin(self, match: re.Match[str], delta: Delta) -> str:
        try:
            name = json.loads(match[1])
        except ValueError:
            name = ""
        if name not in self._names:
            self.phase = "bad"
            return ""
        self._first.name = name
        self.phase, self._scan = "arguments", _Scan()
        self._emit(delta, "")
        return self.raw[match.end() :]

    def _emit(self, delta: Delta, arguments: str) -> None:
        part, self._first = self._first, ToolCallDelta(self._first.index)
        part.arguments = arguments
        if delta.tool_calls and delta.tool_calls[-1].index == part.index:
            delta.tool_calls[-1].arguments += arguments
        elif arguments or part.id is not None:
            delta.tool_calls.append(part)


_NAMED = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")[\s\S]*')
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


def read_json(text: str) -> Any:
    """A value that a model wrote. Numbers beyond those of a double become the largest double: JSON has no infinity.

    Raises ValueError for text that is not JSON, RecursionError for one that is nested too deeply.
    """
    return json.loads(text, parse_float=_finite, parse_constant=_refuse)


def _finite(number: str) -> float:
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no value of JSON")


def _call_of(call: Any) -> tuple[str, str]:
    """The name and the arguments of a whole call, whatever the order of its fields. Raises ValueError."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a call is an object with a name")
    arguments = call.get("arguments", call.get("parameters", {}))
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class _Calls:
    """Finds the calls in a text: "start" and "text" before a call, "open" after its mark, "call", and "after" one."""

    def __init__(self, form: ToolFormat, names: frozenset[str], opened: bool) -> None:
        self._form = form
        self._names = names
        self._state = "start" if not form.mark else "open" if opened else "text"
        self._held = self._lead = ""  # lead: what stands between a mark and its object
        self._count = 0
        self._said = False
        self._bare = False  # nothing but white space since the last call
        self._call = _CallParser(form, names, 0)

    @property
    def called(self) -> bool:
        return self._count > 0

    def push(self, text: str, token: int | None, delta: Delta) -> None:  # noqa: ARG002  (part of the protocol)
        text, self._held = self._held + text, ""
        while text:
            if self._state == "text":
                text = self._read_text(text, delta)
            elif self._state == "call":
                text = self._read_call(text, delta)
            elif self._state == "after":
                text = self._read_after(text)
            else:
                text = self._open(text, delta)

    def finish(self, delta: Delta) -> None:
        if self._state == "call" and self._call.phase == "head":
            if not self._form.mark:
                self._say(self._lead + self._call.raw, delta)
            elif self._call.cut(delta):
                self._count = self._call.index + 1
            elif self._call.phase == "bad":
                self._say(self._form.mark + self._lead + self._call.raw, delta)
        elif self._state == "open":  # a call of which nothing was written
            return
        elif self._state != "after":
            self._say(self._held, delta)

    def _say(self, text: str, delta: Delta) -> None:
        """Add text of the answer. After a call it goes on in a line of its own, if text came before the call."""
        text = text.lstrip() if self._bare else text
        if text:
            delta.text += f"\n{text}" if self._bare and self._said else text
            self._said, self._bare = True, False

    def _read_text(self, text: str, delta: Delta) -> str:
        said, mark, rest = text.partition(self._form.mark) if self._form.mark else (text, "", "")
        if mark:
            self._say(said.rstrip(), delta)
            self._state = "open"
            return rest
        keep = len(said[: len(said) - held_back(said, self._form.mark)].rstrip())  # white space before a mark goes
        self._say(said[:keep], delta)
        self._held = said[keep:]
        return ""

    def _open(self, text: str, delta: Delta) -> str:
        """After a mark, or at the start of a text that may be a call as a whole."""
        core = text.lstrip().removeprefix(self._form.tag)
        core = core.removeprefix("[") if self._form.listed and self._state == "open" else core
        core = core.lstrip()
        if self._form.tag.startswith(core):
            self._held = text
        elif core[0] == "{":
            self._state, self._call = "call", _CallParser(self._form, self._names, self._count)
            self._lead = text[: len(text) - len(core)]
            return core
        else:
            self._say(self._form.mark + text if self._state == "open" else text, delta)
            self._state = "text"
        return ""

    def _read_call(self, text: str, delta: Delta) -> str:
        rest = self._call.feed(text, delta)
        if self._call.phase in ("arguments", "tail", "done"):
            self._count = self._call.index + 1
        if self._call.phase == "done":
            self._state, self._bare = "after", True
        elif self._call.phase == "bad":
            self._say(self._form.mark + self._lead + self._call.raw, delta)
            self._state = "text"
        return rest

    def _read_after(self, text: str) -> str:
        core, end = text.lstrip(), self._form.end
        if self._form.listed and core[:1] in (",", "]"):
            self._state = "open" if core[0] == "," else "text"
            return core[1:]
        if not core or (end.startswith(core) and core != end):
            self._held = text
            return ""
        self._state = "text"
        return core.removeprefix(end) if end else core
