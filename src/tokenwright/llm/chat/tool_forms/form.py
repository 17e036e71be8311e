"""The form in which a family of models calls tools, as data; reading, grammars and writing follow from it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from tokenwright.engine import Grammar
from tokenwright.llm.chat.chat_options import Tool, ToolMode
from tokenwright.llm.chat.tool_forms.lark import LarkRules
from tokenwright.llm.chat.tool_forms.source import NoCall, Steps, TextSource

LONGEST_NAME = 256  # characters of a tool's name in a call
WORDS = {"True": "true", "False": "false", "None": "null"}  # {Python's constant: JSON's}


class CallSink(Protocol):
    def begin(self, name: str) -> None:
        """Begin a call of the tool `name`. Raises NoCall for an unknown tool."""

    def arguments(self, text: str) -> None:
        """Add the next characters of the arguments' JSON."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of the tool's arguments."""


class CallSyntax(Protocol):
    """How one call is written. All calls begin with `first`."""

    @property
    def first(self) -> str: ...

    def read(self, source: TextSource, sink: CallSink, close: str) -> Steps[None]:
        """Read one call, after which `close` may follow. Raises NoCall, Cut."""

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str: ...

    def rule(self, tool: Tool, lark: LarkRules) -> str:
        """The expression of a call in a grammar. Raises RequestError."""


def name_into(parts: list[str]) -> Callable[[str], None]:
    """A function that collects the parts of a name, and raises NoCall if it becomes too long."""

    def add(part: str) -> None:
        parts.append(part)
        if sum(map(len, parts)) > LONGEST_NAME:
            raise NoCall

    return add


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A section of calls, written: open lead CALL sep CALL ... trail close. Several sections may follow a text."""

    name: str
    open: str  # "": the section is the whole answer, perhaps after `tag`
    call: CallSyntax
    close: str = ""
    lead: str = ""
    sep: str = ""
    trail: str = ""
    many: bool = False  # a section has several calls
    tag: str = ""
    spoken: str = ""  # the name of a call whose argument is the answer's text
    id_length: int = 29  # characters of a call's id

    @property
    def mark(self) -> str:
        return self.open.strip()

    @property
    def literals(self) -> Iterator[str]:
        for part in (self, self.call):
            for field in fields(part):  # type: ignore[arg-type]
                value = getattr(part, field.name)
                if isinstance(value, str) and field.name not in ("name", "spoken"):
                    yield value

    def with_stand_ins(self, stands: Mapping[str, str]) -> "ToolForm":
        """The form with a stand-in for each mark that is a special token, as readers see it."""

        def replaced(value: object) -> object:
            for mark, stand in stands.items():
                value = value.replace(mark, stand) if isinstance(value, str) else value
            return value

        def changed(part: Any) -> Any:
            return replace(part, **{field.name: replaced(getattr(part, field.name)) for field in fields(part)})

        form: ToolForm = changed(self)
        return replace(form, call=changed(self.call))

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        texts = [self.call.write(name, arguments, index) for index, (name, arguments) in enumerate(calls)]
        if self.many:
            return f"{self.open}{self.lead}{self.sep.join(texts)}{self.trail}{self.close}"
        return "\n".join(f"{self.open}{self.lead}{text}{self.trail}{self.close}" for text in texts)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
        answer: str | None = None,
        *,
        ends: Sequence[int] = (),
        opened: bool = False,
    ) -> Grammar:
        """The grammar of an answer that may (choice "auto") or must (choice "required") call tools.

        special: ids of marks that are special tokens. answer: the rule of text that is not calls. opened: the prompt
        ends with the mark. Raises RequestError for a schema that cannot be written as JSON.
        """
        lark = LarkRules(special or {}, ends, symbols=answer is not None and not self.open)
        calls = [lark.fresh("call", self.call.rule(tool, lark)) for tool in tools]
        lark.add("call", " | ".join(calls))
        if choice != "auto":
            start = self._sections(lark, parallel, "" if opened else lark.literal(self.open.rstrip()))
        elif answer is not None:
            lark.add("answer", answer)
            start = f"answer | {self._sections(lark, parallel, lark.literal(self.open.rstrip()))}"
        elif opened and self.spoken:
            start = self._spoken(lark, parallel)
        else:
            start = self._among_text(lark, parallel)
        return Grammar.lark(lark.written(start), special=lark.special)

    def _section(self, lark: LarkRules, parallel: bool) -> str:
        space = lark.space() if self.open != self.mark or self.close.strip() != self.close else ""
        lead, trail, close = (lark.literal(one.strip()) for one in (self.lead, self.trail, self.close))
        sep = lark.literal(self.sep.strip()) + (f" {lark.space()}" if self.sep else "")
        calls = f"call ({sep} call)*" if parallel and self.many else "call"
        inner = f"{lark.space()} {calls} {lark.space()}" if self.lead.strip() != self.lead else calls
        return " ".join(filter(None, (space, lead, inner, trail, space, close)))

    def _sections(self, lark: LarkRules, parallel: bool, mark: str) -> str:
        one = self._section(lark, parallel)
        tag = f"({lark.literal(self.tag)})? " if self.tag in lark.special_names else ""
        again = parallel and not self.many and self.open
        more = f" ({lark.space()} {lark.literal(self.open.rstrip())} {one})*" if again else ""
        return f"{tag}{mark} {one}{more}".strip()

    def _among_text(self, lark: LarkRules, parallel: bool) -> str:
        one = self._section(lark, parallel)
        if not self.open:
            first = (self.lead + self.call.first).strip()[0]
            lark.add("OTHER", f"/([^{_CLASS.get(first, first)}](.|\\n)*)?/")
            tagged = f" | {lark.literal(self.tag)} {one}" if self.tag in lark.special_names else ""
            return f"OTHER | {one}{tagged}"
        opening = lark.until(self.open.rstrip())
        if self.many or not parallel:
            return f"{lark.text()} | {opening} {one}"
        return f"({opening} {one})* {lark.text()}"

    def _spoken(self, lark: LarkRules, parallel: bool) -> str:
        """An answer whose first mark ends the prompt: text or a call, then calls."""
        one = self._section(lark, parallel)
        said = f"{lark.literal(self.spoken + getattr(self.call, 'between', ''))}"
        more = f"({lark.literal(self.open)} {one})*" if parallel else ""
        return f"{said} {lark.text()} | {one} {more}"


_CLASS = {"[": "\\[", "]": "\\]"}
