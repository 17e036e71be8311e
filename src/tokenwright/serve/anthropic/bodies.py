"""The bodies of Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from tokenwright.checks import MAX_TOKENS
from tokenwright.serve.http.fields import (
    MOST_ITEMS,
    MOST_PARTS,
    MOST_TOOLS,
    Body,
    CallId,
    Name,
    Object,
    Refused,
    Share,
    Stops,
    Text,
    ToolName,
    many,
)

CACHED = ("cache_control",)  # every prefix is cached, marked or not


class TextBlock(Body):
    harmless = (*CACHED, "citations")

    type: Literal["text"]
    text: Text


class ThinkingBlock(Body):
    """The reasoning of an earlier answer. signature: any; it is not checked."""

    harmless = CACHED

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class RedactedBlock(Body):
    """Reasoning that only its provider can read; it is left out."""

    harmless = CACHED

    type: Literal["redacted_thinking"]
    data: Text = ""


class ToolUseBlock(Body):
    harmless = (*CACHED, "caller", "toolset_name")

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: Object


class ToolReference(Body):
    """A tool that a search found; its definition is among the tools."""

    harmless = CACHED

    type: Literal["tool_reference"]
    tool_name: Text = ""


ResultBlock = Annotated[TextBlock | ToolReference, Field(discriminator="type")]


class ToolResultBlock(Body):
    harmless = (*CACHED, "toolset_name")

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Text | Annotated[list[ResultBlock], many(MOST_PARTS)] = ""
    is_error: bool = False


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock, Field(discriminator="type")]


class AnthropicUserMessage(Body):
    role: Literal["user"]
    content: Text | Annotated[list[UserBlock], many(MOST_PARTS)]


class AnthropicAssistantMessage(Body):
    role: Literal["assistant"]
    content: Text | Annotated[list[AssistantBlock], many(MOST_PARTS)]


class AnthropicSystemMessage(Body):
    """A system message in the middle of a conversation."""

    role: Literal["system"]
    content: Text | Annotated[list[TextBlock], many(MOST_PARTS)]


Message = Annotated[
    AnthropicUserMessage | AnthropicAssistantMessage | AnthropicSystemMessage, Field(discriminator="role")
]


class AnthropicTool(Body):
    """A function of the client. strict: a schema that cannot be enforced whole is refused."""

    harmless = (*CACHED, "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples")

    type: Literal["custom"] = "custom"
    name: ToolName
    description: Text = ""
    input_schema: Object
    strict: bool = False


class HostedTool(BaseModel):
    """A tool that Anthropic's own servers run; it is left out, and named in X-Tokenwright-Ignored."""

    type: Text
    name: Text = ""


def _tool_type(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "function" if kind in (None, "custom") else "hosted"


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("function")] | Annotated[HostedTool, Tag("hosted")], Discriminator(_tool_type)
]


class AutoChoice(Body):
    type: Literal["auto"]
    disable_parallel_tool_use: bool = False


class AnyChoice(Body):
    type: Literal["any"]
    disable_parallel_tool_use: bool = False


class ToolChoice(Body):
    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool = False


class NoChoice(Body):
    type: Literal["none"]


Choice = Annotated[AutoChoice | AnyChoice | ToolChoice | NoChoice, Field(discriminator="type")]


class ThinkingOn(Body):
    """The model reasons if it can, as long as it wants. display omitted: the reasoning is not returned."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] = "summarized"


class ThinkingWithin(Body):
    """The model reasons if it can. budget_tokens: named in X-Tokenwright-Ignored, as reasoning has no limit here."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    display: Literal["summarized", "omitted"] = "summarized"


class ThinkingOff(Body):
    harmless = ("budget_tokens", "display")

    type: Literal["disabled"]


Thinking = Annotated[ThinkingOn | ThinkingWithin | ThinkingOff, Field(discriminator="type")]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[Object, Field(alias="schema")]


class OutputConfig(Body):
    harmless = ("task_budget",)

    format: OutputFormat | None = None
    effort: Text | None = None


class ThinkingTurns(Body):
    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class ClearThinking(Body):
    """Leave reasoning out of the conversation, but for the newest answers that have some."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | ThinkingTurns = ThinkingTurns(type="thinking_turns", value=1)


class OtherEdit(BaseModel):
    """An edit that is not made here; it is named in X-Tokenwright-Ignored."""

    type: Text


def _edit_type(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "thinking" if kind == "clear_thinking_20251015" else "other"


Edit = Annotated[
    Annotated[ClearThinking, Tag("thinking")] | Annotated[OtherEdit, Tag("other")], Discriminator(_edit_type)
]


class ContextManagement(Body):
    edits: Annotated[list[Edit], many(MOST_PARTS)] = []


class AnthropicPrompted(Body):
    """What both routes have."""

    refused = {
        "compaction": Refused("the client edits its conversation"),
        "container": Refused("this server runs no code"),
        "mcp_servers": Refused("this server calls no tools itself"),
        "thread": Refused("nothing is stored; send the whole conversation in messages"),
    }
    harmless = (
        *(*CACHED, "betas", "billing_policy", "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo"),
        *("metadata", "service_tier", "speed", "user_profile_id", "workspace_id"),
    )
    off = {"model": ("",)}

    model: Name | None = None
    messages: Annotated[list[Message], many(MOST_ITEMS, 1)]
    system: Text | Annotated[list[TextBlock], many(MOST_PARTS)] = ""
    tools: Annotated[list[AnyTool], many(MOST_TOOLS)] = []
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None


class CountTokens(AnthropicPrompted):
    """POST /v1/messages/count_tokens."""


class Messages(AnthropicPrompted):
    """POST /v1/messages. max_tokens 0 fills the prefix cache and writes nothing."""

    off = {"model": ("",), "top_k": (-1,), "top_p": (-1, 0)}

    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)]
    stream: bool = False
    temperature: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    top_p: Share | None = None
    stop_sequences: Stops = []
