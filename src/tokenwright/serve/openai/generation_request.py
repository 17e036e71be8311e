"""From OpenAI's bodies to the service's requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import Request

from tokenwright.decode.gbnf import is_gbnf, lark_of
from tokenwright.sampling_params import Grammar
from tokenwright.serve.http.api import RefusedRequest, about
from tokenwright.serve.http.replying import check_model, note_unenforced, schema_grammar
from tokenwright.serve.http.samplers import samplers_of
from tokenwright.serve.openai.bodies import (
    AllowedChoice,
    AnyFormat,
    AnyMessage,
    AssistantMessage,
    CalledTool,
    ChatBody,
    CompletionBody,
    FunctionTool,
    GrammarFormat,
    NamedTool,
    ObjectFormat,
    RefusalPart,
    RegexFormat,
    Sampling,
    SchemaFormat,
    StructuredOutputs,
    TextPart,
    ToolMessage,
)
from tokenwright.serve.openai.stored_responses import read_arguments
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Gap, GenerationRequest, Problem, Tool, ToolMode

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
    model = check_model(request, service, body.model)
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
        "model": model,
    }


def messages_of(messages: Sequence[AnyMessage]) -> list[Json]:
    """The messages as templates read them. Raises RefusedRequest for a result without its call."""
    names: dict[str, str] = {}  # of the functions, by the id of their call
    return [_message(at, message, names) for at, message in enumerate(messages)]


def _message(at: int, message: AnyMessage, names: dict[str, str]) -> Json:
    content = _joined(message.content)
    found: Json = {"role": message.role, "content": content}
    if isinstance(message, AssistantMessage):
        if content is None:
            found["content"] = message.refusal or ""
        thoughts = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if thoughts is not None:
            found["reasoning_content"] = thoughts
        if message.tool_calls:
            found["tool_calls"] = [_call(call) for call in message.tool_calls]
            names.update({call.id: call.function.name for call in message.tool_calls})
    if message.name is not None and not isinstance(message, ToolMessage):
        found["name"] = message.name
    if isinstance(message, ToolMessage):
        found |= {"tool_call_id": message.tool_call_id, "name": _name_of(at, message, names)}
    return found


def _joined(content: str | Sequence[TextPart | RefusalPart] | None) -> str | None:
    """The text of a content."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def predicted(body: ChatBody) -> str:
    """What the client expects as the answer; "" if it does not say."""
    return "" if body.prediction is None else _joined(body.prediction.content) or ""


def _name_of(at: int, result: ToolMessage, names: Mapping[str, str]) -> str:
    """The function whose result this is."""
    name = names.get(result.tool_call_id)
    if name is None:
        place = f"messages.{at}.tool_call_id"
        why = f"{place}: no message before it has a call with the id {result.tool_call_id!r}"
        raise RefusedRequest(Problem(400, "invalid", why, place))
    return name


def _call(call: CalledTool) -> Json:
    """A call as templates read it; arguments that are no JSON object stay text."""
    arguments = read_arguments(call.function.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def chat_wanted(service: Service, request: Request, body: ChatBody) -> GenerationRequest:
    """The internal request of a chat. Raises Missing, Refusal, RequestError."""
    overrides = sampling_of(body)
    overrides["max_tokens"] = most_tokens_of(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise RefusedRequest(Problem(400, "invalid", "top_logprobs needs logprobs: true", "top_logprobs"))
    overrides["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    overrides["grammar"] = grammar_of(request, body, body.response_format)
    tools = tools_of(body.tools or ())
    note_unenforced(request, tools)
    thinking, variables = variables_of(body)
    messages = messages_of(body.messages)
    return GenerationRequest(
        messages=messages,
        overrides=overrides,
        tools=tools,
        **choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        json_object=overrides["grammar"] is None and wants_object(body),
        thinking=thinking,
        variables=variables,
        continue_last=continues_last(body),
        prediction=predicted(body),
        **checked(service, request, body),
    )


def tools_of(tools: Sequence[FunctionTool]) -> list[Tool]:
    """The functions that the model may call."""
    return [
        Tool(
            tool.function.name,
            tool.function.description or "",
            tool.function.parameters or {"type": "object"},
            bool(tool.function.strict),
        )
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


def variables_of(body: ChatBody) -> tuple[bool | None, Json]:
    """Whether the model shall reason first (None: as its template says), and the template's other variables."""
    variables = dict(body.chat_template_kwargs or {})
    effort, thinking = body.reasoning_effort, variables.pop("enable_thinking", None)
    if effort is not None and effort != "none":
        variables.setdefault("reasoning_effort", effort)
    if not isinstance(thinking, bool | None):
        why = "chat_template_kwargs.enable_thinking must be true or false"
        raise RefusedRequest(Problem(400, "invalid", why, "chat_template_kwargs.enable_thinking"))
    return (None if effort is None else effort != "none") if thinking is None else thinking, variables


def continues_last(body: ChatBody) -> bool:
    """Whether the answer goes on from the last message, which then is the assistant's and text."""
    last = body.messages[-1]
    plain = isinstance(last, AssistantMessage) and not last.tool_calls and bool(last.content)
    return body.continue_final_message or (plain and body.add_generation_prompt is not True)


def wants_object(body: Sampling) -> bool:
    """Whether the answer must be any JSON object."""
    form = body.response_format if isinstance(body, ChatBody) else None
    given = body.structured_outputs
    return (form is not None and form.type == "json_object") or (given is not None and given.json_object)


def grammar_of(request: Request, body: Sampling, form: AnyFormat | None = None) -> Grammar | None:
    """The form of the whole text, by whatever name. Raises RefusedRequest for several, RequestError for a wrong one."""
    given = body.structured_outputs or StructuredOutputs.model_construct()
    found = [
        *_forms_of(request, form),
        *(Grammar.choice(texts) for texts in (body.choice, body.guided_choice, given.choice) if texts),
        *(Grammar.regex(pattern) for pattern in (body.regex, body.guided_regex, given.regex) if pattern),
        *(written_grammar(text) for text in (body.grammar, body.guided_grammar, given.grammar) if text),
        *(_of_schema(request, one) for one in (body.guided_json, body.json_schema, given.json_) if one is not None),
    ]
    if len(found) > 1:
        why = "the form of the text is given more than once; leave one of response_format, choice, regex, grammar"
        raise RefusedRequest(Problem(400, "invalid", why, "response_format" if form is not None else "grammar"))
    return found[0] if found else None


def written_grammar(text: str) -> Grammar:
    """A grammar in llguidance's Lark, or in llama.cpp's GBNF. Raises RequestError."""
    return Grammar.lark(lark_of(text) if is_gbnf(text) else text)


def _of_schema(request: Request, schema: Json | str) -> Grammar:
    """A grammar of a schema, or of the text of one."""
    if isinstance(schema, str):
        return Grammar.json_schema(schema)
    return schema_grammar(request, schema, strict=False, where="json_schema")


def _forms_of(request: Request, form: AnyFormat | None) -> Iterator[Grammar]:
    match form:
        case SchemaFormat(json_schema=None, schema_=None):
            why = "response_format.json_schema: this field is required"
            raise RefusedRequest(Problem(400, "invalid", why, "response_format.json_schema"))
        case SchemaFormat(json_schema=named) if named is not None:
            strict = named.strict in (True, "true")
            yield schema_grammar(request, named.schema_, strict, "response_format.json_schema.schema")
        case SchemaFormat(schema_=schema) | ObjectFormat(schema_=schema) if schema is not None:
            yield _of_schema(request, schema)
        case RegexFormat():
            yield Grammar.regex(form.pattern)
        case GrammarFormat():
            yield written_grammar(form.grammar)


def completion_wanted(service: Service, request: Request, body: CompletionBody) -> list[GenerationRequest]:
    """The internal requests of a completion, one for each prompt. Raises Missing, Refusal."""
    overrides = sampling_of(body) | {"logprobs": body.logprobs, "best_of": body.best_of}
    overrides["max_tokens"] = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    overrides["grammar"] = grammar_of(request, body)
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
    form = wants_object(body) and overrides["grammar"] is None
    return [
        GenerationRequest(prompt=one, overrides=overrides, json_object=form, together=len(prompts), **common)
        for one in prompts
    ]
