"""The bodies of Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Literal

from pydantic import Field

from tokenwright.checks import MAX_TOKENS
from tokenwright.serve.http.fields import (
    MOST_ITEMS,
    MOST_NAME,
    MOST_PARTS,
    MOST_TOOLS,
    Body,
    Name,
    Object,
    Refused,
    Share,
    Stops,
    Text,
    ToolName,
    many,
)

_CITATIONS = Refused("answers are plain text", ([],))
_TOOLSETS = Refused("tools are in no sets")


class CacheControl(Body):
    """Accepted: every prefix is cached, marked or not."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class TextBlock(Body):
    refused = {"citations": _CITATIONS}

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None


class ThinkingBlock(Body):
    """The reasoning of an earlier answer. signature: any; it is not checked."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class ToolUseBlock(Body):
    refused = {"caller": Refused("only the model calls tools", ({"type": "direct"},)), "toolset_name": _TOOLSETS}

    type: Literal["tool_use"]
    id: Name
    name: ToolName
    input: Object
    cache_control: CacheControl | None = None


class ToolResultBlock(Body):
    refused = {"toolset_name": _TOOLSETS}

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list[TextBlock], many(MOST_PARTS)] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


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
    """A function of the client. Its input always follows its schema, whatever `strict` says."""

    refused = {
        "allowed_callers": Refused("only the model calls tools", (["direct"],)),
        "defer_loading": Refused("all tools are in the prompt", (False,)),
        "eager_input_streaming": Refused("inputs are streamed as they are written", (True, False)),
        "input_examples": Refused("put examples into the description", ([],)),
    }

    type: Literal["custom"] = "custom"
    name: ToolName
    description: Text = ""
    input_schema: Object
    strict: bool = True
    cache_control: CacheControl | None = None


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


class ThinkingOff(Body):
    type: Literal["disabled"]


Thinking = Annotated[ThinkingOn | ThinkingOff, Field(discriminator="type")]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[Object, Field(alias="schema")]


class OutputConfig(Body):
    refused = {
        "effort": Refused("models here have no levels of effort; use thinking"),
        "task_budget": Refused("use max_tokens"),
    }

    format: OutputFormat | None = None


class Metadata(Body):
    user_id: Annotated[str, Field(max_length=MOST_NAME)] | None = None


class AnthropicPrompted(Body):
    """What both routes have."""

    refused = {
        "betas": Refused("there are no beta features here", ([],)),
        "billing_policy": Refused("nothing is billed"),
        "compaction": Refused("the client edits its conversation"),
        "container": Refused("this server runs no code"),
        "context_management": Refused("the client edits its conversation", ({"edits": []},)),
        "diagnostics": Refused("usage has the tokens that were cached"),
        "fallback_credit_token": Refused("there is no other model"),
        "fallbacks": Refused("there is no other model", ([],)),
        "inference_geo": Refused("the model runs where this server runs"),
        "mcp_servers": Refused("this server calls no tools itself", ([],)),
        "output_format": Refused("use output_config.format"),
        "speed": Refused("there is one speed", ("standard",)),
        "thread": Refused("nothing is stored; send the whole conversation in messages"),
        "user_profile_id": Refused("use metadata.user_id"),
        "workspace_id": Refused("there are no workspaces"),
    }

    model: Name
    messages: Annotated[list[Message], many(MOST_ITEMS, 1)]
    system: Text | Annotated[list[TextBlock], many(MOST_PARTS)] = ""
    tools: Annotated[list[AnthropicTool], many(MOST_TOOLS)] = []
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class CountTokens(AnthropicPrompted):
    """POST /v1/messages/count_tokens."""


class Messages(AnthropicPrompted):
    """POST /v1/messages. max_tokens 0 fills the prefix cache and writes nothing."""

    without_effect = ("metadata", "service_tier")

    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)]
    stream: bool = False
    temperature: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    top_p: Share | None = None
    stop_sequences: Stops = []
    metadata: Metadata = Metadata()
    service_tier: Literal["auto", "standard_only"] = "auto"
