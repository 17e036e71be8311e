"""Packed weights: a matrix in the order in which kernels read it, and in fewer bits where that is asked for.

A matrix [out, in] lies in blocks of 16 outputs, a block in slabs of inputs (`native/api.h` draws them). Missing outputs
and inputs are zeros, so that every block and slab is whole.

    float32, bfloat16, float16    the numbers, to the nearest
    int8    round(x / scale) from -127 to 127, scale = max |x| / 127; kept with 128 added
    int4    round(x / scale) from -8 to 7, with the scale that has the least squared error among `DIVISORS`; kept with 8
            added, two to a byte

Each output has a scale for every `group` inputs, 32 or 64, a float16; a shorter last group has its own. What is written
here in torch is the meaning; `NativeKernels.pack` gives the same bytes.
"""

import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from tokenwright.config import WeightFormat

LANES = 16  # outputs of a block
HUGE_PAGE = 1 << 21  # bytes
DIVISORS = tuple(-7 - k / 4 for k in range(16))  # an int4 scale is the extreme of its group over one of these
_CUT = ~0xFFF  # of an fp32's bits: leaves 12 of its 24, whose square fp32 holds whole


@dataclass(frozen=True, slots=True)
class Slab:
    """The weights of 16 outputs at `inputs` inputs: `lines` of 16 units, a unit of `dtype` times `per_unit`."""

    inputs: int
    lines: int
    per_unit: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.lines * LANES * self.per_unit * self.dtype.itemsize


SLABS: Mapping[str, Slab] = {
    "float32": Slab(16, 16, 1, torch.float32),
    "bfloat16": Slab(32, 16, 2, torch.bfloat16),
    "float16": Slab(32, 16, 2, torch.float16),
    "int8": Slab(64, 16, 4, torch.uint8),
    "int4": Slab(64, 8, 4, torch.uint8),
}
_ZERO = {"int8": 128, "int4": 0x88}  # the byte of codes that are zero


def packed_sizes(out: int, inner: int, form: WeightFormat) -> tuple[int, int]:
    """Bytes of codes and number of scales of a matrix [out, inner] in a format that is not native."""
    slab = SLABS[form.name]
    blocks, slabs = -(-out // LANES), -(-inner // slab.inputs)
    groups = slabs * slab.inputs // form.group if form.group else 0
    return blocks * slabs * slab.nbytes, blocks * groups * LANES


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight [out, inner] in a format, and perhaps a bias.

    `codes`: uint8, flat, 64-byte aligned. `scales`: float16, flat, [block][depth / group][16]; empty where there are
    none. `bias`: fp32 [out], or None.
    """

    out: int
    inner: int
    format: str  # of SLABS
    group: int  # inputs that share a scale: 32 or 64, else 0
    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def empty(cls, out: int, inner: int, form: WeightFormat, bias: torch.Tensor | None = None) -> "Packed":
        """Memory for a matrix, whose rows are yet to be packed; what stands for missing outputs is there."""
        code_bytes, scale_count = packed_sizes(out, inner, form)
        codes = aligned_bytes(code_bytes)
        scales = torch.empty(scale_count, dtype=torch.float16)
        blocks = -(-out // LANES)
        if out % LANES:
            codes.view(blocks, -1)[-1] = _ZERO.get(form.name, 0)
            scales.view(blocks, -1)[-1] = 0
        return cls(out, inner, form.name, form.group, codes, scales, bias)

    @property
    def depth(self) -> int:
        """Inputs with those that fill the last slab."""
        return -(-self.inner // self.slab.inputs) * self.slab.inputs

    @property
    def slab(self) -> Slab:
        return SLABS[self.format]

    @property
    def numel(self) -> int:
        """Weights, without those that fill blocks and slabs."""
        return self.out * self.inner

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and bias."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def pack_rows(self, first: int, rows: torch.Tensor) -> int:
        """Write rows [n, inner] (float32, bfloat16 or float16) at `first` and behind; nothing else is touched.

        Returns how many numbers have no finite form here, in quantised formats those that share a group with one; where
        it is not 0, what was written means nothing.
        """
        assert rows.shape[1] == self.inner and first + len(rows) <= self.out, "the rows belong to this matrix"
        slab = self.slab
        ids = torch.arange(first, first + len(rows))
        blocks, lanes = ids // LANES, ids % LANES
        padded = torch.nn.functional.pad(rows, (0, self.depth - self.inner))
        if not self.group:
            kept = padded.to(slab.dtype)
            self._units()[blocks, :, :, lanes] = kept.view(len(rows), -1, slab.lines, slab.per_unit)
            return int((~kept.isfinite()).sum())
        groups = padded.float().view(len(rows), self.depth // self.group, self.group)
        codes, scales = (_int8 if self.format == "int8" else _int4)(groups)
        self._scales()[blocks, :, lanes] = scales
        units = codes.to(torch.uint8).view(len(rows), -1, slab.inputs)  # [n, slabs, inputs]
        if self.format == "int4":
            units = units[..., :32] | units[..., 32:] << 4
        self._units()[blocks, :, :, lanes] = units.view(len(rows), -1, slab.lines, slab.per_unit)
        sound = (groups.isfinite().all(-1) & scales.isfinite()).repeat_interleave(self.group, -1)
        return int((~sound[:, : self.inner]).sum())

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some outputs' weights, decoded: [n, inner] fp32 of ids [n]."""
        blocks, lanes = ids // LANES, ids % LANES
        return self._decoded(self._units()[blocks, :, :, lanes], self._scales()[blocks, :, lanes])

    def blocks(self, first: int, last: int) -> torch.Tensor:
        """The outputs of blocks [first, last), decoded: [16 (last - first), inner] fp32, fewer at the matrix's end."""
        units = self._units()[first:last].permute(0, 3, 1, 2, 4).flatten(0, 1)
        scales = self._scales()[first:last].transpose(1, 2).flatten(0, 1)
        return self._decoded(units, scales)[: self.out - first * LANES]

    def unpack(self) -> torch.Tensor:
        """The whole matrix, decoded: [out, inner] fp32."""
        return self.blocks(0, -(-self.out // LANES))

    def _decoded(self, units: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Numbers [n, inner] in fp32 of units [n, slabs, lines, per_unit] and scales [n, groups]."""
        if self.format == "int4":
            units = torch.stack((units & 15, units >> 4), 2)  # the first 32 inputs of a slab, then the others
        numbers = units.reshape(len(units), self.depth)[:, : self.inner]
        if not self.group:
            return numbers.float()
        codes = numbers.float() - (128 if self.format == "int8" else 8)
        return codes * scales.float().repeat_interleave(self.group, -1)[:, : self.inner]

    def _units(self) -> torch.Tensor:
        """The codes as [blocks, slabs, lines, 16, per_unit]."""
        slab = self.slab
        units = self.codes.view(slab.dtype)
        return units.view(-1, self.depth // slab.inputs, slab.lines, LANES, slab.per_unit)

    def _scales(self) -> torch.Tensor:
        """The scales as [blocks, groups, 16]; no groups where there are none."""
        groups = self.depth // self.group if self.group else 0
        return self.scales.view(-(-self.out // LANES), groups, LANES)


def aligned_bytes(nbytes: int) -> torch.Tensor:
    """Bytes [nbytes], 64-byte aligned; in pages of 2 MiB as far as they fill some, where the system has such.

    A sum over a gigabyte took 15 % less time than in pages of 4 KiB: the processor looks up fewer addresses.
    """
    if nbytes < 2 * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    room = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    with suppress(OSError):  # a system that was built without them
        room.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return whole[start : start + nbytes]


def _int8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 1..255 of groups [n, G, group] in fp32, and their scales [n, G]."""
    scales = (groups.abs().amax(-1) / 127).half()
    return _codes(groups, scales).clamp(-127, 127) + 128, scales


def _int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0..15 of groups [n, G, group] in fp32, and their scales [n, G]: the first that has the least error."""
    high, low = groups.amax(-1), groups.amin(-1)
    extreme = torch.where(high > -low, high, low) + 0.0  # no -0
    best = scales = torch.zeros_like(extreme)
    for divisor in DIVISORS:
        tried = (extreme * (1 / divisor)).half()
        error = _error(groups, _codes(groups, tried).clamp(-8, 7) * tried.float()[..., None])
        better = (error < best) | (divisor == DIVISORS[0])
        best, scales = torch.where(better, error, best), torch.where(better, tried, scales)
    return _codes(groups, scales).clamp(-8, 7) + 8, scales.half()


def _codes(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """round(x / scale) in fp32, and 0 where the scale is 0."""
    steps = scales.float()[..., None]
    return torch.where(steps == 0, 0.0, groups / torch.where(steps == 0, 1.0, steps)).round()


def _error(groups: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Sum of squared differences [n, G], one input after the other.

    A difference is cut to 12 bits, so that its square is exact: then it is no matter whether a compiler fuses the sum.
    """
    differences = ((groups - kept).view(torch.int32) & _CUT).view(torch.float32)
    total = torch.zeros_like(groups[..., 0])
    for square in differences.square().unbind(-1):
        total = total + square
    return total
