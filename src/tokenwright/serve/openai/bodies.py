"""OpenAI's bodies: completions, chats, embeddings, and the ids of texts. `fields.py` says how they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from tokenwright.checks import MAX_TOKENS
from tokenwright.sampling_params import MOST_CHOICES, MOST_LOGPROBS
from tokenwright.serve.http.fields import (
    MOST_ITEMS,
    MOST_PARTS,
    MOST_TEXT,
    MOST_TOOLS,
    Body,
    CallId,
    Effort,
    Name,
    Object,
    Refused,
    Share,
    Stops,
    StopText,
    Text,
    Tokens,
    ToolName,
    many,
    names,
)
from tokenwright.serve.http.samplers import Samplers
from tokenwright.serve.service.types import PRIORITIES

MOST_BATCH = 128  # prompts of one request
MOST_INPUTS = 2_048  # texts of one request for embeddings

Id = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Ids = Annotated[list[Id], many(MAX_TOKENS >> 8, 1)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
IdText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[dict[IdText, Annotated[float, Field(ge=-100, le=100)]], names(4096), Field(max_length=4096)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Seconds = Annotated[float, Field(gt=0.0, le=86_400.0)]
Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=MOST_TEXT)]], many(4096, 1)]
Pattern = Annotated[str, Field(min_length=1, max_length=MOST_TEXT)]

_BEAMS = Refused("beam search is in the Python API and on the command line; use best_of here")
_CUSTOM = Refused("functions are the only tools")
_TEXT_ALONE = Refused("models here read text")


class StreamOptions(Body):
    """What a stream also says. include_usage: one more chunk with the usage."""

    harmless = ("include_obfuscation",)

    include_usage: bool = False


class StructuredOutputs(Body):
    """The form of the whole text, as vLLM writes it: one of these."""

    harmless = ("disable_additional_properties", "disable_any_whitespace", "disable_fallback", "whitespace_pattern")

    choice: Choices | None = None
    regex: Pattern | None = None
    grammar: Pattern | None = None
    json_: Object | Pattern | None = Field(None, alias="json")
    json_object: bool = False


class Sampling(Samplers):
    """Fields that completions and chats have in common; many, the `Samplers` too, are extensions.

    model: may be left out where the server has one. choice, regex, grammar (Lark, or llama.cpp's GBNF) and
    structured_outputs, by these names and by vLLM's older ones: the form of the whole text.
    """

    refused: ClassVar[Mapping[str, Refused]] = dict.fromkeys(("beams", "num_beams", "use_beam_search"), _BEAMS)
    harmless: ClassVar[tuple[str, ...]] = (
        *("cache_prompt", "id_slot", "keep_alive", "metadata", "num_batch", "num_gpu", "num_thread", "request_id"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
        *("samplers", "service_tier", "skip_special_tokens", "slot_id", "spaces_between_special_tokens", "store"),
        *("user", "verbosity"),
    )
    off: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **dict.fromkeys(("top_k", "max_tokens", "max_completion_tokens", "truncate_prompt_tokens"), (-1,)),
        **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "timeout_s"), (-1, 0)),
        **{name: ("", [], {}) for name in ("stop", "guided_choice", "choice", "guided_regex", "regex", "grammar")},
        "guided_grammar": ("",),
        "model": ("",),
        "n": (0,),
    }

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    seed: Seed | None = None
    stop: StopText | Stops | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    min_p: Share | None = None
    typical_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    stop_token_ids: Annotated[list[Id], many(4096)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Field(ge=PRIORITIES[0], le=PRIORITIES[-1])] = 0
    timeout_s: Seconds | None = None
    truncate_prompt_tokens: Tokens | None = None
    return_timings: bool = False
    choice: Choices | None = None
    guided_choice: Choices | None = None
    regex: Pattern | None = None
    guided_regex: Pattern | None = None
    grammar: Pattern | None = None
    guided_grammar: Pattern | None = None
    guided_json: Object | Pattern | None = None
    json_schema: Object | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionBody(Sampling):
    """POST /v1/completions. suffix: what follows the text; a model that was trained for it fills the gap."""

    harmless = (*Sampling.harmless, "prediction")

    suffix: Text | None = None
    prompt: Text | Ids | Annotated[list[Text], many(MOST_BATCH, 1)] | Annotated[list[Ids], many(MOST_BATCH, 1)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None


class TextPart(Body):
    """A part of a message that is text."""

    refused: ClassVar = {
        "file": _TEXT_ALONE,
        "image_url": _TEXT_ALONE,
        "input_audio": _TEXT_ALONE,
    }
    harmless = ("cache_control", "prompt_cache_breakpoint")

    type: Literal["text"]
    text: Text


class RefusalPart(Body):
    """A part of an assistant's message that was a refusal; it is read as text."""

    harmless = ("cache_control",)

    type: Literal["refusal"]
    refusal: Text


Parts = Annotated[list[TextPart], many(MOST_PARTS)]


class Prediction(Body):
    """What the answer may come to, such as the file that it edits; its tokens are drafted where they fit."""

    type: Literal["content"]
    content: Text | Parts


AnswerParts = Annotated[list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]], many(MOST_PARTS)]


class CalledFunction(Body):
    """The function of a call. arguments: JSON text of an object; any other text is handed on as it is."""

    harmless = ("parsed_arguments",)

    name: ToolName
    arguments: Text = ""


class CalledTool(Body):
    """A call in an assistant's message."""

    refused: ClassVar = {"custom": _CUSTOM}
    harmless = ("cache_control", "extra_content", "index", "provider_specific_fields")

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class SystemMessage(Body):
    """What the model is told beforehand."""

    harmless = ("cache_control",)

    role: Literal["system", "developer"]
    content: Text | Parts
    name: Text | None = None


class UserMessage(Body):
    """What the user says, in text."""

    harmless = ("cache_control",)

    role: Literal["user"]
    content: Text | Parts
    name: Text | None = None


class AssistantMessage(Body):
    """What the model said before; its content may be missing beside tool calls."""

    refused: ClassVar = {
        "audio": Refused("there is only text"),
        "function_call": Refused("use tool_calls"),
    }
    harmless = ("annotations", "cache_control", "id", "parsed", "provider_specific_fields", "reasoning_details")

    role: Literal["assistant"]
    name: Text | None = None
    reasoning: Text | None = None
    content: Text | AnswerParts | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[CalledTool], many(MOST_TOOLS)] | None = None


class ToolMessage(Body):
    """What a tool answered."""

    harmless = ("cache_control", "status", "artifact", "is_error")

    role: Literal["tool"]
    content: Text | Parts
    tool_call_id: CallId
    name: ToolName | None = None


AnyMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


class Function(Body):
    """A function that the model may call. strict: a schema that cannot be enforced whole is refused."""

    harmless = ("cache_control", "defer_loading", "returns", "response")

    name: ToolName
    description: Text | None = None
    parameters: Object | None = None
    strict: bool | None = None


class FunctionTool(Body):
    """A tool; functions are the only ones."""

    refused: ClassVar = {"custom": _CUSTOM}
    harmless = ("cache_control", "defer_loading")

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: ToolName


class NamedTool(Body):
    """The tool that must be called."""

    refused: ClassVar = {"custom": _CUSTOM}

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """The tools that may (mode auto) or must (required) be called. The prompt has all tools all the same."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], many(MOST_TOOLS, 1)]


class AllowedChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]


class JsonSchema(Body):
    """A schema of the answer. strict: it is refused where it cannot be enforced whole."""

    harmless = ("name", "description")

    schema_: Object = Field(alias="schema")
    strict: bool | Literal["true", "false"] = False  # LM Studio writes it as text


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object; with a schema, as llama.cpp and Together write it, one that follows it."""

    type: Literal["json_object"]
    schema_: Object | None = Field(None, alias="schema")


class SchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Object | None = Field(None, alias="schema")  # as llama.cpp writes it


class RegexFormat(Body):
    """Text that a regular expression matches, as Together writes it."""

    type: Literal["regex"]
    pattern: Pattern


class GrammarFormat(Body):
    """Text of a grammar, as Fireworks and vLLM write it."""

    type: Literal["grammar"]
    grammar: Pattern


AnyFormat = TextFormat | ObjectFormat | SchemaFormat | RegexFormat | GrammarFormat


class ChatBody(Sampling):
    """POST /v1/chat/completions. reasoning_effort none: no reasoning; any other: the model reasons, if it can."""

    refused: ClassVar = {
        **Sampling.refused,
        "audio": Refused("there is only text"),
        "modalities": Refused("there is only text", (["text"],)),
        "function_call": Refused("use tool_choice", ("none", "auto")),
        "functions": Refused("use tools"),
        "moderation": Refused("nothing is moderated here"),
        "web_search_options": Refused("the server opens no connections"),
        "chat_template": Refused("the model's own template is used"),
    }
    messages: Annotated[list[AnyMessage], many(MOST_ITEMS, 1)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Annotated[AnyFormat, Field(discriminator="type")] | None = None
    tools: Annotated[list[FunctionTool], many(MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Object | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    prediction: Prediction | None = None


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    refused: ClassVar = {"dimensions": Refused("vectors have the width of the model")}
    harmless = ("keep_alive", "user")

    model: Name | None = None
    input: Text | Ids | Annotated[list[Text], many(MOST_INPUTS, 1)] | Annotated[list[Ids], many(MOST_INPUTS, 1)]
    encoding_format: Literal["float", "base64"] = "float"
    truncate_prompt_tokens: Tokens | None = None
    return_timings: bool = False


class Problems(BaseModel):
    """An error."""

    class ErrorDetail(BaseModel):
        """What is wrong. param: the field."""

        message: str
        type: str
        param: str | None
        code: str | None

    error: ErrorDetail
