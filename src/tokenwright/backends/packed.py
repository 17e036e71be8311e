"""Packed weights: a matrix in the kernels' memory order, quantised if its format says so.

A matrix [out, in] is a sequence of blocks of 16 outputs, a block a sequence of slabs of inputs (`native/cpp/api.h`
draws them). Zeros pad the outputs and inputs, so that every block and slab is whole.

    float32, bfloat16, float16    the numbers, rounded to nearest
    int8    round(x / scale) from -127 to 127, scale = max |x| / 127; stored with 128 added
    int4    round(x / scale) from -8 to 7, with the scale of least squared error among `DIVISORS`; stored with 8 added,
            two to a byte

Each output has a float16 scale for every `group` inputs, 32 or 64; a shorter last group has its own. This torch code is
the definition; `NativeKernels.pack` writes the same bytes.

Blocks of files have more forms, to which nothing is quantised here (`put_codes` copies them):

    int5, int6      as int4, stored with 16 or 32 added; the bits above the fourth lie apart
    super-blocks    a group's scale is an integer times the float16 scale of its `super` inputs
    minima          a weight is scale * code - minimum, with codes from 0 on; in super-blocks a minimum is a product too
"""

import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from tokenwright.formats import WeightFormat

LANES = 16  # outputs of a block
HUGE_PAGE = 1 << 21  # bytes
DIVISORS = tuple(-7 - k / 4 for k in range(16))  # an int4 scale is the extreme of its group over one of these
_CUT = ~0xFFF  # mask over an fp32's bits: keeps 12 of 24 significand bits, whose square is exact in fp32


@dataclass(frozen=True, slots=True)
class Slab:
    """The weights of 16 outputs at `inputs` inputs: `lines` lines of 16 units, each `per_unit` numbers of `dtype`."""

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
    "int5": Slab(64, 10, 4, torch.uint8),
    "int6": Slab(64, 12, 4, torch.uint8),
}
_ZERO = {"int8": 128, "int4": 0x88}  # the byte that encodes zero weights
_OFFSETS = {"int8": 128, "int4": 8, "int5": 16, "int6": 32}  # added to codes without minima
_UPPER_BITS = {"int5": 1, "int6": 2}  # of a code, above its lower four


def record_bytes(form: "WeightFormat | Packed") -> int:
    """Bytes of the scales and minima of one output in a super-block, or in a group where there are none."""
    return (1 + form.minima) * (2 + (form.super // form.group if form.super else 0))


def packed_sizes(out: int, inner: int, form: WeightFormat) -> tuple[int, int]:
    """Bytes of codes, and scales in units of two bytes, of a matrix [out, inner] in a resolved format (not native)."""
    slab = SLABS[form.name]
    blocks, slabs = -(-out // LANES), -(-inner // slab.inputs)
    records = slabs * slab.inputs // (form.super or form.group) if form.group else 0
    return blocks * slabs * slab.nbytes, blocks * records * LANES * record_bytes(form) // 2


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A packed weight [out, inner] with an optional bias.

    `codes`: uint8, flat, 64-byte aligned. `scales`: float16, flat, [block][depth / group][16]; empty if the format has
    none; with minima or super-blocks as api.h draws them, integers included. `bias`: fp32 [out], or None.
    """

    out: int
    inner: int
    format: str  # of SLABS
    group: int  # inputs that share a scale: 16, 32 or 64, else 0
    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None
    super: int = 0  # inputs of a super-block: 64, 128 or 256, or 0
    minima: bool = False

    @classmethod
    def empty(cls, out: int, inner: int, form: WeightFormat, bias: torch.Tensor | None = None) -> "Packed":
        """Allocate a matrix for `pack_rows` to fill; the padding of missing outputs is already written."""
        code_bytes, scale_count = packed_sizes(out, inner, form)
        codes = aligned_bytes(code_bytes)
        scales = torch.empty(scale_count, dtype=torch.float16)
        blocks = -(-out // LANES)
        if out % LANES:
            codes.view(blocks, -1)[-1] = _ZERO.get(form.name, 0)
            scales.view(blocks, -1)[-1] = 0
        return cls(out, inner, form.name, form.group, codes, scales, bias, form.super, form.minima)

    @property
    def depth(self) -> int:
        """The number of inputs, padded to whole slabs."""
        return -(-self.inner // self.slab.inputs) * self.slab.inputs

    @property
    def form(self) -> WeightFormat:
        return WeightFormat(self.format, self.group, self.super, self.minima)

    @property
    def slab(self) -> Slab:
        return SLABS[self.format]

    @property
    def numel(self) -> int:
        """The number of weights, without padding."""
        return self.out * self.inner

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and bias."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def pack_rows(self, first: int, rows: torch.Tensor) -> int:
        """Pack rows [n, inner] (float32, bfloat16 or float16) as the outputs from `first` on; write nothing else.

        Returns the number of values that are not finite in this format; in quantised formats a bad value counts its
        whole group. If it is not 0, the written rows are invalid.
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
        self._place(first, codes.to(torch.uint8).flatten(1), scales)
        sound = (groups.isfinite().all(-1) & scales.isfinite()).repeat_interleave(self.group, -1)
        return int((~sound[:, : self.inner]).sum())

    def put_codes(self, first: int, codes: torch.Tensor, scales: torch.Tensor) -> int:
        """Write rows that are quantised already as the outputs from `first` on.

        codes: uint8 [n, inner], as they are stored here (an offset added, unless there are minima). scales: float16
        [n, inner / group]; with minima or super-blocks their records, uint8 [n, records * record_bytes]: the float16
        scale and minimum, then for each group of the super-block the integers that multiply them. Returns the number of
        float16 numbers that are not finite, and one more if an int8 code is -128, which no kernel expects.
        """
        span = self.super or self.group
        assert codes.shape[1] == self.inner and self.inner % span == 0, "the groups are whole"
        pad = self.depth - self.inner
        codes = torch.nn.functional.pad(codes, (0, pad), value=0 if self.minima else _OFFSETS[self.format])
        below = self.format == "int8" and int(codes.min()) == 0
        if not (self.super or self.minima):
            self._place(first, codes, torch.nn.functional.pad(scales, (0, pad // span)))
            return below + int((~scales.isfinite()).sum())
        records = torch.nn.functional.pad(scales, (0, pad // span * record_bytes(self)))
        records = records.view(len(codes), self.depth // span, record_bytes(self))
        self._place(first, codes, records)
        return below + int((~self._halves_of(records).isfinite()).sum())

    def stored_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of the whole matrix, as `put_codes` takes them; without minima and super-blocks."""
        assert self.inner % self.group == 0 and not (self.super or self.minima), "the groups are whole and plain"
        units = self._units().permute(0, 3, 1, 2, 4).flatten(0, 1)
        codes = self._numbers(units)[: self.out]
        scales = self._scales().transpose(1, 2).flatten(0, 1)[: self.out, : self.inner // self.group]
        return codes, scales

    def _place(self, first: int, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write codes [n, depth] (uint8, one to a byte), and scales [n, groups] or records [n, records, bytes]."""
        ids = torch.arange(first, first + len(codes))
        blocks, lanes = ids // LANES, ids % LANES
        if self.super or self.minima:
            wide, narrow = self._records()
            wide[blocks, :, :, lanes] = self._halves_of(scales)
            narrow[blocks, :, :, lanes] = scales[..., 2 * (1 + self.minima) :].view(torch.int8)
        else:
            self._scales()[blocks, :, lanes] = scales
        units = codes.view(len(codes), -1, self.slab.inputs)  # [n, slabs, inputs]
        if self.format != "int8":
            units = self._joined(units)
        words = units.contiguous().view(torch.int32).view(len(codes), -1, self.slab.lines)  # four codes of an output
        target = self.codes.view(torch.int32).view(-1, words.shape[1], self.slab.lines, LANES)
        if first % LANES or len(codes) % LANES:
            target[blocks, :, :, lanes] = words
        else:  # whole blocks, which copy faster
            at = first // LANES
            target[at : at + len(codes) // LANES] = words.view(-1, LANES, *words.shape[1:]).permute(0, 2, 3, 1)

    def _joined(self, codes: torch.Tensor) -> torch.Tensor:
        """The bytes [n, slabs, bytes] of codes [n, slabs, 64] of four bits or more."""
        lower = codes & 15
        both = lower[..., :32] | lower[..., 32:] << 4
        if self.format == "int4":
            return both
        bits = _UPPER_BITS[self.format]
        pieces = (codes >> 4).view(*codes.shape[:2], -1, 8 // bits, 4)  # [n, slabs, lines, pieces, 4]
        places = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
        upper = (pieces << places).sum(-2, dtype=torch.uint8)
        return torch.cat((both, upper.flatten(-2)), -1)

    def _halves_of(self, records: torch.Tensor) -> torch.Tensor:
        """The float16 numbers [n, records, 1 or 2] of records [n, records, bytes]."""
        return records[..., : 2 * (1 + self.minima)].contiguous().view(torch.float16)

    def split(self, count: int) -> "list[Packed]":
        """`count` matrices of equally many outputs, one after another, as views; each must be whole blocks."""
        out = self.out // count
        assert out * count == self.out and out % LANES == 0, "each is whole blocks"
        codes, scales = self.codes.view(count, -1), self.scales.view(count, -1)
        biases = [None] * count if self.bias is None else list(self.bias.view(count, -1))
        return [
            replace(self, out=out, codes=codes[i], scales=scales[i], bias=biases[i])  # as views
            for i in range(count)
        ]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The decoded weights [n, inner] in fp32 of the outputs `ids` [n]."""
        blocks, lanes = ids // LANES, ids % LANES
        levels = self._levels(blocks)[torch.arange(len(ids)), ..., lanes]
        return self._decoded(self._units()[blocks, :, :, lanes], levels)

    def blocks(self, first: int, last: int) -> torch.Tensor:
        """Blocks [first, last), decoded: [16 (last - first), inner] fp32, fewer rows at the matrix's end."""
        units = self._units()[first:last].permute(0, 3, 1, 2, 4).flatten(0, 1)
        levels = self._levels(slice(first, last)).permute(0, 3, 1, 2).flatten(0, 1)
        return self._decoded(units, levels)[: self.out - first * LANES]

    def unpack(self) -> torch.Tensor:
        """The whole matrix, decoded: [out, inner] fp32."""
        return self.blocks(0, -(-self.out // LANES))

    def _decoded(self, units: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """Weights [n, inner] in fp32 from units [n, slabs, lines, per_unit] and levels [n, groups, 1 or 2]."""
        numbers = self._numbers(units)
        if not self.group:
            return numbers.float()
        scales, *minima = levels.repeat_interleave(self.group, 1)[:, : self.inner].unbind(-1)
        return numbers.float() * scales - minima[0] if minima else (numbers.float() - _OFFSETS[self.format]) * scales

    def _levels(self, blocks: torch.Tensor | slice) -> torch.Tensor:
        """The scales of some blocks, and where there are any the minima: fp32 [blocks, groups, 1 or 2, 16]."""
        if not (self.super or self.minima):
            return self._scales()[blocks].float()[:, :, None]
        wide, narrow = (one[blocks] for one in self._records())
        levels = wide.float()[:, :, None]  # [blocks, super-blocks, 1, fields, 16]
        if self.super:
            levels = levels * narrow.float().view(*narrow.shape[:2], -1, 1 + self.minima, LANES)
        return levels.flatten(1, 2)

    def _numbers(self, units: torch.Tensor) -> torch.Tensor:
        """Codes, or numbers of formats without scales, [n, inner] of units [n, slabs, lines, per_unit]."""
        if self.format in ("int4", *_UPPER_BITS):
            lower = units[:, :, :8]
            codes = torch.stack((lower & 15, lower >> 4), 2).flatten(2)  # [n, slabs, 64]
            if self.format != "int4":
                bits = _UPPER_BITS[self.format]
                places = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
                upper = units[:, :, 8:, None] >> places & (1 << bits) - 1  # [n, slabs, lines, pieces, 4]
                codes = codes | upper.flatten(2) << 4
            units = codes
        return units.reshape(len(units), self.depth)[:, : self.inner]

    def _units(self) -> torch.Tensor:
        """The codes as [blocks, slabs, lines, 16, per_unit]."""
        slab = self.slab
        units = self.codes.view(slab.dtype)
        return units.view(-1, self.depth // slab.inputs, slab.lines, LANES, slab.per_unit)

    def _records(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The float16 numbers [blocks, records, 1 or 2, 16] and the integers [blocks, records, 1 or 2 a group, 16]."""
        fields = 1 + self.minima
        memory = self.scales.view(torch.uint8).view(-(-self.out // LANES), self.depth // (self.super or self.group), -1)
        wide = memory[..., : 2 * fields * LANES].view(torch.float16).view(*memory.shape[:2], fields, LANES)
        integers = self.super // self.group * fields if self.super else 0
        return wide, memory[..., 2 * fields * LANES :].view(torch.int8).view(*memory.shape[:2], integers, LANES)

    def _scales(self) -> torch.Tensor:
        """The scales as [blocks, groups, 16]; groups is 0 for formats without scales."""
        groups = self.depth // self.group if self.group else 0
        return self.scales.view(-(-self.out // LANES), groups, LANES)


def aligned_bytes(nbytes: int) -> torch.Tensor:
    """Allocate bytes [nbytes], 64-byte aligned; from 4 MiB on in huge pages of 2 MiB, if the system has them.

    A sum over a gigabyte took 15 % less time than in pages of 4 KiB, because of fewer TLB misses.
    """
    if nbytes < 2 * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    room = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    with suppress(OSError):  # a kernel built without huge pages
        room.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return whole[start : start + nbytes]


def _int8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 1..255 of groups [n, G, group] in fp32, and their scales [n, G]."""
    scales = (groups.abs().amax(-1) / 127).half()
    return _codes(groups, scales).clamp(-127, 127) + 128, scales


def _int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0..15 of groups [n, G, group] in fp32, and their scales [n, G]: the first of least squared error."""
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
    """round(x / scale) in fp32; 0 if the scale is 0."""
    steps = scales.float()[..., None]
    return torch.where(steps == 0, 0.0, groups / torch.where(steps == 0, 1.0, steps)).round()


def _error(groups: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Sum of squared differences [n, G], in the order of inputs.

    Each difference is truncated to 12 bits, so that its square is exact: then a fused multiply-add gives the same sum.
    """
    differences = ((groups - kept).view(torch.int32) & _CUT).view(torch.float32)
    total = torch.zeros_like(groups[..., 0])
    for square in differences.square().unbind(-1):
        total = total + square
    return total
