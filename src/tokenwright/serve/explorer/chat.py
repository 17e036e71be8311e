"""Routes of the chat page beside the public API, by which it talks: the model's card, and the prompt of an answer.

The page opens an answer in the explorer by its prompt's ids: texts would not do, because a control token that a person
has written in a message is text there, and would be a control token in a prompt that is read again.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Request

from tokenwright.errors import RequestError
from tokenwright.explorer.messages.chat import ChatModel, ChatPrompt
from tokenwright.serve.explorer.explorer import HIDDEN, Explorer
from tokenwright.serve.http.api import about, body_of, unless_gone
from tokenwright.serve.http.fields import MOST_ITEMS, Body, Text, many
from tokenwright.serve.openai.generation_request import messages_of
from tokenwright.serve.openai.message_bodies import AnyMessage
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import GenerationRequest


class PromptBody(Body):
    """POST /chat/prompt: the messages of a conversation, or a text to continue."""

    messages: Annotated[list[AnyMessage], many(MOST_ITEMS, 1)] | None = None
    prompt: Text | None = None


async def rendered(service: Service, explorer: Explorer, body: PromptBody, key: str) -> ChatPrompt:
    """The prompt of a body. Raises RequestError, NotReady, Busy."""
    if (body.messages is None) == (body.prompt is None):
        raise RequestError("prompt: give one of prompt and messages")
    preparer = await service.preparer()

    def read() -> ChatPrompt:
        messages = None if body.messages is None else messages_of(body.messages)
        ids, text = preparer.prompt(GenerationRequest(prompt=body.prompt, messages=messages))
        return ChatPrompt(text, explorer.looks(ids))

    return await service.read(key, read)


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the routes."""
    service: Service = app.state.service

    @app.get("/chat/model", **HIDDEN)
    def model() -> ChatModel:
        llm = explorer.llm
        suggested = llm.sampling()
        return ChatModel(
            name=service.names[0],
            template=llm.prepared.template is not None,
            traced=llm.prepared.traced,
            context=llm.context,
            temperature=suggested.temperature,
            top_k=suggested.top_k,
            top_p=suggested.top_p,
        )

    @app.post("/chat/prompt", **HIDDEN)
    async def prompt(request: Request) -> ChatPrompt:
        body = await body_of(request, PromptBody)
        return await unless_gone(request, rendered(service, explorer, body, about(request).caller.key))
