"""OpenTelemetry: adds the attributes of generative AI to FastAPI's span of each request.

Off unless the usual variables name a collector (extra "otel"). Spans have no text of prompts or answers, and no key.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

from tokenwright.serve.http.api import About

_CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/responses/compact", "/v1/messages", "/api/chat")
OPERATIONS: Mapping[str, str] = {
    **dict.fromkeys(_CHATS, "chat"),
    **dict.fromkeys(("/v1/completions", "/api/generate", "/completion", "/infill"), "text_completion"),
    **dict.fromkeys(("/v1/embeddings", "/api/embed", "/api/embeddings", "/embedding"), "embeddings"),
}
TELEMETRY: Any = {  # of FastAPI
    "auto_configure": True,
    "exclude": lambda scope: scope["path"] not in OPERATIONS or scope.get("method") != "POST",
    **dict.fromkeys(("metrics", "logs", "operation_spans"), False),
}


def describe(scope: MutableMapping[str, Any], about: About) -> None:
    """Name a traced request's span and set its attributes, before its last message ends it."""
    from opentelemetry.trace import get_current_span

    span, operation = get_current_span(), OPERATIONS[scope["path"]]
    if not span.is_recording():
        return
    span.update_name(f"{operation} {about.model}".strip())
    found: dict[str, str | float | list[str]] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tokenwright",
        "http.route": scope["path"],
        "tokenwright.request.id": about.request_id,
    }
    if about.model:
        found["gen_ai.request.model"] = found["gen_ai.response.model"] = about.model
    if about.finishes:
        found["gen_ai.response.finish_reasons"] = about.finishes
    if (timings := about.timings) is not None:
        found["gen_ai.usage.input_tokens"] = timings.prompt_tokens
        found["gen_ai.usage.output_tokens"] = timings.completion_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = timings.cached_tokens
        names = ("queue_s", "prefill_s", "decode_s", "disk_tokens", "preemptions")
        found |= {f"tokenwright.{name}": getattr(timings, name) for name in names}
    span.set_attributes(found)
