"""`race`: the same tokens several times, and the work of every lane against the closed formulas."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tokenwright.cli.commands.race import forward_tokens
from tokenwright.llm.llm import LLM
from tokenwright.llm.output_processor import Stream

Race = Callable[..., Any]

LONG = "the sun and the rain and the sea and the sand in the other season"
LANES = ("cached", "naive", "prefix")


@pytest.fixture
def race(run: Run, model: Path) -> Race:
    def go(*arguments: object, prompt: str = "the sun", model: Path = model) -> Any:
        return run("race", prompt, "--model", model, *arguments)

    return go


@pytest.fixture
def found(race: Race) -> Race:
    """The race as JSON; it must have gone well."""

    def go(*arguments: object, **options: Any) -> Any:
        result = race("--json", *arguments, **options)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return go


def wrong(monkeypatch: pytest.MonkeyPatch, *lanes: int) -> None:
    """From now on the third token of these lanes, counted from 0 in the order they run, is another."""
    plain, written, streams = LLM.stream, Stream.completion.fget, []
    assert written is not None

    def stream(llm: LLM, prompt: Any, params: Any, *, cache: bool = True) -> Stream:
        streams.append(plain(llm, prompt, params, cache=cache))
        return streams[-1]

    def completion(stream: Stream) -> Any:
        found = written(stream)
        ids = list(found.token_ids)
        if len(ids) > 2 and streams.index(stream) in lanes:
            ids[2] += 1
        return replace(found, token_ids=tuple(ids))

    monkeypatch.setattr(LLM, "stream", stream)
    monkeypatch.setattr(Stream, "completion", property(completion))


def test_formulas() -> None:
    """Issue figures for N = 8, T = 20 on six layers: 162 and 2,100 layer-tokens."""
    assert 6 * forward_tokens(8, 20, cache=True) == 162
    assert 6 * forward_tokens(8, 20, cache=False) == 2100
    assert forward_tokens(40, 5, cache=True, reused=32) == 12
    for n in range(1, 9):
        for t in range(1, 9):
            assert forward_tokens(n, t, cache=True) == n + sum(1 for _ in range(t - 1))
            assert forward_tokens(n, t, cache=False) == sum(range(n, n + t))


def test_the_cost_of_a_prompt_that_is_found(model: Path) -> None:
    """What is found is neither computed nor stored; the rows that are left read all the same."""
    with LLM(model) as llm, LLM(llm.loaded, window=9) as window:
        for costs in (llm.costs, window.costs):
            whole, rest = costs.run(40, 5, cache=True), costs.run(40, 5, cache=True, reused=32)
            spared = costs.chunk(0, 32, rows=0)
            assert (whole.flops - rest.flops, whole.kv_written - rest.kv_written) == (spared.flops, spared.kv_written)
        assert llm.costs.run(40, 5, cache=True, reused=32).kv_read == llm.costs.run(40, 5, cache=True).kv_read


def test_report(race: Race) -> None:
    result = race("-n", 24)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "The same tokens as cached: naive.\n" in result.stdout
    n = int(result.stdout.split("N = ")[1].split()[0])
    lines = result.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if "forward tokens  layer-tokens" in line)
    cached, naive = (line.split() for line in lines[at + 1 : at + 3])
    assert cached[:3] + cached[5:] == ["cached", f"{n + 23}", f"{3 * (n + 23)}", "=", "N", "+", "T", "-", "1"]
    total = sum(range(n, n + 24))
    assert naive[:9] == ["naive", f"{total:,}", f"{3 * total:,}", "0", "B", "=", "the", "sum", "of"]
    assert f"for {total / (n + 23):.1f} times the forward tokens" in result.stdout


def test_a_busy_machine_is_told_once(race: Race, found: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["", "other processes took 40% of the processors' time"]
    monkeypatch.setattr("tokenwright.planner.machine_load.load_between", lambda before, after: told[-1])
    assert race("-n", 2).stdout.splitlines()[-1] == (
        f"the machine was busy: {told[-1]}. Run it again when nothing else runs."
    )
    assert found("-n", 2)["busy"] == told.pop()
    assert "the machine was busy" not in race("-n", 2).stdout


def test_json(found: Race, model: Path) -> None:
    race = found("-n", 6, "--temperature", 0.9, "--seed", 3)
    assert race["same_tokens"] is True
    assert len(race["token_ids"]) == len(race["cached"]["step_s"]) == len(race["naive"]["step_s"]) == 6
    assert "prefix" not in race
    assert race["ratio"] == pytest.approx(race["naive"]["total_s"] / race["cached"]["total_s"])
    with LLM(model) as llm:
        assert race["text"] == llm.tokenizer.decode(race["token_ids"])


def test_every_lane_does_the_work_of_its_formula(found: Race, model: Path) -> None:
    race = found("-n", 20, prompt=LONG)
    n, t = race["prompt_tokens"], 20
    reused = (n - 1) // 16 * 16
    assert reused
    tokens = {"cached": n + t - 1, "naive": sum(range(n, n + t)), "prefix": n + t - 1 - reused}
    with LLM(model) as llm:
        for name in LANES:
            lane = race[name]
            assert (lane["name"], lane["parts_at"]) == (name, None)
            assert lane["forward_tokens"] == lane["formula"]["forward_tokens"] == tokens[name]
            assert lane["layer_tokens"] == lane["formula"]["layer_tokens"] == 3 * tokens[name]
            assert lane["reused_tokens"] == (reused if name == "prefix" else 0)
            kept = 0 if name == "naive" else llm.kv_bytes(n + t - 1)
            assert lane["kv_bytes"] == lane["formula"]["kv_bytes"] == kept
            cost = llm.costs.run(n, t, cache=name != "naive", reused=lane["reused_tokens"])
            assert lane["derived"] == {"flops": cost.flops, "kv_read_bytes": cost.kv_read}
            assert len(lane["step_s"]) == t


def test_every_lane_is_reported(race: Race) -> None:
    result = race("-n", 12, prompt=LONG)
    heading, *lines = result.stdout.splitlines()
    assert heading.startswith("N = ")
    assert max(map(len, lines)) <= 100
    for name in LANES:
        assert sum(line.lstrip().startswith(f"{name}  ") for line in lines) == 4  # three tables and the bars
    assert "R = " in result.stdout
    assert " NOT " not in result.stdout


def test_a_prompt_must_fill_a_page_to_be_found_again(race: Race, found: Race) -> None:
    n = found("-n", 1)["prompt_tokens"]
    short = race("-n", 3, "--page-size", n)
    assert short.exit_code == 0
    assert (
        f"No prefix lane: texts share full pages of a prompt, so it takes a prompt of {n + 1} tokens or more; "
        f"this one has {n}.\n" in short.stdout
    )
    enough = found("-n", 3, "--page-size", n - 1)
    assert enough["prefix"]["reused_tokens"] == n - 1
    assert enough["prefix"]["forward_tokens"] == 3


@pytest.mark.parametrize("prompt", ["x", "xxxxxxxx", "xyxyxyx"])
def test_the_warm_up_leaves_nothing_of_the_race(found: Race, prompt: str) -> None:
    """The tokenizer writes no BOS: the ids of these read the same backwards."""
    race = found("-n", 4, "--page-size", 1, prompt=prompt)
    n = race["prompt_tokens"]
    assert n == len(prompt)
    assert (race["cached"]["reused_tokens"], race["cached"]["forward_tokens"]) == (0, n + 3)
    assert race["prefix"]["reused_tokens"] == n - 1 if n > 1 else "prefix" not in race


@pytest.mark.parametrize(("lane", "name"), [(1, "naive"), (2, "prefix")])
def test_lanes_that_must_not_part_are_told(race: Race, monkeypatch: pytest.MonkeyPatch, lane: int, name: str) -> None:
    wrong(monkeypatch, lane)
    result = race("-n", 6, prompt=LONG)
    assert result.exit_code == 1
    assert f"THE LANES WROTE DIFFERENT TOKENS: {name} from token 3 on." in result.stdout
    assert f"different tokens: {name} from token 3 on" in result.stderr


def test_lanes_that_must_not_part_in_json(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, 1, 2)
    result = race("-n", 6, "--json", prompt=LONG)
    assert result.exit_code == 1
    assert "naive from token 3 on, prefix from token 3 on" in result.stderr
    told = json.loads(result.stdout)
    assert told["same_tokens"] is False
    assert told["naive"]["parts_at"] == told["prefix"]["parts_at"] == 3


def test_all_lanes_end_with_the_context(found: Race) -> None:
    race = found("-n", 600, "--token-budget", 64, prompt="the " * 500)
    written = 512 - race["prompt_tokens"]
    assert {len(race[kind]["step_s"]) for kind in LANES} == {written}


def test_refused_before_a_model_is_looked_for(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "a race needs at least one new token" in refused("race", "x", "--model", tmp_path / "nowhere", "-n", 0)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("x" * 512, "the prompt fills the model's context of 512 tokens"),
        ("x" * 600, "more than the model's context of 512"),
    ],
)
def test_refused_by_the_model(refused: Callable[..., str], model: Path, prompt: str, message: str) -> None:
    assert message in refused("race", prompt, "--model", model)
