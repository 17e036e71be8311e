"""What the tests of the native kernels share: every instruction set of this processor, and inputs that are hard.

A build without a compiler has none; there the tests that use `each_isa` are skipped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from tests.tensors import NativeOverTensors, TensorPacked
from tokenwright.backends.device import threads_of
from tokenwright.backends.native.library import find, load
from tokenwright.backends.native.native_kernels import NativeKernels, usable
from tokenwright.formats import FILE_FORMATS, TABLES, WeightFormat

FOUND = find()
KERNELS = {isa: NativeOverTensors(NativeKernels(load(FOUND), isa)) for isa in usable(load(FOUND))} if FOUND else {}
FUSED = [isa for isa in KERNELS if isa != "portable"]  # a b + c is rounded once
WEIGHTS = ("float32", "bfloat16", "float16", "int8:32", "int8:64", "int4:32", "int4:64")

OF_FILES = [WeightFormat(*one) for one in sorted(FILE_FORMATS)]

needs_native = pytest.mark.skipif(not KERNELS, reason="no native kernels were compiled")
each_isa = pytest.mark.parametrize(
    "isa", [pytest.param(isa, id=isa) for isa in KERNELS] or [pytest.param("none", marks=needs_native)]
)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows(count: int, size: int, seed: int) -> torch.Tensor:
    """Rows [count, size]: plain ones, and now and then one of zeros, of tiny, huge or very unequal numbers."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=random)
    kinds = torch.randint(0, 8, (count, 1), generator=random)
    unequal = x * torch.exp(3 * torch.randn(count, size, generator=random))
    for kind, made in ((0, x * 0), (1, x * 1e-30), (2, x * 1e12), (3, unequal)):
        x = torch.where(kinds == kind, made, x)
    return x


def packed(form: str, out: int, inner: int, bias: bool = False, seed: int = 1) -> TensorPacked:
    """A random weight [out, inner], its rows of different sizes."""
    w = noise(out, inner, seed=seed) * torch.exp(noise(out, 1, seed=seed + 1))
    made = TensorPacked.empty(out, inner, WeightFormat.parse(form), noise(out, seed=seed + 2).numpy() if bias else None)
    assert made.pack_rows(0, w) == 0
    return made


@dataclass(frozen=True)
class Blocks:
    """A random weight in a form that files have. codes: whole numbers [out, in]; scales, minima: fp32 [out, groups].

    factors: fp32 [out].
    """

    packed: TensorPacked
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor
    factors: torch.Tensor


def blocks(form: WeightFormat, out: int, inner: int, bias: bool = False, seed: int = 1) -> Blocks:
    random = torch.Generator().manual_seed(seed)
    span, whole_blocks = form.super or form.group, form.name in ("int1", "int2")
    bits = 4 if form.name in TABLES else int(form.name.removeprefix("int"))

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    codes = whole(0, 1 << bits, out, inner) << (form.name == "int1")
    halves = (noise(2, out, inner // span, seed=seed) * torch.exp(noise(1, out, 1, seed=seed + 1))).half()
    integers = (
        whole(-128, 128, 2, out, inner // form.group)
        if form.super and not whole_blocks
        else torch.ones(2, out, inner // form.group)
    )
    levels = halves.float().repeat_interleave(span // form.group, -1) * integers
    made = TensorPacked.empty(out, inner, form, noise(out, seed=seed + 2).numpy() if bias else None)
    if form.super or form.minima:
        fields = 1 + form.minima
        parts = [torch.stack(tuple(halves[:fields]), -1).view(torch.uint8)]
        if form.super and not whole_blocks:
            pairs = integers[:fields].movedim(0, -1).to(torch.int8)  # [out, groups, fields]
            parts.append(pairs.reshape(out, inner // span, -1).view(torch.uint8))
        scales = torch.cat(parts, -1).flatten(1)
    else:
        scales = halves[0]
    factors = torch.exp(noise(out, seed=seed + 3))
    if form.factors:
        scales = torch.cat((scales.contiguous().view(torch.uint8), factors[:, None].view(torch.uint8)), -1)
    for first, last in ((out // 3, out), (0, out // 3)) if out > 2 else ((0, out),):
        assert made.put_codes(first, codes[first:last].to(torch.uint8), scales[first:last]) == 0
    if form.name in TABLES:
        numbers = torch.tensor(TABLES[form.name])[codes]
    else:
        numbers = codes - (0 if form.minima else 1 if whole_blocks else 1 << bits - 1)
    return Blocks(made, numbers, levels[0], levels[1] * form.minima, factors if form.factors else torch.ones(out))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """With so many threads, however many processors there are and whoever else uses them."""
    libraries = [KERNELS[isa].library for isa in list(KERNELS)[:1]]
    with threads_of(count):
        before = [library.tw_exact_threads(count) for library in libraries]
        try:
            yield
        finally:
            for library, exact in zip(libraries, before, strict=True):
                library.tw_exact_threads(exact)
