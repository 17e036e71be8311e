"""Streams through the clients' own SDKs, five kinds of them, and all that a stream says.

Requests are greedy and seeded (OpenAI's responses have no seed), and come plain, with a stop string, with
log-probabilities, with a JSON schema or a regular expression, and with a demanded call of a tool, as far as an API has
them. No SDK tries a second time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any

import anthropic
import ollama
import openai

from tokenwright import LLM

MODEL = "stories"
TOKENS = 300  # of a text at most
PROMPTS = (
    "Tell me a story about a dog.",
    "Once upon a time there was a",
    "Lily and Tom went to the",
    "One day, a big bird",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 40, "maxLength": 80},
        "words": {"type": "array", "items": {"enum": ["dog", "cat", "bird", "tree"]}, "minItems": 20, "maxItems": 25},
    },
    "required": ["title", "words"],
    "additionalProperties": False,
}
REGEX = "[a-z ]{200,400}"
STOP = ["xyzw", " happy"]


@dataclass(frozen=True)
class Ask:
    """A request. kind: which of STREAMS asks it. form: what is special about it. fields: of the SDK's method."""

    kind: str
    form: str
    prompt: str
    seed: int
    temperature: float
    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.form}, {'seeded' if self.temperature else 'greedy'}"

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]

    def alone(self, llm: LLM) -> str:
        """The text of an engine in this process. Of plain requests alone."""
        chosen = {"max_tokens": TOKENS, "temperature": self.temperature, "seed": self.seed}
        if self.kind == "completions":
            [completion] = llm.generate(self.prompt, **chosen)  # type: ignore[arg-type]
            return completion.text
        return llm.chat(self.messages, **chosen).text  # type: ignore[arg-type]


@dataclass(frozen=True)
class Part:
    """What an event of a stream says. said: text, names and arguments of calls. moves: None where it does not tell."""

    said: str = ""
    logprobs: tuple[tuple[str, float], ...] = ()
    end: str = ""
    moves: int | None = None


@dataclass(frozen=True)
class Told:
    """A whole stream. moves: of its texts, None where the SDK leaves that out. pause_s: between two events at most."""

    said: tuple[str, tuple[tuple[str, float], ...], str]
    moves: int | None
    pause_s: float


class Clients:
    """An SDK of each kind, for one thread. Use it in a `with`."""

    def __init__(self, url: str, timeout: float) -> None:
        common: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": timeout}
        self.openai = openai.OpenAI(base_url=f"{url}/v1", **common)
        self.anthropic = anthropic.Anthropic(base_url=url, **common)
        self.ollama = ollama.Client(host=url, timeout=timeout)
        self._open = ExitStack()
        for one in (self.openai, self.anthropic, self.ollama):
            self._open.callback(one.close)

    def told(self, ask: Ask) -> Told:
        """Ask, and read the whole stream. Raises what the SDK raises, and ValueError for a stream without an end."""
        parts, longest, last = [], 0.0, 0.0
        for part in STREAMS[ask.kind](self, ask):
            now = time.monotonic()
            longest, last = max(longest, now - (last or now)), now
            parts.append(part)
        said = "".join(part.said for part in parts)
        end = "".join(part.end for part in parts)
        if not end:
            raise ValueError(f"a stream without its end, after {said[-80:]!r}")
        moves = next((part.moves for part in parts if part.moves is not None), None)
        return Told((said, tuple(one for part in parts for one in part.logprobs), end), moves, longest)

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()


def chat(clients: Clients, ask: Ask) -> Iterator[Part]:
    made = {"max_tokens": TOKENS, "temperature": ask.temperature, "seed": ask.seed, **ask.fields}
    stream: Any = clients.openai.chat.completions.create(model=MODEL, messages=ask.messages, stream=True, **made)  # type: ignore[call-overload]
    for event in stream:
        for choice in event.choices:
            delta, tokens = choice.delta, (choice.logprobs.content if choice.logprobs else None) or ()
            called = (f"{call.function.name or ''}{call.function.arguments or ''}" for call in delta.tool_calls or ())
            logprobs = tuple((one.token, one.logprob) for one in tokens)
            yield Part("".join((delta.content or "", *called)), logprobs, choice.finish_reason or "", moves(event))
        if not event.choices:
            yield Part(moves=moves(event))


def completions(clients: Clients, ask: Ask) -> Iterator[Part]:
    made = {"max_tokens": TOKENS, "temperature": ask.temperature, "seed": ask.seed, **ask.fields}
    for event in clients.openai.completions.create(model=MODEL, prompt=ask.prompt, stream=True, **made):
        for choice in event.choices:
            found = choice.logprobs
            tokens = zip(found.tokens or (), found.token_logprobs or (), strict=True) if found else ()
            yield Part(choice.text, tuple(tokens), choice.finish_reason or "", moves(event))
        if not event.choices:
            yield Part(moves=moves(event))


def responses(clients: Clients, ask: Ask) -> Iterator[Part]:
    made = {"max_output_tokens": TOKENS, "temperature": ask.temperature, **ask.fields}
    stream: Any = clients.openai.responses.create(model=MODEL, input=ask.messages, stream=True, **made)  # type: ignore[call-overload]
    for event in stream:
        match event.type:
            case "response.output_text.delta":
                yield Part(event.delta, tuple((one.token, one.logprob) for one in event.logprobs))
            case "response.function_call_arguments.delta":
                yield Part(event.delta)
            case "response.output_item.done" if event.item.type == "function_call":
                yield Part(event.item.name)
            case "response.completed" | "response.incomplete":
                reason = event.response.incomplete_details
                yield Part(end=event.response.status + (reason.reason if reason else ""), moves=moves(event.response))
            case "response.failed" | "error":
                raise ValueError(f"the stream says {event}")


def messages(clients: Clients, ask: Ask) -> Iterator[Part]:
    extra = {"temperature": ask.temperature, "seed": ask.seed}
    made = {"model": MODEL, "messages": ask.messages, "max_tokens": TOKENS, "extra_body": extra, **ask.fields}
    stream: Any = clients.anthropic.messages.create(stream=True, **made)
    for event in stream:
        match event.type:
            case "content_block_start" if event.content_block.type == "tool_use":
                yield Part(event.content_block.name)
            case "content_block_delta":
                yield Part(event.delta.text if event.delta.type == "text_delta" else event.delta.partial_json)
            case "message_delta":
                yield Part(end=f"{event.delta.stop_reason} {event.delta.stop_sequence}", moves=moves(event))


def ollama_chat(clients: Clients, ask: Ask) -> Iterator[Part]:
    chosen = {"num_predict": TOKENS, "temperature": ask.temperature, "seed": ask.seed}
    made = dict(ask.fields)
    options = chosen | made.pop("options", {})
    for event in clients.ollama.chat(model=MODEL, messages=ask.messages, stream=True, options=options, **made):
        tokens = tuple((one.token, one.logprob) for one in event.logprobs or ())
        yield Part(event.message.content or "", tokens, event.done_reason or "")


def moves(event: Any) -> int | None:
    """How often others went on with the text, where an event says it."""
    timings = (event.model_extra or {}).get("timings")
    return None if timings is None else int(timings["moves"])


STREAMS: Mapping[str, Callable[[Clients, Ask], Iterator[Part]]] = {
    "chat.completions": chat,
    "completions": completions,
    "responses": responses,
    "messages": messages,
    "ollama chat": ollama_chat,
}
NAMED = {"name": "tell", "description": "Tell a story."}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
FORMS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "chat.completions": {
        "plain": {},
        "stop": {"stop": STOP, "extra_body": {"min_tokens": 40}},
        "logprobs": {"logprobs": True, "top_logprobs": 2, "frequency_penalty": 0.3},
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA}}},
        "tool": {
            "tools": [{"type": "function", "function": {**NAMED, "parameters": SCHEMA}}],
            "tool_choice": "required",
        },
    },
    "completions": {
        "plain": {},
        "stop": {"stop": STOP, "extra_body": {"min_tokens": 40}},
        "logprobs": {"logprobs": 2, "frequency_penalty": 0.3},
        "regex": {"extra_body": {"structured_outputs": {"regex": REGEX}}},
    },
    "responses": {
        "plain": {},
        "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        "schema": {"text": {"format": {"name": "story", **FORMAT}}},
        "tool": {"tools": [{"type": "function", **NAMED, "parameters": SCHEMA}], "tool_choice": "required"},
    },
    "messages": {
        "plain": {},
        "stop": {"stop_sequences": STOP},
        "schema": {"output_config": {"format": FORMAT}},
        "tool": {"tools": [{**NAMED, "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
    },
    "ollama chat": {
        "plain": {},
        "stop": {"options": {"stop": STOP}},
        "logprobs": {"logprobs": True, "top_logprobs": 2},
        "schema": {"format": SCHEMA},
    },
}


def asks() -> list[Ask]:
    """Every form of every kind, greedy and seeded, each with a seed of its own."""
    seeds = count(1)
    return [
        Ask(kind, form, PROMPTS[(seed := next(seeds)) % len(PROMPTS)], seed, temperature, fields)
        for kind, forms in FORMS.items()
        for temperature in (0.0, 1.0)
        if kind != "responses" or not temperature
        for form, fields in forms.items()
    ]
