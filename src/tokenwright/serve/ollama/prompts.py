"""The prompt of Ollama's bodies: its conversation, in which calls need no ids, and its tools."""

from __future__ import annotations

from typing import Any

from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_options import read_arguments
from tokenwright.serve.http.api import About
from tokenwright.serve.http.hosted import leave_out
from tokenwright.serve.http.open_calls import OpenCalls
from tokenwright.serve.ollama.bodies import Chat, Generate, OllamaMessage
from tokenwright.serve.service.types import Gap, Tool, distinct


def generate_prompt(body: Generate) -> dict[str, Any]:
    """The prompt of /api/generate: a conversation of one message, or the text itself if it is raw or before a gap."""
    if body.suffix and (body.system or body.think is not None):
        raise RequestError("system and think belong to the chat template, which suffix leaves out; leave them out")
    if body.suffix:
        return {"prompt": body.prompt, "gap": Gap(body.suffix)}
    if body.raw:
        if body.think is not None:
            raise RequestError("think belongs to the chat template, which raw leaves out; leave it out as well")
        if body.system:
            raise RequestError("system belongs to the chat template, which raw leaves out; put it into the prompt")
        return {"prompt": body.prompt}
    system = [{"role": "system", "content": body.system}] if body.system else []
    return {"messages": [*system, {"role": "user", "content": body.prompt}]}


def chat_messages(body: Chat) -> list[dict[str, Any]]:
    """The conversation of /api/chat.

    A call without an id gets one, and a result without one answers the next call. Where the conversation does not have
    the call, the template gets the result without it.
    """
    found: list[dict[str, Any]] = []
    calls = OpenCalls()
    for at, message in enumerate(body.messages):
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        one |= {"name": message.name} if message.name and message.role != "tool" else {}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            own = [(call.id or f"call_{at}_{place}", call) for place, call in enumerate(message.tool_calls)]
            for identity, call in own:
                calls.add(identity, call.function.name)
            one["tool_calls"] = [
                {
                    "id": identity,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": read_arguments(call.function.arguments),
                    },
                }
                for identity, call in own
            ]
        if message.role == "tool":
            one |= _answered(message, calls, at)
        found.append(one)
    return found


def _answered(message: OllamaMessage, calls: OpenCalls, at: int) -> dict[str, str]:
    """The id and name of the call that a result answers, which is then no longer open, or its own."""
    call = calls.answer(message.tool_call_id, message.tool_name)
    if call is None:
        return {"tool_call_id": message.tool_call_id or f"call_{at}", "name": message.tool_name or message.name}
    return {"tool_call_id": call[0], "name": call[1]}


def chat_prompt(about: About, body: Chat) -> dict[str, Any]:
    """The fields of a GenerationRequest that make the prompt of /api/chat."""
    last = body.messages[-1] if len(body.messages) > 1 else None
    goes_on = last is not None and last.role == "assistant" and not last.tool_calls
    return {"messages": chat_messages(body), "tools": tools_of(about, body), "continue_last": goes_on}


def tools_of(about: About, body: Chat) -> list[Tool]:
    """The tools that the model may call. Raises RefusedRequest as `leave_out`, and for one without its function."""
    leave_out(about, [tool.type for tool in body.tools], ("function",))
    found = []
    for at, tool in enumerate(body.tools):
        if tool.type == "function":
            if tool.function is None:
                raise RequestError(f"tools.{at}.function: this field is required")
            found.append(Tool(tool.function.name, tool.function.description, tool.function.parameters))
    return distinct(found)
