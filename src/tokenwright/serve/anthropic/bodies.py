"""The bodies of Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from tokenwright.checks import MAX_TOKENS
from tokenwright.serve.http import fields
from tokenwright.serve.http.request_parts import BreakpointBody, ImageBlock

_TOOLSETS = fields.Refused("tools are in no sets")
_CALLER = {"caller": "only the model calls tools"}


class TextBlock(BreakpointBody):
    harmless = {"citations": "answers are plain text"}

    type: Literal["text"]
    text: fields.Text = ""


class PlainSource(fields.Body):
    harmless = {"media_type": "it is plain text"}

    type: Literal["text"]
    data: fields.Text


class ContentSource(fields.Body):
    type: Literal["content"]
    content: fields.Text | Annotated[list[TextBlock], fields.many(fields.MOST_PARTS)]


class DocumentBlock(BreakpointBody):
    """A text document in a message."""

    harmless = {"citations": "answers are plain text"}

    type: Literal["document"]
    source: Annotated[PlainSource | ContentSource, Field(discriminator="type")]
    title: fields.Text = ""
    context: fields.Text = ""


class SearchResultBlock(BreakpointBody):
    """A result of a client's search in a message."""

    harmless = {"citations": "answers are plain text"}

    type: Literal["search_result"]
    source: fields.Text
    title: fields.Text
    content: Annotated[list[TextBlock], fields.many(fields.MOST_PARTS)]


class CompactionBlock(BreakpointBody):
    """A summary that replaces a conversation."""

    harmless = dict.fromkeys(("encrypted_content", "signature", "tool_changes"), "only its text is read")

    type: Literal["compaction"]
    content: fields.Text = ""


HOSTED_BLOCKS = frozenset(
    (
        "advisor_tool_result", "bash_code_execution_tool_result", "code_execution_tool_result",
        "container_upload", "fallback", "mcp_tool_listing", "mcp_tool_result", "mcp_tool_use",
        "server_tool_use", "text_editor_code_execution_tool_result", "tool_addition", "tool_reference",
        "tool_removal", "tool_search_tool_result", "web_fetch_tool_result", "web_search_tool_result",
    )
)  # fmt: skip


class HostedBlock(fields.Body):
    """A block of a hosted tool, which is ignored."""

    type: Annotated[fields.Text, Field(json_schema_extra={"enum": sorted(HOSTED_BLOCKS)})]


def _block_type(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "hosted" if isinstance(kind, str) and kind in HOSTED_BLOCKS else kind


Left = Annotated[HostedBlock, fields.others(), Tag("hosted")]
ContentBlock = (
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ImageBlock, Tag("image")]
    | Left
)


class ThinkingBlock(BreakpointBody):
    harmless = {"signature": "reasoning is not signed here"}

    type: Literal["thinking"]
    thinking: fields.Text = ""


class RedactedBlock(BreakpointBody):
    """Reasoning that another server encrypted, which is ignored."""

    harmless = {"data": "no model here can read it"}

    type: Literal["redacted_thinking"]


class ToolUseBlock(BreakpointBody):
    refused = {"toolset_name": _TOOLSETS}
    harmless = _CALLER

    type: Literal["tool_use"]
    id: fields.CallId
    name: fields.Text = ""
    input: fields.Object | fields.Text = {}


class ToolResultBlock(BreakpointBody):
    refused = {"toolset_name": _TOOLSETS}

    type: Literal["tool_result"]
    tool_use_id: fields.CallId
    content: (
        fields.Text
        | Annotated[list[Annotated[ContentBlock, Discriminator(_block_type)]], fields.many(fields.MOST_PARTS)]
    ) = ""
    is_error: bool = False


UserBlock = Annotated[ContentBlock | Annotated[ToolResultBlock, Tag("tool_result")], Discriminator(_block_type)]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[CompactionBlock, Tag("compaction")]
    | Left,
    Discriminator(_block_type),
]


class AnthropicUserMessage(fields.Body):
    role: Literal["user"]
    content: fields.Text | Annotated[list[UserBlock], fields.many(fields.MOST_PARTS)] = ""


class AnthropicAssistantMessage(fields.Body):
    role: Literal["assistant"]
    content: fields.Text | Annotated[list[AssistantBlock], fields.many(fields.MOST_PARTS)] = ""


class AnthropicSystemMessage(fields.Body):
    role: Literal["system"]
    content: fields.Text | Annotated[list[TextBlock], fields.many(fields.MOST_PARTS)]


Message = Annotated[
    AnthropicUserMessage | AnthropicAssistantMessage | AnthropicSystemMessage, Field(discriminator="role")
]


class AnthropicTool(BreakpointBody):
    """A client's function, whose input always follows its schema. Hosted and predefined types are ignored."""

    harmless = {
        "allowed_callers": "only the model calls tools",
        "defer_loading": "all tools are in the prompt",
        "eager_input_streaming": "inputs are streamed as they are written",
    }

    type: fields.Text = "custom"
    name: fields.ToolName | None = None
    description: fields.Text = ""
    input_schema: fields.Object | None = None
    strict: bool = False


class PlainChoice(fields.Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class ToolChoice(fields.Body):
    type: Literal["tool"]
    name: fields.ToolName
    disable_parallel_tool_use: bool = False


Choice = Annotated[PlainChoice | ToolChoice, Field(discriminator="type")]


class ThinkingOn(fields.Body):
    """display omitted: reasoning is returned without text. budget_tokens: most tokens of reasoning, unless adaptive."""

    type: Literal["adaptive", "enabled"]
    display: Literal["summarized", "omitted"] = "summarized"
    budget_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None


class ThinkingOff(fields.Body):
    harmless = dict.fromkeys(("budget_tokens", "display"), "there is no reasoning")

    type: Literal["disabled"]


Thinking = Annotated[ThinkingOn | ThinkingOff, Field(discriminator="type")]


class OutputFormat(fields.Body):
    harmless = {"name": "it is a label", "strict": "the answer always follows it"}

    type: Literal["json_schema"]
    schema_: Annotated[fields.Object, Field(alias="schema")]


class OutputConfig(fields.Body):
    """effort: for templates with levels."""

    format: OutputFormat | None = None
    effort: fields.Effort | None = None


class Amount(fields.Body):
    """A number of tokens or tool uses."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns"]
    value: Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class Edit(fields.Body):
    """Removes old reasoning or tool results. keep: how many of the last stay. trigger: from which size on."""

    type: fields.Text
    keep: Literal["all"] | Amount | None = None
    trigger: Amount | None = None
    exclude_tools: Annotated[list[fields.Text], fields.many(fields.MOST_TOOLS)] = []
    clear_tool_inputs: bool | Annotated[list[fields.Text], fields.many(fields.MOST_TOOLS)] = False


class ContextManagement(fields.Body):
    edits: Annotated[list[Edit], fields.many(16)] = []


class DiagnosticsAsked(fields.Body):
    """previous_message_id: the message whose prompt is compared with this one; null: none."""

    previous_message_id: fields.Text | None = None


class AnthropicPrompted(BreakpointBody):
    """chat_template_kwargs: an extension, as in OpenAI's chats."""

    refused = {
        "container": fields.Refused("this server runs no code"),
        "thread": fields.Refused("nothing is stored; send the whole conversation in messages"),
    }
    harmless = {
        "betas": "a field that is implemented needs no mark",
        "billing_policy": "nothing is billed",
        "fallback_credit_token": "there is no other model",
        "fallbacks": "there is no other model",
        "inference_geo": "the model runs where this server runs",
        "service_tier": "there is one tier",
        "speed": "there is one speed",
        "user_profile_id": "it is a label",
        "workspace_id": "it is a label",
        "anthropic_version": "there is one version",
    }

    metadata: fields.Object | None = None
    model: fields.ModelName = ""
    messages: Annotated[list[Message], fields.many(fields.MOST_ITEMS, 1)]
    system: fields.Text | Annotated[list[TextBlock], fields.many(fields.MOST_PARTS)] = ""
    tools: Annotated[list[Annotated[AnthropicTool, fields.others("custom")]], fields.many(fields.MOST_TOOLS)] = []
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    diagnostics: DiagnosticsAsked | None = None
    chat_template_kwargs: fields.Variables | None = None


class CountTokens(AnthropicPrompted):
    """POST /v1/messages/count_tokens."""

    harmless = dict.fromkeys(("max_tokens", "stream", "temperature", "top_k", "top_p"), "nothing is generated") | {
        "stop_sequences": "nothing is generated"
    }


class Messages(AnthropicPrompted):
    """POST /v1/messages. max_tokens 0 only fills the prefix cache. seed is an extension."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)]
    stream: bool = False
    temperature: fields.Share | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    top_p: fields.Nucleus | None = None
    seed: Annotated[fields.Seed | None, fields.absent(-1)] = None
    stop_sequences: fields.Stops = []
