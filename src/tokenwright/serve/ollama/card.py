"""A model for Ollama's clients: its entry in the list, and its card."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from tokenwright.sampling_params import SamplingParams

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server
    from tokenwright.llm.llm import LLM


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
    """The fields of a model in any list."""

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


def _named(name: str, llm: LLM) -> OllamaNamed:
    return {
        "name": name,
        "model": name,
        "size": llm.weight_bytes,
        "digest": hashlib.sha256(repr(llm.config).encode()).hexdigest(),  # of its configuration
        "details": details(llm),
    }


def entry(name: str, llm: LLM, created: int) -> OllamaEntry:
    """A model in the list. created: when it was loaded, in seconds since 1970."""
    return {**_named(name, llm), "modified_at": when(created)}


def loaded(name: str, llm: LLM) -> OllamaLoaded:
    """A model in the list of those that are loaded: this one, for as long as the server runs."""
    on_gpu = llm.prepared.device.type in ("cuda", "gpu")
    return {
        **_named(name, llm),
        "expires_at": NEVER,
        "size_vram": llm.weight_bytes if on_gpu else 0,
        "context_length": llm.context,
    }


def card(llm: LLM, created: int, *, thinks: bool, calls: bool) -> OllamaCard:
    """A model's card. thinks: its template has think tags; calls: it has a form for tools."""
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


def details(llm: LLM) -> OllamaDetails:
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
    """The checkpoint's sampling parameters, where they differ from ours."""
    ours = SamplingParams()
    named = ((field.name, getattr(params, field.name)) for field in fields(SamplingParams))
    return {name: value for name, value in named if value != getattr(ours, name)}


def size(parameters: int) -> str:
    """A number of parameters in words: 494.0M, 7.6B."""
    for unit, word in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.1f}{word}"
    return str(parameters)


def when(seconds: float) -> str:
    """A time, in seconds since 1970, as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
