"""Requests that are made from the server's own OpenAPI document: no 500, and no answer that it does not announce."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import checks

from tests.serve.live import HANGS, Live, live, make_chat_model, settled

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]
SHORT = 4  # tokens of an answer at most: the model is random and would write on


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(make_chat_model(tmp_path_factory.mktemp("schema") / "model"), pages=512) as running:
        yield running


def shortened(body: Any) -> Any:
    """A body whose answer is short, and which more often names a model that exists."""
    if not isinstance(body, dict):
        return body
    found = dict(body)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(found.get(name), int) and found[name] > SHORT:
            found[name] = SHORT
    if isinstance(found.get("model"), str) and len(found["model"]) % 3:
        found["model"] = "tiny"
    return found


def check_all(server: Live, cases: int) -> dict[int, int]:
    """Send `cases` requests to every operation, valid and invalid ones; returns how often each status came."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    statuses: dict[int, int] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        strategy = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))

        @given(case=strategy)
        @settings(
            max_examples=cases,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            case.body = shortened(case.body)
            answer = case.call(timeout=HANGS)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            late = answer.status_code == 503 and "deadline" in answer.text  # the request has set one itself
            assert answer.status_code < 500 or late, (case.body, answer.text)
            case.validate_response(answer, checks=CHECKS)

        ask()
    return statuses


def test_no_request_breaks_the_server(server: Live) -> None:
    statuses = check_all(server, 6)
    assert statuses.get(200, 0) > 5 and statuses.get(400, 0) > 5, statuses
    settled(server)


@pytest.mark.sweep
def test_ten_thousand_requests_break_nothing(server: Live) -> None:
    operations = 16
    statuses = check_all(server, 10_000 // operations + 1)
    print(sorted(statuses.items()))
    assert sum(statuses.values()) >= 10_000
    settled(server)
