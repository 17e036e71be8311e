"""How many threads a server's model computes with, where nobody says."""

from types import SimpleNamespace

import pytest
import torch

from tokenwright.backends.device import QUICK, compute_with, kernel_threads
from tokenwright.backends.native import native_kernels
from tokenwright.cli.options.shared import loader


@pytest.mark.parametrize(
    ("native", "browser", "threads", "weights", "found"),
    [
        (True, False, None, QUICK, 3),
        (True, False, None, QUICK - 1, 2),
        (True, True, None, QUICK, 2),
        (True, True, None, 1, 2),
        (False, False, None, 1, 2),
        (True, True, 3, 1, 3),
        (True, False, 3, 1, 3),
        (False, False, 1, QUICK, 1),
    ],
)
def test_a_core_is_left_to_a_browser_and_beside_torch_and_for_small_models(
    monkeypatch: pytest.MonkeyPatch, native: bool, browser: bool, threads: int | None, weights: int, found: int
) -> None:
    made = SimpleNamespace(kernels="avx2" if native else "reference", weight_bytes=weights)
    monkeypatch.setattr("tokenwright.llm.llm.LLM", lambda *_, **__: made)
    monkeypatch.setattr(native_kernels, "find_kernels", lambda: object() if native else None)
    vars(kernel_threads).pop("count", None)  # what another test asked for in this thread
    before = kernel_threads.count
    try:
        compute_with(3)
        assert loader("stories", threads=threads, browser=browser)(lambda *_: None) is made
        assert (kernel_threads.count, torch.get_num_threads()) == (found, found)
    finally:
        compute_with(before)
