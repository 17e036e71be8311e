"""The replies of Ollama's API, as the OpenAPI document declares them."""

from __future__ import annotations

from typing import Literal

from tokenwright.serve.http.reply_schema import Json, Reply, TimingsReply, TokenLogprob, absent


class OllamaReplyFunction(Reply):
    name: str
    arguments: Json


class OllamaCall(Reply):
    id: str
    function: OllamaReplyFunction


class OllamaReplyMessage(Reply):
    role: Literal["assistant"]
    content: str
    thinking: str = absent()
    tool_calls: list[OllamaCall] = absent()


class OllamaAnswer(Reply):
    """The fields that replies of /api/chat and /api/generate have in common; durations are in nanoseconds.

    One that only loads the model has no durations and no counts.
    """

    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load", "unload"]
    logprobs: list[TokenLogprob] = absent()
    total_duration: int = absent()
    load_duration: int = absent()
    prompt_eval_count: int = absent()
    prompt_eval_cached_count: int = absent()
    prompt_eval_duration: int = absent()
    eval_count: int = absent()
    eval_duration: int = absent()
    timings: TimingsReply = absent()


class OllamaChat(OllamaAnswer):
    """The reply of /api/chat."""

    message: OllamaReplyMessage


class OllamaGenerated(OllamaAnswer):
    """The reply of /api/generate."""

    response: str
    thinking: str = absent()


class OllamaVectors(Reply):
    """The reply of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    timings: TimingsReply = absent()


class OllamaVector(Reply):
    """The reply of /api/embeddings."""

    embedding: list[float]
    timings: TimingsReply = absent()


class OllamaDetails(Reply):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaEntry(Reply):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(Reply):
    """The reply of /api/tags."""

    models: list[OllamaEntry]


class OllamaLoaded(Reply):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunning(Reply):
    """The reply of /api/ps."""

    models: list[OllamaLoaded]


class OllamaCard(Reply):
    """The reply of /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[Literal["completion", "tools", "thinking"]]
    modified_at: str


class OllamaStatus(Reply):
    """The reply of /api/pull."""

    status: str


class OllamaVersion(Reply):
    """The reply of /api/version."""

    version: str


class OllamaError(Reply):
    error: str
