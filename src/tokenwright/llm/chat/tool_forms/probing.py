"""Finds what a chat template does with tools, from what it prints for a known call.

The form is the one whose reader reads that call back, or one made from the text where arguments are JSON after the
name. If no call is printed, it is the form whose marks all stand in the text about tools.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, Literal

from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_options import Tool
from tokenwright.llm.chat.output_parser import Delta
from tokenwright.llm.chat.template_messages import nine_letters
from tokenwright.llm.chat.tool_forms.form import ToolForm, as_json
from tokenwright.llm.chat.tool_forms.json_calls import NamedCall
from tokenwright.llm.chat.tool_forms.known_forms import FORMS, HERMES
from tokenwright.llm.chat.tool_forms.reading import FormReader
from tokenwright.llm.prompts.provenance import joined
from tokenwright.text.messages import text_of

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]
Identities = Literal["any", "nine", "named"]  # any ids of calls; nine letters or digits; functions.NAME:NUMBER

GENERIC = HERMES  # for templates without a form
_NAME, _KEY, _VALUE, _RESULT, _SYSTEM = "probe_tool", "probe_key", "probe value", "probe result", "probe system"
_SCHEMA = {"type": "object", "properties": {_KEY: {"type": "string", "description": "probe"}}, "required": [_KEY]}
_FUNCTION = {"name": _NAME, "description": "probe", "parameters": _SCHEMA, "return": {"type": "string"}}
PROBE = Tool(_NAME, "probe", _SCHEMA, sent={"type": "function", "function": _FUNCTION})
_USER = {"role": "user", "content": "Hello"}
_SAID = {"role": "assistant", "content": "\ue000"}
_IDENTITIES: dict[Identities, str] = {"any": "call_0123456789ab", "nine": "a12345678", "named": f"functions.{_NAME}:0"}


@dataclass(frozen=True, slots=True)
class TemplateTools:
    """The abilities of a template. unread: its form of calls is unknown, so `form` is the generic one."""

    form: ToolForm = GENERIC
    declares: bool = False  # prints the tools that it is given
    writes: bool = False  # prints earlier calls
    text_arguments: bool = False  # they are JSON text, not objects
    identities: Identities = "any"  # the ids of calls that it takes
    results: bool = False  # prints the results of tools
    beside: bool = True  # prints calls of a message that has text as well
    system: bool = True  # takes a system message
    unread: bool = False

    @property
    def own(self) -> bool:
        return self.declares or self.writes


def declared(tool: Tool) -> dict[str, Any]:
    if tool.sent is not None:
        return dict(tool.sent)
    about = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": about}


def probed(render: Render, source: str, known: ToolForm | None = None) -> TemplateTools:
    """Find a template's abilities from its source and output. `known` is its form, or None. `render` may raise."""
    tools: list[dict[str, Any]] | None = [declared(PROBE)]
    before = _try(render, [_USER], tools)
    if not before:  # the template refuses tools
        tools, before = None, _try(render, [_USER], None)
    system = _SYSTEM in _try(render, [{"role": "system", "content": _SYSTEM}, _USER], None)
    declares = _NAME in before
    found = None  # the first way in which the template prints the call, or the first in a known form
    for text_arguments, (identities, identity) in product((False, True), _IDENTITIES.items()):
        messages = [_USER, _called(identity, text_arguments)]
        said = _after(before, _try(render, messages, tools))
        form = _form_of(said) if known is None else known if _calls(said) else None
        if form is not None or (found is None and _calls(said)):
            result = {"role": "tool", "tool_call_id": identity, "name": _NAME, "content": _RESULT}
            results = _RESULT in _try(render, [*messages, result], tools)
            beside = _calls(_after(before, _try(render, [_USER, messages[1] | _SAID], tools)))
            own = form or _own_form(_after(before, _try(render, [_USER, _SAID], tools)), said)
            facts = declares, True, text_arguments, identities, results, beside, system, own is None
            found = TemplateTools(own or GENERIC, *facts)
        if form is not None:
            break
    if found is not None:
        return found
    if declares:
        return TemplateTools(known or _named(before, source), True, system=system)
    return TemplateTools(known or GENERIC, system=system)


def _calls(said: str) -> bool:
    """Whether a text has the probe's call, printed neither as a Python object nor as escaped JSON."""
    return _NAME in said and _VALUE in said and f"'{_KEY}'" not in said and f'\\"{_KEY}' not in said


def _own_form(plain: str, said: str) -> ToolForm | None:
    """A new form for calls that are printed as text, name, text, JSON, text; None for others."""
    head, _, tail = plain.partition(str(_SAID["content"]))
    begun, name, rest = said.removeprefix(head).removesuffix(tail).partition(_NAME)
    between, arguments, after = rest.partition(as_json({_KEY: _VALUE}))
    if not (begun.strip() and between.strip() and name and arguments) or _NAME in after:
        return None
    form = ToolForm("own", begun.lstrip(), NamedCall(between), after.rstrip())
    return form if _fit(form, said) is not None else None


def _after(before: str, text: str) -> str:
    same = next((at for at, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), None)
    return text[min(len(before), len(text)) if same is None else same :]


def _called(identity: str, text_arguments: bool) -> dict[str, Any]:
    arguments: Any = {_KEY: _VALUE}
    function = {"name": _NAME, "arguments": json.dumps(arguments) if text_arguments else arguments}
    calls = [{"id": identity, "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _try(render: Render, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
    try:
        return render(messages, tools)
    except RequestError:
        return ""


def _form_of(text: str) -> ToolForm | None:
    if _NAME not in text or _VALUE not in text:
        return None
    fits = [(fit, -order, form) for order, form in enumerate(FORMS) if (fit := _fit(form, text)) is not None]
    return max(fits, key=lambda one: one[:2])[2] if fits else None


def _fit(form: ToolForm, text: str) -> tuple[bool, int] | None:
    """How well a form fits: whether it would write the same, and how little text is left over; None: not at all."""
    core = text
    if not form.open:
        first = (form.lead + form.call.first).strip()[0]
        start = text.find(form.tag) if form.tag and form.tag in text else text.find(first)
        if start < 0:
            return None
        core = text[start:]
    elif form.mark not in text:
        return None
    answer = read_whole(form, [PROBE], core)
    if [(call.name, arguments_of(call.arguments)) for call in answer.tool_calls] != [(_NAME, {_KEY: _VALUE})]:
        return None
    same = "".join(form.written([(_NAME, {_KEY: _VALUE})]).split()) in "".join(text.split())
    return same, -(len(text) - len(core) + len(answer.text))


def read_whole(form: ToolForm, tools: Sequence[Tool], text: str) -> Delta:
    reader, delta, answer = FormReader(form, tools), Delta(0), Delta(0)
    reader.push(text, None, delta)
    reader.finish(delta)
    answer.add(delta)
    return answer


def arguments_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _named(printed: str, source: str) -> ToolForm:
    """The form whose marks are all in the source of a template that declares tools but prints no call."""
    fits = []
    for order, form in enumerate(FORMS):
        texts = {one.strip() for one in form.literals if len(one.strip()) > 1 and "{" not in one and one != form.tag}
        quoted = {f'"{one}"' for one in ("name", "parameters")} if not form.open else set()
        distinct = [one for one in texts if not one.isidentifier()] + sorted(quoted)
        whole = source + (printed if form.open else "")
        if distinct and all(one in whole for one in distinct):
            fits.append((sum(map(len, distinct)) if form.open else 0, -order, form))
    return max(fits, key=lambda one: one[:2])[2] if fits else GENERIC


Message = Mapping[str, Any]


def instructions(form: ToolForm, tools: Iterable[Tool]) -> str:
    shown = "\n".join(json.dumps(declared(tool)["function"], ensure_ascii=False) for tool in tools)
    example = form.written([("NAME", {"ARGUMENT": "VALUE"})])
    return (
        f"You can call these tools; each line is one, with the JSON schema of its arguments:\n{shown}\n\n"
        f"To call a tool, write exactly this, with its name and its arguments:\n{example}\n"
        "Then stop: the next message has the result. Where no tool is needed, answer in plain text."
    )


def as_template_reads(messages: Sequence[Message], facts: TemplateTools, tools: Sequence[Tool]) -> list[Message]:
    """The messages, with tools, calls and results written as text if the template would not print them."""
    found: list[Message] = []
    renamed: dict[str, str] = {}
    for is_result, several in groupby(messages, lambda one: one.get("role") == "tool" and not one.get("tool_calls")):
        if is_result:
            found += _results(list(several), facts, renamed)
        else:
            found += [_calling(one, facts, renamed) if one.get("tool_calls") else one for one in several]
    if tools and not facts.declares:
        found = _instructed(found, instructions(facts.form, tools), facts.system)
    return found


def _calling(message: Message, facts: TemplateTools, renamed: dict[str, str]) -> Message:
    calls = [_renamed(call, facts, renamed) for call in message["tool_calls"]]
    content = text_of(message.get("content"))
    if facts.writes and (facts.beside or not content):
        return {**message, "tool_calls": calls}
    text = facts.form.written([(one["function"]["name"], _object(one["function"]["arguments"])) for one in calls])
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": f"{content}\n{text}" if content else text}


def _object(arguments: Any) -> Mapping[str, Any]:
    return arguments if isinstance(arguments, Mapping) else {"arguments": arguments}


def _renamed(call: Mapping[str, Any], facts: TemplateTools, renamed: dict[str, str]) -> Mapping[str, Any]:
    function, identity = call["function"], str(call.get("id", ""))
    if facts.identities == "named":
        identity = f"functions.{function['name']}:{len(renamed)}"
    elif facts.identities == "nine":
        identity = nine_letters(identity)
    renamed[str(call.get("id", ""))] = identity
    if facts.text_arguments and not isinstance(function["arguments"], str):
        function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "id": identity, "function": function}


def _results(messages: Sequence[Message], facts: TemplateTools, renamed: Mapping[str, str]) -> list[Message]:
    if facts.results:
        ids = [str(one.get("tool_call_id", "")) for one in messages]
        return [{**one, "tool_call_id": renamed.get(at, at)} for one, at in zip(messages, ids, strict=True)]
    told = [{"name": one.get("name", ""), "content": text_of(one["content"])} for one in messages]
    texts = (f"<tool_response>\n{json.dumps(one, ensure_ascii=False)}\n</tool_response>" for one in told)
    return [{"role": "user", **joined(zip(texts, messages, strict=True), "\n")}]


def _instructed(messages: Sequence[Message], text: str, system: bool) -> list[Message]:
    first, rest = messages[0], list(messages[1:])
    if system and first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    own = f"{text_of(first.get('content'))}\n\n".lstrip()
    places = [*first.get("places", []), (len(own), -1)]
    return [{**first, "content": f"{own}{text}".strip(), "places": places}, *rest]
