"""`race`: the same tokens several times, and the work of every lane against the closed formulas."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.models.fixtures import make_checkpoint
from tokenwright.cli.reports.race_report import forward_tokens
from tokenwright.engine import SamplingParams
from tokenwright.llm.llm import LLM
from tokenwright.llm.output_processor import Stream

Race = Callable[..., Any]

LONG = "the sun and the rain and the sea and the sand in the other season"
OTHERS = ("--kv", "int4", "--window", 9, "--sinks", 2)
PRINTED = {"cached": "cached", "naive": "naive", "prefix": "prefix", "kv": "int4", "window": "window 9 + 2 sinks"}


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
    assert not {"prefix", "kv", "window"} & race.keys()
    assert race["ratio"] == pytest.approx(race["naive"]["total_s"] / race["cached"]["total_s"])
    with LLM(model) as llm:
        assert race["text"] == llm.tokenizer.decode(race["token_ids"])


def test_every_lane_does_the_work_of_its_formula(found: Race, model: Path) -> None:
    race = found("-n", 20, *OTHERS, prompt=LONG)
    assert {kind: race[kind]["name"] for kind in PRINTED} == PRINTED
    n, t = race["prompt_tokens"], 20
    reused = (n - 1) // 16 * 16
    assert reused
    tokens = dict.fromkeys(PRINTED, n + t - 1) | {"naive": sum(range(n, n + t)), "prefix": n + t - 1 - reused}
    with LLM(model) as llm, LLM(llm.loaded, kv="int4") as int4, LLM(llm.loaded, window=9, sinks=2) as window:
        engines = dict.fromkeys(PRINTED, llm) | {"kv": int4, "window": window}
        for kind, engine in engines.items():
            lane = race[kind]
            assert lane["forward_tokens"] == lane["formula"]["forward_tokens"] == tokens[kind]
            assert lane["layer_tokens"] == lane["formula"]["layer_tokens"] == 3 * tokens[kind]
            assert lane["reused_tokens"] == (reused if kind == "prefix" else 0)
            kept = 0 if kind == "naive" else engine.kv_bytes(n + t - 1)
            assert lane["kv_bytes"] == lane["formula"]["kv_bytes"] == kept
            cost = engine.costs.run(n, t, cache=kind != "naive", reused=lane["reused_tokens"])
            assert lane["derived"] == {"flops": cost.flops, "kv_read_bytes": cost.kv_read}
            assert len(lane["step_s"]) == t
    bytes_kept = {kind: race[kind]["kv_bytes"] for kind in PRINTED}
    assert bytes_kept["cached"] == bytes_kept["prefix"] > bytes_kept["kv"] > bytes_kept["naive"] == 0
    assert bytes_kept["window"] == bytes_kept["cached"] * (9 - 1 + 2) // (n + t - 1)  # what the next row would read


def test_what_other_caches_wrote_is_told(found: Race, race: Race, model: Path) -> None:
    told = found("-n", 30, *OTHERS, prompt=LONG)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with LLM(model, kv="int4") as int4, LLM(model, window=9, sinks=2) as window:
        for kind, llm in (("kv", int4), ("window", window)):
            [other] = llm.generate([LONG], params)
            apart = [i for i, (a, b) in enumerate(zip(told["token_ids"], other.token_ids, strict=True), 1) if a != b]
            assert told[kind]["parts_at"] == min(apart, default=None)
    assert told["window"]["parts_at"] is not None
    assert told["cached"]["parts_at"] is told["naive"]["parts_at"] is told["prefix"]["parts_at"] is None
    report = race("-n", 30, *OTHERS, prompt=LONG)
    assert report.exit_code == 0
    assert "The same tokens as cached: naive, prefix" in report.stdout
    assert f"window 9 + 2 sinks from token {told['window']['parts_at']} on" in report.stdout


def test_a_cache_that_loses_nothing_writes_the_same(found: Race) -> None:
    race = found("-n", 12, "--kv", "float32", "--window", 500)
    assert (race["kv"]["name"], race["window"]["name"]) == ("float32", "window 500")
    assert race["kv"]["parts_at"] is race["window"]["parts_at"] is None
    assert race["kv"]["kv_bytes"] == race["window"]["kv_bytes"] == race["cached"]["kv_bytes"]


def test_every_lane_is_reported(race: Race) -> None:
    result = race("-n", 12, *OTHERS, prompt=LONG)
    heading, *lines = result.stdout.splitlines()
    assert heading.startswith("N = ")
    assert max(map(len, lines)) <= 100
    for name in PRINTED.values():
        assert sum(line.lstrip().startswith(f"{name}  ") for line in lines) == 4  # three tables and the bars
    assert "R = " in result.stdout
    assert " NOT " not in result.stdout


def test_sinks_alone_where_the_model_has_windows_of_its_own(found: Race, tmp_path: Path) -> None:
    race = found("-n", 4, "--sinks", 2, model=make_checkpoint(tmp_path / "m", "mistral").path)
    assert race["window"]["name"] == "window + 2 sinks"


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
    race = found("-n", 4, "--page-size", 1, *OTHERS[:4], prompt=prompt)
    n = race["prompt_tokens"]
    assert n == len(prompt)
    for kind in ("cached", "kv", "window"):
        assert (race[kind]["reused_tokens"], race[kind]["forward_tokens"]) == (0, n + 3)
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


def test_lanes_that_may_part_do_no_harm(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, 2)
    result = race("-n", 6, "--kv", "float32")  # a short prompt: the third lane is this one
    assert result.exit_code == 0
    assert "Other tokens than cached: float32 from token 3 on." in result.stdout


def test_all_lanes_end_with_the_context(found: Race) -> None:
    race = found("-n", 600, "--token-budget", 64, *OTHERS[2:], prompt="the " * 500)
    written = 512 - race["prompt_tokens"]
    assert {len(race[kind]["step_s"]) for kind in ("cached", "naive", "prefix", "window")} == {written}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kv", "int3"), "kv 'int3' is not known"),
        (("--window", 0), "window must be a whole number from 1"),
        (("--sinks", -1), "sinks must be a whole number from 0"),
        (("-n", 0), "a race needs at least one new token"),
    ],
)
def test_refused_before_a_model_is_looked_for(
    refused: Callable[..., str], tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    assert message in refused("race", "the sun", "--model", tmp_path / "nowhere", *options)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("the sun", ("--sinks", 2), "--sinks stay visible beyond a --window"),
        ("the sun", ("--kv", "int8,native=7"), "there is no layer 7"),
        ("x" * 512, (), "the prompt fills the model's context of 512 tokens"),
        ("x" * 600, ("--kv", "int8"), "more than the model's context of 512"),
    ],
)
def test_refused_by_the_model(
    refused: Callable[..., str], model: Path, prompt: str, options: tuple[object, ...], message: str
) -> None:
    assert message in refused("race", prompt, "--model", model, *options)


def test_the_logits_of_both_lanes_are_compared_when_asked_for(race: Race, found: Race) -> None:
    compared = found("-n", 7, "--agreement")["agreement"]
    assert compared == {
        "compared": 7,
        "equal": 7,
        "divergent": None,
        "max_delta": compared["max_delta"],
        "kl": compared["kl"],
    }
    assert compared["max_delta"] <= 1e-3 and compared["kl"] <= 1e-6
    assert "argmax equal at 7 of 7 steps; max |difference|" in race("-n", 7, "--agreement").output
    assert "agreement" not in found("-n", 7)
