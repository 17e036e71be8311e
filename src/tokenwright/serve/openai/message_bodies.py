"""Bodies of the messages and tools in OpenAI's chats."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from tokenwright.serve.http import fields
from tokenwright.serve.http.request_parts import BreakpointBody, BreakpointPart, ImageUrlPart

CACHED = "every prefix is cached, marked or not"
_OTHER = "it was made for the program of the client"
_NOT_TEXT = fields.Refused("models here read text")


class TextPart(fields.Handed, BreakpointPart):
    refused: ClassVar = {"file": _NOT_TEXT, "input_audio": _NOT_TEXT}
    harmless: ClassVar = {"annotations": "they point into the text", "logprobs": "they are of an earlier answer"}

    type: Literal["text", "input_text", "output_text"]
    text: fields.Text = ""


class RefusalPart(fields.Body):
    """An assistant's refusal, which is read as text."""

    harmless: ClassVar = {"cache_control": CACHED}

    type: Literal["refusal"]
    refusal: fields.Text


Parts = Annotated[list[TextPart], fields.many(fields.MOST_PARTS)]


class ThoughtPart(fields.Body):
    harmless: ClassVar = {"cache_control": CACHED, "signature": "reasoning is not signed here"}

    aliases: ClassVar = {"reasoning": "thinking", "text": "thinking"}

    type: Literal["thinking", "reasoning"]
    thinking: fields.Text | Parts = ""

    @property
    def text(self) -> str:
        return self.thinking if isinstance(self.thinking, str) else "".join(part.text for part in self.thinking)


SeenPart = Annotated[TextPart | ImageUrlPart, Field(discriminator="type")]
SeenParts = Annotated[list[SeenPart], fields.many(fields.MOST_PARTS)]


class Prediction(fields.Body):
    """A likely answer, such as the file to edit, whose tokens are drafted."""

    type: Literal["content"]
    content: fields.Text | Parts = ""


AnswerPart = Annotated[TextPart | RefusalPart | ThoughtPart, Field(discriminator="type")]
AnswerParts = Annotated[list[AnswerPart], fields.many(fields.MOST_PARTS)]


class CalledFunction(fields.Body):
    """The function of a call. arguments: an object's JSON; other text is passed to the template unchanged."""

    harmless: ClassVar = {"parsed_arguments": "it repeats arguments"}

    name: fields.Text = ""
    arguments: fields.Text | fields.Object = ""


class CalledCustom(fields.Body):
    name: fields.Text = ""
    input: fields.Text = ""


class CalledTool(fields.Body):
    harmless: ClassVar = {
        "cache_control": CACHED,
        "index": "calls are in the order of the list",
        "provider_specific_fields": _OTHER,
        "extra_content": _OTHER,
    }

    id: fields.GivenId = None
    type: fields.Text = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class AnyRole(fields.Handed, BreakpointBody):
    """The fields of messages of all roles. name: the speaker, for templates that print it."""

    harmless: ClassVar = {
        "provider_specific_fields": _OTHER,
        "id": "messages are in the order of the list",
        "metadata": "it is a label",
        **dict.fromkeys(("artifact", "is_error", "status"), _OTHER),
    }

    name: fields.Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: object) -> object:
        """Read bare strings as text parts, and no parts, or null except in answers, as empty text."""
        content = data.get("content", "") if isinstance(data, dict) else ""
        if isinstance(content, list):
            first = content[: fields.MOST_PARTS + 1]  # one too many is refused
            content = [{"type": "text", "text": one} if isinstance(one, str) else one for one in first]
        content = "" if content == [] or (content is None and cls is not AssistantMessage) else content
        return {**data, "content": content} if isinstance(data, dict) and "content" in data else data


class SystemMessage(AnyRole):
    role: Literal["system", "developer"]
    content: fields.Text | Parts


class UserMessage(AnyRole):
    role: Literal["user"]
    content: fields.Text | SeenParts


class ReasoningDetail(fields.Body):
    """Reasoning of an earlier answer, in the format of model routers."""

    harmless: ClassVar = dict.fromkeys(
        ("type", "id", "index", "format", "signature", "data", "provider_specific_fields"),
        "only the text of reasoning is read",
    )

    aliases: ClassVar = {"summary": "text"}

    text: fields.Text = ""


class AssistantMessage(AnyRole):
    """An earlier answer. Its content may be missing if it has tool calls."""

    refused: ClassVar = {"audio": fields.Refused("models return text only")}
    harmless: ClassVar = {
        "annotations": "they point into the text",
        "parsed": "it repeats the content",
        "thinking_blocks": "it repeats the reasoning",
        "images": "an answer has none",
        "prefix": "an answer goes on from the last message of the assistant's",
    }

    aliases: ClassVar = {"reasoning": "reasoning_content"}

    role: Literal["assistant"]
    content: fields.Text | AnswerParts | None = None
    refusal: fields.Text | None = None
    reasoning_content: fields.Text | None = None
    reasoning_details: Annotated[list[ReasoningDetail], fields.many(fields.MOST_PARTS)] | None = None
    tool_calls: Annotated[list[CalledTool], fields.many(fields.MOST_TOOLS)] | None = None
    function_call: CalledFunction | None = None

    @property
    def calls(self) -> list[CalledTool]:
        older = [] if self.function_call is None else [CalledTool(function=self.function_call)]
        return self.tool_calls or older

    @property
    def thought(self) -> str | None:
        parts = self.content if isinstance(self.content, list) else []
        told = "\n".join(part.text for part in parts if isinstance(part, ThoughtPart))
        return self.reasoning_content or told or "".join(one.text for one in self.reasoning_details or ()) or None


class ToolMessage(AnyRole):
    """The result of a tool. Without an id, it belongs to the first call without one."""

    role: Literal["tool"]
    content: fields.Text | SeenParts = ""
    tool_call_id: fields.GivenId = None


class FunctionMessage(AnyRole):
    role: Literal["function"]
    content: fields.Text | Parts = ""
    name: fields.Text


AnyMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage, Field(discriminator="role")
]


class Function(fields.Handed):
    harmless: ClassVar = {"cache_control": CACHED, "defer_loading": "all tools are in the prompt"}

    name: fields.ToolName
    description: fields.Text | None = None
    parameters: fields.Object | None = None
    strict: bool | None = None


class GrammarText(fields.Body):
    syntax: Literal["lark", "regex"]
    definition: fields.Text


class CustomFormat(fields.Body):
    """The format of a custom tool's input: text, or a grammar, which clients write in two ways."""

    type: Literal["text", "grammar"]
    grammar: GrammarText | None = None
    syntax: Literal["lark", "regex"] | None = None
    definition: fields.Text | None = None

    @property
    def rule(self) -> tuple[str, str] | None:
        if self.grammar is not None:
            return self.grammar.syntax, self.grammar.definition
        return None if self.syntax is None or self.definition is None else (self.syntax, self.definition)


class CustomTool(fields.Body):
    harmless: ClassVar = {"cache_control": CACHED}

    name: fields.ToolName
    description: fields.Text | None = None
    format: CustomFormat | None = None


class FunctionTool(fields.Body):
    """A function or custom tool. Its fields may be in the tool itself. Hosted tools are ignored."""

    harmless: ClassVar = {"cache_control": CACHED, "defer_loading": "all tools are in the prompt"}

    type: fields.Text = "function"
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


Tools = Annotated[list[Annotated[FunctionTool, fields.others("function", "custom")]], fields.many(fields.MOST_TOOLS)]


class NamedFunction(fields.Body):
    name: fields.ToolName


class NamedTool(fields.Body):
    """The tool that must be called. name: the format of other APIs."""

    type: Literal["function", "custom", "tool"]
    name: fields.ToolName | None = None
    function: NamedFunction | None = None
    custom: NamedFunction | None = None

    @property
    def tool(self) -> str:
        """The name of the tool; "": it is missing."""
        named = self.function or self.custom
        return self.name or "" if named is None else named.name


class AllowedTools(fields.Body):
    """The tools that may (mode auto) or must (required) be called; the prompt always has all tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], fields.many(fields.MOST_TOOLS, 1)]


class AllowedChoice(fields.Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChoiceObject(fields.Body):
    type: Literal["none", "auto", "required", "any"]


Choice = Annotated[NamedTool | AllowedChoice | ChoiceObject, Field(discriminator="type")]


class JsonSchema(fields.Body):
    name: fields.Name | None = None
    schema_: fields.Object | None = Field(default=None, alias="schema")
    description: fields.Text | None = None
    strict: bool | fields.Text | None = None


class TextFormat(fields.Body):
    type: Literal["text"]


class ObjectFormat(fields.Body):
    """Any JSON object, or one that follows a schema."""

    aliases: ClassVar = {"value": "schema"}

    type: Literal["json_object", "json"]
    schema_: fields.Object | None = Field(default=None, alias="schema")


class SchemaFormat(fields.Body):
    """JSON that follows a schema, which clients put in one of two places."""

    harmless: ClassVar = {"strict": "the answer always follows it", "name": "it is a label"}

    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    schema_: fields.Object | None = Field(default=None, alias="schema")


class RegexFormat(fields.Body):
    aliases: ClassVar = {"regex": "pattern", "value": "pattern"}

    type: Literal["regex"]
    pattern: fields.Text | None = None


class GrammarFormat(fields.Body):
    aliases: ClassVar = {"value": "grammar"}

    type: Literal["grammar"]
    grammar: fields.Text | None = None


Format = Annotated[TextFormat | ObjectFormat | SchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")]
