"""The messages and tools of OpenAI's chats, as clients write them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from tokenwright.serve.http.fields import (
    MOST_PARTS,
    MOST_TOOLS,
    Body,
    GivenId,
    Handed,
    Name,
    Object,
    Refused,
    Text,
    ToolName,
    finite,
    many,
    names,
)

CACHED = "every prefix is cached, marked or not"
_OTHER = "it was made for the program of the client"
_NOT_TEXT = Refused("models here read text")


class TextPart(Handed):
    refused: ClassVar = {"file": _NOT_TEXT, "image_url": _NOT_TEXT, "input_audio": _NOT_TEXT}
    harmless: ClassVar = {
        "annotations": "they point into the text",
        "cache_control": CACHED,
        "logprobs": "they are of an earlier answer",
        "prompt_cache_breakpoint": CACHED,
    }

    type: Literal["text", "input_text", "output_text"]
    text: Text = ""


class RefusalPart(Body):
    """A part of an assistant's message that was a refusal; it is read as text."""

    harmless: ClassVar = {"cache_control": CACHED}

    type: Literal["refusal"]
    refusal: Text


class ThoughtPart(Body):
    """A part of an assistant's message that was reasoning."""

    harmless: ClassVar = {"cache_control": CACHED, "signature": "reasoning is not signed here"}

    aliases: ClassVar = {"reasoning": "thinking", "text": "thinking"}

    type: Literal["thinking", "reasoning"]
    thinking: Text = ""


Parts = Annotated[list[TextPart], many(MOST_PARTS)]


class Prediction(Body):
    """A text that the answer may come to, such as the file that it edits; its tokens are drafted where they fit."""

    type: Literal["content"]
    content: Text | Parts = ""


AnswerPart = Annotated[TextPart | RefusalPart | ThoughtPart, Field(discriminator="type")]
AnswerParts = Annotated[list[AnswerPart], many(MOST_PARTS)]


class CalledFunction(Body):
    """The function of a call. arguments: JSON text of an object; other text is handed on as it is."""

    harmless: ClassVar = {"parsed_arguments": "it repeats arguments"}

    name: Text = ""
    arguments: Text | Object = ""


class CalledCustom(Body):
    """The custom tool of a call, and what it was called with."""

    name: Text = ""
    input: Text = ""


class CalledTool(Body):
    """A call in an assistant's message, of a function or of a custom tool."""

    harmless: ClassVar = {
        "cache_control": CACHED,
        "index": "calls are in the order of the list",
        "provider_specific_fields": _OTHER,
        "extra_content": _OTHER,
    }

    id: GivenId = None
    type: Text = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class AnyRole(Handed):
    """The fields of messages of all roles. name: the speaker, for templates that print it."""

    harmless: ClassVar = {
        "cache_control": CACHED,
        "provider_specific_fields": _OTHER,
        "id": "messages are in the order of the list",
        "metadata": "it is a label",
        **dict.fromkeys(("artifact", "is_error", "status"), _OTHER),
    }

    name: Text | None = None


class SpokenMessage(AnyRole):
    """A message that is text. null is an empty one."""

    @model_validator(mode="before")
    @classmethod
    def _spoken(cls, data: object) -> object:
        empty = isinstance(data, dict) and data.get("content", "") is None
        return {**data, "content": ""} if isinstance(data, dict) and empty else data


class SystemMessage(SpokenMessage):
    role: Literal["system", "developer"]
    content: Text | Parts


class UserMessage(SpokenMessage):
    role: Literal["user"]
    content: Text | Parts


class ReasoningDetail(Body):
    """A part of the reasoning of an earlier answer, as routers of models write it."""

    harmless: ClassVar = dict.fromkeys(
        ("type", "id", "index", "format", "signature", "data", "provider_specific_fields"),
        "only the text of reasoning is read",
    )

    aliases: ClassVar = {"summary": "text"}

    text: Text = ""


class AssistantMessage(AnyRole):
    """An earlier answer of the model; its content may be missing beside tool calls."""

    refused: ClassVar = {"audio": Refused("there is text alone")}
    harmless: ClassVar = {
        "annotations": "they point into the text",
        "parsed": "it repeats the content",
        "thinking_blocks": "it repeats the reasoning",
        "images": "an answer has none",
        "prefix": "an answer goes on from the last message of the assistant's",
    }

    aliases: ClassVar = {"reasoning": "reasoning_content"}

    role: Literal["assistant"]
    content: Text | AnswerParts | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning_details: Annotated[list[ReasoningDetail], many(MOST_PARTS)] | None = None
    tool_calls: Annotated[list[CalledTool], many(MOST_TOOLS)] | None = None
    function_call: CalledFunction | None = None

    @property
    def calls(self) -> list[CalledTool]:
        """Its calls, from whichever field has them."""
        older = [] if self.function_call is None else [CalledTool(function=self.function_call)]
        return self.tool_calls or older

    @property
    def thought(self) -> str | None:
        """Its reasoning, from whichever field has it."""
        parts = self.content if isinstance(self.content, list) else []
        told = "\n".join(part.thinking for part in parts if isinstance(part, ThoughtPart))
        return self.reasoning_content or told or "".join(one.text for one in self.reasoning_details or ()) or None


class ToolMessage(AnyRole):
    """The answer of a tool: without an id, to the first call that has none."""

    role: Literal["tool"]
    content: Text | Parts = ""
    tool_call_id: GivenId = None


class FunctionMessage(AnyRole):
    """The answer of a function that was called by function_call."""

    role: Literal["function"]
    content: Text | Parts = ""
    name: Text


AnyMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage,
    Field(discriminator="role"),
]


class Function(Handed):
    """A function that the model may call."""

    harmless: ClassVar = {
        "cache_control": CACHED,
        "defer_loading": "all tools are in the prompt",
    }

    name: ToolName
    description: Text | None = None
    parameters: Object | None = None
    strict: bool | None = None


class GrammarText(Body):
    """A grammar that a custom tool's input follows."""

    syntax: Literal["lark", "regex"]
    definition: Text


class CustomFormat(Body):
    """The form of a custom tool's input: any text, or that of a grammar, which clients write in two ways."""

    type: Literal["text", "grammar"]
    grammar: GrammarText | None = None
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None

    @property
    def rule(self) -> tuple[str, str] | None:
        """The syntax and the definition of its grammar."""
        if self.grammar is not None:
            return self.grammar.syntax, self.grammar.definition
        return None if self.syntax is None or self.definition is None else (self.syntax, self.definition)


class CustomTool(Body):
    """A tool whose input is text."""

    harmless: ClassVar = {"cache_control": CACHED}

    name: ToolName
    description: Text | None = None
    format: CustomFormat | None = None


class FunctionTool(Body):
    """A tool: a function, or a custom tool. One of another type runs on servers, and is left out.

    Its fields may stand in the tool itself, as in OpenAI's Responses API.
    """

    harmless: ClassVar = {"cache_control": CACHED, "defer_loading": "all tools are in the prompt"}

    type: Text = "function"
    function: Function | None = None
    custom: CustomTool | None = None

    @model_validator(mode="before")
    @classmethod
    def _folded(cls, data: object) -> object:
        if not isinstance(data, dict) or "name" not in data or data.get("function") or data.get("custom"):
            return data
        kind = data.get("type") or "function"
        inner = {name: value for name, value in data.items() if name not in ("type", "function", "custom")}
        return {"type": kind, kind: inner} if kind in ("function", "custom") else data


class NamedFunction(Body):
    name: ToolName


class NamedTool(Body):
    """The tool that must be called. name: as other APIs write it."""

    type: Literal["function", "custom", "tool"]
    name: ToolName | None = None
    function: NamedFunction | None = None
    custom: NamedFunction | None = None

    @property
    def tool(self) -> str:
        """The name of the tool; "": it is missing."""
        named = self.function or self.custom
        return self.name or "" if named is None else named.name


class AllowedTools(Body):
    """The tools that may (mode auto) or must (required) be called. The prompt has all tools all the same."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], many(MOST_TOOLS, 1)]


class AllowedChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChoiceObject(Body):
    """Whether a tool may or must be called, as an object."""

    type: Literal["none", "auto", "required", "any"]


Choice = Annotated[NamedTool | AllowedChoice | ChoiceObject, Field(discriminator="type")]


class JsonSchema(Body):
    name: Name | None = None
    schema_: Object | None = Field(default=None, alias="schema")
    description: Text | None = None
    strict: bool | Text | None = None


class TextFormat(Body):
    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object, or one that follows a schema."""

    aliases: ClassVar = {"value": "schema"}

    type: Literal["json_object", "json"]
    schema_: Object | None = Field(default=None, alias="schema")


class SchemaFormat(Body):
    """JSON that follows a schema, which clients write in two places."""

    harmless: ClassVar = {"strict": "the answer always follows it", "name": "it is a label"}

    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Object | None = Field(default=None, alias="schema")


class RegexFormat(Body):
    aliases: ClassVar = {"regex": "pattern", "value": "pattern"}

    type: Literal["regex"]
    pattern: Text | None = None


class GrammarFormat(Body):
    aliases: ClassVar = {"value": "grammar"}

    type: Literal["grammar"]
    grammar: Text | None = None


Format = Annotated[
    TextFormat | ObjectFormat | SchemaFormat | RegexFormat | GrammarFormat,
    Field(discriminator="type"),
]
Variables = Annotated[dict[str, Any], names(256), Field(max_length=256), AfterValidator(finite)]  # of the chat template
