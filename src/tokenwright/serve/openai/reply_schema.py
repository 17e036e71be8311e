"""The replies of OpenAI's APIs, as the OpenAPI document declares them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, RootModel

from tokenwright.serve.http.reply_schema import Json, Reply, TimingsReply, TokenLogprob, TopLogprobReply, absent


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


class LlamaLogprob(TopLogprobReply):
    id: int


class LlamaToken(LlamaLogprob):
    """A token of a text, and the likeliest ones of its place."""

    top_logprobs: list[LlamaLogprob]


class Infilled(Reply):
    """The reply of /infill and /completion, and in a stream the last event; earlier ones have only the first fields.

    `response_fields` may leave out any of them.
    """

    index: int = absent()
    content: str = absent()
    tokens: list[int] = absent()
    stop: bool = absent()
    completion_probabilities: list[LlamaToken] = absent()
    model: str = absent()
    tokens_evaluated: int = absent()
    tokens_cached: int = absent()
    tokens_predicted: int = absent()
    generation_settings: Json = absent()
    prompt: str = absent()
    has_new_line: bool = absent()
    truncated: bool = absent()
    stop_type: Literal["eos", "limit", "word"] = absent()
    stopping_word: str = absent()
    timings: LlamaTimings = absent()


class InfilledList(RootModel[list[Infilled]]):
    """The reply of /completion to several prompts."""


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


class TokenPiece(Reply):
    id: int
    piece: str


class TokenPieces(Reply):
    """The reply of /tokenize to content."""

    tokens: list[int] | list[TokenPiece]


class InputTokensReply(Reply):
    """The reply of /v1/chat/completions/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class LlamaEmbedding(Reply):
    index: int
    embedding: Annotated[list[list[float]], Field(fail_fast=True)]


class LlamaEmbeddings(RootModel[list[LlamaEmbedding]]):
    """The reply of /embedding."""


class LoraAdapter(Reply):
    """An adapter; requests choose it as their model."""

    id: int
    path: str
    scale: float


class LoraAdapters(RootModel[Annotated[list[LoraAdapter], Field(fail_fast=True)]]):
    """The reply of /lora-adapters."""


class AppliedTemplate(Reply):
    """The reply of /apply-template."""

    prompt: str


class GenerationSettings(Reply):
    """The value of a field that a request leaves open. n_ctx: the tokens of the context."""

    n_ctx: int
    params: Json


class Props(Reply):
    """The reply of /props."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


class Slot(Reply):
    """A place in the engine; prompt and answer are its request's so far, in tokens."""

    id: int
    n_ctx: int
    is_processing: bool
    n_prompt_tokens: int
    n_decoded: int


class Slots(RootModel[Annotated[list[Slot], Field(fail_fast=True)]]):
    """The reply of /slots."""


class Detokenized(Reply):
    """The reply of /detokenize to tokens. Both are the text."""

    prompt: str
    content: str


class DetokenizedText(Reply):
    """The reply of /detokenize to ids."""

    text: str
