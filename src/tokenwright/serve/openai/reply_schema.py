"""The replies of OpenAI's APIs, as the OpenAPI document declares them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, RootModel

from tokenwright.serve.http.reply_schema import Reply, TimingsReply, TokenLogprob, absent


class Truncated(Reply):
    truncated_tokens: int


class PromptDetails(Reply):
    """disk_tokens: of the cached ones, those read from a disk. truncated_tokens: cut off by truncate_prompt_tokens."""

    cached_tokens: int
    disk_tokens: int = absent()
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


class LlamaTimings(Reply):
    """Times of the prompt without its cached part, and of the text; in the words of llama.cpp's server."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int = absent()
    draft_n_accepted: int = absent()


class ReplyTimings(TimingsReply, LlamaTimings):
    """The same times in our words and in llama.cpp's."""


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
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageReply
    timings: ReplyTimings = absent()


class ChatLogprobs(Reply):
    content: list[TokenLogprob]
    refusal: None


class AnswerFunction(Reply):
    name: str
    arguments: str


class AnswerInput(Reply):
    name: str
    input: str


class AnswerCall(Reply):
    """A call of a function, or of a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: AnswerFunction = absent()
    custom: AnswerInput = absent()


class ChatMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = absent()
    tool_calls: list[AnswerCall] = absent()
    function_call: AnswerFunction = absent()


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]


class ChatCompletion(Reply):
    """The reply of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageReply
    timings: ReplyTimings = absent()


class ModelMeta(Reply):
    n_ctx: int


class ModelEntry(Reply):
    """A model. max_model_len, context_length and meta.n_ctx: its context, once it is loaded, for clients of several."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int = absent()
    context_length: int = absent()
    meta: ModelMeta = absent()


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


class TeiEntry(Reply):
    index: int
    score: float
    text: str = absent()


class TeiReranked(RootModel[Annotated[list[TeiEntry], Field(fail_fast=True)]]):
    """The reply of /rerank to `texts`."""


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


class InputTokensReply(Reply):
    """The reply of /v1/chat/completions/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int
