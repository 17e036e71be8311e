"""The bodies of llama.cpp's server: /completion, /infill, /embedding, /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tokenwright.checks import MAX_TOKENS
from tokenwright.errors import RequestError
from tokenwright.sampling_params import MOST_LOGPROBS
from tokenwright.serve.http.fields import (
    MOST_ITEMS,
    MOST_TOOLS,
    Body,
    ModelName,
    Nucleus,
    Object,
    Positive,
    Refused,
    Repetition,
    Share,
    Stops,
    StopText,
    Text,
    absent,
    many,
    names,
    others,
)
from tokenwright.serve.http.request_parts import Samplers, samplers_of
from tokenwright.serve.openai.bodies import LABELS
from tokenwright.serve.openai.message_bodies import AnyMessage, FunctionTool, Variables
from tokenwright.serve.openai.prompt_forms import MOST_BATCH, Id, Prompts
from tokenwright.text import Tokenizer

MOST_BIASES = 4096
MOST_FILES = 1_024

Json = dict[str, Any]
Ids = Annotated[list[Id], many(MAX_TOKENS >> 8)]
Real = Annotated[float, Field(ge=-100, le=100)]
Biased = Annotated[list[Id | StopText | Real | bool], many(2, 2)]  # an id or a text, and its bias; false: never
Biases = Annotated[list[Biased], many(MOST_BIASES)] | Annotated[dict[StopText, Real | bool], names(MOST_BIASES)]


class LlamaBody(Samplers):
    """The fields that both routes have in common. n_predict: -1 goes on to the end of the context.

    top_k 0 and -1: all ids. repeat_last_n -1: the whole text; 0: no repetition penalty. seed -1: a random one.
    logit_bias: by id or text, each of whose tokens gets the bias; false: never. n_probs: the likeliest tokens of each
    place. response_fields: the only fields of the reply, with `/` into objects.
    """

    aliases: ClassVar = {"max_tokens": "n_predict"}
    refused: ClassVar = {
        "post_sampling_probs": Refused("the log-probabilities of n_probs are those of the model"),
        "lora": Refused("use model", ([],)),
    }
    harmless: ClassVar = dict.fromkeys(
        ("cache_prompt", "id_slot", "n_cache_reuse", "timings_per_token"), "it changes no text that a model here writes"
    )

    model: ModelName = ""
    stream: bool = False
    n_predict: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    top_p: Nucleus | None = None
    min_p: Share | None = None
    typical_p: Positive = None
    seed: Annotated[int, Field(ge=-1, lt=2**64)] | None = None
    repeat_penalty: Repetition = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    stop: Annotated[StopText | Stops | None, absent("")] = None
    ignore_eos: bool | None = None
    logit_bias: Biases | None = None
    n_probs: Annotated[Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None, absent(0)] = None
    return_tokens: bool = False
    response_fields: Annotated[list[StopText], many(MOST_BATCH)] | None = None

    @property
    def names_texts(self) -> bool:
        """Whether a bias is that of a text, so that the tokenizer must be asked."""
        return any(isinstance(what, str) and not what.isdecimal() for what, _ in _biases(self.logit_bias))


class LlamaCompletionBody(LlamaBody):
    """POST /completion: continue one text, or several at once. json_schema, grammar: the form of what follows.

    prompt: a text, ids, both in one list, an object with a prompt_string, or a list of these.
    """

    prompt: Prompts
    grammar: Text = ""
    json_schema: Object | None = None


class ExtraFile(Body):
    """Another file, or a part of one, that the model reads before."""

    filename: Text = ""
    text: Text


class InfillBody(LlamaBody):
    """POST /infill. prompt: how the text of the gap begins."""

    refused: ClassVar = {"grammar": Refused("use /v1/completions", ("",))}

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[ExtraFile], many(MOST_FILES)] | None = None
    prompt: Text = ""


class LlamaEmbeddingBody(Body):
    """POST /embedding, as llama.cpp's server has it. input: another name of content."""

    harmless: ClassVar = {"encoding_format": "vectors are numbers here", **dict.fromkeys(LABELS, "it is a label")}

    model: ModelName = ""
    content: Prompts | None = None
    input: Prompts | None = None


class TokenizeBody(Body):
    """POST /tokenize: one of a prompt, the messages of a conversation, content, and a text for tokens with their texts.

    add_special_tokens false: a prompt without those that the tokenizer adds; a chat template writes its own. content is
    llama.cpp's prompt: add_special, parse_special and with_pieces belong to it.
    """

    refused: ClassVar = {"chat_template": Refused("the model's own template is used")}

    model: ModelName = ""
    prompt: Text | None = None
    messages: Annotated[list[AnyMessage], many(MOST_ITEMS, 1)] | None = None
    text: Text | None = None
    content: Text | None = None
    tools: Annotated[list[Annotated[FunctionTool, others("function", "custom")]], many(MOST_TOOLS)] | None = None
    chat_template_kwargs: Variables | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    """POST /detokenize: token ids, as `tokens` (answered by `prompt`) or as `ids` (answered by `text`)."""

    model: ModelName = ""
    tokens: Ids | None = None
    ids: Ids | None = None


def overrides_of(body: LlamaBody, tokenizer: Tokenizer | None) -> Json:
    """The sampling parameters. tokenizer: where a bias `names_texts`. Raises RequestError."""
    same = ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "ignore_eos")
    found: Json = {name: getattr(body, name) for name in same} | samplers_of(body)
    found["top_k"] = None if body.top_k is None else max(0, body.top_k)
    found["seed"] = None if body.seed == -1 else body.seed
    found["max_tokens"] = None if body.n_predict is None or body.n_predict < 0 else body.n_predict
    found["stop"] = (body.stop,) if isinstance(body.stop, str) else body.stop or None
    found["repetition_penalty"] = 1.0 if body.repeat_last_n == 0 else body.repeat_penalty
    found["repetition_window"] = None if body.repeat_last_n is None else max(0, body.repeat_last_n)
    found["logprobs"] = body.n_probs
    return found | _biased(body.logit_bias, tokenizer)


def _biases(given: Biases | None) -> Sequence[tuple[Any, Any]]:
    return [] if given is None else [*given.items()] if isinstance(given, dict) else [(one[0], one[1]) for one in given]


def _biased(given: Biases | None, tokenizer: Tokenizer | None) -> Json:
    """The fields of SamplingParams that biases are. A later one of the same token counts."""
    biases: dict[int, float | bool] = {}
    for what, bias in _biases(given):
        if bias is True or isinstance(bias, str) or isinstance(what, bool | float):
            raise RequestError("logit_bias must pair an id or a text with a number, or with false", "logit_bias")
        if isinstance(what, str) and not what.isdecimal():
            assert tokenizer is not None, "the body names texts"
            ids = tokenizer.encode(what, add_special=False, parse_special=False)
        else:
            ids = [int(what)]
        biases |= dict.fromkeys(ids, bias)
    numbers = {token: float(bias) for token, bias in biases.items() if bias is not False}
    banned = [token for token, bias in biases.items() if bias is False]
    return {"logit_bias": numbers or None, "banned_ids": banned or None}
