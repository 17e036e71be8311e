"""Requests that are made from the server's own OpenAPI document: no 500, and no answer that it does not announce."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.core.failures import AcceptedNegativeData
from schemathesis.core.parameters import ParameterLocation

from tests.profiles import share
from tests.serve.live import HANGS, Live, live, make_chat_model, settled
from tokenwright.sampling_params import MOST_CHOICES

# Left out: positive_data_acceptance, as a valid body may be refused for what no schema says (an unknown model, a prompt
# longer than the context, options that contradict each other); unsupported_method, allow_header_conformance and
# missing_required_header, as no case here has another method or lacks a header (test_31_other_methods_everywhere asks
# all routes by all methods); ignored_auth and object_level_authorization, as this server has no keys
# (test_every_route_but_health_demands_a_key); use_after_free and ensure_resource_availability, as nothing is created or
# deleted; not_a_server_error, which `check` asserts itself, since a deadline of the request's own may end in 503.


def negative_data_rejection(context: Any, response: Any, case: Any) -> bool | None:
    """As schemathesis has it, but for a body that its change has left valid, say as another branch of a union."""
    try:
        return response.status_code == 413 or bool(checks.negative_data_rejection(context, response, case))
    except AcceptedNegativeData:
        if not is_valid(case):
            raise
        return None


def is_valid(case: Any) -> bool:
    """Whether only the body was meant to be invalid, and it follows the published schema after all."""
    parts = case.meta.components
    if any(part.mode.is_negative for place, part in parts.items() if place is not ParameterLocation.BODY):
        return False
    document = case.operation.schema.raw_schema
    body = document["paths"][case.operation.path][case.operation.method]["requestBody"]
    schema = body["content"]["application/json"]["schema"] | {"components": document["components"]}
    return bool(jsonschema_rs.is_valid(schema, case.body))


CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    negative_data_rejection,
]
SHORT = 4  # tokens of an answer at most: the model is random and would write on


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(make_chat_model(tmp_path_factory.mktemp("schema") / "model"), pages=512) as running:
        yield running


LENGTHS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
MOST_TEXTS = 16  # of a prompt


def shortened(path: str, body: Any) -> Any:
    """A body whose answer is short, and which more often names a model that exists."""
    if not isinstance(body, dict):
        return body
    found = dict(body)
    if path in LENGTHS:
        found.setdefault(LENGTHS[path], SHORT)
    elif path in ("/api/chat", "/api/generate") and isinstance(found.setdefault("options", {}), dict):
        found["options"] = {"num_predict": SHORT} | found["options"]
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(found.get(name), int) and SHORT < found[name] <= 2**20:
            found[name] = SHORT
    for name in ("n", "best_of"):
        if isinstance(found.get(name), int) and MOST_TEXTS < found[name] <= MOST_CHOICES:
            found[name] = MOST_TEXTS
    if isinstance(found.get("model"), str) and len(found["model"]) % 3:
        found["model"] = "tiny"
    return found


def check_all(server: Live, cases: int) -> Counter[int]:
    """Send `cases` requests to every operation that takes any, valid and invalid ones, and one to each of the others.

    Prints the statuses of each; returns how often each status came.
    """
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found: Counter[int] = Counter()
    for result in schema.get_all_operations():
        statuses = check(result.ok(), cases)
        print(f"{result.ok().label}: {sum(statuses.values())} cases, {dict(sorted(statuses.items()))}", flush=True)
        found += statuses
    return found


def check(operation: Any, cases: int) -> Counter[int]:
    """Send `cases` requests to an operation; returns how often each status came."""
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    statuses: Counter[int] = Counter()

    @given(case=st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes)))
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        case.body = shortened(case.operation.path, case.body)
        answer = case.call(timeout=HANGS)
        statuses[answer.status_code] += 1
        late = answer.status_code == 503 and "deadline" in answer.text  # the request has set one itself
        assert answer.status_code < 500 or late, (case.body, answer.text)
        case.validate_response(answer, checks=CHECKS)

    ask()
    return statuses


def test_no_request_breaks_the_server(server: Live) -> None:
    statuses = check_all(server, share(8))
    assert statuses[200] > 5 and statuses[400] > 5, statuses
    settled(server)


def test_a_streamed_answer_is_of_a_type_that_is_announced(server: Live) -> None:
    document = httpx2.get(f"{server.url}/openapi.json").json()
    for path, body in STREAMS.items():
        answer = httpx2.post(server.url + path, json=body | {"model": "tiny", "stream": True}, timeout=HANGS)
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind != "application/json"
        assert kind in document["paths"][path]["post"]["responses"]["200"]["content"], path


STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 2}},
}


@pytest.mark.sweep
def test_ten_thousand_requests_break_nothing(server: Live) -> None:
    statuses = check_all(server, 10_000 // 10)
    print(f"in all: {sum(statuses.values())} cases, {dict(sorted(statuses.items()))}")
    assert sum(statuses.values()) >= 10_000
    settled(server)


TOOL = {"type": "x", "name": False, "description": 5, "tools": [1], "function": 1, "input_schema": 1, "parameters": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools": [TOOL]}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1, "tools": [TOOL]}),
        ("/v1/conversations", {"items": [{"type": "additional_tools", "tools": [TOOL]}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools": [TOOL]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}], "stream": False, "tools": [TOOL]}),
    ],
)
def test_the_schema_has_tools_of_other_types(server: Live, path: str, body: dict[str, Any]) -> None:
    """The server reads nothing but the type of a tool that is not its client's."""
    document = httpx2.get(f"{server.url}/openapi.json", timeout=HANGS).json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for kind, right in (("x", True), ("custom" if path == "/v1/messages" else "function", False)):
        TOOL["type"] = kind
        answer = httpx2.post(server.url + path, json={"model": "tiny", **body}, timeout=HANGS)
        assert (answer.status_code == 200 or "hosted" in answer.text) is right, answer.text
        whole = schema | {"components": document["components"]}
        assert jsonschema_rs.is_valid(whole, {"model": "tiny", **body}) is right
