"""The replies of OpenAI's Responses API, as the OpenAPI document declares them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tokenwright.serve.http.reply_schema import Json, Reply, TimingsReply, TokenLogprob, absent
from tokenwright.serve.openai.reply_schema import OutputDetails

ItemStatus = Literal["completed", "incomplete"]


class ResponseText(Reply):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Json], Field(max_length=0)]
    logprobs: list[TokenLogprob]


class OutputMessage(Reply):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[ResponseText]


class ResponseReasoning(Reply):
    type: Literal["reasoning_text"]
    text: str


class ResponseSummary(Reply):
    type: Literal["summary_text"]
    text: str


class OutputReasoning(Reply):
    """Reasoning, as content, or as a summary where one is asked for. encrypted_content: the whole of it, if asked."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[ResponseSummary]
    content: list[ResponseReasoning]
    encrypted_content: str = absent()


class OutputCall(Reply):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str = absent()


class OutputCustomCall(Reply):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str = absent()


class OutputCompaction(Reply):
    """A summary of the conversation, which stands for it in later requests."""

    id: str
    type: Literal["compaction"]
    encrypted_content: str


class Incomplete(Reply):
    reason: Literal["max_output_tokens"]


class InputDetails(Reply):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(Reply):
    """The reply of /v1/responses. The fields of the request come back as they were read."""

    id: str
    object: Literal["response"]
    created_at: float
    completed_at: float | None
    status: ItemStatus
    error: None
    incomplete_details: Incomplete | None
    output: list[
        Annotated[
            OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | OutputCompaction,
            Field(discriminator="type"),
        ]
    ]
    usage: ResponseUsage
    model: str
    background: Literal[False]
    conversation: None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[Literal["effort", "summary"], str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    timings: TimingsReply = absent()


class ResponseTokens(Reply):
    """The reply of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(Reply):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class CancelledResponse(Reply):
    id: str
    object: Literal["response"]
    status: Literal["cancelled"]


class ResponseItems(Reply):
    """The items that a response was asked with."""

    object: Literal["list"]
    data: list[Json]
    has_more: bool
    first_id: str | None
    last_id: str | None
