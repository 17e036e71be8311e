"""Errors as clients see them."""

import pytest

from tokenwright.errors import ReplicaError
from tokenwright.serve.service.types import problem_of, without_folders


def test_replicas_that_died_are_a_reason_to_try_again() -> None:
    problem = problem_of(ReplicaError("4 replicas died"))
    assert (problem.status, problem.kind, problem.headers) == (503, "unavailable", {"retry-after": "1"})


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("/srv/models/x/config.json is no JSON", "config.json is no JSON"),
        ("there is no 'a' in /srv/models: /srv/models/a", "there is no 'a' in models: a"),
        ("ask https://hub.example/a/b, or /metrics", "ask https://hub.example/a/b, or /metrics"),
        ("1/2 of it, and a/b/c", "1/2 of it, and a/b/c"),
    ],
)
def test_a_message_has_no_folder_of_this_machine(said: str, told: str) -> None:
    assert without_folders(said) == told
