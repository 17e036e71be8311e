"""Each field that the official clients can send is implemented, harmless, or refused by name."""

from typing import Annotated, Any, ClassVar, Literal, get_type_hints

import anthropic.types as anthropic_types
import anthropic.types.beta as anthropic_beta
import ollama._types as ollama_types
import openai.types.responses as openai_types
import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import chat, completion_create_params, embedding_create_params, shared_params
from openai.types.chat import chat_completion_content_part_param as chat_part
from openai.types.responses import response_create_params, response_input_item_param
from pydantic import BaseModel, Field, ValidationError

from tokenwright.serve.anthropic import bodies as anthropic_schema
from tokenwright.serve.http.fields import Body, Reading, Refused, Share, accepted, complaint, mistyped, refusals
from tokenwright.serve.ollama import bodies as ollama_schema
from tokenwright.serve.openai import bodies as openai_schema
from tokenwright.serve.openai import responses_bodies

BODIES: list[tuple[type[Body], Any]] = [
    (openai_schema.CompletionBody, completion_create_params.CompletionCreateParamsBase),
    (openai_schema.CompletionBody, completion_create_params.CompletionCreateParamsStreaming),
    (openai_schema.ChatBody, chat.completion_create_params.CompletionCreateParamsBase),
    (openai_schema.ChatBody, chat.completion_create_params.CompletionCreateParamsStreaming),
    (openai_schema.EmbeddingBody, embedding_create_params.EmbeddingCreateParams),
    (openai_schema.SystemMessage, chat.ChatCompletionSystemMessageParam),
    (openai_schema.SystemMessage, chat.ChatCompletionDeveloperMessageParam),
    (openai_schema.UserMessage, chat.ChatCompletionUserMessageParam),
    (openai_schema.AssistantMessage, chat.ChatCompletionAssistantMessageParam),
    (openai_schema.ToolMessage, chat.ChatCompletionToolMessageParam),
    (openai_schema.TextPart, chat.ChatCompletionContentPartTextParam),
    (openai_schema.TextPart, chat.ChatCompletionContentPartImageParam),
    (openai_schema.TextPart, chat.ChatCompletionContentPartInputAudioParam),
    (openai_schema.TextPart, chat_part.File),
    (openai_schema.RefusalPart, chat.ChatCompletionContentPartRefusalParam),
    (openai_schema.FunctionTool, chat.ChatCompletionFunctionToolParam),
    (openai_schema.CalledTool, chat.ChatCompletionMessageFunctionToolCallParam),
    (openai_schema.FunctionTool, chat.ChatCompletionCustomToolParam),
    (openai_schema.CalledTool, chat.ChatCompletionMessageCustomToolCallParam),
    (openai_schema.NamedTool, chat.ChatCompletionNamedToolChoiceParam),
    (openai_schema.NamedTool, chat.ChatCompletionNamedToolChoiceCustomParam),
    (openai_schema.AllowedChoice, chat.ChatCompletionAllowedToolChoiceParam),
    (openai_schema.AllowedTools, chat.ChatCompletionAllowedToolsParam),
    (responses_bodies.ResponseAllowedChoice, openai_types.ToolChoiceAllowedParam),
    (openai_schema.StreamOptions, chat.ChatCompletionStreamOptionsParam),
    (openai_schema.Function, shared_params.FunctionDefinition),
    (openai_schema.JsonSchema, shared_params.response_format_json_schema.JSONSchema),
    (anthropic_schema.Messages, message_create_params.MessageCreateParamsBase),
    (anthropic_schema.Messages, message_create_params.MessageCreateParamsStreaming),
    (anthropic_schema.Messages, beta_create_params.MessageCreateParamsBase),
    (anthropic_schema.CountTokens, anthropic_types.MessageCountTokensParams),
    (anthropic_schema.AnthropicTool, anthropic_types.ToolParam),
    (anthropic_schema.AnthropicTool, anthropic_beta.BetaToolParam),
    (anthropic_schema.TextBlock, anthropic_types.TextBlockParam),
    (anthropic_schema.ToolUseBlock, anthropic_types.ToolUseBlockParam),
    (anthropic_schema.ToolResultBlock, anthropic_types.ToolResultBlockParam),
    (anthropic_schema.ThinkingBlock, anthropic_types.ThinkingBlockParam),
    (anthropic_schema.ThinkingOn, anthropic_types.ThinkingConfigAdaptiveParam),
    (anthropic_schema.AutoChoice, anthropic_types.ToolChoiceAutoParam),
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
def test_every_published_field_is_implemented_or_refused(ours: type[Body], theirs: Any) -> None:
    implemented = {field.alias or name for name, field in ours.model_fields.items()}
    assert not implemented & (ours.refused.keys() | set(ours.harmless))
    assert not ours.refused.keys() & set(ours.harmless)
    assert set(ours.without_effect) <= implemented
    assert published(theirs) <= implemented | ours.refused.keys() | set(ours.harmless)


class Inner(Body):
    refused: ClassVar = {"inside": Refused("use another")}
    harmless = ("mark",)

    text: str


class Outer(Body):
    refused: ClassVar = {"store": Refused("nothing is stored", ("no",))}
    harmless = ("label",)
    off: ClassVar = {"number": (-1,)}

    number: int = 1
    share: Share = 1.0
    stop: str | Annotated[list[str], Field(max_length=8)] = ""
    kind: Literal["a", "b"] = "a"
    parts: Annotated[list[Inner], Field(max_length=8)] = []  # noqa: RUF012


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"store": True}, "store", "store is not supported: nothing is stored"),
        ({"sotre": False}, "sotre", "sotre: this API has no such field; remove it"),
        ({"nubmer": 1}, "nubmer", "nubmer: this API has no such field; did you mean number?"),
        (
            {"parts": [{"text": "a", "txet": "b"}]},
            "parts.0.txet",
            "parts.0.txet: this API has no such field; remove it",
        ),
        ({"number": True}, "number", "number must be a whole number, not true"),
        ({"number": 1.0}, "number", "number must be a whole number, not 1.0"),
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


def test_values_that_ask_for_nothing_are_accepted() -> None:
    for off in (False, 0, -1, "", [], {}, None, "no"):
        body = Outer.model_validate(
            {"store": off, "number": -1, "parts": [{"text": "a", "inside": None if off == "no" else off}]}
        )
        assert (body.number, body.parts) == (1, [Inner(text="a")])
    body = Outer.model_validate({"label": {"any": [1]}, "parts": [{"text": "a", "mark": 5}]})
    assert body.parts == [Inner(text="a")]


def test_unknown_fields_are_named_wherever_they_stand() -> None:
    reading = Reading()
    Outer.model_validate({"new": 1, "parts": [{"text": "a", "newer\n": True}], "label": 2}, context=reading)
    assert list(reading.ignored) == ["new", "newer?"]
    with pytest.raises(ValidationError):
        Outer.model_validate({"new": 1}, context=Reading(strict=True))
    for n in range(100):
        reading.ignore(f"field_{n}")
    assert len(reading.ignored) == 32


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("temprature", "temperature"),
        ("temperatrue", "temperature"),
        ("temperaturee", "temperature"),
        ("temperarure", "temperature"),
        ("top_a", ""),  # other engines' sampler, not top_p
        ("temp", ""),
        ("temperature", ""),
    ],
)
def test_a_typing_error_is_one_letter(name: str, near: str) -> None:
    assert mistyped(name, ["temperature", "top_p", "n"]) == near


def test_the_schema_says_what_is_accepted() -> None:
    schema = Outer.model_json_schema()["properties"]
    assert schema["store"]["enum"] == [None, False, 0, 0.0, -1, "", [], {}, "no"]
    assert "additionalProperties" not in Outer.model_json_schema()
    assert set(accepted(Outer)) == {"label", "parts.mark"}
    assert {"type": "null"} in schema["number"]["anyOf"]
    assert dict(refusals(Outer)) == {"store": Outer.refused["store"], "parts.inside": Inner.refused["inside"]}
