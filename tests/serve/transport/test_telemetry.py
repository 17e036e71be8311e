"""OpenTelemetry: what the spans of requests say, whose children they are, and the variables that switch them on."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.engines import HANGS_S, until
from tests.serve.talking import Talker, make_talker, talking
from tokenwright.serve.transport.telemetry import OPERATIONS

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
    "/completion": {"prompt": "Once", "n_predict": 4},
    "/embedding": {"content": "Once"},
}
EMBED = ("/v1/embeddings", "/api/embed", "/api/embeddings", "/embedding")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Take = Callable[[int], Sequence[ReadableSpan]]


@pytest.fixture(scope="module")
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, exported: InMemorySpanExporter) -> Iterator[Talker]:
    provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    with pytest.MonkeyPatch.context() as patch, talking(make_talker(tmp_path_factory.mktemp("traced"))) as talker:
        patch.setattr(trace, "_TRACER_PROVIDER", provider)
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
def test_a_request_is_a_span_with_its_times(traced: Talker, take: Take, path: str, stream: bool) -> None:
    if stream and path in EMBED:
        return
    body = BODIES[path] | {"model": "tiny"} | ({"stream": True} if stream else {})
    before = time.time_ns()
    answer = httpx.post(traced.url + path, json=body, headers={"x-request-id": "mine"}, timeout=HANGS_S)
    assert answer.status_code == 200
    [request] = take(1)
    assert request.name == f"{OPERATIONS[path]} tiny"
    assert (request.kind, request.parent, request.status.status_code) == (SpanKind.SERVER, None, StatusCode.UNSET)
    assert before <= (request.start_time or 0) <= (request.end_time or 0) <= time.time_ns()
    found = dict(request.attributes or {})
    times = [float(str(found[f"tokenwright.{name}"])) for name in ("queue_s", "prefill_s", "decode_s")]
    assert min(times) >= 0 < times[1]
    assert 1e9 * sum(times) <= (request.end_time or 0) - (request.start_time or 0)
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
    assert "Hello" not in request.to_json()


def test_a_traceparent_is_taken(traced: Talker, take: Take) -> None:
    for flags in ("00", "01"):  # not sampled, sampled
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
        body = BODIES["/v1/completions"] | {"model": "tiny"}
        httpx.post(f"{traced.url}/v1/completions", json=body, headers=headers, timeout=HANGS_S).raise_for_status()
    [request] = take(1)
    parent = request.parent
    assert parent is not None
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE, PARENT)
    assert request.context and request.context.trace_id == int(TRACE, 16)


def test_errors_are_marked_and_other_paths_have_no_spans(
    traced: Talker, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    httpx.get(f"{traced.url}/health").raise_for_status()
    httpx.post(f"{traced.url}/tokenize", json={"prompt": "a"}).raise_for_status()
    for path in ("/v1/responses/compact", "/v1/completions"):
        assert httpx.post(f"{traced.url}{path}", json={"model": "tiny"}).status_code == 400
    [compacted, refused] = take(2)
    assert (compacted.name, refused.name) == ("chat tiny", "text_completion")
    assert dict(refused.attributes or {})["http.response.status_code"] == 400
    assert refused.status.status_code is StatusCode.UNSET

    def broken(*_: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(traced.service, "start", broken)
    answer = httpx.post(f"{traced.url}/v1/completions", json={"model": "tiny", "prompt": "a"})
    assert answer.status_code == 500
    failed = take(3)[2]
    assert failed.status.status_code is StatusCode.ERROR
    assert "planted" not in failed.to_json()


def test_a_collector_gets_the_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
                "OTEL_SERVICE_NAME": "served-here",
            }
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider(shutdown_on_exit=False))
            with talking(make_talker(tmp_path)) as talker:
                body = BODIES["/v1/completions"] | {"model": "tiny"}
                httpx.post(f"{talker.url}/v1/completions", json=body, timeout=HANGS_S).raise_for_status()
        finally:
            collector.shutdown()
            thread.join(HANGS_S)
    [(path, kind, data)] = got
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    assert all(word in data for word in (b"text_completion tiny", b"served-here"))
