"""`race`: the same tokens twice, and the work of both against the closed formulas."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tokenwright.cache import layer_specs
from tokenwright.cli.race import forward_tokens
from tokenwright.llm import LLM, Stream
from tokenwright.models.checkpoint import Checkpoint
from tokenwright.trace.cost import CostModel

Race = Callable[..., Any]


@pytest.fixture
def race(run: Run, model: Path, tmp_path: Path) -> Race:
    def go(*arguments: object) -> Any:
        return run("race", "the sun", "--model", model, "--out", tmp_path / "race.svg", *arguments)

    return go


def test_formulas() -> None:
    """Issue figures for N = 8, T = 20 on six layers: 162 and 2,100 layer-tokens."""
    assert 6 * forward_tokens(8, 20, cache=True) == 162
    assert 6 * forward_tokens(8, 20, cache=False) == 2100
    for n in range(1, 9):
        for t in range(1, 9):
            assert forward_tokens(n, t, cache=True) == n + sum(1 for _ in range(t - 1))
            assert forward_tokens(n, t, cache=False) == sum(range(n, n + t))


def test_report_and_chart(race: Race, tmp_path: Path) -> None:
    result = race("-n", 24)
    assert result.exit_code == 0, result.output
    assert "Both lanes wrote the same tokens." in result.stdout
    n = int(result.stdout.split("N = ")[1].split()[0])
    cached, naive = (line.split() for line in result.stdout.splitlines()[-5:-3])  # above the ratio and the chart
    assert (*cached[:3], cached[4]) == ("cached", f"{n + 23}", f"{3 * (n + 23)}", "=")
    total = sum(range(n, n + 24))
    assert (*naive[:3], naive[4]) == ("naive", f"{total:,}", f"{3 * total:,}", "=")
    assert f"for {total / (n + 23):.1f} times the forward tokens" in result.stdout
    assert result.stdout.endswith(f"chart: {tmp_path / 'race.svg'}\n")
    picture = ElementTree.fromstring((tmp_path / "race.svg").read_text(encoding="utf-8"))
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert f"24 tokens after a prompt of {n}" in "".join(picture.itertext())


def test_json(race: Race, model: Path) -> None:
    result = race("-n", 6, "--json", "--temperature", 0.9, "--seed", 3)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["same_tokens"] is True
    assert len(found["token_ids"]) == len(found["cached"]["step_s"]) == len(found["naive"]["step_s"]) == 6
    for lane in ("cached", "naive"):
        formula = found[lane]["formula"]
        assert (found[lane]["forward_tokens"], found[lane]["layer_tokens"]) == (
            formula["forward_tokens"],
            formula["layer_tokens"],
        )
    config = Checkpoint.open(model).config
    costs = CostModel(config, layer_specs(config, "float32"))
    for lane, cache in (("cached", True), ("naive", False)):
        cost = costs.run(found["prompt_tokens"], 6, cache=cache)
        assert found[lane]["derived"] == {"flops": cost.flops, "kv_read_bytes": cost.kv_read}
    assert found["ratio"] == pytest.approx(found["naive"]["total_s"] / found["cached"]["total_s"])


def test_lanes_that_part_are_told(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, naive = LLM.stream, []

    def stream(llm: LLM, prompt: Any, params: Any, *, cache: bool = True) -> Stream:
        found = plain(llm, prompt, params, cache=cache)
        naive.extend([] if cache else [found])
        return found

    written = Stream.completion.fget
    assert written is not None

    def completion(stream: Stream) -> Any:
        found = written(stream)
        if stream in naive and len(found.token_ids) > 2:
            ids = list(found.token_ids)
            ids[2] += 1
            return replace(found, token_ids=tuple(ids))
        return found

    monkeypatch.setattr(LLM, "stream", stream)
    monkeypatch.setattr(Stream, "completion", property(completion))
    result = race("-n", 6)
    assert result.exit_code == 1
    assert "THE LANES WROTE DIFFERENT TOKENS." in result.stdout
    assert "different tokens from token 3 on" in result.stderr
