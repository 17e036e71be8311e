"""OpenTelemetry: what the spans of requests say, whose children they are, and the variables that switch them on."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.serve.talking import HANGS_S, Talker, make_talker, talking, until
from tokenwright import RequestError
from tokenwright.serve.app import Served
from tokenwright.serve.http.api import About
from tokenwright.serve.transport.telemetry import OPERATIONS, Spans, spans_of

MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 4}, "stream": False},
    "/v1/completions": {"prompt": ["Once", "Twice"], "max_tokens": 4},
    "/api/generate": {"prompt": "Once", "options": {"num_predict": 4}, "stream": False},
    "/v1/embeddings": {"input": ["Once", "Twice"]},
    "/api/embed": {"input": ["Once", "Twice"]},
    "/api/embeddings": {"prompt": "Once"},
}
EMBED = ("/v1/embeddings", "/api/embed", "/api/embeddings")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Take = Callable[[int], Sequence[ReadableSpan]]


@pytest.fixture(scope="module")
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, exported: InMemorySpanExporter) -> Iterator[Talker]:
    provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    served = Served(["tiny"], spans=Spans(provider))
    with talking(make_talker(tmp_path_factory.mktemp("traced")), served=served) as talker:
        yield talker


@pytest.fixture
def take(exported: InMemorySpanExporter) -> Take:
    """So many spans that were exported since, in the order of their ends."""
    exported.clear()

    def taken(count: int) -> Sequence[ReadableSpan]:
        until(lambda: len(exported.get_finished_spans()) >= count)
        return exported.get_finished_spans()

    return taken


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_queue_prefill_and_decode(
    traced: Talker, take: Take, path: str, stream: bool
) -> None:
    if stream and path in EMBED:
        return
    body = BODIES[path] | {"model": "tiny"} | ({"stream": True} if stream else {})
    before = time.time_ns()
    answer = httpx.post(traced.url + path, json=body, headers={"x-request-id": "mine"}, timeout=HANGS_S)
    assert answer.status_code == 200
    queue, prefill, decode, request = take(4)
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert request.name == f"{OPERATIONS[path]} tiny"
    assert (request.kind, request.parent, request.status.status_code) == (SpanKind.SERVER, None, StatusCode.UNSET)
    assert all(span.parent == request.context for span in (queue, prefill, decode))
    times = [before, request.start_time, queue.start_time, queue.end_time, prefill.end_time, decode.end_time]
    assert times == sorted(times, key=lambda at: at or 0)
    assert (decode.end_time or 0) <= (request.end_time or 0) <= time.time_ns()
    assert (prefill.start_time, decode.start_time) == (queue.end_time, prefill.end_time)
    found = dict(request.attributes or {})
    texts = 2 if path in ("/v1/completions", "/v1/embeddings", "/api/embed") else 1
    written = 0 if path in EMBED else 4 * texts
    ended = "stop" in str(found.get("gen_ai.response.finish_reasons"))  # the draws are not fixed
    assert found["gen_ai.usage.output_tokens"] == written or ended
    assert isinstance(found["gen_ai.usage.input_tokens"], int) and found["gen_ai.usage.input_tokens"] > texts
    if not stream and "usage" in answer.json():
        usage = answer.json()["usage"]
        cached = usage.get("cache_read_input_tokens", 0)  # which Anthropic's input_tokens leave out
        assert found["gen_ai.usage.input_tokens"] == cached + usage.get("prompt_tokens", usage.get("input_tokens"))
    if written:
        reasons = found["gen_ai.response.finish_reasons"]
        assert isinstance(reasons, tuple) and len(reasons) == texts and set(reasons) <= {"length", "stop"}
    assert (found["gen_ai.operation.name"], found["gen_ai.provider.name"]) == (OPERATIONS[path], "tokenwright")
    assert found["gen_ai.request.model"] == "tiny"
    assert (found["http.route"], found["http.response.status_code"]) == (path, 200)
    assert found["tokenwright.request.id"] == "mine"
    assert "error.type" not in found
    assert "Hello" not in request.to_json()


def test_a_traceparent_is_taken(traced: Talker, take: Take) -> None:
    for flags in ("00", "01"):  # not sampled, sampled
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
        body = BODIES["/v1/completions"] | {"model": "tiny"}
        httpx.post(f"{traced.url}/v1/completions", json=body, headers=headers, timeout=HANGS_S).raise_for_status()
    each = take(4)
    assert [span.name for span in each] == ["queue", "prefill", "decode", "text_completion tiny"]
    parent = each[-1].parent
    assert parent is not None
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE, PARENT)
    assert {span.context.trace_id for span in each if span.context} == {int(TRACE, 16)}


def test_errors_have_their_type_and_other_paths_no_spans(
    traced: Talker, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    httpx.get(f"{traced.url}/health").raise_for_status()
    httpx.post(f"{traced.url}/tokenize", json={"prompt": "a"}).raise_for_status()
    assert httpx.post(f"{traced.url}/v1/completions", json={"model": "tiny"}).status_code == 400
    [refused] = take(1)
    assert refused.name == "text_completion"
    assert dict(refused.attributes or {})["error.type"] == "400"
    assert refused.status.status_code is StatusCode.UNSET

    def broken(*_: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(traced.service, "start", broken)
    answer = httpx.post(f"{traced.url}/v1/completions", json={"model": "tiny", "prompt": "a"})
    assert answer.status_code == 500
    failed = take(2)[1]
    assert failed.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
    ],
)
def test_without_the_variables_there_are_no_spans(variables: dict[str, str]) -> None:
    assert spans_of(variables) is None


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER must be otlp, console or none, not 'zipkin'"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf, not 'grpc'",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_its_variable(variables: dict[str, str], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        spans_of(variables)


def test_no_other_part_of_the_server_makes_spans(
    traced: Talker, exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FastAPI would make spans, and records of errors with their texts, wherever a process has a global provider."""
    provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    exported.clear()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    for path in ("/ready", "/v1/models/none", "/v1/completions"):
        httpx.get(traced.url + path)
    assert exported.get_finished_spans() == ()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(RequestError, match=r"pip install opentelemetry-sdk"):
        spans_of({"OTEL_TRACES_EXPORTER": "otlp"})


def test_a_collector_gets_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[str, str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["content-length"])
            got.append((self.path, self.headers["content-type"], self.rfile.read(size)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            variables = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
                "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
                "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
            }
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            spans = spans_of(variables)
            assert spans is not None
            scope = {"path": "/v1/completions", "method": "POST", "headers": []}
            spans.ended(scope, About("r1", model="tiny"), 200, time.perf_counter())
            spans.close()
        finally:
            collector.shutdown()
            thread.join(HANGS_S)
    [(path, kind, data)] = got
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    assert all(word in data for word in (b"text_completion tiny", b"tokenwright", b"deployment.environment.name"))
