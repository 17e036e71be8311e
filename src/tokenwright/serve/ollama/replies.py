"""Ollama's replies. As in Ollama, only complete tool calls are sent."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from tokenwright.llm.outputs import Piece
from tokenwright.sampling_params import SamplingParams
from tokenwright.serve.http.exchange import arguments_of
from tokenwright.serve.http.reply_text import Json, TimingsReply, when
from tokenwright.serve.openai.logprobs import TokenLogprob, Tokens
from tokenwright.serve.service.types import Delta, Problem, Timings, TokenCounts, ToolCall

if TYPE_CHECKING:
    from tokenwright.llm.llm import LLM


Line = dict[str, Any]


class OllamaError(TypedDict):
    error: str


def error_body(problem: Problem, request_id: str) -> OllamaError:  # noqa: ARG001  (it is in the header alone)
    return {"error": problem.message}


class OllamaReplyFunction(TypedDict):
    index: int
    name: str
    arguments: Json


class OllamaCall(TypedDict):
    id: str
    function: OllamaReplyFunction


class OllamaReplyMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class Durations(TypedDict):
    """Tokens and nanoseconds. The prompt's tokens include cached ones."""

    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_cached_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    timings: NotRequired[TimingsReply]


class OllamaAnswer(Durations):
    """An answer; one that only loads the model has no durations and counts."""

    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load", "unload"]
    logprobs: NotRequired[list[TokenLogprob]]


class OllamaChat(OllamaAnswer):
    message: OllamaReplyMessage


class OllamaGenerated(OllamaAnswer):
    response: str
    thinking: NotRequired[str]


class OllamaVectors(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    timings: NotRequired[TimingsReply]


class OllamaVector(TypedDict):
    embedding: list[float]
    timings: NotRequired[TimingsReply]


class OllamaVersion(TypedDict):
    version: str


def durations(counts: TokenCounts, timings: Timings) -> Durations:
    return {
        "total_duration": total_duration(timings),
        "load_duration": 0,
        "prompt_eval_count": counts.prompt,
        "prompt_eval_cached_count": counts.cached,
        "prompt_eval_duration": _ns(timings.prefill_s),
        "eval_count": counts.completion,
        "eval_duration": _ns(timings.decode_s),
    }


def total_duration(timings: Timings) -> int:
    """Nanoseconds."""
    return _ns(timings.queue_s + timings.prefill_s + timings.decode_s)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def loaded_line(model: str, keep_s: float | None, *, chat: bool) -> Line:
    """The reply to a request that loads the model, or unloads it by keep_alive 0."""
    empty: Line = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    done = {"done": True, "done_reason": "unload" if keep_s == 0 else "load"}
    return {"model": model, "created_at": when(time.time()), **empty, **done}


class Lines:
    """The lines of one reply. tokens: for logprobs, once the model is loaded."""

    def __init__(self, model: str, *, chat: bool, tokens: Callable[[], Tokens]) -> None:
        self.model = model
        self.chat = chat
        self._tokens = tokens
        self._answer = Delta(0)
        self._sent = 0  # tool calls

    def take(self, delta: Delta) -> Iterator[Line]:
        self._answer.add(delta)
        if delta.reasoning and delta.text:  # many clients read only one of them in a line
            yield self._line("", delta.reasoning, (), ())
            yield self._line(delta.text, "", (), delta.tokens)
        elif delta.text or delta.reasoning or delta.tokens:
            yield self._line(delta.text, delta.reasoning, (), delta.tokens)
        calls = self._answer.calls[: None if delta.finish and not delta.unfinished else -1]
        if ready := [*enumerate(calls)][self._sent :]:
            self._sent = len(calls)
            yield self._line("", "", ready, ())

    def end(self, counts: TokenCounts, timings: Timings) -> Line:
        return self._line("", "", (), ()) | self._done(counts, timings)

    def whole(self, answer: Delta, counts: TokenCounts, timings: Timings) -> Line:
        self._answer = answer
        calls = answer.calls[: -1 if answer.unfinished else None]
        line = self._line(answer.text, answer.reasoning, enumerate(calls), answer.tokens)
        return line | self._done(counts, timings)

    def _done(self, counts: TokenCounts, timings: Timings) -> Line:
        reason = "length" if self._answer.finish == "length" else "stop"
        return {"done": True, "done_reason": reason, **durations(counts, timings)}

    def _line(self, text: str, thinking: str, calls: Iterable[tuple[int, ToolCall]], tokens: Sequence[Piece]) -> Line:
        content: dict[str, Any] = {"content" if self.chat else "response": text}
        if thinking:
            content["thinking"] = thinking
        if called := [
            OllamaCall(id=call.id, function={"index": at, "name": call.name, "arguments": arguments_of(call)})
            for at, call in calls
        ]:
            content["tool_calls"] = called
        body = {"message": {"role": "assistant", **content}} if self.chat else content
        extra = {"logprobs": self._tokens().chat(tokens)} if tokens else {}
        return {"model": self.model, "created_at": when(time.time()), **body, "done": False, **extra}


Capability = Literal["completion", "tools", "thinking"]
NEVER = "9999-12-31T23:59:59Z"


class OllamaDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaNamed(TypedDict):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaEntry(OllamaNamed):
    modified_at: str


class OllamaTags(TypedDict):
    models: list[OllamaEntry]


class OllamaLoaded(OllamaNamed):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunning(TypedDict):
    models: list[OllamaLoaded]


class OllamaCard(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[Capability]
    modified_at: str


def _named(name: str, llm: "LLM") -> OllamaNamed:
    return {
        "name": name,
        "model": name,
        "size": llm.weight_bytes,
        "digest": hashlib.sha256(repr(llm.config).encode()).hexdigest(),
        "details": details(llm),
    }


def entry(name: str, llm: "LLM", created: int) -> OllamaEntry:
    """created: the Unix time of its load."""
    return {**_named(name, llm), "modified_at": when(created)}


def loaded(name: str, llm: "LLM") -> OllamaLoaded:
    on_gpu = llm.prepared.facts.device.type in ("cuda", "gpu")
    return {
        **_named(name, llm),
        "expires_at": NEVER,
        "size_vram": llm.weight_bytes if on_gpu else 0,
        "context_length": llm.context,
    }


def card(llm: "LLM", created: int, *, thinks: bool, calls: bool) -> OllamaCard:
    """thinks: its template has think tags. calls: it can call tools."""
    family, config = llm.graph.architecture, llm.config
    can: list[tuple[Capability, bool]] = [("completion", True), ("tools", calls), ("thinking", thinks)]
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in defaults(llm.sampling()).items()),
        "template": llm.tokenizer.chat_template or "",
        "details": details(llm),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": llm.graph.parameters,
            f"{family}.attention.head_count": config.heads,
            f"{family}.attention.head_count_kv": config.kv_heads,
            f"{family}.block_count": config.layers,
            f"{family}.context_length": llm.context,
            f"{family}.embedding_length": config.width,
            f"{family}.vocab_size": config.vocab_size,
        },
        "capabilities": [name for name, whether in can if whether],
        "modified_at": when(created),
    }


def details(llm: "LLM") -> OllamaDetails:
    family = llm.graph.architecture
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": size(llm.graph.parameters),
        "quantization_level": str(llm.weights),
    }


def defaults(params: SamplingParams) -> dict[str, Any]:
    """The checkpoint's sampling parameters that differ from ours."""
    ours = SamplingParams()
    named = ((field.name, getattr(params, field.name)) for field in fields(SamplingParams))
    return {name: value for name, value in named if value != getattr(ours, name)}


def size(parameters: int) -> str:
    for unit, word in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.1f}{word}"
    return str(parameters)
