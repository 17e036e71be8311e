"""How many threads a server's model computes with, where nobody says."""

import pytest
import torch

from tokenwright.backends.native import kernels
from tokenwright.cli.options import loader


@pytest.mark.parametrize(
    ("native", "browser", "threads", "found"),
    [(True, False, None, 3), (True, True, None, 2), (False, False, None, 2), (True, True, 3, 3), (False, False, 1, 1)],
)
def test_a_core_is_left_to_a_browser_and_beside_torch(
    monkeypatch: pytest.MonkeyPatch, native: bool, browser: bool, threads: int | None, found: int
) -> None:
    monkeypatch.setattr("tokenwright.llm.LLM", lambda *_, **__: torch.get_num_threads())
    monkeypatch.setattr(kernels, "find_kernels", lambda: object() if native else None)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert loader("stories", threads=threads, browser=browser)(lambda *_: None) == found
    finally:
        torch.set_num_threads(before)
