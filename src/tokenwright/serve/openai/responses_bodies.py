"""The body of OpenAI's Responses API: POST /v1/responses."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from tokenwright.checks import MAX_TOKENS
from tokenwright.serve.http.fields import (
    MOST_ITEMS,
    MOST_PARTS,
    MOST_TOOLS,
    Body,
    CallId,
    Effort,
    Metadata,
    Name,
    Object,
    Refused,
    Share,
    Text,
    ToolName,
    many,
)

MOST_LOGPROBS = 20  # as OpenAI's
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    harmless = ("cache_control", "prompt_cache_breakpoint")

    type: Literal["input_text"]
    text: Text


class OutputText(Body):
    """A part of an earlier answer, as it was returned."""

    harmless = ("annotations", "logprobs", "parsed")

    type: Literal["output_text"]
    text: Text


class ResponsesRefusalPart(Body):
    type: Literal["refusal"]
    refusal: Text


Part = Annotated[InputText | OutputText | ResponsesRefusalPart, Field(discriminator="type")]
InputParts = Annotated[list[InputText], many(MOST_PARTS)]


class ResponseMessage(Body):
    """A message, or an answer as it was returned."""

    harmless = ("name", "phase")

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Annotated[list[Part], many(MOST_PARTS)]
    id: Name | None = None
    status: Status | None = None


class FunctionCall(Body):
    harmless = ("async", "caller", "namespace", "parsed_arguments")

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: Text
    id: Name | None = None
    status: Status | None = None


class FunctionOutput(Body):
    harmless = ("caller", "name", "namespace")

    type: Literal["function_call_output"]
    call_id: CallId
    output: Text | InputParts
    id: Name | None = None
    status: Status | None = None


class CustomCall(Body):
    """A call of a tool whose input is any text."""

    harmless = ("caller", "namespace")

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: ToolName
    input: Text
    id: Name | None = None
    status: Status | None = None


class CustomOutput(Body):
    harmless = ("caller", "name", "namespace")

    type: Literal["custom_tool_call_output"]
    call_id: CallId
    output: Text | InputParts
    id: Name | None = None
    status: Status | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: Text


class SummaryText(Body):
    type: Literal["summary_text"]
    text: Text


class Reasoning(Body):
    """The reasoning before an earlier answer, as it was returned: its text, or encrypted_content."""

    type: Literal["reasoning"]
    encrypted_content: Text | None = None
    id: Name | None = None
    summary: Annotated[list[SummaryText], many(MOST_PARTS)] = []
    content: Annotated[list[ReasoningText], many(MOST_PARTS)] = []
    status: Status | None = None


class HostedItem(BaseModel):
    """An item of a tool that OpenAI's servers run, or of a type that is unknown; it is left out, and named."""

    type: Text


_KNOWN_ITEMS = (
    *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning"),
)
_REFUSED_ITEMS = ("item_reference", "compaction")  # what they stand for is not here


def _item_type(value: object) -> object:
    """A message may leave its type out."""
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in (*_KNOWN_ITEMS, *_REFUSED_ITEMS) or not isinstance(kind, str) else "hosted"


Item = Annotated[
    Annotated[ResponseMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[CustomCall, Tag("custom_tool_call")]
    | Annotated[CustomOutput, Tag("custom_tool_call_output")]
    | Annotated[Reasoning, Tag("reasoning")]
    | Annotated[HostedItem, Tag("hosted")],
    Discriminator(_item_type),
]


class ResponseFunctionTool(Body):
    """A function of the client. strict: a schema that cannot be enforced whole is refused."""

    harmless = ("allowed_callers", "async", "defer_loading", "output_schema")

    type: Literal["function"]
    name: ToolName
    description: Text = ""
    parameters: Object = {"type": "object", "properties": {}}
    strict: bool = True


class CustomTool(Body):
    """A tool of the client whose input is any text. The model is told its format; nothing enforces it."""

    harmless = ("defer_loading",)

    type: Literal["custom"]
    name: ToolName
    description: Text = ""
    format: Object = {"type": "text"}


class Namespace(Body):
    """Tools under one name; they are used as if they stood beside it."""

    type: Literal["namespace"]
    name: ToolName
    description: Text = ""
    tools: Annotated[list[Annotated[ResponseFunctionTool | CustomTool, Field(discriminator="type")]], many(MOST_TOOLS)]


class HostedResponseTool(BaseModel):
    """A tool that OpenAI's servers run; it is left out, and named in X-Tokenwright-Ignored."""

    model_config = ConfigDict(extra="allow")

    type: Text


def _tool_type(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("function", "custom", "namespace") or not isinstance(kind, str) else "hosted"


AnyTool = Annotated[
    Annotated[ResponseFunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[HostedResponseTool, Tag("hosted")],
    Discriminator(_tool_type),
]


class NamedChoice(Body):
    type: Literal["function", "custom"]
    name: ToolName


class ResponseAllowedChoice(Body):
    """A choice among some of the tools: one may (mode auto) or must (required) be called. The prompt has all tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], many(MOST_TOOLS, 1)]


class PlainFormat(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]


class ResponseJsonSchema(Body):
    """The answer always follows the schema, whatever `strict` says."""

    type: Literal["json_schema"]
    name: ToolName
    schema_: Annotated[Object, Field(alias="schema")]
    description: Text = ""
    strict: bool = True


class TextConfig(Body):
    harmless = ("verbosity",)

    format: Annotated[PlainFormat | JsonObject | ResponseJsonSchema, Field(discriminator="type")] = PlainFormat(
        type="text"
    )


class ReasoningConfig(Body):
    """effort none: no reasoning; any other: the model reasons, if it can."""

    harmless = ("context", "enabled", "exclude", "generate_summary", "max_tokens", "mode", "summary")

    effort: Effort | None = None


class ResponseStreamOptions(Body):
    harmless = ("include_obfuscation",)


class Create(Body):
    """POST /v1/responses. truncation: an input is never cut; one that does not fit is refused."""

    refused = {
        "background": Refused("ask with stream instead"),
        "conversation": Refused("conversations are not stored; use previous_response_id, or send it in input"),
        "image": Refused("models here read text"),
        "prompt": Refused("there are no stored prompts; send input"),
    }
    harmless = (
        *("access_programs", "background_options", "client_metadata", "context_management", "max_tool_calls"),
        *("moderation", "prompt_cache_options", "prompt_cache_retention", "service_tier", "truncation"),
    )
    without_effect = ("metadata", "prompt_cache_key", "safety_identifier", "user")
    off = {"model": ("",), "max_output_tokens": (-1, 0), "top_p": (-1, 0)}

    model: Name | None = None
    input: Text | Annotated[list[Item], many(MOST_ITEMS)] = ""
    instructions: Text | None = None
    include: Annotated[list[Text], many(64)] = []
    store: bool = True
    previous_response_id: Name | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    metadata: Metadata = {}
    parallel_tool_calls: bool = True
    prompt_cache_key: Text | None = None
    reasoning: ReasoningConfig | None = None
    safety_identifier: Text | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    text: TextConfig = TextConfig()
    tool_choice: (
        Literal["auto", "none", "required"]
        | Annotated[NamedChoice | ResponseAllowedChoice, Field(discriminator="type")]
    ) = "auto"
    tools: Annotated[list[AnyTool], many(MOST_TOOLS)] = []
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    top_p: Share | None = None
    user: Text | None = None
