"""From OpenAI's bodies to the service's requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request

from tokenwright.sampling_params import Grammar
from tokenwright.serve.http.api import RefusedRequest, about
from tokenwright.serve.http.samplers import samplers_of
from tokenwright.serve.openai.bodies import (
    AllowedChoice,
    AnyMessage,
    AssistantMessage,
    ChatBody,
    CompletionBody,
    FunctionTool,
    NamedTool,
    Sampling,
    SchemaFormat,
    TextPart,
    ToolMessage,
)
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Gap, GenerationRequest, Problem, Tool, ToolMode, no_model

Json = dict[str, Any]
DEFAULT_TOKENS = 16  # of a completion; a chat goes on to its end


def sampling_of(body: Sampling) -> Json:
    """The sampling parameters that completions and chats have in common."""
    same = ("n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "top_k", "min_p", "typical_p")
    found = {name: getattr(body, name) for name in (*same, "repetition_penalty", "min_tokens", "ignore_eos")}
    found |= samplers_of(body)
    found["seed"] = None if body.seed is None else body.seed % 2**64
    found["stop"] = (body.stop,) if isinstance(body.stop, str) else body.stop
    found["stop_ids"], found["include_stop"] = body.stop_token_ids, body.include_stop_str_in_output
    found["logit_bias"] = {int(token): bias for token, bias in (body.logit_bias or {}).items()} or None
    return found


def checked(service: Service, request: Request, body: Sampling) -> Json:
    """The fields of `GenerationRequest` that completions and chats have in common. Raises Missing, Refusal."""
    if body.model not in service.names:
        raise no_model(body.model, service.names)
    if body.stream_options is not None and not body.stream:
        raise RefusedRequest(
            Problem(400, "invalid", "stream_options belongs to a stream; set stream", "stream_options")
        )
    known_of = about(request)
    return {
        "caller": known_of.caller,
        "request_id": known_of.request_id,
        "deadline_s": body.timeout_s,
        "priority": body.priority,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "streamed": body.stream,
        "model": body.model,
    }


def messages_of(messages: Sequence[AnyMessage]) -> list[Json]:
    """The messages as templates read them.

    Raises Refusal for arguments that are no JSON object, and for a result without its call.
    """
    names: dict[str, str] = {}  # of the functions, by the id of their call
    return [_message(at, message, names) for at, message in enumerate(messages)]


def _message(at: int, message: AnyMessage, names: dict[str, str]) -> Json:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
    found: Json = {"role": message.role, "content": content}
    if isinstance(message, AssistantMessage):
        if content is None:
            found["content"] = message.refusal or ""
        if message.reasoning_content is not None:
            found["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            found["tool_calls"] = [_call(at, n, call) for n, call in enumerate(message.tool_calls)]
            names.update({call.id: call.function.name for call in message.tool_calls})
    elif isinstance(message, ToolMessage):
        found |= {"tool_call_id": message.tool_call_id, "name": _name_of(at, message, names)}
    return found


def _name_of(at: int, result: ToolMessage, names: Mapping[str, str]) -> str:
    """The function whose result this is."""
    name, given = names.get(result.tool_call_id), result.name
    if name is None:
        place = f"messages.{at}.tool_call_id"
        why = f"{place}: no message before it has a call with the id {result.tool_call_id!r}"
        raise RefusedRequest(Problem(400, "invalid", why, place))
    if given not in (None, name):
        place = f"messages.{at}.name"
        raise RefusedRequest(Problem(400, "invalid", f"{place}: its call is of {name!r}, not of {given!r}", place))
    return name


def _call(at: int, n: int, call: Any) -> Json:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        place = f"messages.{at}.tool_calls.{n}.function.arguments"
        raise RefusedRequest(Problem(400, "invalid", f"{place} must be the text of a JSON object", place))
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def chat_wanted(service: Service, request: Request, body: ChatBody) -> GenerationRequest:
    """The internal request of a chat. Raises Missing, Refusal, RequestError."""
    overrides = sampling_of(body)
    overrides["max_tokens"] = most_tokens_of(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise RefusedRequest(Problem(400, "invalid", "top_logprobs needs logprobs: true", "top_logprobs"))
    overrides["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    if isinstance(body.response_format, SchemaFormat):
        overrides["grammar"] = Grammar.json_schema(body.response_format.json_schema.schema_)
    return GenerationRequest(
        messages=messages_of(body.messages),
        overrides=overrides,
        tools=tools_of(body.tools or ()),
        **choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        json_object=body.response_format is not None and body.response_format.type == "json_object",
        thinking=thinking_of(body),
        **checked(service, request, body),
    )


def tools_of(tools: Sequence[FunctionTool]) -> list[Tool]:
    """The functions that the model may call."""
    return [
        Tool(tool.function.name, tool.function.description or "", tool.function.parameters or {"type": "object"})
        for tool in tools
    ]


def choice_of(choice: ToolMode | NamedTool | AllowedChoice | None) -> Json:
    """The fields of a Wanted that say whether a tool must be called, and which may be."""
    match choice:
        case NamedTool():
            return {"tool_choice": "required", "allowed_tools": [choice.function.name]}
        case AllowedChoice(allowed_tools=some):
            return {"tool_choice": some.mode, "allowed_tools": [tool.function.name for tool in some.tools]}
        case _:
            return {"tool_choice": choice or "auto"}


def most_tokens_of(body: ChatBody) -> int | None:
    """The most tokens of the answer; None: as many as fit. Raises Refusal for two fields that differ."""
    older, newer = body.max_tokens, body.max_completion_tokens
    if None not in (older, newer) and older != newer:
        why = "max_tokens and max_completion_tokens contradict each other; leave one of them out"
        raise RefusedRequest(Problem(400, "invalid", why, "max_tokens"))
    return older if newer is None else newer


def thinking_of(body: ChatBody) -> bool | None:
    """Whether the model shall reason first; None: as its template says. Raises Refusal for two fields that differ."""
    effort = None if body.reasoning_effort is None else body.reasoning_effort != "none"
    variable = None if body.chat_template_kwargs is None else body.chat_template_kwargs.enable_thinking
    if None not in (effort, variable) and effort != variable:
        why = "reasoning_effort and chat_template_kwargs.enable_thinking contradict each other; leave one of them out"
        raise RefusedRequest(Problem(400, "invalid", why, "reasoning_effort"))
    return variable if effort is None else effort


def completion_wanted(service: Service, request: Request, body: CompletionBody) -> list[GenerationRequest]:
    """The internal requests of a completion, one for each prompt. Raises Missing, Refusal."""
    overrides = sampling_of(body) | {"logprobs": body.logprobs, "best_of": body.best_of}
    overrides["max_tokens"] = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and body.logprobs is not None:
        overrides["prompt_logprobs"] = body.logprobs
    prompt = body.prompt
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    common = checked(service, request, body)
    if body.suffix and body.echo:
        raise RefusedRequest(
            Problem(400, "invalid", "echo repeats a prompt, which suffix parts; leave one out", "echo")
        )
    common["gap"] = Gap(body.suffix) if body.suffix else None
    return [GenerationRequest(prompt=one, overrides=overrides, together=len(prompts), **common) for one in prompts]
