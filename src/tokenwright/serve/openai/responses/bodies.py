"""The bodies of OpenAI's Responses API: POST /v1/responses and /v1/responses/input_tokens."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from tokenwright.checks import MAX_TOKENS
from tokenwright.serve.http.cache_fields import BreakpointPart, CacheOptions
from tokenwright.serve.http.fields import (
    MOST_ITEMS,
    MOST_PARTS,
    MOST_TEXT,
    MOST_TOOLS,
    Body,
    CallId,
    Effort,
    Metadata,
    ModelName,
    Nucleus,
    Object,
    Refused,
    Text,
    ToolName,
    absent,
    many,
    others,
)
from tokenwright.serve.http.picture_bodies import InputImage
from tokenwright.serve.openai.bodies import LABELS
from tokenwright.serve.openai.message_bodies import CACHED, CustomFormat, RefusalPart

MOST_LOGPROBS = 20  # as OpenAI's
_ITEM = {
    "caller": "only the model calls functions",
    "namespace": "the names of functions are enough",
    "async": "the client runs its functions when it wants",
    "internal_chat_message_metadata_passthrough": "it is a label",
    "metadata": "it is a label",
}
Identity = Annotated[str, Field(max_length=MOST_TEXT)]  # of an item
# Items of calls that servers have run, by their types; they are left out.
HOSTED = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call"),
        *("computer_call_output", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
        *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call"),
        *("tool_search_output", "apply_patch_call", "apply_patch_call_output", "ghost_snapshot"),
    )
)


class InputText(BreakpointPart):
    type: Literal["input_text", "text"]
    text: Text = ""


class OutputText(Body):
    """A part of an earlier answer, as it was returned."""

    harmless = {
        "annotations": "they point into the text",
        "logprobs": "they are of an earlier answer",
        "parsed": "it repeats the text",
    }

    type: Literal["output_text"]
    text: Text = ""


Part = Annotated[InputText | InputImage | OutputText | RefusalPart, Field(discriminator="type")]
InputParts = Annotated[
    list[Annotated[InputText | InputImage | OutputText, Field(discriminator="type")]], many(MOST_PARTS)
]


class ResponseMessage(Body):
    """A message, or an answer as it was returned."""

    harmless = {**_ITEM, "phase": "the order of items says what an answer was", "status": "it is over"}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Annotated[list[Part], many(MOST_PARTS)] = ""
    id: Identity | None = None
    name: Text | None = None


class FunctionCall(Body):
    """arguments: JSON text of an object; other text is handed on as it is."""

    harmless = {**_ITEM, "status": "it is over", "parsed_arguments": "it repeats arguments"}

    type: Literal["function_call"]
    call_id: CallId
    name: Text = ""
    arguments: Text = ""
    id: Identity | None = None


class FunctionOutput(Body):
    harmless = {**_ITEM, "name": "its call has the name", "status": "it is over"}

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: Text | InputParts = ""
    id: Identity | None = None


class CustomCall(Body):
    harmless = {**_ITEM, "status": "it is over"}

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: Text = ""
    input: Text = ""
    id: Identity | None = None


class ItemReference(Body):
    """An item of a response that is stored."""

    type: Literal["item_reference"]
    id: Identity


class HostedItem(Body):
    """A call that a server has run, or its result."""

    type: Annotated[Text, Field(json_schema_extra={"enum": sorted(HOSTED)})]


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: Text


class SummaryText(Body):
    type: Literal["summary_text"]
    text: Text


class Reasoning(Body):
    """The reasoning before an earlier answer, as it was returned. encrypted_content: the whole of it, if it is ours."""

    harmless = {**_ITEM, "status": "it is over"}

    type: Literal["reasoning"]
    id: Identity | None = None
    summary: Annotated[list[SummaryText], many(MOST_PARTS)] = []
    content: Annotated[list[ReasoningText], many(MOST_PARTS)] = []
    encrypted_content: Text | None = None


class Compaction(Body):
    """A summary, which stands for the conversation before it. encrypted_content: its text, if it is ours."""

    harmless = {**_ITEM, "created_by": "it is a label", "status": "it is over"}

    type: Literal["compaction", "compaction_summary", "context_compaction"]
    id: Identity | None = None
    encrypted_content: Text | None = None


class CompactionTrigger(Body):
    """At the end of the input: the answer is a summary of the conversation, as an item of the type compaction."""

    harmless = _ITEM

    type: Literal["compaction_trigger"]
    id: Identity | None = None


_SAME = {
    "custom_tool_call_output": "function_call_output",
    "compaction_summary": "compaction",
    "context_compaction": "compaction",
}


def _item_type(value: object) -> object:
    """The tag of an item. A message may leave its type out."""
    kind = value.get("type") or "message" if isinstance(value, dict) else getattr(value, "type", None)
    return "hosted" if isinstance(kind, str) and kind in HOSTED else _SAME.get(str(kind), kind)


Item = Annotated[
    Annotated[ResponseMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[CustomCall, Tag("custom_tool_call")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[HostedItem, others(), Tag("hosted")]
    | Annotated[Compaction, Tag("compaction")]
    | Annotated[CompactionTrigger, Tag("compaction_trigger")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(_item_type),
]


class ResponseFunctionTool(Body):
    """A function of the client, a custom tool, or a namespace of several. One of another type runs on servers, and is
    left out.

    Arguments always follow their schema, whatever `strict` says.
    """

    harmless = {
        "defer_loading": "all functions are in the prompt",
        "allowed_callers": "only the model calls functions",
        "async": "the client runs its functions when it wants",
        "output_schema": "results are text for the model",
        "cache_control": CACHED,
    }

    type: Text
    name: Text = ""
    description: Text | None = None
    parameters: Object | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: Annotated[list[Object], many(MOST_TOOLS)] | None = None


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
    name: ToolName = "answer"
    schema_: Annotated[Object, Field(alias="schema")]
    description: Text = ""
    strict: bool = True


class TextConfig(Body):
    harmless = {"verbosity": "models here have no such setting"}

    format: Annotated[PlainFormat | JsonObject | ResponseJsonSchema, Field(discriminator="type")] = PlainFormat(
        type="text"
    )


class ReasoningConfig(Body):
    """effort none: no reasoning; any other: the model reasons, if it can. summary: the reasoning comes as a summary,
    which is the whole of it. max_tokens: of reasoning.
    """

    harmless = {
        "context": "templates keep the reasoning that their model was trained with",
        "mode": "models here have no modes",
    }

    effort: Effort | None = None
    max_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    aliases = {"generate_summary": "summary"}

    summary: Text | None = None


class ResponseStreamOptions(Body):
    harmless = {"include_obfuscation": "events carry no padding"}


class ResponsePrompted(Body):
    """The fields that a response and the count of its tokens have in common."""

    refused = {
        "conversation": Refused("use previous_response_id, or send the whole conversation in input"),
        "image": Refused("models here read text"),
        "prompt": Refused("there are no stored prompts; send input"),
    }
    harmless = {
        **LABELS,
        "access_programs": "there are none",
        "background_options": "responses are answered at once",
        "max_tool_calls": "this server calls no tools itself",
        "moderation": "nothing is moderated here",
        "service_tier": "there is one tier",
    }

    model: ModelName = ""
    prompt_cache_key: Text | None = None
    prompt_cache_options: CacheOptions | None = None
    input: Text | Annotated[list[Item], many(MOST_ITEMS)] = []
    instructions: Text | None = None
    parallel_tool_calls: bool = True
    previous_response_id: Identity | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig = TextConfig()
    tool_choice: (
        Literal["auto", "none", "required"]
        | Annotated[NamedChoice | ResponseAllowedChoice, Field(discriminator="type")]
    ) = "auto"
    tools: Annotated[
        list[Annotated[ResponseFunctionTool, others("function", "custom", "namespace")]], many(MOST_TOOLS)
    ] = []
    truncation: Literal["auto", "disabled"] = "disabled"

    @property
    def compacts(self) -> bool:
        """Whether it asks for a summary of the conversation."""
        return not isinstance(self.input, str) and bool(self.input) and isinstance(self.input[-1], CompactionTrigger)


class InputTokens(ResponsePrompted):
    """POST /v1/responses/input_tokens."""

    harmless = dict.fromkeys(("include", "max_output_tokens", "metadata", "store", "stream"), "nothing is generated")


class Create(ResponsePrompted):
    """POST /v1/responses. store: keep the response for `previous_response_id`; by default it is kept."""

    refused = {
        "background": Refused("ask with stream instead"),
    }

    include: Annotated[list[Text], many(16)] = []
    max_output_tokens: Annotated[Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None, absent(-1)] = None
    metadata: Metadata = {}
    safety_identifier: Text | None = None
    store: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    top_p: Nucleus | None = None
    user: Text | None = None
