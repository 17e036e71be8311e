"""Translates OpenAI's bodies into the service's requests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from tokenwright.decode.grammars.gbnf import is_gbnf, lark_of
from tokenwright.errors import RequestError
from tokenwright.sampling_params import MOST_GRAMMAR, Grammar
from tokenwright.serve.http import request_parts
from tokenwright.serve.http.api import About, missing_field, wrong_field
from tokenwright.serve.http.exchange import Exchange, schema_grammar
from tokenwright.serve.http.fields import MOST_TEXT
from tokenwright.serve.http.request_parts import mark_of, seen_in
from tokenwright.serve.openai import message_bodies
from tokenwright.serve.openai.bodies import ChatBody, CompletionBody, Sampling
from tokenwright.serve.openai.custom_tools import arguments_of_input, custom_tool, is_described_only
from tokenwright.serve.service.preprocess import ANY_OBJECT
from tokenwright.serve.service.types import Gap, GenerationRequest, Tool, ToolMode, distinct
from tokenwright.text.messages import PICTURES, called, text_of

Json = dict[str, Any]
DEFAULT_TOKENS = 16  # of a completion; a chat goes on to its end
TYPES = ("function", "custom")
ChoiceField = ToolMode | Literal["any"] | message_bodies.Choice | None


def overrides_of(body: Sampling) -> Json:
    found = request_parts.sampling_of(body)
    found["stop_ids"], found["include_stop"] = body.stop_token_ids, body.include_stop_str_in_output
    found["bad_words"], found["allowed_ids"] = body.bad_words or None, body.allowed_token_ids or None
    found["logit_bias"] = {int(token): bias for token, bias in (body.logit_bias or {}).items()} or None
    return found


def common_of(body: Sampling) -> Json:
    return {
        "deadline_s": body.timeout_s,
        "priority": body.priority,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "speculate": body.speculate,
        "streamed": body.stream,
        "shows_special": not body.skip_special_tokens,
    }


def messages_of(messages: Sequence[message_bodies.AnyMessage], *, marked: bool = False) -> list[Json]:
    """The messages as templates read them. A tool result whose call is missing keeps its own name."""
    names: dict[str, str] = {}  # of the functions, by call id
    calls = request_parts.OpenCalls()
    found = [_message(at, message, names, calls) for at, message in enumerate(messages)]
    pairs = zip(found, messages, strict=True)
    return (
        [request_parts.with_marks(one, marks) if (marks := _marks(its)) else one for one, its in pairs]
        if marked
        else found
    )


def _message(
    at: int, message: message_bodies.AnyMessage, names: dict[str, str], calls: request_parts.OpenCalls
) -> Json:
    found: Json = {"role": message.role, "content": _text(message.content)}
    if isinstance(message.content, list):
        found |= seen_in(message.content)
    if message.name:
        found["name"] = message.name
    if isinstance(message, message_bodies.AssistantMessage):
        found["content"] = found["content"] or message.refusal or (found["content"] if message.calls else "")
        if (thought := message.thought) is not None:
            found["reasoning_content"] = thought
        if message.calls:
            found["tool_calls"] = [_call(at, n, call) for n, call in enumerate(message.calls)]
            for call, given in zip(found["tool_calls"], message.calls, strict=True):
                names[call["id"]] = call["function"]["name"]
                calls.add(call["id"], call["function"]["name"], given.id or "")
    elif isinstance(message, message_bodies.ToolMessage):
        found |= _answered(at, message, names, calls)
    elif isinstance(message, message_bodies.FunctionMessage):
        identity, name = calls.answer(None, message.name) or (f"call_{at}", message.name)
        found |= {"role": "tool", "tool_call_id": identity, "name": name}
    others = message.others
    for name in (request_parts.MARKS, PICTURES):  # no fields of clients
        others.pop(name, None)
    return {**others, **found}


def _answered(
    at: int, message: message_bodies.ToolMessage, names: dict[str, str], calls: request_parts.OpenCalls
) -> Json:
    """The call that a tool message answers; without an id, the first open call without one."""
    given = message.tool_call_id or f"call_{at}"
    call = calls.answer(message.tool_call_id, None) or (None if given in names else calls.answer("", None))
    identity, name = call or (given, names.get(given, message.name or ""))
    return {"tool_call_id": identity, "name": name}


def _text(content: object) -> object:
    """A content's text without reasoning, or its parts if they have further fields."""
    if not isinstance(content, list):
        return content
    if any(map(mark_of, content)):
        return "\n".join(text for one in content if (text := _said(one)) is not None)
    parts = [
        {"type": "text", "text": one.text, **one.others}
        if isinstance(one, message_bodies.TextPart)
        else {"type": "text", "text": one.refusal}
        for one in content
        if isinstance(one, message_bodies.TextPart | message_bodies.RefusalPart)
    ]
    return parts if len(parts) > 1 or any(len(one) > 2 for one in parts) else "".join(one["text"] for one in parts)


def _marks(message: message_bodies.AnyMessage) -> list[tuple[int, float]]:
    parts = message.content if isinstance(message.content, list) else ()
    found = request_parts.marks_in(parts, map(_said, parts)) if parts else []
    if (own := message.kept_s()) is not None:
        found.append((MOST_TEXT, own))
    return found


def _said(part: object) -> str | None:
    """The text of a part; None for reasoning, or if it has none."""
    if isinstance(part, message_bodies.RefusalPart):
        return part.refusal
    return part.text if isinstance(part, message_bodies.TextPart) else mark_of(part)


def predicted(body: ChatBody) -> str:
    return "" if body.prediction is None else text_of(_text(body.prediction.content))


def _call(at: int, n: int, call: message_bodies.CalledTool) -> Json:
    arguments: str | Json
    if call.custom is not None:
        name, arguments = call.custom.name, arguments_of_input(call.custom.input)
    elif call.function is not None:
        name, arguments = call.function.name, call.function.arguments
    else:
        raise missing_field(f"messages.{at}.tool_calls.{n}.{call.type}")
    return called(call.id or f"call_{at}_{n}", name, arguments or {})


def chat_wanted(exchange: Exchange, body: ChatBody) -> GenerationRequest:
    body.model = exchange.check_model(body.model)
    exchange.about.ignored = [one for one in exchange.about.ignored if not _is_read(exchange, one)]
    overrides = overrides_of(body)
    overrides["max_tokens"] = most_tokens_of(body)
    if body.top_logprobs and not body.logprobs:
        raise wrong_field("top_logprobs", "top_logprobs needs logprobs: true")
    overrides["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    form = form_of(body)
    return exchange.wanted(
        messages=messages_of(body.messages, marked=True),
        overrides=overrides | {name: one for name, one in form.items() if name == "grammar"},
        tools=tools_of(exchange.about, given_tools(body)),
        **choice_of(given_choice(body)),
        parallel_tool_calls=body.parallel_tool_calls and not body.functions,
        reads_calls=body.parse_tool_calls,
        json_object=form.get("json_object", False),
        prediction=predicted(body),
        **thinking_of(body),
        reasoning=body.separate_reasoning and body.reasoning_format != "none",
        **prefill_of(body),
        **common_of(body),
    )


def _is_read(exchange: Exchange, field: str) -> bool:
    """Whether the chat template reads an unknown field of a message, a part or a tool."""
    service = exchange.service
    template = service.host.llm.prepared.template if service.ready else None
    name = field.rpartition(".")[2]
    return field.startswith(("messages.", "tools.function.")) and template is not None and name in template.tools_source


def prefill_of(body: ChatBody) -> Json:
    """The fields for an answer that continues the last message. Raises RefusedRequest if it cannot."""
    last, asked = body.messages[-1], body.continue_final_message
    own = isinstance(last, message_bodies.AssistantMessage) and not last.calls
    if asked and body.add_generation_prompt:
        why = "add_generation_prompt begins a message, and continue_final_message continues one; leave one out"
        raise wrong_field("add_generation_prompt", why)
    if asked and not own:
        why = "continue_final_message: the last message must be a text of the assistant"
        raise wrong_field("continue_final_message", why)
    goes_on = own and asked is not False and not body.add_generation_prompt and len(body.messages) > 1
    return {"continue_last": goes_on, "generation_prompt": goes_on or body.add_generation_prompt is not False}


def given_tools(body: ChatBody) -> Sequence[message_bodies.FunctionTool]:
    """The tools of a chat. Raises RefusedRequest if both `tools` and `functions` are given."""
    if body.tools and body.functions:
        raise wrong_field("functions", "functions is the older form of tools; leave one of them out")
    return body.tools or [message_bodies.FunctionTool(function=one) for one in body.functions or ()]


def given_choice(body: ChatBody) -> ChoiceField:
    if isinstance(body.function_call, message_bodies.NamedFunction):
        return message_bodies.NamedTool(type="function", function=body.function_call)
    return (body.function_call if body.functions else None) or body.tool_choice


def tools_of(about: About, tools: Sequence[message_bodies.FunctionTool]) -> list[Tool]:
    """The tools that the model may call. Raises RefusedRequest for one without its function."""
    if not tools:
        return []
    request_parts.leave_out(about, [tool.type for tool in tools], TYPES)
    return distinct([_tool(about, at, tool) for at, tool in enumerate(tools) if tool.type in TYPES])


def _tool(about: About, at: int, tool: message_bodies.FunctionTool) -> Tool:
    if tool.type == "custom" and tool.custom is not None:
        if is_described_only(tool.custom.format):
            about.ignored.append("tools.custom.format.grammar")
        return custom_tool(tool.custom.name, tool.custom.description, tool.custom.format)
    if tool.function is None:
        raise missing_field(f"tools.{at}.{tool.type}")
    function = tool.function
    parameters = function.parameters or {"type": "object"}
    sent = {"type": "function", "function": function.sent}
    return Tool(function.name, function.description or "", parameters, bool(function.strict), sent)


def customs_of(body: ChatBody) -> frozenset[str]:
    return frozenset(tool.custom.name for tool in body.tools or () if tool.type == "custom" and tool.custom)


def choice_of(choice: ChoiceField) -> Json:
    match choice:
        case message_bodies.ChoiceObject():
            return choice_of(choice.type)
        case message_bodies.NamedTool():
            return {"tool_choice": "required", "allowed_tools": [choice.tool]}
        case message_bodies.AllowedChoice(allowed_tools=some):
            return {"tool_choice": some.mode, "allowed_tools": [tool.tool for tool in some.tools]}
        case "any":
            return {"tool_choice": "required"}
        case _:
            return {"tool_choice": choice or "auto"}


def most_tokens_of(body: ChatBody) -> int | None:
    """The most tokens of the answer; None: as many as fit. Raises RefusedRequest if two fields differ."""
    older, newer = body.max_tokens, body.max_completion_tokens
    if None not in (older, newer) and older != newer:
        why = "max_tokens and max_completion_tokens contradict each other; leave one of them out"
        raise wrong_field("max_tokens", why)
    return older if newer is None else newer


def thinking_of(body: ChatBody) -> Json:
    """Whether and how the model reasons. If fields differ, the first of `asked` wins."""
    given = dict(body.chat_template_kwargs or {})
    switch, options = body.thinking, body.reasoning
    if switch is not None and switch.clear_thinking is not None:
        given.setdefault("clear_thinking", switch.clear_thinking)
    effort = body.reasoning_effort or (None if options is None else options.effort)
    asked = [
        body.enable_thinking,
        None if switch is None or switch.type == "auto" else switch.type != "disabled",
        None if options is None else options.enabled,
        None if effort in (None, "auto") else effort != "none",
    ]
    budgets = (
        body.thinking_token_budget,
        None if switch is None else switch.budget_tokens,
        None if options is None else options.max_tokens,
    )
    budget = next((one for one in budgets if one is not None), None)
    return request_parts.thinking_fields(next((one for one in asked if one is not None), None), budget, effort, given)


def completion_wanted(exchange: Exchange, body: CompletionBody) -> list[GenerationRequest]:
    overrides = overrides_of(body) | {"logprobs": body.logprobs, "best_of": body.best_of}
    overrides["max_tokens"] = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and body.logprobs is not None:
        overrides["prompt_logprobs"] = body.logprobs
    form = form_of(body)
    overrides |= {name: one for name, one in form.items() if name == "grammar"}
    prompt = body.prompt
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    body.model = exchange.check_model(body.model)
    common = common_of(body) | {"json_object": form.get("json_object", False)}
    if body.suffix and body.echo:
        raise wrong_field("echo", "echo repeats the prompt, and suffix splits it; leave one of them out")
    common |= {"gap": Gap(body.suffix) if body.suffix else None, "add_special": body.add_special_tokens}
    return [exchange.wanted(prompt=one, overrides=overrides, together=len(prompts), **common) for one in prompts]


Form = Grammar | None  # None: any JSON object


def form_of(body: Sampling) -> dict[str, Any]:
    """The fields of GenerationRequest for the answer's format. Raises RefusedRequest if two are given."""
    found = list(_forms(body))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise wrong_field(found[0][0], f"{names} each set the answer's format; leave out all but one")
    if not found:
        return {}
    [(_, form)] = found
    if body.whitespace is None:
        return {"json_object": True} if form is None else {"grammar": form}
    return {"grammar": replace(form or ANY_OBJECT, whitespace=body.whitespace)}


def _forms(body: Sampling) -> Iterator[tuple[str, Form]]:
    yield from _of_format(body.response_format)
    for name, made in _MADE.items():
        for before, holder in (("", body), ("structured_outputs.", body.structured_outputs)):
            if (given := getattr(holder, name, None)) not in (None, False, ""):
                yield f"{before}{name}", made(given)


def _of_format(given: object) -> Iterator[tuple[str, Form]]:
    name = "response_format"
    match given:
        case message_bodies.ObjectFormat():
            yield name, None if given.schema_ is None else schema_grammar(given.schema_, name)
        case message_bodies.SchemaFormat():
            inner = None if given.json_schema is None else given.json_schema.schema_
            found = given.schema_ if inner is None else inner
            if found is None:
                raise missing_field(f"{name}.json_schema.schema")
            strict = given.json_schema is not None and given.json_schema.strict in (True, "true")
            yield name, schema_grammar(found, f"{name}.json_schema", strict=strict)
        case message_bodies.RegexFormat():
            yield name, Grammar.regex(given.pattern or "")
        case message_bodies.GrammarFormat():
            yield name, grammar(given.grammar or "")


def grammar(text: str) -> Grammar:
    """The grammar of a text in llguidance's variant of Lark, or in llama.cpp's GBNF. Raises RequestError."""
    if not is_gbnf(text):
        return Grammar.lark(text)
    if len(text) > MOST_GRAMMAR:
        raise RequestError(f"grammar has {len(text):,} characters; {MOST_GRAMMAR:,} are allowed")
    return Grammar.lark(lark_of(text))


# Fields other than response_format that set the answer's format.
_MADE: dict[str, Callable[[Any], Form]] = {
    "json_schema": lambda one: schema_grammar(one, "schema"),
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": grammar,
    "json_object": lambda _: None,
}
