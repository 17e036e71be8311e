"""Integers in groups, w = (code - zero) * scale: AutoGPTQ's and AutoAWQ's packing, and compressed-tensors'."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Array, Bytes, Floats, narrowed
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.quantised.codecs import WORD, Parts, unpacked
from tokenwright.formats import WeightFormat

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # output k of a word is its nibble _AWQ_ORDER[k]
_SPANS = (256, 128, 64, 32)  # inputs with one scale in our forms: of a super-block, or a group


Shorts = NDArray[Any]
Indices = NDArray[np.int64]


class _Grouped(NamedTuple):
    codes: Shorts  # [out, in], unpacked
    zeros: Shorts  # [out, groups]
    scales: Array  # [out, groups]
    group_of: Indices  # each input's group [in]

    def numbers(self) -> Floats:
        steps = self.codes - self.zeros[:, self.group_of]
        numbers: Floats = steps.astype(np.float32) * self.scales.astype(np.float32)[:, self.group_of]
        return numbers

    def packed(self, form: WeightFormat) -> tuple[Bytes, Array]:
        if form.minima:
            return self.codes.astype(np.uint8), self._records(form)
        middle = 128 if form.name == "int8" else 8
        codes = (self.codes - self.zeros[:, self.group_of] + middle).astype(np.uint8)
        return codes, _halves(self.scales)[:, self.group_of[:: form.group]]

    def _records(self, form: WeightFormat) -> Bytes:
        of_super, times = self.group_of[:: form.super], form.super // form.group
        scales, zeros = _halves(self.scales)[:, of_super], self.zeros[:, of_super]
        halves = np.stack((scales, scales), -1).view(np.uint8)  # [out, super-blocks, 4]
        pairs = np.stack((np.ones_like(zeros), zeros), -1).astype(np.uint8)
        return np.concatenate((halves, np.tile(pairs, (1, 1, times))), -1).reshape(len(scales), -1)


def _halves(scales: Array) -> NDArray[np.float16]:
    return narrowed(scales, np.dtype(np.float16))


def _form_of_groups(bits: int, zeros: Shorts, scales: Array, group_of: Indices) -> WeightFormat | None:
    """The form of codes that fill groups of ours and whose scales fit float16, or None."""
    inner = len(group_of)
    span = next((one for one in _SPANS if inner % one == 0 and _constant_within(group_of, one)), None)
    if bits != 4 or span is None or not np.array_equal(_halves(scales).astype(scales.dtype), scales):
        return None
    if bool((zeros == 8).all()):
        return WeightFormat("int4", min(span, 64))
    return WeightFormat("int4", 32, span, minima=True) if span > 32 else WeightFormat("int8", 32)


def _constant_within(group_of: Indices, size: int) -> bool:
    blocks = group_of.reshape(-1, size)
    return bool((blocks == blocks[:, :1]).all())


def _groups(inner: int, count: int) -> Indices:
    return np.arange(inner) // max(1, -(-inner // count))


class _Integers(ABC):
    __slots__ = ()
    bits: int

    def form(self, small: Parts, inner: int) -> WeightFormat | None:
        return _form_of_groups(self.bits, *self._groups(small, inner))

    def numbers(self, parts: Parts) -> Floats:
        return self._grouped(parts).numbers()

    def codes(self, parts: Parts, form: WeightFormat) -> tuple[Bytes, Array]:
        return self._grouped(parts).packed(form)

    def _grouped(self, parts: Parts) -> _Grouped:
        codes = self._codes(parts)
        return _Grouped(codes, *self._groups(parts, codes.shape[1]))

    @abstractmethod
    def _codes(self, parts: Parts) -> Shorts:
        """[out, in], unpacked."""

    @abstractmethod
    def _groups(self, parts: Parts, inner: int) -> tuple[Shorts, Array, Indices]:
        """The other fields of `_Grouped`."""


def _order_of(parts: Parts, key: str, inner: int, count: int) -> Indices:
    """The group of each input: in order, unless a tensor names groups. Raises ValueError for unknown groups."""
    order = parts.get(key)
    if order is None or bool((order == -1).all()):  # -1, or an empty one: in order
        return _groups(inner, count)
    if bool((order < 0).any()) or bool((order >= count).any()):
        raise ValueError(f"{key} names groups beyond {count}")
    return order.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Gptq(_Integers):
    """GPTQ: words along the inputs, zeros along the outputs (less one in version 1), and each input's group."""

    bits: int
    less_one: bool
    small: tuple[str, ...] = ("qzeros", "scales", "g_idx")

    @property
    def title(self) -> str:
        return f"GPTQ int{self.bits}"

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        packed, scales, zeros = parts["qweight"], parts["scales"], parts["qzeros"]
        if len(packed.shape) != 2 or len(scales.shape) != 2 or {packed.dtype, zeros.dtype} != {"I32"}:
            return None
        out, inner, groups = packed.shape[1], packed.shape[0] * WORD // self.bits, scales.shape[0]
        order, words = parts.get("g_idx"), -(-out * self.bits // WORD)
        fits = scales.shape == (groups, out) and zeros.shape == (groups, words) and 0 < groups <= inner
        ordered = inner % max(1, groups) == 0 if order is None else order.shape in ((inner,), (0,))
        return (out, inner) if fits and ordered else None

    def _codes(self, parts: Parts) -> Shorts:
        return unpacked(parts["qweight"].T, self.bits)

    def _groups(self, parts: Parts, inner: int) -> tuple[Shorts, Array, Indices]:
        scales = parts["scales"]
        zeros = unpacked(parts["qzeros"], self.bits)[:, : scales.shape[1]] + self.less_one & (1 << self.bits) - 1
        return zeros.T, scales.T, _order_of(parts, "g_idx", inner, len(scales))


@dataclass(frozen=True, slots=True)
class Awq(_Integers):
    """AWQ (gemm): words along the outputs in their own order, zeros as they are."""

    title: str = "AWQ int4"
    bits: int = 4
    small: tuple[str, ...] = ("qzeros", "scales")

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        packed, scales, zeros = parts["qweight"], parts["scales"], parts["qzeros"]
        if len(packed.shape) != 2 or len(scales.shape) != 2 or {packed.dtype, zeros.dtype} != {"I32"}:
            return None
        inner, words = packed.shape
        groups = scales.shape[0]
        fits = scales.shape == (groups, words * 8) and zeros.shape == (groups, words) and 0 < groups <= inner
        return (words * 8, inner) if fits and inner % groups == 0 else None

    def _codes(self, parts: Parts) -> Shorts:
        return self._in_order(parts["qweight"]).T

    def _groups(self, parts: Parts, inner: int) -> tuple[Shorts, Array, Indices]:
        return self._in_order(parts["qzeros"]).T, parts["scales"].T, _groups(inner, len(parts["scales"]))

    @staticmethod
    def _in_order(words: Array) -> Shorts:
        return unpacked(words, 4).reshape(len(words), -1, 8)[..., list(_AWQ_ORDER)].reshape(len(words), -1)


@dataclass(frozen=True, slots=True)
class PackedIntegers(_Integers):
    """compressed-tensors, pack-quantized: words along the inputs; zeros, if any, along the outputs. No code is cut."""

    bits: int
    inner: int
    small: tuple[str, ...] = ("weight_scale", "weight_zero_point", "weight_g_idx")

    @property
    def title(self) -> str:
        return f"compressed-tensors int{self.bits}"

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        packed, scales = parts["weight_packed"], parts.get("weight_scale")
        if scales is None or packed.dtype != "I32" or len(packed.shape) != 2 or len(scales.shape) != 2:
            return None
        pack, inner = WORD // self.bits, self.inner
        (out, words), groups = packed.shape, scales.shape[1]
        zeros, order = parts.get("weight_zero_point"), parts.get("weight_g_idx")
        fits = scales.shape[0] == out and 0 < groups <= inner <= words * pack and inner % groups == 0
        fits = fits and (zeros is None or (zeros.dtype == "I32" and zeros.shape == (-(-out // pack), groups)))
        return (out, inner) if fits and (order is None or order.shape == (inner,)) else None

    def _codes(self, parts: Parts) -> Shorts:
        return unpacked(parts["weight_packed"], self.bits, cut=False)[:, : self.inner]

    def _groups(self, parts: Parts, inner: int) -> tuple[Shorts, Array, Indices]:
        scales, zeros = parts["weight_scale"], np.array(1 << (self.bits - 1), np.int16)
        if "weight_zero_point" in parts:
            zeros = unpacked(parts["weight_zero_point"].T, self.bits, cut=False).T[: len(scales)]
        order = _order_of(parts, "weight_g_idx", inner, scales.shape[1])
        return np.broadcast_to(zeros, scales.shape), scales, order
