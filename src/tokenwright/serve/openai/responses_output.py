"""The response object of OpenAI's Responses API, and the events with which it is written.

A response's output is a list of items: reasoning, a message, function calls, in the order in which the model wrote
them. Each item has its events from output_item.added to output_item.done; all events are numbered.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from tokenwright.llm.outputs import Piece
from tokenwright.sampling_params import SamplingParams
from tokenwright.serve.openai.responses_bodies import (
    AnyTool,
    Create,
    CustomTool,
    HostedResponseTool,
    Namespace,
    ResponseFunctionTool,
)
from tokenwright.serve.service.ids import new_hex
from tokenwright.serve.service.types import Delta, TokenCounts, ToolCallDelta

Kind = Literal["reasoning", "message", "function_call", "custom_tool_call"]
Event = dict[str, Any]
Render = Callable[[Iterable[Piece]], list[dict[str, Any]]]  # tokens -> their logprobs as this API writes them

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
_CALLS = ("function_call", "custom_tool_call")
ENCRYPTED = "reasoning.encrypted_content"  # of `include`: reasoning as one opaque text, for the next request
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


def new_identity(prefix: str) -> str:
    return f"{prefix}_{new_hex(16)}"


class Envelope:
    """A response but for its output: what it has from the request, and its id."""

    def __init__(self, body: Create, model: str, params: SamplingParams) -> None:
        choice = body.tool_choice
        self.identity = new_identity("resp")
        self._created = time.time()
        self.encrypted = ENCRYPTED in body.include
        self.custom = {tool.name for tool in functions_of(body.tools) if isinstance(tool, CustomTool)}
        self._about = {
            "object": "response",
            "background": False,
            "conversation": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata,
            "model": model,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store,
            "temperature": params.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True), "verbosity": "medium"},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def at(
        self, status: str, output: list[dict[str, Any]], counts: TokenCounts | None = None, error: str | None = None
    ) -> dict[str, Any]:
        """The response in a state. counts: once its text has ended. error: why it failed."""
        return {
            "id": self.identity,
            "created_at": self._created,
            "completed_at": max(time.time(), self._created) if status == "completed" else None,  # it may be set back
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": None if counts is None else usage_of(counts),
            **self._about,
        }


def functions_of(tools: Iterable[AnyTool]) -> Iterator[ResponseFunctionTool | CustomTool]:
    """The tools of a request that its client runs, those in namespaces included."""
    for tool in tools:
        if isinstance(tool, Namespace):
            yield from tool.tools
        elif not isinstance(tool, HostedResponseTool):
            yield tool


def input_of(arguments: str) -> str:
    """The input of a custom tool's call; what was written of it, if the text ended before it was complete."""
    try:
        return str(json.loads(arguments)["input"])
    except (ValueError, KeyError, TypeError):
        return arguments


def usage_of(counts: TokenCounts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.completion,
    }


class ResponseOutput:
    """Writes the items of one response, event by event. An event is only valid until the next one is taken.

    render(tokens): their logprobs as this API writes them.
    """

    def __init__(self, envelope: Envelope, render: Render) -> None:
        self._items: list[dict[str, Any]] = []
        self._envelope = envelope
        self._render = render
        self._number = 0
        self._open = False  # the last item is being written
        self._cut = False  # the text became too long
        self._tokens: list[Piece] = []  # of text that is held back
        self._written = ""  # the arguments of the open call of a custom tool

    def start(self) -> Iterator[Event]:
        """The events before anything is written."""
        for state in ("created", "in_progress"):
            yield self._event(f"response.{state}", response=self._envelope.at("in_progress", []))

    def take(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta, but for the response's end."""
        for call in delta.continued:
            yield from self._add_call(call)
        if delta.reasoning:
            yield from self._add_text("reasoning", delta.reasoning)
        self._tokens += delta.tokens
        if delta.text:
            yield from self._add_text("message", delta.text)
        for call in delta.begun:
            yield from self._add_call(call)
        if delta.finish is not None:
            self._cut = delta.finish == "length"
            if not self._items:  # an answer without a word
                yield from self._begin("message")
            if self._tokens and self._items[-1]["type"] == "message":  # the last tokens have added no text
                yield from self._add_text("message", "")
            yield from self._end_item()

    def response(self, counts: TokenCounts) -> dict[str, Any]:
        """The whole response, once its text has ended."""
        return self._envelope.at("incomplete" if self._cut else "completed", self._items, counts)

    def end(self, counts: TokenCounts) -> Event:
        """The last event."""
        response = self.response(counts)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, message: str) -> Event:
        """The last event of a response that failed."""
        return self._event("response.failed", response=self._envelope.at("failed", self._items, error=message))

    def _event(self, kind: str, **content: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **content}
        self._number += 1
        return event

    def _add_text(self, kind: Kind, text: str) -> Iterator[Event]:
        if not (self._open and self._items[-1]["type"] == kind):
            yield from self._begin(kind)
        part = self._items[-1]["content"][0]
        part["text"] += text
        more = {}
        if kind == "message":
            more["logprobs"] = self._render(self._tokens)
            part["logprobs"] += more["logprobs"]
            self._tokens = []
        yield self._event(f"response.{_PARTS[kind]}.delta", **self._place(part=True), delta=text, **more)

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.id is not None:
            self._written = ""
            if call.name in self._envelope.custom:
                yield from self._begin("custom_tool_call", call_id=call.id, name=call.name, input="")
            else:
                yield from self._begin("function_call", call_id=call.id, name=call.name, arguments="")
        if call.arguments and self._items[-1]["type"] == "custom_tool_call":
            self._written += call.arguments  # the JSON around the input
        elif call.arguments:
            self._items[-1]["arguments"] += call.arguments
            yield self._event("response.function_call_arguments.delta", **self._place(), delta=call.arguments)

    def _begin(self, kind: Kind, **about: Any) -> Iterator[Event]:
        """End the open item, and open a new one."""
        yield from self._end_item()
        item = {"id": new_identity(_PREFIXES[kind]), "type": kind, "status": "in_progress", **about}
        item |= {"role": "assistant", "content": []} if kind == "message" else {}
        item |= {"summary": [], "content": []} if kind == "reasoning" else {}
        self._items.append(item)
        self._open = True
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if kind not in _CALLS:
            part: dict[str, Any] = {"type": _PARTS[kind], "text": ""} | (
                {"annotations": [], "logprobs": []} if kind == "message" else {}
            )
            item["content"].append(part)
            yield self._event("response.content_part.added", **self._place(part=True), part=part)

    def _end_item(self) -> Iterator[Event]:
        """End the open item, if there is one."""
        if not self._open:
            return
        self._open, item = False, self._items[-1]
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._place(), **done)
        elif item["type"] == "custom_tool_call":
            item["input"] = input_of(self._written)
            yield self._event("response.custom_tool_call_input.delta", **self._place(), delta=item["input"])
            yield self._event("response.custom_tool_call_input.done", **self._place(), input=item["input"])
        else:
            part, place = item["content"][0], self._place(part=True)
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._event(f"response.{part['type']}.done", **place, **done)
            yield self._event("response.content_part.done", **place, part=part)
            if item["type"] == "reasoning" and self._envelope.encrypted:
                item["encrypted_content"] = base64.b64encode(part["text"].encode()).decode()
        item["status"] = "incomplete" if self._cut else "completed"
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self, *, part: bool = False) -> dict[str, Any]:
        """Where the open item is, and its part."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place | ({"content_index": 0} if part else {})
