"""Each field that the official clients can send is implemented, harmless, or refused by name; others are unknown."""

import tracemalloc
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

import anthropic.types as anthropic_types
import anthropic.types.beta as anthropic_beta
import ollama._types as ollama_types
import openai.types.responses as openai_types
import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import chat, completion_create_params, embedding_create_params, shared_params
from openai.types.chat import chat_completion_content_part_image_param as chat_image
from openai.types.chat import chat_completion_content_part_param as chat_part
from openai.types.responses import response_create_params, response_input_item_param
from pydantic import BaseModel, Field, ValidationError

from tests.serve.tables import drops, refusals
from tokenwright.serve.anthropic import bodies as anthropic_schema
from tokenwright.serve.http import request_parts
from tokenwright.serve.http.complaints import complaint
from tokenwright.serve.http.fields import Body, Reading, Refused, Share, rule, typed
from tokenwright.serve.ollama import bodies as ollama_schema
from tokenwright.serve.openai import bodies as openai_schema
from tokenwright.serve.openai import message_bodies
from tokenwright.serve.openai.responses import bodies as responses_bodies

BODIES: list[tuple[type[Body], Any]] = [
    (openai_schema.CompletionBody, completion_create_params.CompletionCreateParamsBase),
    (openai_schema.CompletionBody, completion_create_params.CompletionCreateParamsStreaming),
    (openai_schema.ChatBody, chat.completion_create_params.CompletionCreateParamsBase),
    (openai_schema.ChatBody, chat.completion_create_params.CompletionCreateParamsStreaming),
    (openai_schema.EmbeddingBody, embedding_create_params.EmbeddingCreateParams),
    (message_bodies.SystemMessage, chat.ChatCompletionSystemMessageParam),
    (message_bodies.SystemMessage, chat.ChatCompletionDeveloperMessageParam),
    (message_bodies.UserMessage, chat.ChatCompletionUserMessageParam),
    (message_bodies.AssistantMessage, chat.ChatCompletionAssistantMessageParam),
    (message_bodies.ToolMessage, chat.ChatCompletionToolMessageParam),
    (message_bodies.TextPart, chat.ChatCompletionContentPartTextParam),
    (request_parts.ImageUrlPart, chat.ChatCompletionContentPartImageParam),
    (request_parts.ImageUrl, chat_image.ImageURL),
    (message_bodies.TextPart, chat.ChatCompletionContentPartInputAudioParam),
    (message_bodies.TextPart, chat_part.File),
    (message_bodies.RefusalPart, chat.ChatCompletionContentPartRefusalParam),
    (message_bodies.FunctionTool, chat.ChatCompletionFunctionToolParam),
    (message_bodies.CalledTool, chat.ChatCompletionMessageFunctionToolCallParam),
    (message_bodies.FunctionTool, chat.ChatCompletionCustomToolParam),
    (message_bodies.CalledTool, chat.ChatCompletionMessageCustomToolCallParam),
    (message_bodies.NamedTool, chat.ChatCompletionNamedToolChoiceParam),
    (message_bodies.NamedTool, chat.ChatCompletionNamedToolChoiceCustomParam),
    (message_bodies.AllowedChoice, chat.ChatCompletionAllowedToolChoiceParam),
    (message_bodies.AllowedTools, chat.ChatCompletionAllowedToolsParam),
    (responses_bodies.ResponseAllowedChoice, openai_types.ToolChoiceAllowedParam),
    (openai_schema.StreamOptions, chat.ChatCompletionStreamOptionsParam),
    (message_bodies.Function, shared_params.FunctionDefinition),
    (message_bodies.JsonSchema, shared_params.response_format_json_schema.JSONSchema),
    (anthropic_schema.Messages, message_create_params.MessageCreateParamsBase),
    (anthropic_schema.Messages, message_create_params.MessageCreateParamsStreaming),
    (anthropic_schema.Messages, beta_create_params.MessageCreateParamsBase),
    (anthropic_schema.CountTokens, anthropic_types.MessageCountTokensParams),
    (anthropic_schema.AnthropicTool, anthropic_types.ToolParam),
    (anthropic_schema.AnthropicTool, anthropic_beta.BetaToolParam),
    (anthropic_schema.TextBlock, anthropic_types.TextBlockParam),
    (anthropic_schema.ToolUseBlock, anthropic_types.ToolUseBlockParam),
    (anthropic_schema.ToolResultBlock, anthropic_types.ToolResultBlockParam),
    (request_parts.ImageBlock, anthropic_types.ImageBlockParam),
    (request_parts.Base64Source, anthropic_types.Base64ImageSourceParam),
    (request_parts.UrlSource, anthropic_types.URLImageSourceParam),
    (anthropic_schema.ThinkingBlock, anthropic_types.ThinkingBlockParam),
    (anthropic_schema.DocumentBlock, anthropic_types.DocumentBlockParam),
    (anthropic_schema.SearchResultBlock, anthropic_types.SearchResultBlockParam),
    (anthropic_schema.CompactionBlock, anthropic_beta.BetaCompactionBlockParam),
    (anthropic_schema.ThinkingOn, anthropic_types.ThinkingConfigAdaptiveParam),
    (anthropic_schema.PlainChoice, anthropic_types.ToolChoiceAutoParam),
    (anthropic_schema.ToolChoice, anthropic_types.ToolChoiceToolParam),
    (anthropic_schema.OutputConfig, anthropic_types.OutputConfigParam),
    (ollama_schema.Generate, ollama_types.GenerateRequest),
    (ollama_schema.Chat, ollama_types.ChatRequest),
    (ollama_schema.Options, ollama_types.Options),
    (ollama_schema.OllamaMessage, ollama_types.Message),
    (ollama_schema.Called, ollama_types.Message.ToolCall.Function),
    (ollama_schema.OllamaTool, ollama_types.Tool),
    (ollama_schema.OllamaFunction, ollama_types.Tool.Function),
    (ollama_schema.Show, ollama_types.ShowRequest),
    (ollama_schema.OllamaEmbed, ollama_types.EmbedRequest),
    (ollama_schema.OllamaEmbeddings, ollama_types.EmbeddingsRequest),
    (responses_bodies.Create, response_create_params.ResponseCreateParamsBase),
    (responses_bodies.Create, response_create_params.ResponseCreateParamsStreaming),
    (responses_bodies.ResponseMessage, openai_types.EasyInputMessageParam),
    (responses_bodies.ResponseMessage, openai_types.ResponseOutputMessageParam),
    (responses_bodies.InputText, openai_types.ResponseInputTextParam),
    (request_parts.InputImage, openai_types.ResponseInputImageParam),
    (responses_bodies.OutputText, openai_types.ResponseOutputTextParam),
    (responses_bodies.FunctionCall, openai_types.ResponseFunctionToolCallParam),
    (responses_bodies.FunctionOutput, response_input_item_param.FunctionCallOutput),
    (responses_bodies.Reasoning, openai_types.ResponseReasoningItemParam),
    (responses_bodies.ResponseFunctionTool, openai_types.FunctionToolParam),
    (responses_bodies.TextConfig, openai_types.ResponseTextConfigParam),
    (responses_bodies.ResponseJsonSchema, openai_types.ResponseFormatTextJSONSchemaConfigParam),
    (responses_bodies.ReasoningConfig, shared_params.Reasoning),
    (responses_bodies.ResponseStreamOptions, response_create_params.StreamOptions),
]


def published(theirs: Any) -> set[str]:
    if isinstance(theirs, type) and issubclass(theirs, BaseModel):
        return {field.alias or name for name, field in theirs.model_fields.items()}
    return set(get_type_hints(theirs))


@pytest.mark.parametrize(("ours", "theirs"), BODIES, ids=lambda one: one.__name__)
def test_every_published_field_has_a_rule(ours: type[Body], theirs: Any) -> None:
    implemented, harmless, refused, aliases = map(set, rule(ours))
    assert published(theirs) - NAMED_IN_THE_HEADER <= implemented | harmless | refused | aliases


# What asks for something that nothing here does, while the answer goes on without it: it is unknown on purpose.
NAMED_IN_THE_HEADER = {"mcp_servers", "context_management", "compaction", "input_examples", "task_budget"}


class Inner(Body):
    refused: ClassVar = {"inside": Refused("use another")}

    text: str


class Outer(Body):
    refused: ClassVar = {"store": Refused("nothing is stored", ("no",))}
    harmless: ClassVar = {"label": "it is a label"}

    number: int = 1
    share: Share = 1.0
    stop: str | Annotated[list[str], Field(max_length=8)] = ""
    kind: Literal["a", "b"] = "a"
    parts: Annotated[list[Inner], Field(max_length=8)] = []  # noqa: RUF012


class Further(Outer):
    refused: ClassVar = {"voice": Refused("there is none")}
    harmless: ClassVar = {"note": "nobody reads it"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"store": True}, "store", "store is not supported: nothing is stored"),
        ({"store": 1}, "store", "store is not supported: nothing is stored"),
        ({"nubmer": 1}, "nubmer", "nubmer: this API has no such field; did you mean number?"),
        ({"Number": 1}, "Number", "Number: this API has no such field; did you mean number?"),
        ({"labl": 1}, "labl", "labl: this API has no such field; did you mean label?"),
        ({"nubmer": 0}, "nubmer", "nubmer: this API has no such field; did you mean number?"),
        ({"stroe": False}, "stroe", "stroe: this API has no such field; did you mean store?"),
        (
            {"parts": [{"text": "a", "txet": "b"}]},
            "parts.0.txet",
            "parts.0.txet: this API has no such field; did you mean text?",
        ),
        ({"number": True}, "number", "number must be a whole number, not true"),
        ({"number": 1.5}, "number", "number must be a whole number, not 1.5"),
        ({"number": "x"}, "number", "number must be a whole number, not 'x'"),
        ({"share": 2}, "share", "share must be at most 1, not 2"),
        ({"share": "x", "number": 1}, "share", "share must be a number, not 'x'"),
        ({"stop": 3}, "stop", "stop must be text, or a list, not 3"),
        ({"stop": ["a", {}]}, "stop.1", "stop.1 must be text, not an object"),
        ({"kind": "c"}, "kind", "kind must be 'a' or 'b', not 'c'"),
        ({"stop": ["a"] * 9}, "stop", "stop: it has more than 8 entries; leave some out"),
        ({"parts": [{"text": "a"}, {}]}, "parts.1.text", "parts.1.text: this field is required"),
        (
            {"parts": [{"text": "a", "inside": 1}]},
            "parts.0.inside",
            "parts.0.inside is not supported: use another",
        ),
        ([], None, "the body must be an object, not a list"),
    ],
)
def test_what_is_wrong_is_said_by_name(body: Any, param: str | None, message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Outer.model_validate(body)
    found = complaint(raised.value, body)
    assert (found.param, found.message) == (param, message)


@pytest.mark.parametrize("value", [None, False, 0, -1, 0.0, -1.0, 1.0, "", [], {}, "no"], ids=repr)
def test_values_that_ask_for_nothing_are_accepted(value: Any) -> None:
    body = Outer.model_validate({"store": value, "number": None, "parts": [{"text": "a", "inside": None}]})
    assert (body.number, body.parts) == (1, [Inner(text="a")])


def test_unknown_fields_are_dropped_and_reported_with_their_paths() -> None:
    reading = Reading(Outer)
    given = {"label": {"a": 1}, "novel": 1, "parts": [{"text": "a", "shiny": []}, {"text": "b", "shiny": 2}], "x": None}
    body = Outer.model_validate(given, context=reading)
    assert body == Outer(parts=[Inner(text="a"), Inner(text="b")])
    assert reading.ignored == ["novel", "parts.shiny"]


@pytest.mark.parametrize(
    ("given", "field"), [({"novel": 1}, "novel"), ({"parts": [{"text": "", "y": 1}]}, "parts.0.y")]
)
def test_a_strict_reading_refuses_unknown_fields(given: Any, field: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Outer.model_validate(given, context=Reading(Outer, strict=True))
    assert complaint(raised.value, given).message == f"{field}: this API has no such field; remove it"
    Outer.model_validate(
        {"label": 1, "store": 0, "novel": None, "new": 0, "old": []}, context=Reading(Outer, strict=True)
    )


def test_a_body_of_countless_unknown_fields_is_refused() -> None:
    given = {f"field {number}": 1 for number in range(100_000)}
    with pytest.raises(ValidationError):
        Outer.model_validate(given, context=Reading(Outer))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *((name, "number") for name in ("numbr", "nummber", "numebr", "NUMBER", "num-ber")),
        *(("kinds", "kind"), ("lable", "label"), ("kinf", ""), ("top", ""), ("numerous", ""), ("st", "")),
    ],
)
def test_a_typing_error_is_one_edit(name: str, meant: str) -> None:
    assert typed(Outer, name) == meant


def test_a_body_has_the_rules_of_its_bases() -> None:
    assert set(rule(Further)[1]) == {"label", "note"}
    assert set(rule(Further)[2]) == {"store", "voice"}


def test_the_schema_says_what_is_accepted() -> None:
    whole = Outer.model_json_schema()
    schema = whole["properties"]
    assert schema["store"]["enum"] == [None, False, 0, -1, 0.0, -1.0, 1.0, "", [], {}, "no"]
    assert schema["label"] == {"description": "Without effect: it is a label."}
    assert whole["additionalProperties"] is True
    assert {"type": "null"} in schema["number"]["anyOf"]
    assert dict(refusals(Outer)) == {"store": Outer.refused["store"], "parts.inside": Inner.refused["inside"]}
    assert dict(drops(Outer)) == {"label": "it is a label"}


class Named(Body):
    aliases: ClassVar = {"tall": "size", "wide": "size", "why": "reason"}
    once: ClassVar = frozenset(("reason",))

    size: int | None = None
    reason: str | None = None
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("data", "size"),
    [({"wide": 2}, 2), ({"tall": 1, "wide": 2}, 1), ({"size": 3, "wide": 2}, 3), ({"size": -1, "wide": 2}, 2)],
)
def test_the_first_name_that_says_something_counts(data: dict[str, Any], size: int) -> None:
    assert Named.model_validate(data).size == size


def test_an_alias_is_a_name_of_a_field_and_an_error_has_the_clients() -> None:
    reading = Reading(Named)
    with pytest.raises(ValidationError) as caught:
        Named.model_validate({"tall": "x"}, context=reading)
    assert complaint(caught.value, {"tall": "x"}, reading.renamed).param == "tall"
    with pytest.raises(ValidationError, match="reason and why say the same thing"):
        Named.model_validate({"reason": "a", "why": "b"})
    assert typed(Named, "talll") == "tall"
    properties = Named.model_json_schema()["properties"]
    assert properties["wide"] == properties["size"]
    for body in openai_schema.ChatBody, openai_schema.CompletionBody, message_bodies.AssistantMessage:
        assert set(rule(body).aliases.values()) <= rule(body).known
        assert not rule(body).aliases.keys() & rule(body).known


def test_variables_of_a_template_are_finite() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": [float("inf")]}}
    with pytest.raises(ValidationError, match="it contains a number that is too large"):
        openai_schema.ChatBody.model_validate(body)


def messages(content: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize("content", [0, False, {}], ids=str)
def test_content_that_is_no_text_is_not_read_as_an_empty_one(content: object) -> None:
    with pytest.raises(ValidationError, match="content"):
        openai_schema.ChatBody.model_validate(messages(content), context=Reading(openai_schema.ChatBody))


def test_bare_strings_are_counted_before_they_become_parts() -> None:
    body = messages(["a"] * 200_000)
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError) as raised:
            openai_schema.ChatBody.model_validate(body, context=Reading(openai_schema.ChatBody))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    found = complaint(raised.value, body)
    assert found.message == "messages.0.content: it has more than 10,000 entries; leave some out"
    assert peak < 16 << 20, "a part takes 184 bytes and more"
