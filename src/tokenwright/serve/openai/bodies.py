"""Bodies of OpenAI's completions, chats and embeddings. `fields.py` explains how other fields are treated."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tokenwright.checks import MAX_TOKENS
from tokenwright.errors import RequestError
from tokenwright.sampling_params import MOST_CHOICES, MOST_LOGPROBS, Whitespace
from tokenwright.serve.http import fields
from tokenwright.serve.http.exchange import Exchange
from tokenwright.serve.http.fields import Body, Refused, Text, many
from tokenwright.serve.http.request_parts import CacheOptions, Extensions, Samplers
from tokenwright.serve.openai import message_bodies
from tokenwright.serve.openai.message_bodies import TextPart
from tokenwright.serve.service.types import PRIORITIES
from tokenwright.text import Tokenizer

MOST_BATCH = 128

Id = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class PromptObject(Body):
    """A prompt as an object, with its text or its parts."""

    refused: ClassVar = {"multimodal_data": Refused("models here read text")}

    prompt_string: Text | None = None
    content: Annotated[list[TextPart], many(MOST_BATCH, 1)] | None = None


Mixed = Annotated[list[Id | Text], many(MAX_TOKENS >> 8, 1)]
Prompts = Text | PromptObject | Annotated[list[Id | Text | PromptObject | Mixed], many(MAX_TOKENS >> 8, 1)]
Prompt = str | PromptObject | list[int | str]


def prompts_of(given: Prompts, most: int = MOST_BATCH) -> tuple[list[Prompt], bool]:
    """The prompts of a body, and whether it has a list of them; a list that contains ids is one prompt."""
    if not isinstance(given, list):
        return [given], False
    if any(isinstance(one, int) for one in given):
        if all(isinstance(one, int | str) for one in given):
            return [given], False  # type: ignore[list-item]
        raise RequestError(
            "prompt: a list of ids and texts cannot contain lists or objects; put the ids into a list of their own"
        )
    if len(given) > most:
        raise RequestError(f"prompt: {len(given)} prompts are too many for one request; send {most} at most")
    return given, True  # type: ignore[return-value]


def plain(prompt: Prompt) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(one, int) for one in prompt))


def plainly(prompt: Prompt, tokenizer: Tokenizer) -> str | list[int]:
    """The text or the ids of a prompt. Raises RequestError."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, PromptObject):
        if prompt.content is not None:
            return "".join(part.text for part in prompt.content)
        if prompt.prompt_string is None:
            raise RequestError("prompt: an object needs prompt_string or content")
        return prompt.prompt_string
    ids: list[int] = []
    for at, part in enumerate(prompt):
        ids += [part] if isinstance(part, int) else tokenizer.encode(part, add_special=at == 0)
    return ids


async def read_prompts(exchange: Exchange, given: Sequence[Prompt]) -> list[str | list[int]]:
    """Each prompt as text or ids. Raises RequestError, and what `Service.read` raises."""
    if all(plain(one) for one in given):
        return [*given]  # type: ignore[list-item]
    tokenizer = (await exchange.service.opened(exchange.key)).llm.tokenizer
    return await exchange.read(lambda: [plainly(one, tokenizer) for one in given])


MOST_INPUTS = 2_048

Ids = Annotated[list[Id], fields.many(MAX_TOKENS >> 8, 1)]
IdText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[dict[IdText, Annotated[float, Field(ge=-100, le=100)]], fields.names(4096), Field(max_length=4096)]
Seconds = Annotated[float, Field(gt=0.0, le=86_400.0)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=fields.MOST_TEXT)]], fields.many(fields.MOST_PARTS, 1)
]

LABELS: Mapping[str, str] = {
    "user": "it is a label",
    "metadata": "it is a label",
    "safety_identifier": "it is a label",
    "client_metadata": "it is a label",
    "models": "the model of the field model answers",
    "prompt_cache_key": message_bodies.CACHED,
    "prompt_cache_retention": "prefixes are cached as long as there is room",
}
Budget = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]  # tokens of reasoning; -1: no limit


class StreamOptions(fields.Body):
    """include_usage: a last chunk has the usage. continuous_usage_stats: each chunk has it too."""

    harmless: ClassVar = {"include_obfuscation": "chunks are sent as they are"}

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(fields.Body):
    """The answer's format, as in vLLM. One field may be given."""

    harmless: ClassVar = dict.fromkeys(
        ("disable_fallback", "disable_any_whitespace"), "JSON is written without free white space"
    )

    json_schema: fields.Object | fields.Text | None = Field(default=None, alias="json")
    regex: fields.Text | None = None
    choice: Choices | None = None
    grammar: fields.Text | None = None
    json_object: bool | None = None


class Sampling(Samplers):
    """Fields that completions and chats share; those after `seed`, and most of `Samplers`, are extensions.

    The answer's format has many names: OpenAI's response_format, llama.cpp's json_schema and grammar, vLLM's
    structured_outputs, SGLang's regex. whitespace: between the tokens of JSON (see Grammar).
    skip_special_tokens false: the text contains special tokens, except those that end it.
    """

    aliases: ClassVar = {
        "n_predict": "max_tokens",
        "repeat_penalty": "repetition_penalty",
        "timings_per_token": "return_timings",
        "guided_json": "json_schema",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
        "ebnf": "grammar",
    }
    once: ClassVar = frozenset(("json_schema", "regex", "choice", "grammar"))
    prompt_cache_key: fields.Text | None = None
    nvext: Extensions | None = None

    refused: ClassVar = {
        "beams": fields.Refused("there is no beam search in this API", (1,)),
        "use_beam_search": fields.Refused("there is no beam search in this API"),
    }
    harmless: ClassVar = {
        **LABELS,
        "cache_prompt": message_bodies.CACHED,
        "id_slot": "requests have no slots",
        "spaces_between_special_tokens": "texts are decoded as they were cut into tokens",
        "guided_decoding_backend": "there is one backend",
        **dict.fromkeys(("keep_alive", "num_batch", "num_gpu", "num_thread"), "the command line says how it is loaded"),
        "slot_id": "requests have no slots",
    }

    model: fields.ModelName = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: fields.MostTokens = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    logit_bias: Annotated[Bias | None, fields.absent([])] = None
    seed: Annotated[fields.Seed | None, fields.absent(-1)] = None
    repetition_penalty: fields.Repetition = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    stop_token_ids: Annotated[list[Id], fields.many(4096)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool = True
    bad_words: Annotated[list[fields.StopText], fields.many(fields.MOST_STOPS)] | None = None
    allowed_token_ids: Annotated[list[Id], fields.many(MAX_TOKENS >> 8)] | None = None
    priority: Annotated[int, Field(ge=PRIORITIES[0], le=PRIORITIES[-1])] = 0
    timeout_s: Seconds | None = None
    truncate_prompt_tokens: Annotated[fields.Tokens | None, fields.absent(-1)] = None
    return_timings: bool = False
    speculate: bool = True
    response_format: message_bodies.Format | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: fields.Object | fields.Text | None = None
    regex: fields.Text | None = None
    choice: Annotated[Choices | None, fields.absent([])] = None
    grammar: fields.Text | None = None
    whitespace: Whitespace | None = None

    @property
    def counts(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_chunks(self) -> bool:
        return self.counts and self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionBody(Sampling):
    """POST /v1/completions. suffix: text after the gap that the model fills, if it was trained for that.

    add_special_tokens: the tokenizer adds its own tokens to the prompt.
    """

    suffix: fields.Text | None = None
    prompt: (
        fields.Text
        | Ids
        | Annotated[list[fields.Text], fields.many(MOST_BATCH, 1)]
        | Annotated[list[Ids], fields.many(MOST_BATCH, 1)]
    )
    echo: bool = False
    add_special_tokens: bool = True
    logprobs: Annotated[Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None, fields.absent(False)] = None
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None


class ThinkingSwitch(fields.Body):
    """Whether the model reasons, and for how many tokens, as in Anthropic's API.

    display omitted: the reasoning is not returned. clear_thinking: a template variable.
    """

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Budget | None = None
    display: fields.Text | None = None
    clear_thinking: bool | None = None


class ReasoningOptions(fields.Body):
    """Reasoning options as in model routers. exclude: the reasoning is not returned."""

    harmless: ClassVar = dict.fromkeys(("summary", "generate_summary"), "reasoning is returned whole")

    effort: fields.Effort | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    exclude: bool = False


class ChatBody(Sampling):
    """POST /v1/chat/completions. reasoning_effort none: no reasoning; any other: the model reasons, if it can.

    thinking_token_budget: the most tokens of reasoning. continue_final_message: the answer continues the last message
    if it is the assistant's, which is the default. add_generation_prompt false: the prompt does not begin the answer.
    separate_reasoning false, reasoning_format none: the reasoning stays in the text. parse_tool_calls false: calls
    stay in the text. functions, function_call: the older tools and tool_choice; the reply has one function_call.
    """

    aliases: ClassVar = dict.fromkeys(
        ("thinking_budget", "thinking_budget_tokens", "reasoning_budget"), "thinking_token_budget"
    )
    refused: ClassVar = {
        "audio": fields.Refused("models return text only"),
        "best_of": fields.Refused("use n", (1,)),
        "modalities": fields.Refused("models return text only", (["text"],)),
        "web_search_options": fields.Refused("the server opens no connections"),
        "chat_template": fields.Refused("the model's own template is used"),
    }
    harmless: ClassVar = {
        "moderation": "nothing is moderated here",
        "service_tier": "there is one tier",
        "store": "chats are not stored",
        "verbosity": "models here have no such setting",
        "stream_reasoning": "reasoning is streamed as it is written",
    }

    messages: Annotated[list[message_bodies.AnyMessage], fields.many(fields.MOST_ITEMS, 1)]
    prompt_cache_options: CacheOptions | None = None
    max_completion_tokens: fields.MostTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: message_bodies.Tools | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | message_bodies.Choice | None = None
    functions: Annotated[list[message_bodies.Function], fields.many(fields.MOST_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | message_bodies.NamedFunction | None = None
    parallel_tool_calls: bool = True
    parse_tool_calls: bool = True
    reasoning_effort: fields.Effort | None = None
    reasoning: ReasoningOptions | None = None
    reasoning_format: fields.Text | None = None
    separate_reasoning: bool = True
    include_reasoning: bool | None = None
    thinking: ThinkingSwitch | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Budget | None = None
    chat_template_kwargs: fields.Variables | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    prediction: message_bodies.Prediction | None = None

    @property
    def hides_reasoning(self) -> bool:
        omitted = self.thinking is not None and self.thinking.display == "omitted"
        return omitted or self.include_reasoning is False or (self.reasoning is not None and self.reasoning.exclude)


class EmbeddingBody(fields.Body):
    """POST /v1/embeddings. input: texts, or prompts as in llama.cpp. normalize false: vectors keep their length.

    truncate_prompt_tokens: read only this many last tokens; -1: as many as fit.
    """

    harmless: ClassVar = LABELS

    model: fields.ModelName = ""
    dimensions: fields.Dimensions = None
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    normalize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: Literal[-1] | fields.Tokens | None = None
    return_timings: bool = False
