"""One conversation as seven agents send it: their APIs, where they name the session, and what they mark and repeat.

The shapes are those of bodies that the agents of `tests/clients` sent; all words are our own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anthropic
import openai

Json = dict[str, Any]
API = "messages", "responses", "chat"
REMINDER = "Answer with whole files only."


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: Json


@dataclass(frozen=True)
class Said:
    """A message. role: user, assistant, or result (of the call `call`)."""

    role: str
    text: str
    thoughts: str = ""
    calls: tuple[Call, ...] = ()
    call: str = ""


@dataclass(frozen=True)
class Talk:
    """A conversation. marks: the user's last message is a breakpoint. previous: the reply to compare with."""

    session: str
    system: str
    tools: tuple[str, ...]
    messages: tuple[Said, ...]
    model: str = "tiny"
    effort: str = "low"
    marks: bool = False
    previous: str = ""

    def said(self, *more: Said) -> Talk:
        return replace(self, messages=(*self.messages, *more))


@dataclass(frozen=True)
class Agent:
    """api: one of API. named: the body's fields and the headers that name its session."""

    api: str
    named: Callable[[str], tuple[Json, dict[str, str]]] = lambda _: ({}, {})
    body: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[str, ...] = ("Bash", "Read")
    reminder: bool = False  # the last user message ends with one, which it sends no more later
    parts: bool = False  # contents are lists of parts

    def ask(self, url: str, key: str, talk: Talk) -> Any:
        """Send a conversation with the official client; returns the reply, as the client's own type."""
        body, headers = self.named(talk.session)
        body = {"model": talk.model, **body, **self.body}
        send = {"messages": _messages, "responses": _responses, "chat": _chat}[self.api]
        return send(self, url, key, talk, body, headers)


AGENTS: Mapping[str, Agent] = {
    "claude-code": Agent(
        "messages",
        lambda session: ({"metadata": {"user_id": f"user_1_session_{session}"}}, {"x-claude-code-session-id": session}),
        parts=True,
    ),
    "codex": Agent(
        "responses",
        lambda session: ({"prompt_cache_key": session}, {"session_id": session}),
        {"store": False, "include": ["reasoning.encrypted_content"], "parallel_tool_calls": False},
    ),
    "opencode": Agent("chat", lambda session: ({}, {"x-session-affinity": session}), parts=True),
    "qwen-code": Agent("chat", lambda session: ({}, {"x-qwen-code-session-id": session}), parts=True),
    "continue": Agent("chat"),
    "open-webui": Agent("chat", body={"stream_options": None, "temperature": 0.5}),
    "aider": Agent("chat", tools=(), reminder=True),
}


def schema(name: str) -> Json:
    return {"type": "object", "properties": {"command": {"type": "string"}, name: {"type": "string"}}}


def _last(at: int, talk: Talk) -> bool:
    users = [at for at, one in enumerate(talk.messages) if one.role == "user"]
    return talk.marks and at == users[-1]


def _words(agent: Agent, one: Said, at: int, talk: Talk) -> str:
    last = agent.reminder and at + 1 == len(talk.messages)
    return f"{one.text}\n{REMINDER}" if last else one.text


def _messages(agent: Agent, url: str, key: str, talk: Talk, body: Json, headers: dict[str, str]) -> Any:
    system = [{"type": "text", "text": talk.system, "cache_control": {"type": "ephemeral"}}]
    tools = [{"name": name, "description": f"{name} it.", "input_schema": schema(name)} for name in talk.tools]
    messages: list[Json] = []
    for at, one in enumerate(talk.messages):
        mark = {"cache_control": {"type": "ephemeral"}} if _last(at, talk) else {}
        blocks: list[Json] = []
        if one.thoughts:
            blocks.append({"type": "thinking", "thinking": one.thoughts, "signature": "s"})
        if one.role == "result":
            blocks.append({"type": "tool_result", "tool_use_id": one.call, "content": one.text, **mark})
        elif one.text:
            blocks.append({"type": "text", "text": _words(agent, one, at, talk), **mark})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in one.calls
        ]
        messages.append({"role": "assistant" if one.role == "assistant" else "user", "content": blocks})
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        return client.messages.create(
            **body,
            max_tokens=120,
            system=system,
            tools=tools or anthropic.omit,
            messages=messages,
            output_config={"effort": talk.effort},
            diagnostics={"previous_message_id": talk.previous or None},
            extra_headers=headers,
        )


def _responses(_: Agent, url: str, key: str, talk: Talk, body: Json, headers: dict[str, str]) -> Any:
    tools = [
        {"type": "function", "name": name, "description": f"{name} it.", "parameters": schema(name), "strict": False}
        for name in talk.tools
    ]
    items: list[Json] = []
    for at, one in enumerate(talk.messages):
        if one.thoughts:
            thoughts = [{"type": "reasoning_text", "text": one.thoughts}]
            items.append({"type": "reasoning", "id": f"rs_{at}", "summary": [], "content": thoughts})
        if one.role == "result":
            items.append({"type": "function_call_output", "call_id": one.call, "output": one.text})
        elif one.text:
            kind = "output_text" if one.role == "assistant" else "input_text"
            mark = {"prompt_cache_breakpoint": {"mode": "explicit"}} if _last(at, talk) else {}
            content = [{"type": kind, "text": one.text, **mark}]
            items.append({"type": "message", "role": one.role, "content": content})
        items += [
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": json.dumps(call.arguments)}
            for call in one.calls
        ]
    compared = {"comparison_response_id": talk.previous} if talk.previous else {}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        return client.responses.create(
            **body,
            max_output_tokens=120,
            instructions=talk.system,
            tools=tools,
            input=items,
            reasoning={"effort": talk.effort},
            extra_body={"prompt_cache_options": {"ttl": "30m", **compared}},
            extra_headers=headers,
        )


def _chat(agent: Agent, url: str, key: str, talk: Talk, body: Json, headers: dict[str, str]) -> Any:
    tools = [
        {"type": "function", "function": {"name": name, "description": f"{name} it.", "parameters": schema(name)}}
        for name in talk.tools
    ]
    messages: list[Json] = [{"role": "system", "content": talk.system}]
    for at, one in enumerate(talk.messages):
        words, mark = _words(agent, one, at, talk), _last(at, talk)
        content: str | Sequence[Json] = words
        if (agent.parts and one.role == "user") or mark:
            content = [{"type": "text", "text": words, **({"cache_control": {"type": "ephemeral"}} if mark else {})}]
        if one.role == "result":
            messages.append({"role": "tool", "tool_call_id": one.call, "content": content})
            continue
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in one.calls
        ]
        thoughts = {"reasoning_content": one.thoughts} if one.thoughts else {}
        messages.append({"role": one.role, "content": content, **({"tool_calls": calls} if calls else {}), **thoughts})
    compared = {"prompt_cache_options": {"comparison_response_id": talk.previous}} if talk.previous else {}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        return client.chat.completions.create(
            **{name: value for name, value in body.items() if value is not None},
            max_tokens=120,
            messages=messages,
            tools=tools or openai.omit,
            reasoning_effort=talk.effort,
            extra_body=compared,
            extra_headers=headers,
        )
