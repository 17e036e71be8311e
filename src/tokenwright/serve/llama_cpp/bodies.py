"""Bodies of llama.cpp's server: /completion, /infill, /embedding, /tokenize and /detokenize."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tokenwright.checks import MAX_TOKENS
from tokenwright.errors import RequestError
from tokenwright.sampling_params import MOST_LOGPROBS
from tokenwright.serve.http import fields
from tokenwright.serve.http.request_parts import Samplers, sampling_of
from tokenwright.serve.openai.bodies import LABELS, MOST_BATCH, Id, Prompts
from tokenwright.serve.openai.message_bodies import AnyMessage, Tools
from tokenwright.text import Tokenizer

MOST_BIASES = 4096
MOST_FILES = 1_024

Json = dict[str, Any]
Ids = Annotated[list[Id], fields.many(MAX_TOKENS >> 8)]
Real = Annotated[float, Field(ge=-100, le=100)]
Biased = Annotated[list[Id | fields.StopText | Real | bool], fields.many(2, 2)]  # (id or text, bias); false: never
Biases = (
    Annotated[list[Biased], fields.many(MOST_BIASES)]
    | Annotated[dict[fields.StopText, Real | bool], fields.names(MOST_BIASES)]
)


class LlamaBody(Samplers):
    """Fields that /completion and /infill share. n_predict -1: to the end of the context.

    repeat_last_n -1: the whole text; 0: no penalty. seed -1: random. logit_bias: by id, or by text for all its tokens;
    false: never. n_probs: top logprobs. response_fields: the only fields of the reply; `/` separates nested names.
    """

    aliases: ClassVar = {"max_tokens": "n_predict"}
    refused: ClassVar = {
        "post_sampling_probs": fields.Refused("the log-probabilities of n_probs are those of the model"),
        "lora": fields.Refused("use model", ([],)),
    }
    harmless: ClassVar = dict.fromkeys(
        ("cache_prompt", "id_slot", "n_cache_reuse", "timings_per_token"), "it changes no text that a model here writes"
    )

    model: fields.ModelName = ""
    stream: bool = False
    n_predict: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**64)] | None = None
    repeat_penalty: fields.Repetition = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Biases | None = None
    n_probs: Annotated[Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None, fields.absent(0)] = None
    return_tokens: bool = False
    response_fields: Annotated[list[fields.StopText], fields.many(MOST_BATCH)] | None = None

    @property
    def names_texts(self) -> bool:
        return any(isinstance(what, str) and not what.isdecimal() for what, _ in _biases(self.logit_bias))


class LlamaCompletionBody(LlamaBody):
    """POST /completion: continue one or several texts. json_schema, grammar: the format of the answer.

    prompt: a text, ids, both in one list, an object with a prompt_string, or a list of these.
    """

    prompt: Prompts
    grammar: fields.Text = ""
    json_schema: fields.Object | None = None


class ExtraFile(fields.Body):
    """Another file, or a part of one, for the prompt."""

    filename: fields.Text = ""
    text: fields.Text


class InfillBody(LlamaBody):
    """POST /infill. prompt: the beginning of the gap's text."""

    refused: ClassVar = {"grammar": fields.Refused("use /v1/completions", ("",))}

    input_prefix: fields.Text = ""
    input_suffix: fields.Text = ""
    input_extra: Annotated[list[ExtraFile], fields.many(MOST_FILES)] | None = None
    prompt: fields.Text = ""


class LlamaEmbeddingBody(fields.Body):
    """POST /embedding, as llama.cpp's server has it. input: another name of content."""

    harmless: ClassVar = {"encoding_format": "vectors are numbers here", **dict.fromkeys(LABELS, "it is a label")}

    model: fields.ModelName = ""
    content: Prompts | None = None
    input: Prompts | None = None


class TokenizeBody(fields.Body):
    """POST /tokenize: exactly one of prompt, messages, content, and text, whose tokens are returned with their texts.

    add_special_tokens false: the tokenizer adds no tokens to a prompt. content: llama.cpp's prompt, with add_special,
    parse_special and with_pieces.
    """

    refused: ClassVar = {"chat_template": fields.Refused("the model's own template is used")}

    model: fields.ModelName = ""
    prompt: fields.Text | None = None
    messages: Annotated[list[AnyMessage], fields.many(fields.MOST_ITEMS, 1)] | None = None
    text: fields.Text | None = None
    content: fields.Text | None = None
    tools: Tools | None = None
    chat_template_kwargs: fields.Variables | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(fields.Body):
    """POST /detokenize: `tokens`, answered by `prompt`, or `ids`, answered by `text`."""

    model: fields.ModelName = ""
    tokens: Ids | None = None
    ids: Ids | None = None


def overrides_of(body: LlamaBody, tokenizer: Tokenizer | None) -> Json:
    """The sampling parameters. tokenizer: for biases that name texts. Raises RequestError."""
    found: Json = sampling_of(body)
    found["max_tokens"] = None if body.n_predict is None or body.n_predict < 0 else body.n_predict
    found["repetition_penalty"] = 1.0 if body.repeat_last_n == 0 else body.repeat_penalty
    found["repetition_window"] = None if body.repeat_last_n is None else max(0, body.repeat_last_n)
    found["logprobs"] = body.n_probs
    return found | _biased(body.logit_bias, tokenizer)


def _biases(given: Biases | None) -> Sequence[tuple[Any, Any]]:
    return [] if given is None else [*given.items()] if isinstance(given, dict) else [(one[0], one[1]) for one in given]


def _biased(given: Biases | None, tokenizer: Tokenizer | None) -> Json:
    """The fields of SamplingParams for biases; a token's last one counts."""
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
