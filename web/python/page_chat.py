"""The chat page in a worker: its conversation as a prompt, and its answers as chunks of OpenAI's form (chat/sse.ts)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any, Literal

from tokenwright.errors import RequestError
from tokenwright.explorer.dataclass_reader import Length
from tokenwright.explorer.explorer import MOST_STOPS, Explorer, MessageStream, Seed, Text
from tokenwright.explorer.panels.chat import ChatPrompt
from tokenwright.explorer.table import PanelRoute
from tokenwright.llm.llm import LLM
from tokenwright.llm.output_processor import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    role: Literal["system", "user", "assistant"]
    content: Text


Messages = Annotated[list[ChatMessage], Length(1, 2**16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPrompt:
    """POST /chat/prompt: the messages of a conversation, or a text to continue."""

    messages: Messages | None = None
    prompt: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    include_usage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAnswer:
    """POST /v1/completions and /v1/chat/completions, with the fields that the page sends."""

    model: Text
    messages: Messages | None = None
    prompt: Text | None = None
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: Seed
    stop: Annotated[list[str], Length(0, MOST_STOPS)] = field(default_factory=list)
    stream: bool
    stream_options: StreamOptions
    return_timings: bool


def _given(body: NewPrompt | NewAnswer) -> list[dict[str, str]] | str:
    """The conversation or the text of a body. Raises RequestError for both or neither."""
    if body.messages is not None and body.prompt is None:
        return [{"role": one.role, "content": one.content} for one in body.messages]
    if body.prompt is not None and body.messages is None:
        return body.prompt
    raise RequestError("prompt: give one of prompt and messages")


def _prompt(explorer: Explorer, body: NewPrompt) -> ChatPrompt:
    given, llm = _given(body), explorer.llm
    if isinstance(given, str):
        return ChatPrompt(given, explorer.looks(llm.tokenizer.encode(given)))
    rendered = llm.render(given)
    return ChatPrompt(rendered.text, explorer.looks(rendered.ids))


def _answer(explorer: Explorer, body: NewAnswer) -> MessageStream:
    given, llm = _given(body), explorer.llm
    names = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop")
    sampling = {name: getattr(body, name) for name in names}
    stream = llm.stream(given, **sampling) if isinstance(given, str) else llm.chat_stream(given, **sampling)
    return MessageStream(_answered(llm, given, stream), stream.close)


def _answered(llm: LLM, given: list[dict[str, str]] | str, stream: Stream) -> Iterator[dict[str, Any]]:
    """The chunks; then K and V of the text are kept under the conversation's first words."""
    yield from _chunks(stream, isinstance(given, str))
    if isinstance(given, str):
        first, ids = given[:200], llm.tokenizer.encode(given)
    else:
        first, ids = json.dumps(given[: 1 + (given[0]["role"] == "system")]), list(llm.render(given).ids)
    import_module("kept_kv").keep(llm, first, [*ids, *stream.completion.token_ids])


def _chunks(stream: Stream, completion: bool) -> Iterator[dict[str, Any]]:
    """A chunk for each piece, then one with the reason of the end, the usage and the times."""
    for piece in stream:
        if completion:
            yield {"choices": [{"text": piece.text}]}
        else:
            yield {"choices": [{"delta": {"content": piece.content, "reasoning_content": piece.reasoning}}]}
    done = stream.completion
    usage, moments = done.usage, done.usage.token_s
    details = {"cached_tokens": usage.reused_tokens, "disk_tokens": usage.disk_tokens}
    yield {
        "choices": [{"finish_reason": done.finish_reason}],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "prompt_tokens_details": details,
        },
        "timings": {
            "queue_ms": usage.queue_s * 1000,
            "prefill_ms": (moments[0] - usage.queue_s) * 1000,
            "decode_ms": (moments[-1] - moments[0]) * 1000,
        },
    }


ROUTES = (
    PanelRoute("POST", "/chat/prompt", _prompt),
    PanelRoute("POST", "/v1/completions", _answer),
    PanelRoute("POST", "/v1/chat/completions", _answer),
)
