"""`plan`: the planner's figures on a page, as JSON and as a picture; what makes no sense is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench.fixtures import read_little
from tests.cli.conftest import Run
from tokenwright import planner
from tokenwright.checkpoints.files.known import KNOWN
from tokenwright.cli.commands.plan import flop, page
from tokenwright.cli.terminal.statistics import rate
from tokenwright.units import binary, decimal

SPEED = ("--bandwidth", "30GB/s")


def shown(run: Run, *arguments: object) -> str:
    result = run("plan", *arguments, *SPEED)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return str(result.stdout)


def test_page(run: Run) -> None:
    text = shown(run, "llama-3.1-8b", "--context", "8k", "--batch", 8, "--memory", "24GB")
    assert text.splitlines()[:2] == ["meta-llama/Llama-3.1-8B (LlamaForCausalLM)", "8,192 of 131,072 tokens, batch 8"]
    sizes = {line[:16].strip(): line[16:].split()[:4] for line in text.splitlines()[4:10]}
    assert sizes == {
        "weights": ["14.96", "GiB", "16.06", "GB"],
        "KV of a token": ["128.00", "KiB", "131.07", "kB"],
        "KV of a sequence": ["1.00", "GiB", "1.07", "GB"],
        "KV in all": ["8.00", "GiB", "8.59", "GB"],
        "together": ["22.96", "GiB", "24.65", "GB"],
        "decode reads": ["21.98", "GiB", "23.60", "GB"],
    }
    assert "32 layers x 8 heads x (256 + 256 B)" in text
    assert "speed (given)         30 GB/s  reading memory\n" in text
    assert "in all, 1.27 each, if reading alone limits\n" in text
    assert "from 15,318 tokens each, at batch 8\n" in text
    assert (
        "in 24.00 GB      does not fit: 650.99 MB too much. The most at batch 8: 7,571 tokens; "
        "at 8,192 tokens: batch 7\n"
    ) in text
    assert (
        "this engine      takes 8.00 GiB for the KV with LLM(pages=4096, max_sequences=8): 4,096 pages and one more; "
        "without native kernels give --dtype bfloat16"
    ) in text


def test_page_of_a_window(run: Run) -> None:
    """Llama 3.1 8B with 30 layers of K in int8 and V in int4, over a window."""
    kv = ("--kv", "k=int8,v=int4,first=64,native=0+-1")
    text = shown(run, "llama-3.1-8b", *kv, "--window", "4k", "--sinks", 4, "--memory", "24GB", "--batch", 4)
    assert "KV of a token       56.75 KiB     58.11 kB  2 layers x 8 heads x (256 + 256 B)\n" in text
    assert f"\n{'':44}30 layers x 8 heads x (136 + 72 B)\n" in text
    assert "131,072 tokens, all layers keep 4,096 and 4 sinks\n" in text
    assert "The most at batch 4: texts without end; at 131,072 tokens: batch 32\n" in text
    options = 'kv="k=int8,v=int4,first=64,native=0+-1", window=4096, sinks=4'
    assert (
        f"LLM(pages=32768, max_sequences=4, {options}): 1,160 + 16 + 1,160 pages and one more of each; without" in text
    )
    assert "bfloat16 all the same: the first 64 tokens, and layers 0 and 31\n" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("gpt2", "--memory", "1GiB"), ["in 1.07 GB", "fits, with 500.44 MB to spare", "all 1,024 tokens"]),
        (("gpt2", "--memory", "100MB"), ["does not fit: the weights alone are 397.81 MB too much"]),
        (("gpt2", "--context", "4k"), ["4,096 tokens, batch 1", "more than the model's context of 1,024"]),
        (("gpt2",), ["cache > weights  from 6,752 tokens, beyond the model's 1,024", "pages and one more\n"]),
        (("mistral-7b",), ["never: every layer", "tokens, all layers keep 4,096\n", "289 pages", "outside the window"]),
        (("mistral-7b", "--memory", "24GB"), ["all 32,768 tokens of the model's context"]),
        (("mistral-7b", "--sinks", 1), ["all layers keep 4,096 and 1 sink\n"]),
        (("mistral-7b", "--window", "1k", "--memory", "24GB"), ["keep 1,024\n", "The most at batch 1: texts without"]),
        (("gemma-3-4b",), ["tokens, 29 layers keep 1,024", "KV with LLM(pages=8192", "image"]),
        (("deepseek-v3",), ["61 layers x (1,024 + 128 B)", "8 of 256 experts", "(MTP)", "its files hold"]),
        (("gpt2", "--kv", "k=int8,v=int4"), ["12 heads x (68 + 36 B)", "takes 14.85 MiB", "int8 and int4 cache: "]),
        (("gpt2", "--weights", "int4"), ["groups of 32", "embeddings and head as int8", 'weights="int4"']),
        (("gpt2", "--kv", "int8,native=0", "--batch", 2), ["1 layer x", "11 layers x", "128 + 128 pages and one"]),
        (("stories", "--window", "100"), ["all layers keep 100", "a text may go on without end", "40 pages"]),
    ],
)  # fmt: skip
def test_pages_say(run: Run, arguments: tuple[str, ...], told: list[str]) -> None:
    text = shown(run, *arguments)
    assert all(words in text for words in told), text


def test_tables_fit_a_narrow_terminal(run: Run) -> None:
    for name in ("llama-3.1-405b", "mistral-7b", "gemma-3-4b", "deepseek-v3"):
        table = shown(run, name, "--batch", 8).split("\ncache > weights")[0]
        assert max(map(len, table.splitlines())) <= 80, table


def test_json(run: Run) -> None:
    found = json.loads(shown(run, "llama-3.1-8b", "--context", "128k", "--kv", "int4", "--json", "--memory", "24GB"))
    assert (found["kv_bytes_per_token"], found["kv_bytes_total"]) == (36_864, 4_831_838_208)
    assert (found["weight_bytes"], found["parameters"]) == (16_061_054_976, 8_030_261_248)
    assert (found["fits"], found["kv"]) == (True, {"k": "int4", "v": "int4", "first": 0, "native": []})
    assert found["engine"] == {
        "runs": True,
        "hindrances": [],
        "page_size": 16,
        "pages": 8192,
        "max_sequences": 1,
        "token_budget": 512,
        "groups": [{"layers": list(range(32)), "pages": 8192, "page_bytes": 16 * 36_864}],
        "kv_bytes": 8193 * 16 * 36_864,
    }
    assert found["bandwidth"] == {"bytes_per_second": 30e9, "kind": "given", "of": "", "busy": ""}
    assert found["tokens_per_second_at_most"] == pytest.approx(30e9 / found["decode_bytes"])
    plain = planner.plan("llama-3.1-8b", context="128k", kv="int4", memory="24GB", bandwidth="30GB/s")
    assert found == plain.facts()


def test_json_of_a_window(run: Run) -> None:
    options = ("--kv", "int8,first=20,native=0", "--window", "1k", "--sinks", 4, "--batch", 3)
    found = json.loads(shown(run, "llama-2-7b", *options, "--json"))
    assert (found["window"], found["sinks"], found["windows"]) == (1024, 4, [1024] * 32)
    assert found["kv"] == {"k": "int8", "v": "int8", "first": 20, "native": [0]}
    rest, wide = list(range(1, 32)), 2 * 32 * 128 * 2  # bytes of a token in a native layer
    near = 3 * (1 + 97)  # pages of 16: one of sinks, and 1,023 + 512 tokens that begin anywhere in a page
    assert found["engine"]["groups"] == [
        {"layers": [0], "pages": near, "page_bytes": 16 * wide},
        {"layers": rest, "pages": 3 * 2, "page_bytes": 16 * 31 * wide},
        {"layers": rest, "pages": near, "page_bytes": 16 * 31 * wide * 17 // 32},
    ]
    plain = planner.plan("llama-2-7b", kv="int8,first=20,native=0", window="1k", sinks=4, batch=3, bandwidth="30GB/s")
    assert found == plain.facts()


def test_bandwidth_is_measured_where_none_is_given(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read_little(monkeypatch)
    assert re.search(r"speed \(measured\) +[\d.,]+ GB/s  reading memory of this machine \(", run("plan").stdout)
    assert json.loads(run("plan", "--json").stdout)["bandwidth"]["kind"] == "measured"


def test_a_busy_machine_is_told_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read_little(monkeypatch)
    monkeypatch.setattr(
        "tokenwright.planner.machine_load.quietly", lambda measure, doubt: (7e9, "the host took 30% of it")
    )
    told = run("plan").stdout
    assert "7 GB/s" in told and told.count("the machine was busy: the host took 30% of it. Run it again") == 1
    assert json.loads(run("plan", "--json").stdout)["bandwidth"]["busy"] == "the host took 30% of it"


def test_words_are_wrapped_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    text = page(planner.plan("deepseek-v3", batch=8, memory="24GB", bandwidth="30GB/s"))
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--kv", "int8,native=12"), "native of --kv: there is no layer 12; use 0 to 11, or -1 to -12 backwards"),
        (
            ("--sinks", "4"),
            "--sinks stay visible beyond a --window; give --window as well, or leave --sinks out",
        ),
        (("--memory", "24G"), "memory must be bytes, such as 24GB (10^9), 24GiB (2^30) or 24000000000, not '24G'"),
    ],
)
def test_options_are_refused(refused: Callable[..., str], options: tuple[str, ...], told: str) -> None:
    assert told in refused("plan", "gpt2", *options)


def test_models_are_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    assert f"there is no file or folder {tmp_path / 'nothing'}" in refused("plan", tmp_path / "nothing")
    told = refused("plan", "llama-9")
    assert "or one of: stories, gpt2, Llama-2-7b-hf" in told
    assert all(name.split("/")[1] in told for name in KNOWN)
    assert "config.json is missing; a model folder needs config.json" in refused("plan", tmp_path)


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (binary, 1023, "1023 B"),
        (binary, 2**30, "1.0 GiB"),
        (binary, 1342 * 10**9, "1,249.8 GiB"),
        (decimal, 999, "999 B"),
        (decimal, 131_072, "131.07 kB"),
        (decimal, 8 * 10**9, "8.00 GB"),
        (flop, 17_825_792, "17.83 MFLOP"),
        (flop, 3 * 10**18, "3.00 EFLOP"),
        (rate, 0.0123456, "0.0123"),
        (rate, 4800.0, "4,800"),
    ],
)
def test_numbers(function: Callable[[Any], str], value: float, text: str) -> None:
    assert function(value) == text


def test_an_unknown_family_lists_those_that_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["RwkvForCausalLM"]}')
    told, lacks = run("plan", tmp_path).stderr, "the recurrence of RWKV, which Tokenwright lacks"
    assert f"unknown architecture RwkvForCausalLM; it needs {lacks}" in told
    assert ". Tokenwright runs GPT2LMHeadModel, " in told


def test_the_memory_may_be_that_of_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenwright.planner.free_memory", lambda device: 24 * 10**9)
    words = ("plan", "llama-3.1-8b", "--bandwidth", "30GB/s", "--memory")
    assert run(*words, "here").stdout == run(*words, "24GB").stdout
    assert "at 131,072 tokens: not even one sequence\n" in run(*words, "18GB").stdout


def test_memory_without_a_unit_is_refused(run: Run) -> None:
    result = run("plan", "gpt2", "--memory", 24)
    assert result.exit_code == 2
    assert "--memory 24 has no unit; write 24GB, 24GiB, or 24B for bytes" in result.stderr
