"""Anthropic's Messages API: translates its bodies into the service's requests."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_options import read_arguments
from tokenwright.serve.anthropic import bodies, replies
from tokenwright.serve.http.api import About, Api, Route, missing_field
from tokenwright.serve.http.exchange import Exchange, Streamed, event, schema_grammar
from tokenwright.serve.http.openapi import EVENTS
from tokenwright.serve.http.request_parts import leave_out, mark_of, marked, seen_in, thinking_fields, with_marks
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.types import Tool, distinct
from tokenwright.text.messages import called

HEADER = "anthropic-version"


async def messages(exchange: Exchange, body: bodies.Messages) -> Response:
    model = exchange.check_model(body.model)
    prompt = await exchange.off_loop(lambda: prompt_of(exchange.about, body))
    identity, asked = replies.new_identity(), body.diagnostics
    prompt |= {"identity": identity, "compared": (asked and asked.previous_message_id) or ""}
    wanted = exchange.wanted(**prompt, overrides=overrides_of(body), streamed=body.stream)
    shown = not (isinstance(body.thinking, bodies.ThinkingOn) and body.thinking.display == "omitted")
    if body.stream:
        generation = await exchange.started(wanted)
        events = replies.Events(identity, model, shown, generation.counts, lambda: _diagnostics(body, generation))
        return Streamed(_stream(exchange, generation, events), generation.cancel)
    generation, answer = await exchange.answered(wanted)

    def reply() -> replies.AnthropicMessage:
        found = replies.message_of(identity, model, answer, generation.counts(), _diagnostics(body, generation))
        if found["content"][:1] and found["content"][0]["type"] == "thinking" and not shown:
            found["content"][0]["thinking"] = ""
        return found

    return await exchange.whole(reply, generation)


async def count_tokens(exchange: Exchange, body: bodies.CountTokens) -> Response:
    exchange.check_model(body.model)
    prompt = await exchange.off_loop(lambda: prompt_of(exchange.about, body))
    tokens = await exchange.unless_gone(exchange.service.count(exchange.wanted(**prompt)))
    return JSONResponse(replies.CountedTokens(input_tokens=tokens))


def _stream(exchange: Exchange, generation: Generation, events: replies.Events) -> AsyncIterator[bytes]:
    return exchange.events(
        generation,
        lambda one: event(one["type"], one),
        events.take,
        lambda delta: events.end(delta, exchange.said(generation)),
        lambda problem: replies.error_body(problem, exchange.about.request_id),
    )


def _diagnostics(body: bodies.Messages, generation: Generation) -> replies.DiagnosticsReply | None:
    named = body.diagnostics is not None and body.diagnostics.previous_message_id is not None
    return replies.diagnostics_of(generation.cache) if named else None


def overrides_of(body: bodies.Messages) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p")}
    found["top_k"] = 0 if body.top_k == -1 else body.top_k
    found["seed"] = None if body.seed is None else body.seed % 2**64
    if body.stop_sequences:
        found["stop"] = body.stop_sequences
    form = (body.output_config and body.output_config.format) or body.output_format
    if form is not None:
        found["grammar"] = schema_grammar(form.schema_, "output_config.format")
    return found


def prompt_of(about: About, body: bodies.AnthropicPrompted) -> dict[str, Any]:
    """The prompt fields of a GenerationRequest. Raises RequestError for messages that cannot be a prompt."""
    choice, last = body.tool_choice, body.messages[-1]
    messages = edited(body, whole := conversation(body), about)
    about.ignored += left_out(body)
    if isinstance(last, bodies.AnthropicAssistantMessage) and "tool_calls" in messages[-1]:
        raise RequestError(
            f"messages.{len(body.messages) - 1}: an answer can continue only text, and this last message has a "
            "tool_use block; send the user's next message after it"
        )
    return {
        "messages": messages,
        "edited": messages is not whole,
        "tools": tools_of(about, body),
        "tools_kept_s": next((kept for tool in reversed(body.tools) if (kept := tool.kept_s()) is not None), None),
        **choice_of(choice),
        **thinking_of(body),
        "continue_last": isinstance(last, bodies.AnthropicAssistantMessage),
        "parallel_tool_calls": not getattr(choice, "disable_parallel_tool_use", False),
    }


def thinking_of(body: bodies.AnthropicPrompted) -> dict[str, Any]:
    effort = None if body.output_config is None else body.output_config.effort
    if isinstance(body.thinking, bodies.ThinkingOn):
        return thinking_fields(True, body.thinking.budget_tokens, effort, body.chat_template_kwargs)
    return thinking_fields(None if body.thinking is None else False, None, effort, body.chat_template_kwargs)


def tools_of(about: About, body: bodies.AnthropicPrompted) -> list[Tool]:
    """The tools that the model may call. Raises RefusedRequest for one without a schema."""
    leave_out(about, [tool.type for tool in body.tools], ("custom",))
    found = []
    for at, tool in enumerate(body.tools):
        if tool.type == "custom":
            if tool.name is None or tool.input_schema is None:
                raise missing_field(f"tools.{at}.{'name' if tool.name is None else 'input_schema'}")
            found.append(Tool(tool.name, tool.description, tool.input_schema, tool.strict))
    return distinct(found)


def choice_of(choice: object) -> dict[str, Any]:
    match choice:
        case bodies.ToolChoice():
            return {"tool_choice": "required", "allowed_tools": [choice.name]}
        case bodies.PlainChoice():
            return {"tool_choice": "required" if choice.type == "any" else choice.type}
        case _:
            return {"tool_choice": "auto"}


API = Api(
    ("/v1/messages",),
    replies.error_body,
    (
        Route("/v1/messages", messages, (replies.AnthropicMessage,), bodies.Messages, EVENTS, prompt="messages"),
        Route("/v1/messages/count_tokens", count_tokens, (replies.CountedTokens,), bodies.CountTokens),
    ),
    errors=replies.AnthropicError,
    header=HEADER,
    shared=("/v1/",),
    name="anthropic",
    tag="Anthropic",
)


def conversation(body: bodies.AnthropicPrompted) -> list[dict[str, Any]]:
    """The service's messages. A tool result whose call is missing has no name."""
    found: list[dict[str, Any]] = []
    if body.system:
        found.append(marked({"role": "system", "content": text_of(body.system)}, body.system, _text))
    names: dict[str, str] = {}  # of the tools, by call id
    for message in body.messages:
        match message:
            case bodies.AnthropicUserMessage():
                found.extend(_from_user(message, names))
            case bodies.AnthropicAssistantMessage():
                found.append(_from_assistant(message, names))
            case bodies.AnthropicSystemMessage():
                found.append(marked({"role": "system", "content": text_of(message.content)}, message.content, _text))
    return found


def text_of(content: str | Iterable[object]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(text for block in content if (text := _text(block)) is not None)


def _text(block: object) -> str | None:
    match block:
        case bodies.TextBlock():
            return block.text
        case bodies.CompactionBlock():
            return block.content
        case bodies.SearchResultBlock():
            return "\n".join((block.title, block.source, text_of(block.content)))
        case bodies.DocumentBlock():
            told = (
                text_of(block.source.content) if isinstance(block.source, bodies.ContentSource) else block.source.data
            )
            return "\n".join(filter(None, (block.title, block.context, told)))
    return mark_of(block)


def left_out(body: bodies.AnthropicPrompted) -> list[str]:
    found: list[str] = []
    for message in body.messages:
        for block in () if isinstance(message.content, str) else message.content:
            inner = block.content if isinstance(block, bodies.ToolResultBlock) else ()
            each = (block, *(() if isinstance(inner, str) else inner))
            found += [f"messages.content.{one.type}" for one in each if isinstance(one, bodies.HostedBlock)]
    return found


def _from_user(message: bodies.AnthropicUserMessage, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    if isinstance(message.content, str):
        yield {"role": "user", "content": message.content}
        return
    for block in message.content:
        if isinstance(block, bodies.ToolResultBlock):
            text = text_of(block.content)
            content = f"Error: {text}" if block.is_error else text
            name = names.get(block.tool_use_id, "")
            told = {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}
            told |= seen_in(block.content)
            own = block.kept_s()
            yield with_marks(told, [(len(content), own)]) if own is not None else marked(told, block.content, _text)
    texts = [block for block in message.content if _text(block) is not None]
    if texts or not message.content:
        yield marked({"role": "user", "content": text_of(texts)}, texts, _text)


def _from_assistant(message: bodies.AnthropicAssistantMessage, names: dict[str, str]) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    found = marked({"role": "assistant", "content": text_of(message.content)}, message.content, _text)
    thoughts = [block.thinking for block in message.content if isinstance(block, bodies.ThinkingBlock)]
    calls = [block for block in message.content if isinstance(block, bodies.ToolUseBlock)]
    names.update({call.id: call.name for call in calls})
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    if calls:
        found["content"] = found["content"] or None
        found["tool_calls"] = [called(call.id, call.name, read_arguments(call.input)) for call in calls]
    return found


CLEARED = "[cleared]"
THINKING, TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
KEPT = {THINKING: 1, TOOL_USES: 3}
CHARACTERS = 4  # per token, about: the prompt has no tokens yet

Message = dict[str, Any]


def edited(body: bodies.AnthropicPrompted, messages: list[Message], about: About) -> list[Message]:
    """Apply a request's edits to its messages; unknown edits are reported as ignored."""
    for edit in [] if body.context_management is None else body.context_management.edits:
        if edit.type not in KEPT:
            about.ignored.append(f"context_management.edits.{edit.type[:100]}")
        elif edit.keep != "all" and _due(edit.trigger, messages):
            kept = edit.keep.value if edit.keep is not None else KEPT[edit.type]
            messages = (_without_thoughts if edit.type == THINKING else _without_results)(messages, kept, edit)
    return messages


def _due(trigger: bodies.Amount | None, messages: Sequence[Message]) -> bool:
    if trigger is None:
        return True
    if trigger.type == "input_tokens":
        return sum(len(str(one)) for one in messages) > CHARACTERS * trigger.value
    return sum(len(one.get("tool_calls", ())) for one in messages) > trigger.value


def _without_thoughts(messages: Sequence[Message], kept: int, _: bodies.Edit) -> list[Message]:
    turns = [at for at, one in enumerate(messages) if "reasoning_content" in one]
    gone = set(turns[: max(0, len(turns) - kept)])
    return [
        {name: value for name, value in one.items() if name != "reasoning_content"} if at in gone else one
        for at, one in enumerate(messages)
    ]


def _without_results(messages: Sequence[Message], kept: int, edit: bodies.Edit) -> list[Message]:
    """Remove the results of all but the last `kept` calls, and their arguments if the edit says so."""
    spared, inputs = frozenset(edit.exclude_tools), edit.clear_tool_inputs
    named = inputs if isinstance(inputs, bool) else frozenset(inputs)
    results = [at for at, one in enumerate(messages) if one["role"] == "tool" and one["name"] not in spared]
    gone = set(results[: max(0, len(results) - kept)])
    calls = {messages[at]["tool_call_id"] for at in gone}
    return [
        {**one, "content": CLEARED} if at in gone else _without_inputs(one, calls, named)
        for at, one in enumerate(messages)
    ]


def _without_inputs(message: Message, calls: set[str], clear: bool | frozenset[str]) -> Message:
    if not clear or "tool_calls" not in message:
        return message

    def cleared(call: Message) -> Message:
        named = clear if isinstance(clear, bool) else call["function"]["name"] in clear
        function = {**call["function"], "arguments": {}} if named and call["id"] in calls else call["function"]
        return {**call, "function": function}

    return {**message, "tool_calls": [cleared(call) for call in message["tool_calls"]]}
