"""Prompts as llama.cpp's server takes them: a text, ids, both in one list, an object, or a list of these."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from tokenwright.checks import MAX_TOKENS
from tokenwright.errors import RequestError
from tokenwright.serve.http.exchange import Exchange
from tokenwright.serve.http.fields import Body, Refused, Text, many
from tokenwright.serve.openai.message_bodies import TextPart
from tokenwright.text import Tokenizer

MOST_BATCH = 128  # prompts of one request

Id = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class PromptObject(Body):
    """A prompt as an object: its text, or parts of it."""

    refused: ClassVar = {"multimodal_data": Refused("models here read text")}

    prompt_string: Text | None = None
    content: Annotated[list[TextPart], many(MOST_BATCH, 1)] | None = None


Mixed = Annotated[list[Id | Text], many(MAX_TOKENS >> 8, 1)]
Prompts = Text | PromptObject | Annotated[list[Id | Text | PromptObject | Mixed], many(MAX_TOKENS >> 8, 1)]
Prompt = str | PromptObject | list[int | str]


def prompts_of(given: Prompts, most: int = MOST_BATCH) -> tuple[list[Prompt], bool]:
    """The prompts of a body, and whether there are several: a list with ids among its entries is one prompt."""
    if not isinstance(given, list):
        return [given], False
    if any(isinstance(one, int) for one in given):
        if all(isinstance(one, int | str) for one in given):
            return [given], False  # type: ignore[list-item]
        raise RequestError("a prompt of ids and texts has no lists and objects in it; put its ids into a list")
    if len(given) > most:
        raise RequestError(f"{len(given)} prompts are too many for one request; {most} are allowed")
    return given, True  # type: ignore[return-value]


def plain(prompt: Prompt) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(one, int) for one in prompt))


def plainly(prompt: Prompt, tokenizer: Tokenizer) -> str | list[int]:
    """The text or the ids of a prompt. Raises RequestError."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, PromptObject):
        if prompt.content is not None:
            return "".join(part.text for part in prompt.content)
        if prompt.prompt_string is None:
            raise RequestError("a prompt that is an object needs its prompt_string, or its content")
        return prompt.prompt_string
    ids: list[int] = []
    for at, part in enumerate(prompt):
        ids += [part] if isinstance(part, int) else tokenizer.encode(part, add_special=at == 0)
    return ids


async def read_prompts(exchange: Exchange, given: Sequence[Prompt]) -> list[str | list[int]]:
    """Each prompt as a text or as ids. Raises RequestError, and as `Service.read`."""
    if all(plain(one) for one in given):
        return [*given]  # type: ignore[list-item]
    tokenizer = (await exchange.service.opened(exchange.key)).tokenizer
    return await exchange.read(lambda: [plainly(one, tokenizer) for one in given])
