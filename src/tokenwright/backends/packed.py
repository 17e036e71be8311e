"""Packed weights: a matrix in the kernels' memory order, quantised if its format says so.

A matrix [out, in] is blocks of 16 outputs, each of slabs of inputs (drawn in `native/cpp/api.h`), padded with zeros.

    float32, bfloat16, float16    the numbers, rounded to nearest
    int8    round(x / scale) from -127 to 127, scale = max |x| / 127; stored with 128 added
    int4    round(x / scale) from -8 to 7, with the best scale among `DIVISORS`; stored with 8 added, two to a byte

Each output has a float16 scale for every `group` inputs. `NativeKernels.pack` writes the same bytes. Only from files:

    int5, int6      as int4, stored with 16 or 32 added; the bits above the fourth are stored apart
    int2, int1      -1, 0, 1 and 2, or -1 and 1; stored with 1 added, in two bits or one
    of `TABLES`     a code is the index of a number
    super-blocks    a group's scale is an integer times the float16 scale of its `super` inputs; of int2 and int1 that
    factors         of all sums of an output, in fp32
    minima          a weight is scale * code - minimum, with codes from 0 on; in super-blocks a minimum is a product too
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import BFLOAT16, Array, Bytes, Floats, aligned_bytes, as_bytes, empty, narrowed, padded, widened
from tokenwright.backends.rounding import Halves, int4, int8
from tokenwright.errors import EngineError
from tokenwright.formats import TABLES, WeightFormat
from tokenwright.regular_file import open_regular

LANES = 16


@dataclass(frozen=True, slots=True)
class Slab:
    """The weights of 16 outputs at `inputs` inputs: `lines` lines of 16 units of `per_unit` numbers."""

    inputs: int
    lines: int
    per_unit: int
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return self.lines * LANES * self.per_unit * self.dtype.itemsize


SLABS: Mapping[str, Slab] = {
    "float32": Slab(16, 16, 1, np.dtype(np.float32)), "bfloat16": Slab(32, 16, 2, BFLOAT16),
    "float16": Slab(32, 16, 2, np.dtype(np.float16)), "int8": Slab(64, 16, 4, np.dtype(np.uint8)),
    "int4": Slab(64, 8, 4, np.dtype(np.uint8)), "int5": Slab(64, 10, 4, np.dtype(np.uint8)),
    "int6": Slab(64, 12, 4, np.dtype(np.uint8)), "int2": Slab(64, 4, 4, np.dtype(np.uint8)),
    "int1": Slab(64, 2, 4, np.dtype(np.uint8)), **dict.fromkeys(TABLES, Slab(64, 8, 4, np.dtype(np.uint8))),
}  # fmt: skip
_ZERO = {"int8": 128, "int4": 0x88}  # the byte of zero weights
_OFFSETS = {"int8": 128, "int4": 8, "int5": 16, "int6": 32, "int2": 1, "int1": 1}  # added to codes without minima
_TERNARY = {"int2": 2, "int1": 1}  # bits
_UPPER_BITS = {"int5": 1, "int6": 2, **_TERNARY}  # those above the lower four, or all
# Exchanges of bits of four bytes, which bring their codes to the places of ours.
_SWAPS = {"int2": ((6, 0xCC00CC), (12, 0xF0F0)), "int1": ((14, 0xCCCC), (7, 0xAA00AA), (2, 0xC0C0C0C), (1, 0x22222222))}
_PLACES = {bits: np.arange(0, 8, bits, dtype=np.uint8)[:, None] for bits in (1, 2)}


def record_bytes(form: "WeightFormat | Packed") -> int:
    """Bytes of scales and minima of one output in a super-block or group."""
    name = form.format if isinstance(form, Packed) else form.name
    return (1 + form.minima) * (2 + (form.super // form.group if form.super and name not in _TERNARY else 0))


def packed_sizes(out: int, inner: int, form: WeightFormat) -> tuple[int, int]:
    """Bytes of codes, and scales in units of two bytes, of a matrix in a resolved format (not native)."""
    slab = SLABS[form.name]
    blocks, slabs = -(-out // LANES), -(-inner // slab.inputs)
    records = slabs * slab.inputs // (form.super or form.group) if form.group else 0
    return blocks * slabs * slab.nbytes, blocks * records * LANES * record_bytes(form) // 2


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A file, and where the codes and the scales of a matrix begin in it."""

    file: Path
    codes: int
    scales: int

    def fault(self, why: str | None) -> EngineError:
        name = self.file.name
        return EngineError(f"an expert of the model cannot be read from {name} ({why}); look at its disk")


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A packed weight [out, inner] with an optional bias [out]."""

    out: int
    inner: int
    format: str
    group: int  # inputs of a scale: 16, 32, 64, or 0
    codes: Bytes  # uint8, flat, 64-byte aligned
    scales: Halves  # flat, [block][depth / group][16]; minima and super-blocks as in api.h
    bias: Floats | None = None
    super: int = 0  # inputs of a super-block: 64, 128, 256, or 0
    minima: bool = False
    factors: Floats | None = None  # [out]
    on_disk: OnDisk | None = None  # for experts that are read when a router chooses them: the arrays are empty

    @classmethod
    def empty(cls, out: int, inner: int, form: WeightFormat, bias: Floats | None = None) -> "Packed":
        """Allocate a matrix for `pack_rows` to fill, with the padding of outputs written."""
        code_bytes, scale_count = packed_sizes(out, inner, form)
        return cls.over(out, inner, form, aligned_bytes(code_bytes), empty(scale_count, np.float16), bias)

    @classmethod
    def over(
        cls, out: int, inner: int, form: WeightFormat, codes: Bytes, scales: Halves, bias: Floats | None = None
    ) -> "Packed":
        if out % LANES and codes.size:
            codes.reshape(-(-out // LANES), -1)[-1] = _ZERO.get(form.name, 0)
            scales.reshape(-(-out // LANES), -1)[-1] = 0
        factors = np.ones(out, np.float32) if form.factors else None
        return cls(out, inner, form.name, form.group, codes, scales, bias, form.super, form.minima, factors)

    @property
    def depth(self) -> int:
        """Inputs, padded to whole slabs."""
        return -(-self.inner // self.slab.inputs) * self.slab.inputs

    @property
    def form(self) -> WeightFormat:
        return WeightFormat(self.format, self.group, self.super, self.minima, self.factors is not None)

    @property
    def slab(self) -> Slab:
        return SLABS[self.format]

    @property
    def _lower(self) -> int:
        """The lower bits of codes that lie two to a byte."""
        return 4 if self.slab.dtype == np.uint8 and self.format != "int8" and self.format not in _TERNARY else 0

    @property
    def numel(self) -> int:
        return self.out * self.inner

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.codes, self.scales, self.bias, self.factors) if one is not None)

    def pack_rows(self, first: int, rows: Array) -> int:
        """Pack rows [n, inner] (float32, bfloat16 or float16) as the outputs from `first` on.

        Returns the number of values that are not finite in this format, by whole groups; if any, the rows are invalid.
        """
        assert rows.shape[1] == self.inner and first + len(rows) <= self.out, "the rows belong to this matrix"
        slab, whole = self.slab, padded(rows, self.depth)
        ids = np.arange(first, first + len(rows))
        blocks, lanes = ids // LANES, ids % LANES
        if not self.group:
            kept = narrowed(whole, slab.dtype)
            self._units()[blocks, :, :, lanes] = kept.reshape(len(rows), -1, slab.lines, slab.per_unit)
            return int((~np.isfinite(widened(kept))).sum())
        groups = widened(whole).reshape(len(rows), self.depth // self.group, self.group)
        with np.errstate(all="ignore"):  # counted below
            codes, scales = (int8 if self.format == "int8" else int4)(groups)
            self._place(first, codes.astype(np.uint8).reshape(len(rows), -1), scales)
        sound = (np.isfinite(groups).all(-1) & np.isfinite(scales)).repeat(self.group, -1)
        return int((~sound[:, : self.inner]).sum())

    def put_codes(self, first: int, codes: Bytes, scales: Array) -> int:
        """Write quantised rows as the outputs from `first` on.

        codes: uint8 [n, inner] with their offset, unless there are minima; of int1 and int2 also bytes of several, the
        first one lowest. scales: float16 [n, inner / group], or
        records uint8 [n, records * record_bytes]: the float16 scale and minimum, then the integers that multiply them.
        With factors, bytes that end in each row's. Returns the number of scales and factors that are not finite, and
        one more if an int8 code is -128.
        """
        wrong = 0
        if self.factors is not None:
            ends = np.ascontiguousarray(scales[:, -4:]).view(np.float32)[:, 0]
            self.factors[first : first + len(ends)] = ends
            wrong, scales = int((~np.isfinite(ends)).sum()), np.ascontiguousarray(scales[:, :-4])
            scales = scales if self.super else scales.view(np.float16)
        span = self.super or self.group
        several = self.format in _TERNARY and codes.shape[1] < self.inner == self.depth
        assert (several or codes.shape[1] == self.inner) and self.inner % span == 0, "the groups are whole"
        records, zero = self.depth // span, 0 if self.minima else _OFFSETS.get(self.format, 0)
        fresh = codes if several else padded(codes, self.depth, zero)
        wrong += self.format == "int8" and int(fresh.min()) == 0
        if not (self.super or self.minima):
            self._place(first, fresh, padded(scales, records))
            return wrong + int((~np.isfinite(scales)).sum())
        size = record_bytes(self)
        rows = padded(scales, records * size).reshape(len(codes), records, size)
        self._place(first, fresh, rows)
        return wrong + int((~np.isfinite(self._halves_of(rows))).sum())

    def _place(self, first: int, codes: Bytes, scales: Array) -> None:
        count = len(codes)
        ids = np.arange(first, first + count)
        blocks, lanes = ids // LANES, ids % LANES
        if self.super or self.minima:
            wide, narrow = self._records()
            wide[blocks, :, :, lanes] = self._halves_of(scales)
            narrow[blocks, :, :, lanes] = scales[..., 2 * (1 + self.minima) :].view(np.int8)
        else:
            self._scales()[blocks, :, lanes] = scales
        units = codes.reshape(count, self.depth // self.slab.inputs, -1)  # [n, slabs, inputs]
        if self.format != "int8":
            units = self._joined(units)
        words = np.ascontiguousarray(units).view(np.int32).reshape(count, -1, self.slab.lines)
        target = self.codes.view(np.int32).reshape(-1, words.shape[1], self.slab.lines, LANES)
        if first % LANES or count % LANES:
            target[blocks, :, :, lanes] = words
        else:  # whole blocks, which copy faster
            at = first // LANES
            target[at : at + count // LANES] = words.reshape(-1, LANES, *words.shape[1:]).transpose(0, 2, 3, 1)

    def _joined(self, codes: Bytes) -> Bytes:
        """[n, slabs, 64] codes -> [n, slabs, bytes]."""
        bits = _UPPER_BITS.get(self.format, 0)
        if codes.shape[-1] < self.slab.inputs:
            words: Any = np.ascontiguousarray(codes).view(np.uint32)
            for shift, mask in _SWAPS[self.format]:
                moved = (words ^ words >> shift) & mask
                words = words ^ moved ^ moved << shift
            joined: Bytes = words.view(np.uint8)
            return joined
        lower = codes & 15
        both: Bytes = lower[..., :32] | lower[..., 32:] << 4
        if not bits:
            return both
        shift = self._lower or 2 - bits  # a bit of int1 is twice as much
        pieces = (codes >> shift).view(np.uint32).reshape(*codes.shape[:2], -1, 8 // bits)  # four codes in each
        upper: Bytes = reduce(np.bitwise_or, (pieces[..., at] << at * bits for at in range(8 // bits))).view(np.uint8)
        return np.concatenate((both, upper), -1) if self._lower else upper

    def _halves_of(self, records: Bytes) -> Halves:
        return np.ascontiguousarray(records[..., : 2 * (1 + self.minima)]).view(np.float16)

    def split(self, count: int) -> "list[Packed]":
        """Views of `count` matrices of equally many outputs, each whole blocks."""
        out = self.out // count
        assert out * count == self.out and out % LANES == 0, "each is whole blocks"
        codes, scales = self.codes.reshape(count, -1), self.scales.reshape(count, -1)
        vectors = ([None] * count if one is None else one.reshape(count, -1) for one in (self.bias, self.factors))
        disks = [None if self.on_disk is None else self._part(self.on_disk, out, at) for at in range(count)]
        each = zip(codes, scales, *vectors, disks, strict=True)
        return [replace(self, out=out, codes=c, scales=s, bias=b, factors=f, on_disk=d) for c, s, b, f, d in each]

    def _part(self, disk: OnDisk, out: int, at: int) -> OnDisk:
        codes, scales = packed_sizes(out, self.inner, self.form)
        return OnDisk(disk.file, disk.codes + at * codes, disk.scales + 2 * at * scales)

    def in_memory(self) -> "Packed":
        """This matrix, or a copy read from the disk. Raises EngineError."""
        if self.on_disk is None:
            return self
        codes, scales = packed_sizes(self.out, self.inner, self.form)
        read = replace(self, codes=aligned_bytes(codes), scales=empty(scales, np.float16), on_disk=None)
        try:
            with open_regular(self.on_disk.file) as stream:
                for start, part in ((self.on_disk.codes, read.codes), (self.on_disk.scales, read.scales)):
                    stream.seek(start)
                    if stream.readinto(as_bytes(part).data) != part.nbytes:
                        raise OSError(None, "it ends too early")
        except OSError as error:
            raise self.on_disk.fault(error.strerror) from error
        return read

    def cut(self, ids: NDArray[np.int64]) -> "Packed":
        """A copy of the outputs `ids` [n], in their order."""
        biases = None if self.bias is None else self.bias[ids]
        factors = None if self.factors is None else self.factors[ids]
        cut = replace(Packed.empty(len(ids), self.inner, self.form, biases), factors=factors)
        if not len(ids):
            return cut
        filled = np.append(ids, ids[-1:].repeat(-len(ids) % LANES)).reshape(-1, LANES)  # whole blocks
        if (filled == filled[:, :1] // LANES * LANES + np.arange(LANES)).all():
            blocks = filled[:, 0] // LANES
            for mine, theirs in ((cut.codes, self.codes), (cut.scales, self.scales)):
                mine.reshape(len(blocks), -1)[:] = theirs.reshape(-(-self.out // LANES), -1)[blocks]
            return cut
        pairs = [(cut._units(), self._units())]
        if self.super or self.minima:
            pairs += zip(cut._records(), self._records(), strict=True)
        elif self.group:
            pairs.append((cut._scales(), self._scales()))
        for lane in range(LANES):
            blocks, lanes = filled[:, lane] // LANES, filled[:, lane] % LANES
            for mine, theirs in pairs:
                at = 3 if mine is pairs[0][0] or mine.ndim == 4 else 2
                np.moveaxis(mine, at, 1)[:, lane] = np.moveaxis(theirs, at, 1)[blocks, lanes]
        return cut

    def rows(self, ids: NDArray[np.int64]) -> Floats:
        """The decoded weights [n, inner] in fp32 of the outputs `ids` [n]."""
        blocks, lanes = ids // LANES, ids % LANES
        levels = self._levels(blocks)[np.arange(len(ids)), ..., lanes]
        return self._decoded(self._units()[blocks, :, :, lanes], levels, ids)

    def blocks(self, first: int, last: int) -> Floats:
        """Blocks [first, last), decoded: at most [16 (last - first), inner] fp32."""
        units, levels = _by_output(self._units()[first:last], 3), _by_output(self._levels(slice(first, last)), 3)
        outputs = min(last * LANES, self.out) - first * LANES
        return self._decoded(units[:outputs], levels[:outputs], slice(first * LANES, first * LANES + outputs))

    def unpack(self) -> Floats:
        return self.blocks(0, -(-self.out // LANES))

    def _decoded(self, units: Array, levels: Floats, outputs: NDArray[np.int64] | slice) -> Floats:
        """Weights [n, inner] of units [n, slabs, lines, per_unit] and levels [n, groups, 1 or 2]."""
        numbers = widened(self._numbers(units))
        if not self.group:
            return numbers
        each = levels.repeat(self.group, 1)[:, : self.inner]
        if self.format in TABLES:
            numbers = np.array(TABLES[self.format], np.float32)[numbers.astype(np.uint8)]
        elif each.shape[-1] == 1:
            numbers = numbers - np.float32(_OFFSETS[self.format])
        scaled = numbers * each[..., 0]
        if each.shape[-1] > 1:
            return scaled - each[..., 1]
        return scaled if self.factors is None else scaled * self.factors[outputs, None]

    def _levels(self, blocks: NDArray[np.int64] | slice) -> Floats:
        """Scales and minima of some blocks: fp32 [blocks, groups, 1 or 2, 16]."""
        if not (self.super or self.minima):
            return self._scales()[blocks].astype(np.float32)[:, :, None]
        wide, narrow = (one[blocks] for one in self._records())
        levels = wide.astype(np.float32)[:, :, None]  # [blocks, super-blocks, 1, fields, 16]
        if self.format in _TERNARY:
            levels = levels.repeat(self.super // self.group, 2)
        elif self.super:
            integers = narrow.astype(np.float32).reshape(*narrow.shape[:2], -1, 1 + self.minima, LANES)
            levels = levels * integers
        return levels.reshape(len(levels), -1, *levels.shape[-2:])

    def _numbers(self, units: Array) -> Array:
        """Codes, or unscaled numbers, [n, inner] of units [n, slabs, lines, per_unit]."""
        if self._lower:
            lower = units[:, :, :8]
            codes = np.stack((lower & 15, lower >> 4), 2).reshape(*units.shape[:2], -1)  # [n, slabs, 64]
        if bits := _UPPER_BITS.get(self.format):
            pieces = units[:, :, 2 * self._lower :, None] >> _PLACES[bits] & (1 << bits) - 1
            upper = pieces.reshape(*units.shape[:2], -1)
            units = codes | upper << 4 if self._lower else upper << 2 - bits
        elif self._lower:
            units = codes
        return units.reshape(len(units), self.depth)[:, : self.inner]

    def _units(self) -> Array:
        slab = self.slab
        units = self.codes.view(slab.dtype)
        return units.reshape(-1, self.depth // slab.inputs, slab.lines, LANES, slab.per_unit)

    def _records(self) -> tuple[Halves, NDArray[np.int8]]:
        """The float16 numbers [blocks, records, 1 or 2, 16], and the integers [blocks, records, 1 or 2 a group, 16]."""
        fields, records = 1 + self.minima, self.depth // (self.super or self.group)
        integers = record_bytes(self) - 2 * fields
        memory = self.scales.view(np.uint8).reshape(-(-self.out // LANES), records, -1)
        wide, narrow = memory[..., : 2 * fields * LANES].view(np.float16), memory[..., 2 * fields * LANES :]
        shape = (len(memory), records)
        return wide.reshape(*shape, fields, LANES), narrow.view(np.int8).reshape(*shape, integers, LANES)

    def _scales(self) -> Halves:
        groups = self.depth // self.group if self.group else 0
        return self.scales.reshape(-(-self.out // LANES), groups, LANES)


def _by_output(blocks: Array, lane: int) -> Array:
    """[blocks, ...] with 16 outputs in dimension `lane` -> [16 blocks, ...]."""
    rows = np.moveaxis(blocks, lane, 1)
    return rows.reshape(LANES * len(blocks), *rows.shape[2:])
