"""OpenAI's bodies: completions, chats, embeddings, and the ids of texts. `fields.py` says how they refuse."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from tokenwright.checks import MAX_TOKENS
from tokenwright.sampling_params import MOST_CHOICES, MOST_LOGPROBS
from tokenwright.serve.http.fields import (
    MOST_ITEMS,
    MOST_PARTS,
    MOST_TOOLS,
    Body,
    Effort,
    Metadata,
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

_STORED = Refused("nothing is stored here", (False,))
_TIER = Refused("there is one tier", ("auto", "default"))
_CUSTOM = Refused("functions are the only tools")
_TEXT_ALONE = Refused("models here read text")


class StreamOptions(Body):
    """What a stream also says. include_usage: one more chunk with the usage."""

    refused: ClassVar = {"include_obfuscation": Refused("chunks are sent as they are", (False,))}

    include_usage: bool = False


class Sampling(Samplers):
    """Fields that completions and chats have in common; those after `user`, and the `Samplers`, are extensions."""

    model: Name
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
    user: Text | None = None
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


class CompletionBody(Sampling):
    """POST /v1/completions. suffix: what follows the text; a model that was trained for it fills the gap."""

    without_effect = ("user",)

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
        "prompt_cache_breakpoint": Refused("every prefix is cached"),
    }

    type: Literal["text"]
    text: Text


class RefusalPart(Body):
    """A part of an assistant's message that was a refusal; it is read as text."""

    type: Literal["refusal"]
    refusal: Text


Parts = Annotated[list[TextPart], many(MOST_PARTS, 1)]
AnswerParts = Annotated[list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]], many(MOST_PARTS, 1)]


class CalledFunction(Body):
    """The function of a call. arguments: JSON text of an object."""

    name: ToolName
    arguments: Text


class CalledTool(Body):
    """A call in an assistant's message."""

    refused: ClassVar = {"custom": _CUSTOM}

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


class SystemMessage(Body):
    """What the model is told beforehand."""

    refused: ClassVar = {"name": Refused("templates know roles, not names")}

    role: Literal["system", "developer"]
    content: Text | Parts


class UserMessage(Body):
    """What the user says, in text."""

    refused: ClassVar = {"name": Refused("templates know roles, not names")}

    role: Literal["user"]
    content: Text | Parts


class AssistantMessage(Body):
    """What the model said before; its content may be missing beside tool calls."""

    refused: ClassVar = {
        "name": Refused("templates know roles, not names"),
        "audio": Refused("there is text alone"),
        "function_call": Refused("use tool_calls"),
        "annotations": Refused("there are none", ([],)),
    }

    role: Literal["assistant"]
    content: Text | AnswerParts | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[CalledTool], many(MOST_TOOLS)] | None = None


class ToolMessage(Body):
    """What a tool answered."""

    role: Literal["tool"]
    content: Text | Parts
    tool_call_id: Name
    name: ToolName | None = None


AnyMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


class Function(Body):
    """A function that the model may call. strict changes nothing: arguments always follow their schema."""

    name: ToolName
    description: Text | None = None
    parameters: Object | None = None
    strict: bool | None = None


class FunctionTool(Body):
    """A tool; functions are the only ones."""

    refused: ClassVar = {"custom": _CUSTOM}

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
    """A named schema of the answer; strict changes nothing: the answer always follows it."""

    name: Name
    schema_: Object = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class ChatTemplateVariables(Body):
    """The variables of the chat template that a request may set."""

    enable_thinking: bool | None = None


class ChatBody(Sampling):
    """POST /v1/chat/completions. reasoning_effort none: no reasoning; any other: the model reasons, if it can."""

    refused: ClassVar = {
        "audio": Refused("there is text alone"),
        "modalities": Refused("there is text alone", (["text"],)),
        "function_call": Refused("use tool_choice", ("none", "auto")),
        "functions": Refused("use tools"),
        "moderation": Refused("nothing is moderated here"),
        "prediction": Refused("send it in a message"),
        "prompt_cache_options": Refused("prefixes are always cached, for as long as there is room"),
        "prompt_cache_retention": Refused("prefixes are cached as long as there is room", ("in_memory", "in-memory")),
        "service_tier": _TIER,
        "store": _STORED,
        "verbosity": Refused("say it in a message", ("medium",)),
        "web_search_options": Refused("the server opens no connections"),
        "chat_template": Refused("the model's own template is used"),
    }
    without_effect = ("metadata", "prompt_cache_key", "safety_identifier", "user")

    messages: Annotated[list[AnyMessage], many(MOST_ITEMS, 1)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    tools: Annotated[list[FunctionTool], many(MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    metadata: Metadata | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    chat_template_kwargs: ChatTemplateVariables | None = None


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    refused: ClassVar = {"dimensions": Refused("vectors have the width of the model")}
    without_effect = ("user",)

    model: Name
    input: Text | Ids | Annotated[list[Text], many(MOST_INPUTS, 1)] | Annotated[list[Ids], many(MOST_INPUTS, 1)]
    encoding_format: Literal["float", "base64"] = "float"
    user: Text | None = None
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
