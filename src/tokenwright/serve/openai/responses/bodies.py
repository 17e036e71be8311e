"""Bodies of OpenAI's Responses API."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from tokenwright.checks import MAX_TOKENS
from tokenwright.serve.http import fields
from tokenwright.serve.http.request_parts import BreakpointPart, CacheOptions, Extensions, InputImage
from tokenwright.serve.openai.bodies import LABELS
from tokenwright.serve.openai.message_bodies import CACHED, CustomFormat, RefusalPart

MOST_LOGPROBS = 20
TYPES = ("function", "custom", "namespace")
_ITEM = {
    "caller": "only the model calls functions",
    "namespace": "the names of functions are enough",
    "async": "the client runs its functions when it wants",
    "internal_chat_message_metadata_passthrough": "it is a label",
    "metadata": "it is a label",
}
Identity = Annotated[str, Field(max_length=fields.MOST_TEXT)]
# Items of hosted tool calls are ignored.
HOSTED = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call"),
        *("computer_call_output", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
        *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call"),
        *("tool_search_output", "apply_patch_call", "apply_patch_call_output", "ghost_snapshot"),
        *("configuration_update", "program", "program_output"),
    )
)


class InputText(BreakpointPart):
    type: Literal["input_text", "text"]
    text: fields.Text = ""


class OutputText(fields.Body):
    harmless = {
        "annotations": "they point into the text",
        "logprobs": "they are of an earlier answer",
        "parsed": "it repeats the text",
    }

    type: Literal["output_text"]
    text: fields.Text = ""


Part = Annotated[InputText | InputImage | OutputText | RefusalPart, Field(discriminator="type")]
InputParts = Annotated[
    list[Annotated[InputText | InputImage | OutputText, Field(discriminator="type")]], fields.many(fields.MOST_PARTS)
]


class ResponseMessage(fields.Body):
    """A message, or a returned answer."""

    harmless = {**_ITEM, "phase": "the order of items says what an answer was", "status": "it is over"}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: fields.Text | Annotated[list[Part], fields.many(fields.MOST_PARTS)] = ""
    id: Identity | None = None
    name: fields.Text | None = None


class FunctionCall(fields.Body):
    """arguments: an object's JSON; other text is passed to the template unchanged."""

    harmless = {**_ITEM, "status": "it is over", "parsed_arguments": "it repeats arguments"}

    type: Literal["function_call"]
    call_id: fields.CallId
    name: fields.Text = ""
    arguments: fields.Text = ""
    id: Identity | None = None


class FunctionOutput(fields.Body):
    harmless = {**_ITEM, "name": "its call has the name", "status": "it is over"}

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: fields.CallId
    output: fields.Text | InputParts = ""
    id: Identity | None = None


class CustomCall(fields.Body):
    harmless = {**_ITEM, "status": "it is over"}

    type: Literal["custom_tool_call"]
    call_id: fields.CallId
    name: fields.Text = ""
    input: fields.Text = ""
    id: Identity | None = None


class ItemReference(fields.Body):
    type: Literal["item_reference"]
    id: Identity


class HostedItem(fields.Body):
    type: Annotated[fields.Text, Field(json_schema_extra={"enum": sorted(HOSTED)})]


class ResponseFunctionTool(fields.Body):
    """A client's function, a custom tool, or a namespace of several. Hosted tools are ignored."""

    harmless = {
        "defer_loading": "all functions are in the prompt",
        "allowed_callers": "only the model calls functions",
        "async": "the client runs its functions when it wants",
        "output_schema": "results are text for the model",
        "cache_control": CACHED,
    }

    type: fields.Text
    name: fields.Text = ""
    description: fields.Text | None = None
    parameters: fields.Object | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: Annotated[list[fields.Object], fields.many(fields.MOST_TOOLS)] | None = None


Tools = Annotated[list[Annotated[ResponseFunctionTool, fields.others(*TYPES)]], fields.many(fields.MOST_TOOLS)]


class AdditionalTools(fields.Body):
    """Tools that are added within the conversation, and offered like the request's own."""

    harmless = _ITEM

    type: Literal["additional_tools"]
    role: Literal["developer"] = "developer"
    tools: Tools = []
    id: Identity | None = None


class ReasoningText(fields.Body):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: fields.Text


class Reasoning(fields.Body):
    """Returned reasoning. encrypted_content: all of it, if this server wrote it."""

    harmless = {**_ITEM, "status": "it is over"}

    type: Literal["reasoning"]
    id: Identity | None = None
    summary: Annotated[list[ReasoningText], fields.many(fields.MOST_PARTS)] = []
    content: Annotated[list[ReasoningText], fields.many(fields.MOST_PARTS)] = []
    encrypted_content: fields.Text | None = None


class Compaction(fields.Body):
    """A summary that replaces the conversation before it. encrypted_content: its text, if this server wrote it."""

    harmless = {**_ITEM, "created_by": "it is a label", "status": "it is over"}

    type: Literal["compaction", "compaction_summary", "context_compaction"]
    id: Identity | None = None
    encrypted_content: fields.Text | None = None


class CompactionTrigger(fields.Body):
    """At the end of the input, it asks for a summary of the conversation, an item of type compaction."""

    harmless = _ITEM

    type: Literal["compaction_trigger"]
    id: Identity | None = None


_SAME = {
    "custom_tool_call_output": "function_call_output",
    "compaction_summary": "compaction",
    "context_compaction": "compaction",
}


def _item_type(value: object) -> object:
    """The type of an item; a message may omit it."""
    kind = value.get("type") or "message" if isinstance(value, dict) else getattr(value, "type", None)
    return "hosted" if isinstance(kind, str) and kind in HOSTED else _SAME.get(str(kind), kind)


Item = Annotated[
    Annotated[ResponseMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[CustomCall, Tag("custom_tool_call")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[HostedItem, fields.others(), Tag("hosted")]
    | Annotated[AdditionalTools, Tag("additional_tools")]
    | Annotated[Compaction, Tag("compaction")]
    | Annotated[CompactionTrigger, Tag("compaction_trigger")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(_item_type),
]


class NamedChoice(fields.Body):
    type: Literal["function", "custom"]
    name: fields.ToolName


class ResponseAllowedChoice(fields.Body):
    """The tools of which one may (mode auto) or must (required) be called; the prompt has all tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], fields.many(fields.MOST_TOOLS, 1)]


class PlainFormat(fields.Body):
    type: Literal["text", "json_object"]


class ResponseJsonSchema(fields.Body):
    """The answer always follows the schema, even without `strict`."""

    type: Literal["json_schema"]
    name: fields.ToolName = "answer"
    schema_: Annotated[fields.Object, Field(alias="schema")]
    description: fields.Text = ""
    strict: bool = True


class TextConfig(fields.Body):
    harmless = {"verbosity": "models here have no such setting"}

    format: Annotated[PlainFormat | ResponseJsonSchema, Field(discriminator="type")] = PlainFormat(type="text")


class ReasoningConfig(fields.Body):
    """effort none: no reasoning. summary: all reasoning is returned as a summary. max_tokens: of reasoning."""

    harmless = {
        "context": "templates keep the reasoning that their model was trained with",
        "mode": "models here have no modes",
    }

    effort: fields.Effort | None = None
    max_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    aliases = {"generate_summary": "summary"}

    summary: fields.Text | None = None


class ResponseStreamOptions(fields.Body):
    harmless = {"include_obfuscation": "events carry no padding"}


class ConversationName(fields.Body):
    id: Identity


class ResponsePrompted(fields.Body):
    """chat_template_kwargs: an extension, as in chats."""

    refused = {
        "image": fields.Refused("models here read text"),
        "prompt": fields.Refused("there are no stored prompts; send input"),
    }
    harmless = {
        **LABELS,
        "access_programs": "there are none",
        "background_options": "responses are answered at once",
        "moderation": "nothing is moderated here",
        "service_tier": "there is one tier",
    }

    model: fields.ModelName = ""
    conversation: Identity | ConversationName | None = None
    prompt_cache_key: fields.Text | None = None
    nvext: Extensions | None = None
    prompt_cache_options: CacheOptions | None = None
    input: fields.Text | Annotated[list[Item], fields.many(fields.MOST_ITEMS)] = []
    instructions: fields.Text | None = None
    parallel_tool_calls: bool = True
    previous_response_id: Identity | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig = TextConfig()
    tool_choice: (
        Literal["auto", "none", "required"]
        | Annotated[NamedChoice | ResponseAllowedChoice, Field(discriminator="type")]
    ) = "auto"
    tools: Tools = []
    chat_template_kwargs: fields.Variables | None = None
    truncation: Literal["auto", "disabled"] = "disabled"

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation

    @property
    def compacts(self) -> bool:
        return not isinstance(self.input, str) and bool(self.input) and isinstance(self.input[-1], CompactionTrigger)


class InputTokens(ResponsePrompted):
    """POST /v1/responses/input_tokens."""

    harmless = dict.fromkeys(("include", "max_output_tokens", "metadata", "store", "stream"), "nothing is generated")


class Create(ResponsePrompted):
    """POST /v1/responses and /v1/responses/compact. store: keep the response. max_tool_calls: of hosted tools."""

    refused = {"background": fields.Refused("ask with stream instead")}

    include: Annotated[list[fields.Text], fields.many(16)] = []
    max_output_tokens: Annotated[Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None, fields.absent(-1)] = None
    max_tool_calls: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    metadata: fields.Metadata = {}
    safety_identifier: fields.Text | None = None
    store: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    top_p: fields.Nucleus | None = None
    user: fields.Text | None = None


class ConversationItems(fields.Body):
    """POST /v1/conversations/ID/items."""

    items: Annotated[list[Item], fields.many(fields.MOST_ITEMS)] = []


class CreateConversation(ConversationItems):
    """POST /v1/conversations."""

    metadata: fields.Metadata = {}
