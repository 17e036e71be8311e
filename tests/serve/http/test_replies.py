"""Replies of every route are those that the OpenAPI document declares, which declares every one in full."""

from typing import Any, get_args

import httpx
import pytest

from tests.serve.declared import read
from tests.serve.talking import SCHEMA, Talker
from tokenwright.serve import model_list
from tokenwright.serve.anthropic import replies as anthropic_replies
from tokenwright.serve.http.api import STATUSES
from tokenwright.serve.llama_cpp import replies as llama_replies
from tokenwright.serve.llama_cpp import routes
from tokenwright.serve.ollama import replies as ollama_replies
from tokenwright.serve.openai import embeddings, replies
from tokenwright.serve.openai.responses import output_items as stored
from tokenwright.serve.operations import Health, Ready, Version

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {"messages": HELLO, "max_tokens": 4}
OLLAMA = {"stream": False, "options": {"num_predict": 4}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALLED = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 400}
OLDER = {"functions": [FUNCTION], "function_call": {"name": "weather"}, "max_tokens": 400}
THINK = {"enable_thinking": True}
USES = {"tools": [{"name": "weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}, "max_tokens": 400}
ASKED: list[tuple[str, dict[str, Any], Any]] = [
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
    ("/v1/embeddings", {"input": ["a", "b" * 99], "truncate_prompt_tokens": 9}, embeddings.EmbeddingList),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}, embeddings.EmbeddingList),
    (
        "/v1/responses",
        {"input": "a", "max_output_tokens": 4, "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}},
        stored.ResponseReply,
    ),
    (
        "/v1/responses",
        {"input": "a", "max_output_tokens": 400, "tools": [{"type": "function"} | FUNCTION], "tool_choice": "required"},
        stored.ResponseReply,
    ),
    (
        "/v1/responses",
        {"input": "a", "max_output_tokens": 4, "reasoning": {"effort": "low"}},
        stored.ResponseReply,
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
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}, embeddings.Reranked),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}, embeddings.ScoreReply),
    ("/tokenize", {"messages": HELLO, "return_token_strs": True}, routes.Tokenized),
    ("/tokenize", {"text": "a"}, routes.TokenCards),
    ("/tokenize", {"content": "a", "with_pieces": True}, routes.TokenPieces),
    ("/tokenize", {"content": "a"}, routes.TokenPieces),
    ("/embedding", {"content": ["a", "b"]}, list[llama_replies.LlamaEmbedding]),
    ("/v1/chat/completions/input_tokens", {"messages": HELLO}, replies.InputTokensReply),
    ("/apply-template", {"messages": HELLO}, llama_replies.AppliedTemplate),
    ("/v1/responses/input_tokens", {"input": "a"}, replies.InputTokensReply),
    ("/detokenize", {"tokens": [1]}, routes.Detokenized),
    ("/detokenize", {"ids": [1]}, routes.DetokenizedText),
]
ANTHROPIC = {"anthropic-version": "2023-06-01"}
GOT: list[tuple[str, Any]] = [
    ("/v1/models", model_list.ModelList),
    ("/v1/models/tiny", model_list.ModelEntry),
    ("/v1/models", model_list.AnthropicModels),
    ("/v1/models/tiny", model_list.AnthropicModel),
    ("/api/tags", ollama_replies.OllamaTags),
    ("/api/ps", ollama_replies.OllamaRunning),
    ("/api/version", ollama_replies.OllamaVersion),
    ("/props", llama_replies.Props),
    ("/slots", list[llama_replies.Slot]),
    ("/lora-adapters", list[llama_replies.LoraAdapter]),
    ("/health", Health),
    ("/v1/health", Health),
    ("/ping", Health),
    ("/ready", Ready),
    ("/version", Version),
]


@pytest.mark.parametrize(("path", "body", "reply"), ASKED)
@pytest.mark.parametrize("headers", [{}, {"x-timings": "1"}], ids=["plain", "timed"])
def test_a_reply_is_what_is_declared(
    talker: Talker, path: str, body: dict[str, Any], reply: Any, headers: dict[str, str]
) -> None:
    answer = httpx.post(talker.url + path, json={"model": "tiny"} | body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    read(reply, answer.content)


@pytest.mark.parametrize(("path", "reply"), GOT)
def test_what_is_read_is_what_is_declared(talker: Talker, path: str, reply: Any) -> None:
    headers = ANTHROPIC if reply in (model_list.AnthropicModels, model_list.AnthropicModel) else {}
    read(reply, httpx.get(talker.url + path, headers=headers).content)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/chat/completions", replies.Problems),
        ("/v1/responses", replies.Problems),
        ("/tokenize", replies.Problems),
        ("/v1/messages", anthropic_replies.AnthropicError),
        ("/api/chat", ollama_replies.OllamaError),
    ],
)
def test_an_error_is_what_is_declared(talker: Talker, path: str, error: Any) -> None:
    answer = httpx.post(talker.url + path, json={"modle": "x"})
    assert answer.status_code == 400
    read(error, answer.content)


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
                    schema = schemas[one.get("items", one)["$ref"].rpartition("/")[2]]
                    assert schema["properties"], path
                    assert schema["additionalProperties"] is False, path
                    declared.add(schema["title"])
            for status in STATUSES:
                error = operation["responses"][str(status)]
                assert path.startswith(("/health", "/ping", "/ready", "/metrics", "/version")) or "$ref" in str(
                    error
                ), (path, status)
    elsewhere = {"DeletedResponse", "CancelledResponse", "ResponseItems"}  # checked by test_stored_responses.py
    elsewhere |= {"ConversationReply", "Deleted"}  # there, too
    elsewhere.add("CompactedReply")  # by test_written_texts
    elsewhere |= {"Infilled", "TeiEntry", "ReleasedSession"}  # by test_infill, test_relevance and test_breakpoints
    named = {(get_args(one) or (one,))[0].__name__ for *_, one in (*ASKED, *GOT)}
    assert declared - elsewhere == named
