"""The examples do what they say."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


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
