"""A conversation with tools as a chat template can print it: what the template lacks becomes text of the messages."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenwright.llm.chat.chat_request import Tool
from tokenwright.llm.chat.template_messages import nine_letters
from tokenwright.llm.chat.tool_forms.form import ToolForm
from tokenwright.llm.chat.tool_forms.probing import TemplateTools, declared
from tokenwright.text.messages import text_of

Message = Mapping[str, Any]


def instructions(form: ToolForm, tools: Iterable[Tool]) -> str:
    """Instructions about the tools, for templates that do not say it."""
    shown = "\n".join(json.dumps(declared(tool)["function"], ensure_ascii=False) for tool in tools)
    example = form.written([("NAME", {"ARGUMENT": "VALUE"})])
    return (
        f"You can call these tools; each line is one, with the JSON schema of its arguments:\n{shown}\n\n"
        f"To call a tool, write exactly this, with its name and its arguments:\n{example}\n"
        "Then stop: the next message has the result. Where no tool is needed, answer in plain text."
    )


def as_template_reads(messages: Sequence[Message], facts: TemplateTools, tools: Sequence[Tool]) -> list[Message]:
    """The messages with the tools that the template does not declare, calls that it does not write, and so on."""
    found: list[Message] = []
    renamed: dict[str, str] = {}
    for message in messages:
        if message.get("tool_calls"):
            found.append(_calling(message, facts, renamed))
        elif message.get("role") == "tool":
            _answering(found, message, facts, renamed)
        else:
            found.append(message)
    if tools and not facts.declares:
        found = _instructed(found, instructions(facts.form, tools), facts.system)
    return found


def _calling(message: Message, facts: TemplateTools, renamed: dict[str, str]) -> Message:
    calls = [_renamed(call, facts, renamed) for call in message["tool_calls"]]
    if facts.writes:
        return {**message, "tool_calls": calls}
    content = text_of(message.get("content"))
    text = facts.form.written([(one["function"]["name"], _object(one["function"]["arguments"])) for one in calls])
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": f"{content}\n{text}" if content else text}


def _object(arguments: Any) -> Mapping[str, Any]:
    return arguments if isinstance(arguments, Mapping) else {"arguments": arguments}


def _renamed(call: Mapping[str, Any], facts: TemplateTools, renamed: dict[str, str]) -> Mapping[str, Any]:
    """A call with the id and the arguments that the template expects."""
    function, identity = call["function"], str(call.get("id", ""))
    if facts.identities == "named":
        identity = f"functions.{function['name']}:{len(renamed)}"
    elif facts.identities == "nine":
        identity = nine_letters(identity)
    renamed[str(call.get("id", ""))] = identity
    if facts.text_arguments and not isinstance(function["arguments"], str):
        function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "id": identity, "function": function}


def _answering(found: list[Message], message: Message, facts: TemplateTools, renamed: Mapping[str, str]) -> None:
    if facts.results:
        identity = str(message.get("tool_call_id", ""))
        found.append({**message, "tool_call_id": renamed.get(identity, identity)})
        return
    name = message.get("name", "")
    told = json.dumps({"name": name, "content": text_of(message["content"])}, ensure_ascii=False)
    text = f"<tool_response>\n{told}\n</tool_response>"
    before, places = text_of(found[-1].get("content")) if found else "", message.get("places", [])
    if before.startswith("<tool_response>") and found[-1]["role"] == "user":  # several results are one message
        behind = [(at + len(before) + 1, number) for at, number in places]
        found[-1] = {"role": "user", "content": f"{before}\n{text}", "places": [*found[-1].get("places", []), *behind]}
    else:
        found.append({"role": "user", "content": text, "places": places})


def _instructed(messages: Sequence[Message], text: str, system: bool) -> list[Message]:
    """The messages with instructions: in the system message, or before the user's first."""
    first, rest = messages[0], list(messages[1:])
    if system and first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    own = f"{text_of(first.get('content'))}\n\n".lstrip()
    places = [*first.get("places", []), (len(own), -1)]
    return [{**first, "content": f"{own}{text}".strip(), "places": places}, *rest]
