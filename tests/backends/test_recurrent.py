"""The native recurrence against the one in plain torch, on every instruction set, in any division of a text."""

from typing import Any

import pytest
import torch

from tests.backends.native import FUSED, KERNELS, each_isa, needs_native, noise, threads
from tokenwright.backends.torch.recurrence import recur
from tokenwright.cache import ChunkRows, StateView
from tokenwright.models.op import Norm
from tokenwright.models.recurrent import Places, Recurrence

ROWS, KEYS, HEADS, TAPS = 71, 24, 4, 4


def delta(values: int) -> Recurrence:
    """Four heads that share two keys; a norm of each head, and then the gate."""
    keys, all_values = 2 * KEYS, HEADS * values
    gate, channels = 2 * keys + all_values, 2 * keys + all_values
    places = Places(0, 0, keys, 2 * keys, gate=gate, beta=gate + all_values, decay=gate + all_values + HEADS)
    norm = Norm("at.norm", "rms", values, 1e-6)
    sizes = {"heads": HEADS, "key_heads": 2, "key_size": KEYS, "value_size": values}
    return Recurrence("at", "delta", channels, TAPS, places, **sizes, norm=norm)


def ssd(values: int) -> Recurrence:
    """Four heads in two groups; the gate, and then a norm of each group. Steps have limits."""
    keys, inner = 2 * KEYS, HEADS * values
    places = Places(inner, 2 * inner + keys, 2 * inner, inner, gate=0, decay=2 * inner + 2 * keys)
    norm = Norm("at.norm", "rms", inner, 1e-6, parts=2)
    sizes = {"heads": HEADS, "key_heads": 2, "key_size": KEYS, "value_size": values}
    limits = {"least_step": 0.4, "most_step": 1.1}
    return Recurrence("at", "ssd", inner + 2 * keys, TAPS, places, True, **sizes, norm=norm, gate_first=True, **limits)


def convolution(values: int) -> Recurrence:
    places = Places(conv=2 * values, before=0, gate=values)
    return Recurrence("at", "convolution", values, 3, places, True, activated=False)


def scan(values: int) -> Recurrence:
    """One head, whose columns have steps of their own; then a gate."""
    inner = HEADS * values
    places = Places(0, 2 * inner + KEYS, 2 * inner, 0, gate=inner, decay=2 * inner + 2 * KEYS)
    sizes = {"heads": 1, "key_heads": 1, "key_size": KEYS, "value_size": inner}
    return Recurrence("at", "scan", inner, TAPS, places, True, **sizes)


OF = {"scan": scan, "delta": delta, "ssd": ssd, "convolution": convolution}


def width(of: Recurrence) -> int:
    """Numbers of a projected row."""
    at = of.places
    ends = (
        at.conv + of.channels,
        at.gate + of.width,
        at.beta + of.heads,
        at.decay + (of.width if of.rule == "scan" else of.heads),
    )
    return max(ends)


def made(of: Recurrence, kernels: Any, cuts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a text of ROWS rows comes to in chunks up to `cuts`, and its state, which lies in two pages in turn."""
    tensors = {name.removeprefix("at."): noise(*shape, seed=3) * 0.5 for name, shape in of.shapes.items()}
    states, x, mixed = torch.full((3, of.numbers), float("nan")), noise(ROWS, width(of), seed=4), []
    for number, (start, stop) in enumerate(zip((0, *cuts), (*cuts, ROWS), strict=True)):
        read, write = number % 2, (number + 1) % 2
        pages, ends = torch.tensor([read, write]), torch.tensor([start, stop])
        chunk = ChunkRows(range(stop - start), start, (pages,), (ends,))
        mixed.append(kernels(x[start:stop], of, tensors, StateView(0, states), [chunk]))
    return torch.cat(mixed), states[(len(cuts) + 1) % 2]


def plain(*arguments: Any) -> torch.Tensor:
    return recur(*arguments, wide=torch.float64)


@each_isa
@pytest.mark.parametrize("values", [16, 20, 64, 128])
@pytest.mark.parametrize("rule", OF)
def test_it_is_the_recurrence_of_the_definition(rule: str, values: int, isa: str) -> None:
    of = OF[rule](values)
    for one, other in zip(made(of, KERNELS[isa].recur, ()), made(of, plain, ()), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@each_isa
@pytest.mark.parametrize("values", [20, 128])
@pytest.mark.parametrize("rule", OF)
def test_chunks_and_threads_change_no_bit(rule: str, values: int, isa: str) -> None:
    of = OF[rule](values)
    whole = made(of, KERNELS[isa].recur, ())
    for cuts, count in (((5,), 1), (tuple(range(1, ROWS)), 1), ((1, 7), 3)):
        with threads(count):
            for one, other in zip(made(of, KERNELS[isa].recur, cuts), whole, strict=True):
                assert torch.equal(one, other)


@needs_native
@pytest.mark.parametrize("rule", OF)
def test_instruction_sets_agree_to_the_bit(rule: str) -> None:
    of = OF[rule](64)
    first, *others = (made(of, KERNELS[isa].recur, ()) for isa in FUSED)
    for other in others:
        assert all(torch.equal(one, mine) for one, mine in zip(first, other, strict=True))
