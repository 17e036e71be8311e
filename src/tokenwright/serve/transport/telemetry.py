"""OpenTelemetry: a span for each request that generates, with its queue, prefill and decode as child spans.

Off unless the usual variables name an exporter (extra "otel"). Spans are made at a request's end, named by the
conventions for generative AI, and have no text of prompts or answers, and no key.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import tokenwright
from tokenwright.errors import RequestError
from tokenwright.serve.http.api import About

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXTRA = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or unset the variables"


class Spans:
    """Makes the spans of one server, which `provider` exports."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tokenwright", tokenwright.__version__)

    def ended(self, scope: MutableMapping[str, Any], about: About, status: int, began: float) -> None:
        """began: when it came, in seconds of time.perf_counter."""
        operation = OPERATIONS.get(scope["path"])
        if operation is None or scope.get("method") != "POST":
            return
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now, offset = time.time_ns(), time.perf_counter()  # one reading of a clock that may be set, for all times
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            f"{operation} {about.model}".strip(),
            TraceContextTextMapPropagator().extract(carrier),
            SpanKind.SERVER,
            _attributes(scope, operation, about, status),
            start_time=now - _ns(offset - began),
        )
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        if span.is_recording():
            self._phases(span, about, now - _ns(offset))
        span.end(now)

    def _phases(self, span: Span, about: About, epoch: int) -> None:
        """epoch: when time.perf_counter was 0, in nanoseconds since 1970."""
        from opentelemetry.trace import set_span_in_context

        timings = about.timings
        if timings is None:
            return
        inside, at = set_span_in_context(span), about.asked
        for name, seconds in (("queue", timings.queue_s), ("prefill", timings.prefill_s), ("decode", timings.decode_s)):
            part = self._tracer.start_span(name, inside, start_time=epoch + _ns(at))
            at += seconds
            part.end(epoch + _ns(at))

    def close(self) -> None:
        self._provider.shutdown()


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


def _attributes(
    scope: MutableMapping[str, Any], operation: str, about: About, status: int
) -> dict[str, str | int | list[str]]:
    found: dict[str, str | int | list[str]] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tokenwright",
        "http.request.method": "POST",
        "http.route": scope["path"],
        "http.response.status_code": status,
        "tokenwright.request.id": about.request_id,
    }
    if about.model:
        found["gen_ai.request.model"] = found["gen_ai.response.model"] = about.model
    if status >= 400:
        found["error.type"] = str(status)
    if about.finishes:
        found["gen_ai.response.finish_reasons"] = about.finishes
    if (timings := about.timings) is not None:
        found["gen_ai.usage.input_tokens"] = timings.prompt_tokens
        found["gen_ai.usage.output_tokens"] = timings.completion_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = timings.cached_tokens
        found["tokenwright.disk_tokens"] = timings.disk_tokens
        found["tokenwright.preemptions"] = timings.preemptions
    return found


def spans_of(variables: Mapping[str, str]) -> Spans | None:
    """The spans that OTEL_TRACES_EXPORTER or OTEL_EXPORTER_OTLP[_TRACES]_ENDPOINT ask for. Raises RequestError."""
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    named = variables.get("OTEL_TRACES_EXPORTER") or ("otlp" if any(map(variables.get, endpoints)) else "none")
    if named == "none" or variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(named, variables)
    except ImportError as error:
        raise RequestError(f"OpenTelemetry's variables ask for traces, which need {error.name}: {_EXTRA}") from None
    resource = Resource.create()  # reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "tokenwright"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Spans(provider)


def _exporter(named: str, variables: Mapping[str, str]) -> SpanExporter:
    if named == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if named != "otlp":
        raise RequestError(f"OTEL_TRACES_EXPORTER must be otlp, console or none, not {named!r}")
    name = next((n for n in _PROTOCOLS if variables.get(n)), "")
    if name and variables[name] != "http/protobuf":
        raise RequestError(f"{name} must be http/protobuf, not {variables[name]!r}; collectors take it at port 4318")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()
