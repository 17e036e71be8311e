"""POST /chat/prompt: the prompt of an answer, read as the public API reads a conversation.

The page opens an answer in the explorer by its prompt's ids: texts would not do, because a control token that a person
has written in a message is text there, and would be a control token in a prompt that is read again.
"""

from dataclasses import asdict
from typing import Annotated

from fastapi import Request
from fastapi.responses import JSONResponse

from tokenwright.errors import RequestError
from tokenwright.explorer.explorer import Explorer
from tokenwright.explorer.panels.chat import ChatPrompt
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


async def rendered(service: Service, explorer: Explorer, request: Request) -> JSONResponse:
    body = await body_of(request, PromptBody)
    if (body.messages is None) == (body.prompt is None):
        raise RequestError("prompt: give one of prompt and messages")

    def read() -> ChatPrompt:
        messages = None if body.messages is None else messages_of(body.messages)
        ids, text = preparer.prompt(GenerationRequest(prompt=body.prompt, messages=messages))
        return ChatPrompt(text, explorer.looks(ids))

    preparer = await unless_gone(request, service.preparer())
    found = await unless_gone(request, service.read(about(request).caller.key, read))
    return JSONResponse(asdict(found))
