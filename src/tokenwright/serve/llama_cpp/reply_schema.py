"""The replies of llama.cpp's routes, as the OpenAPI document declares them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, RootModel

from tokenwright.serve.http.reply_schema import Json, Reply, TopLogprobReply, absent
from tokenwright.serve.openai.reply_schema import LlamaTimings


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
