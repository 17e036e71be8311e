"""Replies of every route are those that the OpenAPI document declares, which declares every one in full."""

from typing import Any

import httpx
import pytest

from tests.serve.talking import SCHEMA, Talker
from tokenwright.serve.anthropic import reply_schema as anthropic_replies
from tokenwright.serve.http.api import STATUSES
from tokenwright.serve.http.reply_schema import Health, Ready, Reply, Version
from tokenwright.serve.llama_cpp import reply_schema as llama_replies
from tokenwright.serve.ollama import reply_schema as ollama_replies
from tokenwright.serve.openai import reply_schema as replies
from tokenwright.serve.openai.bodies import Problems
from tokenwright.serve.openai.responses import reply_schema as stored

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {"messages": HELLO, "max_tokens": 4}
OLLAMA = {"stream": False, "options": {"num_predict": 4}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALLED = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 400}
OLDER = {"functions": [FUNCTION], "function_call": {"name": "weather"}, "max_tokens": 400}
THINK = {"enable_thinking": True}
USES = {"tools": [{"name": "weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}, "max_tokens": 400}
ASKED: list[tuple[str, dict[str, Any], type[Reply]]] = [
    ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 2}, replies.TextCompletion),
    (
        "/v1/completions",
        {"prompt": "a" * 99, "truncate_prompt_tokens": 9, "return_timings": True},
        replies.TextCompletion,
    ),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}, replies.ChatCompletion),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": THINK, "return_timings": True}, replies.ChatCompletion),
    ("/v1/chat/completions", CHAT | CALLED, replies.ChatCompletion),
    ("/v1/chat/completions", CHAT | OLDER, replies.ChatCompletion),
    ("/v1/embeddings", {"input": ["a", "b" * 99], "truncate_prompt_tokens": 9}, replies.EmbeddingList),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}, replies.EmbeddingList),
    (
        "/v1/responses",
        {"input": "a", "max_output_tokens": 4, "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}},
        stored.Response,
    ),
    (
        "/v1/responses",
        {"input": "a", "max_output_tokens": 400, "tools": [{"type": "function"} | FUNCTION], "tool_choice": "required"},
        stored.Response,
    ),
    (
        "/v1/responses",
        {"input": "a", "max_output_tokens": 4, "reasoning": {"effort": "low"}},
        stored.Response,
    ),
    ("/v1/messages", CHAT, anthropic_replies.AnthropicMessage),
    ("/v1/messages", CHAT | {"thinking": {"type": "adaptive"}}, anthropic_replies.AnthropicMessage),
    ("/v1/messages", CHAT | USES, anthropic_replies.AnthropicMessage),
    ("/v1/messages/count_tokens", {"messages": HELLO}, anthropic_replies.CountedTokens),
    ("/api/chat", OLLAMA | {"messages": HELLO, "logprobs": True, "top_logprobs": 2}, ollama_replies.OllamaChat),
    ("/api/chat", OLLAMA | {"messages": HELLO, "think": True}, ollama_replies.OllamaChat),
    ("/api/chat", {}, ollama_replies.OllamaChat),
    ("/api/generate", OLLAMA | {"prompt": "a", "think": True}, ollama_replies.OllamaGenerated),
    ("/api/embed", {"input": ["a", "b"]}, ollama_replies.OllamaVectors),
    ("/api/embeddings", {"prompt": "a"}, ollama_replies.OllamaVector),
    ("/api/show", {}, ollama_replies.OllamaCard),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}, replies.Reranked),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}, replies.ScoreReply),
    ("/tokenize", {"messages": HELLO, "return_token_strs": True}, llama_replies.Tokenized),
    ("/tokenize", {"text": "a"}, llama_replies.TokenCards),
    ("/tokenize", {"content": "a", "with_pieces": True}, llama_replies.TokenPieces),
    ("/tokenize", {"content": "a"}, llama_replies.TokenPieces),
    ("/embedding", {"content": ["a", "b"]}, llama_replies.LlamaEmbeddings),
    ("/v1/chat/completions/input_tokens", {"messages": HELLO}, replies.InputTokensReply),
    ("/apply-template", {"messages": HELLO}, llama_replies.AppliedTemplate),
    ("/v1/responses/input_tokens", {"input": "a"}, stored.ResponseTokens),
    ("/detokenize", {"tokens": [1]}, llama_replies.Detokenized),
    ("/detokenize", {"ids": [1]}, llama_replies.DetokenizedText),
]
ANTHROPIC = {"anthropic-version": "2023-06-01"}
GOT: list[tuple[str, type[Reply]]] = [
    ("/v1/models", replies.ModelList),
    ("/v1/models/tiny", replies.ModelEntry),
    ("/v1/models", anthropic_replies.AnthropicModels),
    ("/v1/models/tiny", anthropic_replies.AnthropicModel),
    ("/api/tags", ollama_replies.OllamaTags),
    ("/api/ps", ollama_replies.OllamaRunning),
    ("/api/version", ollama_replies.OllamaVersion),
    ("/props", llama_replies.Props),
    ("/slots", llama_replies.Slots),
    ("/lora-adapters", llama_replies.LoraAdapters),
    ("/health", Health),
    ("/v1/health", Health),
    ("/ping", Health),
    ("/ready", Ready),
    ("/version", Version),
]


@pytest.mark.parametrize(("path", "body", "reply"), ASKED)
@pytest.mark.parametrize("headers", [{}, {"x-timings": "1"}], ids=["plain", "timed"])
def test_a_reply_is_what_is_declared(
    talker: Talker, path: str, body: dict[str, Any], reply: type[Reply], headers: dict[str, str]
) -> None:
    answer = httpx.post(talker.url + path, json={"model": "tiny"} | body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    reply.model_validate_json(answer.content)


@pytest.mark.parametrize(("path", "reply"), GOT)
def test_what_is_read_is_what_is_declared(talker: Talker, path: str, reply: type[Reply]) -> None:
    headers = ANTHROPIC if reply in (anthropic_replies.AnthropicModels, anthropic_replies.AnthropicModel) else {}
    reply.model_validate_json(httpx.get(talker.url + path, headers=headers).content)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/chat/completions", Problems),
        ("/v1/responses", Problems),
        ("/tokenize", Problems),
        ("/v1/messages", anthropic_replies.AnthropicError),
        ("/api/chat", ollama_replies.OllamaError),
    ],
)
def test_an_error_is_what_is_declared(talker: Talker, path: str, error: Any) -> None:
    answer = httpx.post(talker.url + path, json={"modle": "x"})
    assert answer.status_code == 400
    error.model_validate_json(answer.content)


def test_the_document_declares_every_reply(talker: Talker) -> None:
    document = httpx.get(f"{talker.url}/openapi.json").json()
    schemas = document["components"]["schemas"]
    declared = set()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            content = operation["responses"]["200"]["content"]
            if "application/json" in content:
                named = content["application/json"]["schema"]
                for one in named.get("anyOf", (named,)):
                    schema = schemas[one["$ref"].rpartition("/")[2]]
                    listed = schema.get("type") == "array"
                    assert listed or (schema["properties"] and schema["additionalProperties"] is False), path
                    declared.add(schema["title"])
            for status in STATUSES:
                error = operation["responses"][str(status)]
                assert path.startswith(("/health", "/ping", "/ready", "/metrics", "/version")) or "$ref" in str(
                    error
                ), (path, status)
    elsewhere = {"DeletedResponse", "CancelledResponse", "ResponseItems"}  # checked by test_stored_responses.py
    elsewhere |= {"Infilled", "InfilledList", "TeiReranked"}  # by test_infill.py and test_relevance.py
    assert declared - elsewhere == {reply.__name__ for _, _, reply in ASKED} | {reply.__name__ for _, reply in GOT}
