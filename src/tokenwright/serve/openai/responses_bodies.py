"""The body of OpenAI's Responses API: POST /v1/responses. Answers are not stored."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from tokenwright.checks import MAX_TOKENS
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
    Text,
    ToolName,
    many,
)

MOST_LOGPROBS = 20  # as OpenAI's
_STATELESS = "answers are not stored here; send the whole conversation in input"
_CALLER = Refused("only the model calls functions", ({"type": "direct"},))
_NAMESPACE = Refused("functions have one name")
_NO_SERVER_TOOLS = "this server calls no tools itself"

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    refused = {"prompt_cache_breakpoint": Refused("every prefix is cached")}

    type: Literal["input_text"]
    text: Text


class OutputText(Body):
    """A part of an earlier answer, as it was returned."""

    refused = {
        "annotations": Refused("answers here have none", ([],)),
    }

    type: Literal["output_text"]
    text: Text
    logprobs: list[Any] = []


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: Text


Part = Annotated[InputText | OutputText | RefusalPart, Field(discriminator="type")]
InputParts = Annotated[list[InputText], many(MOST_PARTS)]


class ResponseMessage(Body):
    """A message, or an answer as it was returned."""

    refused = {"phase": Refused("answers have one phase", ("final_answer", "commentary"))}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Annotated[list[Part], many(MOST_PARTS)]
    id: Name | None = None
    status: Status | None = None


class FunctionCall(Body):
    refused = {
        "async": Refused("the client runs its functions when it wants", (False,)),
        "caller": _CALLER,
        "namespace": _NAMESPACE,
    }

    type: Literal["function_call"]
    call_id: Name
    name: ToolName
    arguments: Text
    id: Name | None = None
    status: Status | None = None


class FunctionOutput(Body):
    refused = {"caller": _CALLER, "name": Refused("its call has the name"), "namespace": _NAMESPACE}

    type: Literal["function_call_output"]
    call_id: Name
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
    """The reasoning before an earlier answer, as it was returned."""

    refused = {"encrypted_content": Refused("reasoning here is plain text", ("",))}

    type: Literal["reasoning"]
    id: Name | None = None
    summary: Annotated[list[SummaryText], many(MOST_PARTS)] = []
    content: Annotated[list[ReasoningText], many(MOST_PARTS)] = []
    status: Status | None = None


def _item_type(value: object) -> object:
    """A message may leave its type out."""
    if isinstance(value, dict):
        return value.get("type", "message")
    return getattr(value, "type", None)


Item = Annotated[
    Annotated[ResponseMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(_item_type),
]


class ResponseFunctionTool(Body):
    """A function of the client. Its arguments always follow its schema, whatever `strict` says."""

    refused = {
        "defer_loading": Refused("all functions are in the prompt", (False,)),
        "allowed_callers": Refused("only the model calls functions", (["direct"],)),
        "async": Refused("the client runs its functions when it wants", (False,)),
        "output_schema": Refused("results are text for the model"),
    }

    type: Literal["function"]
    name: ToolName
    description: Text = ""
    parameters: Object = {"type": "object", "properties": {}}
    strict: bool = True


class NamedChoice(Body):
    type: Literal["function"]
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
    refused = {"verbosity": Refused("models here have no such setting; say it in the prompt", ("medium",))}

    format: Annotated[PlainFormat | JsonObject | ResponseJsonSchema, Field(discriminator="type")] = PlainFormat(
        type="text"
    )


class ReasoningConfig(Body):
    """effort none: no reasoning; any other: the model reasons, if it can."""

    refused = {
        "summary": Refused("reasoning is returned whole"),
        "generate_summary": Refused("reasoning is returned whole"),
        "context": Refused("templates keep the reasoning that their model was trained with", ("auto",)),
        "mode": Refused("models here have no modes", ("standard",)),
    }

    effort: Effort | None = None


class ResponseStreamOptions(Body):
    refused = {"include_obfuscation": Refused("events carry no padding", (False,))}


class Create(Body):
    """POST /v1/responses."""

    refused = {
        "access_programs": Refused("there are none"),
        "background_options": Refused("ask with stream instead"),
        "image": Refused("models here read text"),
        "background": Refused("ask with stream instead", (False,)),
        "context_management": Refused("the client edits its conversation", ([],)),
        "conversation": Refused(_STATELESS),
        "max_tool_calls": Refused(_NO_SERVER_TOOLS),
        "moderation": Refused("nothing is moderated here"),
        "previous_response_id": Refused(_STATELESS),
        "prompt": Refused("there are no stored prompts; send input"),
        "prompt_cache_options": Refused("every prefix is cached"),
        "prompt_cache_retention": Refused("pages stay cached until others need them", ("in_memory", "in-memory")),
        "store": Refused(_STATELESS, (False,)),
        "truncation": Refused("an input is never cut", ("disabled",)),
        "service_tier": Refused("there is one tier", ("auto", "default")),
    }
    without_effect = ("metadata", "prompt_cache_key", "safety_identifier", "user")

    model: Name
    input: Text | Annotated[list[Item], many(MOST_ITEMS, 1)]
    instructions: Text | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]], many(16)] = []
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    metadata: Metadata = {}
    parallel_tool_calls: bool = True
    prompt_cache_key: Name | None = None
    reasoning: ReasoningConfig | None = None
    safety_identifier: Name | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    text: TextConfig = TextConfig()
    tool_choice: (
        Literal["auto", "none", "required"]
        | Annotated[NamedChoice | ResponseAllowedChoice, Field(discriminator="type")]
    ) = "auto"
    tools: Annotated[list[ResponseFunctionTool], many(MOST_TOOLS)] = []
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    top_p: Share | None = None
    user: Name | None = None
