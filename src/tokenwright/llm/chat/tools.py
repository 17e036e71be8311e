"""The tools of a request, as one model calls them: in its prompt, in its grammar and in its answer.

How a model calls tools follows from its chat template (tool_forms/probing.py).
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tokenwright.engine import Grammar
from tokenwright.llm.chat.chat_request import ChatRequest, Tool
from tokenwright.llm.chat.output_parser import CallReader, stand_ins
from tokenwright.llm.chat.tool_forms.channels import channel_grammar
from tokenwright.llm.chat.tool_forms.form import ToolForm
from tokenwright.llm.chat.tool_forms.lark import LarkRules
from tokenwright.llm.chat.tool_forms.probing import TemplateTools, declared
from tokenwright.llm.chat.tool_forms.reading import FormReader
from tokenwright.llm.chat.tool_forms.supplement import as_template_reads


def callable_tools(wanted: ChatRequest) -> list[Tool]:
    """The tools that the model may call; the prompt has all."""
    return [tool for tool in wanted.tools if wanted.allowed_tools is None or tool.name in wanted.allowed_tools]


@dataclass(frozen=True, slots=True)
class ModelTools:
    """How one model calls tools. special: ids of the special tokens by name; ends: those that end a text."""

    facts: TemplateTools
    special: Mapping[str, int]
    ends: Sequence[int]

    @property
    def form(self) -> ToolForm:
        return self.facts.form

    @property
    def marks(self) -> dict[str, int]:
        """The special tokens with which calls are written."""
        texts = tuple(self.form.literals)
        return {name: at for name, at in self.special.items() if any(name in text for text in texts)}

    def messages(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[Mapping[str, Any]]:
        """The messages as the template reads them, with what it does not say of tools itself."""
        return as_template_reads(messages, self.facts, tools)

    def declared(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        """The tools for the template; None for one that does not print them."""
        return [declared(tool) for tool in tools] if tools and self.facts.declares else None

    def opened(self, prompt: str) -> bool:
        """Whether the mark of a call, or of text, stands at the prompt's end."""
        return bool(self.form.spoken) and prompt.endswith(self.form.mark)

    def grammar(self, wanted: ChatRequest, prompt: str, answer: str | None, channels: bool) -> Grammar:
        """The grammar of an answer; `answer`: the rule of one that is no call. Raises RequestError."""
        tools = callable_tools(wanted)
        if channels:
            begun = wanted.continue_last
            return channel_grammar(tools, wanted.tool_choice, self.special, self.ends, answer, begun=begun)
        parallel, opened = wanted.parallel_tool_calls, self.opened(prompt)
        return self.form.grammar(tools, wanted.tool_choice, parallel, self.marks, answer, ends=self.ends, opened=opened)

    def silence(self) -> Grammar | None:
        """The grammar of an answer that must not call; None: calls have no mark that it could leave out."""
        lark, form = LarkRules(self.marks, self.ends), self.form
        mark = "" if self.facts.unread else form.mark or (form.tag if form.tag in self.special else "")
        return Grammar.lark(lark.written(lark.without(mark))) if mark else None

    def reader(self, wanted: ChatRequest, prompt: str, marks: Mapping[int, str]) -> CallReader:
        """Reads the calls of one text; `marks`: the special tokens that have stand-ins."""
        form = self.form.with_stand_ins(stand_ins(marks))
        return FormReader(form, callable_tools(wanted), self.opened(prompt))


def read_json(text: str) -> Any:
    """A value that a model wrote. Numbers beyond a double's range become the largest double: JSON has no infinity.

    Raises ValueError for text that is not JSON, RecursionError for one that is nested too deeply.
    """
    return json.loads(whole_escapes(text), parse_float=_finite, parse_constant=_refuse)


def whole_escapes(text: str) -> str:
    """A text of JSON with U+FFFD for each escape of half a surrogate pair, which no prompt and no reply can have."""
    return _ESCAPE.sub(lambda found: r"\ufffd" if found["half"] else found[0], text) if "\\u" in text else text


_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


_Open: TypeAlias = "tuple[str, _Open] | None"  # the brackets that are still open, the innermost first
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


def read_begun(text: str) -> Any:
    """The value that a text of JSON begins, where it was cut off: without what is not whole at its end; None: nothing.

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
            continue  # the name of a field, or a number that may go on
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
