"""The replies of OpenAI's APIs, as the OpenAPI document declares them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tokenwright.serve.http.reply_schema import Json, Reply, TimingsReply, TokenLogprob, absent


class Truncated(Reply):
    truncated_tokens: int


class PromptDetails(Reply):
    """truncated_tokens: that truncate_prompt_tokens has cut off."""

    cached_tokens: int
    truncated_tokens: int = absent()


class OutputDetails(Reply):
    reasoning_tokens: int


class CompletionDetails(OutputDetails):
    """Prediction tokens are drafts of any origin; a rejected one cost a row of a step."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageReply(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TextLogprobs(Reply):
    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]


class TextChoice(Reply):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(Reply):
    """The reply of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageReply
    timings: TimingsReply = absent()


class ChatLogprobs(Reply):
    content: list[TokenLogprob]
    refusal: None


class AnswerFunction(Reply):
    name: str
    arguments: str


class AnswerCall(Reply):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class ChatMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = absent()
    tool_calls: list[AnswerCall] = absent()


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Reply):
    """The reply of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    timings: TimingsReply = absent()


class ModelEntry(Reply):
    """A model. max_model_len: its context, once it is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int = absent()


class ModelList(Reply):
    object: Literal["list"]
    data: list[ModelEntry]


class EmbeddingEntry(Reply):
    """embedding: numbers, or the base64 of float32 bytes, the lowest first."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Reply):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: Truncated = absent()


class EmbeddingList(Reply):
    """The reply of /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    pooling: Literal["mean", "last", "first"]
    usage: EmbeddingUsage
    timings: TimingsReply = absent()


class RerankedDocument(Reply):
    text: str


class RerankedEntry(Reply):
    """index: of the document in the request."""

    index: int
    relevance_score: float
    document: RerankedDocument = absent()


class RerankUsage(Reply):
    prompt_tokens: int
    total_tokens: int


class Reranked(Reply):
    """The reply of /v1/rerank, the most relevant document first."""

    id: str
    model: str
    results: list[RerankedEntry]
    usage: RerankUsage


class ScoredEntry(Reply):
    index: int
    object: Literal["score"]
    score: float


class ScoredUsage(RerankUsage):
    completion_tokens: Literal[0]


class ScoreReply(Reply):
    """The reply of /v1/score, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoredEntry]
    usage: ScoredUsage


class InfillTimings(Reply):
    """Of the prompt without what was cached, and of the text; in the words of llama.cpp's server."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float


class Infilled(Reply):
    """The reply of /infill, and in a stream its last event; those before have content, index and stop alone."""

    index: Literal[0]
    content: str
    stop: bool
    model: str = absent()
    tokens_evaluated: int = absent()
    tokens_cached: int = absent()
    tokens_predicted: int = absent()
    truncated: bool = absent()
    stop_type: Literal["eos", "limit", "word"] = absent()
    stopping_word: str = absent()
    timings: InfillTimings = absent()


class Tokenized(Reply):
    """The reply of /tokenize to a prompt or messages."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenCardReply(Reply):
    id: int
    text: str
    special: bool


class TokenCards(Reply):
    """The reply of /tokenize to a text."""

    tokens: list[TokenCardReply]


class Detokenized(Reply):
    """The reply of /detokenize to tokens."""

    prompt: str


class DetokenizedText(Reply):
    """The reply of /detokenize to ids."""

    text: str


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


class OutputReasoning(Reply):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: Annotated[list[Json], Field(max_length=0)]
    content: list[ResponseReasoning]
    encrypted_content: str = absent()


class OutputCustomCall(Reply):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    input: str


class OutputCall(Reply):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


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


class DeletedResponse(Reply):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Reply):
    """The items of a stored response's own input."""

    object: Literal["list"]
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False]


class InputTokens(Reply):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Response(Reply):
    """The reply of /v1/responses. What a request says comes back as it was read."""

    id: str
    object: Literal["response"]
    created_at: float
    completed_at: float | None
    status: ItemStatus
    error: None
    incomplete_details: Incomplete | None
    output: list[
        Annotated[OutputMessage | OutputReasoning | OutputCall | OutputCustomCall, Field(discriminator="type")]
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
    truncation: Literal["disabled"]
    user: str | None
    timings: TimingsReply = absent()
