"""A text behind a prefix that was computed ahead is the text without it, to the bit, however the cache is kept."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.invariants import check_invariants
from tests.engines import settled
from tests.models.fixtures import make_checkpoint
from tests.vocabulary import most, text_of
from tokenwright import LLM, SamplingParams
from tokenwright.engine import Request
from tokenwright.engine.warming import WarmRules


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {"kv": "int4", "trace": True}),
        ("qwen2", {"window": 24, "sinks": 3, "token_budget": 16}),
        ("qwen2", {"kv_disk": "auto", "draft": "llama3"}),
        ("qwen3-next", {}),
        ("qwen3-next", {"kv": "int8"}),
    ],
)
def test_a_warmed_prefix_changes_no_bit(
    tmp_path: Path, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path / "cache"))
    folder = make_checkpoint(tmp_path / "model", kind).path
    if "draft" in options:
        options = options | {"draft": str(make_checkpoint(tmp_path / "draft", options["draft"]).path)}
    ids, told = text_of(150), list[tuple[int, int]]()
    with LLM(folder, **options) as plain:
        [expected] = plain.generate([ids], most(6))
    with LLM(folder, **options) as llm:
        for cut in (37, 100, 143):
            request = Request((*ids[:cut], 0), SamplingParams(max_tokens=0))
            llm.llm_engine.warm(request, WarmRules(computed=lambda *chunk: told.append(chunk)))
        while settled(llm).due:
            pass
        [found] = llm.generate([ids], most(6))
        llm.inspect(lambda engine: check_invariants(engine.scheduler))
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert found.usage.reused_tokens == sum(tokens for _, tokens in told) == 143


def test_a_next_turn_that_the_cache_cannot_hold_ends_no_engine(tmp_path: Path) -> None:
    folder, ids = make_checkpoint(tmp_path / "model", "qwen2").path, text_of(100)
    with LLM(folder, pages=4) as llm:
        [expected] = llm.generate([ids[:20]], most(6))
        llm.llm_engine.warm(Request((*ids, 0), SamplingParams(max_tokens=0)), WarmRules())
        [found] = llm.generate([ids[:20]], most(6))
    assert found.token_ids == expected.token_ids
