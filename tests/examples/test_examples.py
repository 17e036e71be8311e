"""The examples do what they say."""

import json
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_two_loops_write_the_same_and_are_short(capsys):
    runpy.run_path(str(EXAMPLES / "loop.py"), run_name="__main__")
    naive, cached = capsys.readouterr().out.split("cached:")
    assert naive.removeprefix(" naive:").strip() == cached.strip()
    assert len((EXAMPLES / "loop.py").read_text().splitlines()) <= 30


@pytest.mark.parametrize("loop", ["naive", "cached"])
def test_the_articles_slips_are_mended(loop):
    run = runpy.run_path(str(EXAMPLES / "loop.py"))[loop]

    def model(tokens, cache=None):
        import torch

        held = (cache or 0) + len(tokens)
        return torch.nn.functional.one_hot(torch.tensor([held] * len(tokens)), 10).float(), held

    assert run(model, [5, 6], 3, set()) == [5, 6, 2, 3, 4]
    assert run(model, [5, 6], 3, {2}) == [5, 6, 2], "the first token is tested for the end"
    assert run(model, [5, 6], 0, set()) == [5, 6], "no new tokens give none"


def test_bounded_answers_cost_less_and_the_gain_adds_up(capsys):
    runpy.run_path(str(EXAMPLES / "bounded.py"), run_name="__main__")
    out = capsys.readouterr().out
    rows = {way.strip(): cells for way, *cells in (line.split("|") for line in out.splitlines() if "|" in line)}
    tokens = {way: float(rows[way][0]) for way in ("free", "few tokens", "one of a list")}
    assert 8 < tokens["free"] <= 100
    assert tokens["one of a list"] < tokens["few tokens"] <= 8
    bounded = runpy.run_path(str(EXAMPLES / "bounded.py"))
    listed = [line.split(": ")[1] for line in out.splitlines() if line.startswith("  one of a list: ")]
    assert all(answer in answers for answer, (_, answers) in zip(listed, bounded["QUESTIONS"], strict=True))
    free, few = (("", ""), (100, 50), (2.0, 1.0), (9.0, 5.0)), (("", ""), (8, 1), (1.0, 1.5), (1.0, 0.0))
    to_first, by_fewer, by_time = bounded["gain"](free, few)
    assert to_first == 0.5
    assert to_first + by_fewer + by_time == pytest.approx(17 - 3.5)
    assert by_fewer == pytest.approx((148 - 7) * 14 / 148)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("openai_client", r".{20}[\s\S]*\n2 embeddings of 256 numbers\n"),
        ("anthropic_client", r".{20}[\s\S]*\n\d+ tokens\n"),
        ("tools", r'weather\({"city":\s+"(Oslo|Rome)"}\) is (snow|sun)\n'),
        ("json_from_pydantic", r"Animal\(kind='\w+', color='\w+', happy=(True|False)\)\n$"),
        ("lora", r"the model:, there was .*\n +odd:(?!, there was )"),
        ("search", r"0\.\d+  The cat sat on the mat\.\n(0\.\d+  .*\n){3}True\n$"),
        ("prefix_file", r"64 tokens saved, .*\n64 of \d+ prompt tokens reused:.*\nrefused: .* another kv format"),
        ("explorer_inside", r"page\.html shows 8 steps: \d\.\d MB\n$"),
    ],
)
def test_an_example_runs(name: str, told: str, capsys, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert re.match(told, out), out


def test_the_notebook_of_the_lens_runs(capsys) -> None:
    notebook = json.loads((EXAMPLES / "logit_lens.ipynb").read_text())
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "it is kept small"
            exec("".join(cell["source"]), names)
    out = capsys.readouterr().out
    assert re.search(r"after layer 6: .* has rank 0\n", out), "the last layer knows the token that was written"
    assert re.search(r"reads the token before with [5-9]\d% of its weight", out)


def test_every_example_is_run() -> None:
    source = Path(__file__).read_text() + (Path(__file__).parent / "test_one_file_engine.py").read_text()
    source += (Path(__file__).parent / "test_notebook.py").read_text() + "serving"
    assert all(file.stem in source for file in EXAMPLES.iterdir() if file.suffix in (".py", ".ipynb"))
