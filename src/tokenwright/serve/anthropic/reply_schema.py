"""The replies of Anthropic's API, as the OpenAPI document declares them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tokenwright.serve.http.reply_schema import Json, Reply, TimingsReply, absent


class ThinkingContent(Reply):
    type: Literal["thinking"]
    thinking: str
    signature: str


class TextContent(Reply):
    type: Literal["text"]
    text: str


class ToolUseContent(Reply):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class MessageUsage(Reply):
    """input_tokens: those that were computed; cache_read_input_tokens: the others."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    service_tier: Literal["standard"]


class AnthropicMessage(Reply):
    """The reply of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[ThinkingContent | TextContent | ToolUseContent, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage
    timings: TimingsReply = absent()


class CountedTokens(Reply):
    """The reply of /v1/messages/count_tokens."""

    input_tokens: int


class AnthropicModel(Reply):
    """A model. Its tokens are its context, once it is loaded."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModels(Reply):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class AnthropicErrorDetail(Reply):
    type: str
    message: str
    details: Json = absent()


class AnthropicError(Reply):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
