"""How published formats store a quantised matrix [out, in] in several tensors: one codec for each way.

A codec turns the tensors into numbers, w = (code - zero) * scale, or into the codes and scales of one of our packed
forms where that loses nothing:

    4 bits, every zero in the middle, groups of 32 k inputs    int4 in groups of 64 or 32
    4 bits with zeros of their own                             int8: code - zero is from -15 to 15
    MXFP4                                                      int8 in groups of 32
    8 bits, act-order, fp8, nf4                                none; decoded

Sources: AutoGPTQ's and AutoAWQ's packing, transformers' fine-grained fp8, compressed-tensors' pack-quantized,
int-quantized and float-quantized formats, bitsandbytes' serialised state, and the OCP microscaling formats. No files
are read here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch

from tokenwright.checkpoints.safetensors import Stored
from tokenwright.checkpoints.strict import Keys, shown
from tokenwright.config import WeightFormat

Parts = Mapping[str, torch.Tensor]  # the tensors of a matrix by the last part of their names
_WORD = 32  # bits of a packed word
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ keeps the outputs of a word: output k is its nibble _AWQ_ORDER[k]
_LONGEST_STATE = 1 << 16  # bytes of bitsandbytes' description of a matrix
_GROUPS = (64, 32)  # inputs that share a scale in our forms


class Codec(Protocol):
    """One way to store a matrix in several tensors."""

    @property
    def title(self) -> str:
        """The type's name."""

    @property
    def small(self) -> tuple[str, ...]:
        """The tensors beside the codes, read when a folder is opened to find `form`."""

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        """The matrix's shape [out, in], or None if the shapes of its tensors do not fit together."""

    def form(self, small: Parts, inner: int) -> WeightFormat | None:
        """The packed form that holds the matrix without loss, or None. Raises ValueError for impossible values."""

    def numbers(self, parts: Parts) -> torch.Tensor:
        """The matrix [out, in] in fp32."""

    def codes(self, parts: Parts, form: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes [out, in] (uint8) and scales [out, in / group] (float16) of `form`, as `Packed` stores them."""


class _Grouped(NamedTuple):
    """Unpacked codes [out, in] and zeros [out, groups] (int16), scales [out, groups], and each input's group [in]."""

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group_of: torch.Tensor

    def numbers(self) -> torch.Tensor:
        steps = self.codes - self.zeros[:, self.group_of]
        return steps.float().mul_(self.scales.float()[:, self.group_of])

    def packed(self, form: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
        middle = 128 if form.name == "int8" else 8
        codes = (self.codes - self.zeros[:, self.group_of] + middle).to(torch.uint8)
        return codes, self.scales.half()[:, self.group_of[:: form.group]]


def _form_of_groups(
    bits: int, zeros: torch.Tensor | None, scales: torch.Tensor, group_of: torch.Tensor
) -> WeightFormat | None:
    """The form of codes in groups, if they are whole groups of ours and float16 holds every scale."""
    inner = len(group_of)
    group = next((one for one in _GROUPS if inner % one == 0 and _constant_within(group_of, one)), None)
    if bits != 4 or group is None or not torch.equal(scales.half().to(scales.dtype), scales):
        return None
    middle = zeros is None or bool((zeros == 8).all())
    return WeightFormat("int4" if middle else "int8", group)


def _constant_within(group_of: torch.Tensor, size: int) -> bool:
    blocks = group_of.view(-1, size)
    return bool((blocks == blocks[:, :1]).all())


def _groups(inner: int, count: int) -> torch.Tensor:
    """Each input's group, where `count` groups of the same size follow each other."""
    return torch.arange(inner) // max(1, -(-inner // count))


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The unsigned numbers in int32 words [..., n], the lowest bits first: [..., n * 32 / bits] in int16."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.int16).flatten(-2)


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ: words along the inputs, zeros along the outputs (stored less one in version 1), and each input's group."""

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
        pack = _WORD // self.bits
        out, inner, groups = packed.shape[1], packed.shape[0] * pack, scales.shape[0]
        order = parts.get("g_idx")
        fits = scales.shape == (groups, out) and zeros.shape == (groups, -(-out // pack)) and 0 < groups <= inner
        ordered = inner % max(1, groups) == 0 if order is None else order.shape == (inner,)
        return (out, inner) if fits and ordered else None

    def form(self, small: Parts, inner: int) -> WeightFormat | None:
        return _form_of_groups(self.bits, self._zeros(small), small["scales"], self._group_of(small, inner))

    def numbers(self, parts: Parts) -> torch.Tensor:
        return self._grouped(parts).numbers()

    def codes(self, parts: Parts, form: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
        return self._grouped(parts).packed(form)

    def _grouped(self, parts: Parts) -> _Grouped:
        codes = _unpacked(parts["qweight"].t(), self.bits)  # [out, in]
        order = self._group_of(parts, codes.shape[1])
        return _Grouped(codes, self._zeros(parts).t(), parts["scales"].t(), order)

    def _zeros(self, parts: Parts) -> torch.Tensor:
        """The zeros [groups, out]."""
        zeros = _unpacked(parts["qzeros"], self.bits)[:, : parts["scales"].shape[1]]
        return (zeros + 1) & ((1 << self.bits) - 1) if self.less_one else zeros

    @staticmethod
    def _group_of(parts: Parts, inner: int) -> torch.Tensor:
        count = len(parts["scales"])
        if "g_idx" not in parts:
            return _groups(inner, count)
        order = parts["g_idx"].long()
        if bool((order < 0).any()) or bool((order >= count).any()):
            raise ValueError(f"g_idx names groups beyond {count}")
        return order


@dataclass(frozen=True, slots=True)
class Awq:
    """AWQ (version gemm): four bits, words along the outputs in an order of their own, zeros as they are."""

    title: str = "AWQ int4"
    small: tuple[str, ...] = ("qzeros", "scales")

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        packed, scales, zeros = parts["qweight"], parts["scales"], parts["qzeros"]
        if len(packed.shape) != 2 or len(scales.shape) != 2 or {packed.dtype, zeros.dtype} != {"I32"}:
            return None
        inner, words = packed.shape
        groups = scales.shape[0]
        fits = scales.shape == (groups, words * 8) and zeros.shape == (groups, words) and 0 < groups <= inner
        return (words * 8, inner) if fits and inner % groups == 0 else None

    def form(self, small: Parts, inner: int) -> WeightFormat | None:
        scales = small["scales"]
        return _form_of_groups(4, self._in_order(small["qzeros"]), scales, _groups(inner, len(scales)))

    def numbers(self, parts: Parts) -> torch.Tensor:
        return self._grouped(parts).numbers()

    def codes(self, parts: Parts, form: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
        return self._grouped(parts).packed(form)

    def _grouped(self, parts: Parts) -> _Grouped:
        codes, scales = self._in_order(parts["qweight"]).t(), parts["scales"]
        zeros = self._in_order(parts["qzeros"]).t()
        return _Grouped(codes, zeros, scales.t(), _groups(codes.shape[1], len(scales)))

    @staticmethod
    def _in_order(words: torch.Tensor) -> torch.Tensor:
        """The outputs [n, out] of words [n, out / 8]."""
        return _unpacked(words, 4).view(len(words), -1, 8)[..., list(_AWQ_ORDER)].flatten(-2)


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """compressed-tensors, pack-quantized: words along the inputs; zeros, where there are any, along the outputs."""

    bits: int
    small: tuple[str, ...] = ("weight_scale", "weight_zero_point", "weight_g_idx")

    @property
    def title(self) -> str:
        return f"compressed-tensors int{self.bits}"

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        packed, scales = parts["weight_packed"], parts.get("weight_scale")
        if scales is None or packed.dtype != "I32" or len(packed.shape) != 2 or len(scales.shape) != 2:
            return None
        pack = _WORD // self.bits
        (out, words), groups = packed.shape, scales.shape[1]
        zeros, order = parts.get("weight_zero_point"), parts.get("weight_g_idx")
        inner = words * pack
        fits = scales.shape[0] == out and 0 < groups <= inner and inner % groups == 0
        fits = fits and (zeros is None or (zeros.dtype == "I32" and zeros.shape == (-(-out // pack), groups)))
        return (out, inner) if fits and (order is None or order.shape == (inner,)) else None

    def form(self, small: Parts, inner: int) -> WeightFormat | None:
        scales = small["weight_scale"]
        return _form_of_groups(self.bits, self._zeros(small), scales, self._group_of(small, inner))

    def numbers(self, parts: Parts) -> torch.Tensor:
        return self._grouped(parts).numbers()

    def codes(self, parts: Parts, form: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
        return self._grouped(parts).packed(form)

    def _grouped(self, parts: Parts) -> _Grouped:
        codes, scales = _unpacked(parts["weight_packed"], self.bits), parts["weight_scale"]
        zeros = self._zeros(parts)
        middle = torch.full(scales.shape, 1 << (self.bits - 1), dtype=torch.int16)
        return _Grouped(codes, middle if zeros is None else zeros, scales, self._group_of(parts, codes.shape[1]))

    def _zeros(self, parts: Parts) -> torch.Tensor | None:
        """The zeros [out, groups] as unsigned numbers, as the codes are."""
        if "weight_zero_point" not in parts:
            return None
        return _unpacked(parts["weight_zero_point"].t(), self.bits).t()[: len(parts["weight_scale"])]

    @staticmethod
    def _group_of(parts: Parts, inner: int) -> torch.Tensor:
        count = parts["weight_scale"].shape[1]
        order = parts.get("weight_g_idx")
        if order is None or bool((order == -1).all()):  # -1: in order
            return _groups(inner, count)
        if bool((order < 0).any()) or bool((order >= count).any()):
            raise ValueError(f"weight_g_idx names groups beyond {count}")
        return order.long()


class _Decoded:
    """A codec without a packed form."""

    def form(self, small: Parts, inner: int) -> WeightFormat | None:  # noqa: ARG002  (the answer of others depends on it)
        return None

    def codes(self, parts: Parts, form: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        raise AssertionError("no packed form was offered")


@dataclass(frozen=True, slots=True)
class Scaled(_Decoded):
    """fp8 or int8 numbers with a scale for the matrix, for each output, or for blocks of outputs and inputs."""

    title: str
    dtype: str  # of the numbers, safetensors' name
    scale: str  # the name of the part with the scales
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale; None: by the shape of the scales
    factor: float = 1.0  # of every scale
    small: tuple[str, ...] = ()

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        weight, scale, zero = parts["weight"], parts.get(self.scale), parts.get("weight_zero_point")
        if scale is None or weight.dtype != self.dtype or len(weight.shape) != 2:
            return None
        out, inner = weight.shape
        if self.block is not None:
            fits = scale.shape == (-(-out // self.block[0]), -(-inner // self.block[1]))
        elif prod(scale.shape) in (1, out):
            fits = True
        else:  # groups of inputs
            fits = (
                len(scale.shape) == 2 and scale.shape[0] == out and scale.shape[1] > 0 and inner % scale.shape[1] == 0
            )
        return weight.shape if fits and (zero is None or zero.shape == scale.shape) else None

    def numbers(self, parts: Parts) -> torch.Tensor:
        weight = parts["weight"].float()
        if "weight_zero_point" in parts:
            weight = weight - self._spread(parts["weight_zero_point"].float(), weight.shape)
        return weight * self._spread(parts[self.scale].float() * self.factor, weight.shape)

    def _spread(self, scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Scales for each number of a matrix [out, in], or such that they broadcast to it."""
        if self.block is None and scale.numel() in (1, shape[0]):
            return scale.reshape(-1, 1)
        outs, inputs = self.block or (1, shape[1] // scale.shape[1])
        return scale.repeat_interleave(outs, 0)[: shape[0]].repeat_interleave(inputs, 1)[:, : shape[1]]


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """MXFP4 (OCP microscaling): 4-bit floats, two to a byte, the lower first; 32 of them share a power of two.

    blocks: uint8 [experts, out, groups, 16]; scales: uint8 [experts, out, groups], exponents with 127 added. The
    experts are one matrix, one after another. Twice a number is whole, so int8 holds all but extreme exponents.
    """

    title: str = "MXFP4"
    small: tuple[str, ...] = ("scales",)

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        blocks, scales = parts["blocks"], parts.get("scales")
        if scales is None or {blocks.dtype, scales.dtype} != {"U8"} or len(blocks.shape) != 4:
            return None
        experts, out, groups, half = blocks.shape
        return (experts * out, groups * 32) if scales.shape == (experts, out, groups) and half == 16 else None

    def form(self, small: Parts, inner: int) -> WeightFormat | None:  # noqa: ARG002
        exponents = small["scales"]
        fits = bool((exponents >= 128 - 24).all()) and bool((exponents <= 128 + 15).all())  # powers of two in float16
        return WeightFormat("int8", 32) if fits else None

    def numbers(self, parts: Parts) -> torch.Tensor:
        codes, exponents = self._doubled(parts), parts["scales"].flatten(0, 1).int() - 128
        return torch.ldexp(codes.float().view(*exponents.shape, 32), exponents[..., None]).flatten(1)

    def codes(self, parts: Parts, form: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
        assert form == WeightFormat("int8", 32), "it was offered"
        exponents = parts["scales"].flatten(0, 1).int() - 128
        scales = torch.ldexp(torch.ones(exponents.shape), exponents).half()
        return (self._doubled(parts) + 128).to(torch.uint8), scales

    @staticmethod
    def _doubled(parts: Parts) -> torch.Tensor:
        """Twice the numbers [out, in] without their exponents, in int16."""
        table = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int16)
        blocks = parts["blocks"].flatten(0, 1)  # [out, groups, 16]
        return table[torch.stack((blocks & 15, blocks >> 4), -1).long()].flatten(1)


@dataclass(frozen=True, slots=True)
class FourBit(_Decoded):
    """bitsandbytes' nf4 and fp4: an index into 16 numbers, times the largest magnitude of its block."""

    kind: str
    out: int
    inner: int
    block: int
    nested_block: int
    nested_offset: float
    small: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"bitsandbytes {self.kind}"

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        count = self.out * self.inner
        blocks = -(-count // self.block)
        absmax, table = parts.get("absmax"), parts.get("quant_map")
        if absmax is None or table is None or table.shape != (16,) or absmax.shape != (blocks,) or count % 2:
            return None
        if absmax.dtype == "U8":  # quantised itself
            nested, map_ = parts.get("nested_absmax"), parts.get("nested_quant_map")
            if (
                nested is None
                or map_ is None
                or map_.shape != (256,)
                or nested.shape != (-(-blocks // self.nested_block),)
            ):
                return None
        weight = parts["weight"]
        return (self.out, self.inner) if weight.dtype == "U8" and prod(weight.shape) * 2 == count else None

    def numbers(self, parts: Parts) -> torch.Tensor:
        both = parts["weight"].flatten()
        index = torch.stack((both >> 4, both & 15), -1).flatten().int()  # the first number in the high bits
        numbers = parts["quant_map"].float()[index]
        absmax = parts["absmax"]
        if absmax.dtype == torch.uint8:
            largest = parts["nested_absmax"].float().repeat_interleave(self.nested_block)[: len(absmax)]
            absmax = parts["nested_quant_map"].float()[absmax.int()] * largest + self.nested_offset
        steps = absmax.float().repeat_interleave(self.block)[: len(numbers)]
        return numbers.mul_(steps).view(self.out, self.inner)


def four_bit(parts: Parts) -> FourBit:
    """The codec of one matrix, from bitsandbytes' description of it. Raises ValueError."""
    [raw] = parts.values()
    if raw.dtype != torch.uint8 or raw.numel() > _LONGEST_STATE:
        raise ValueError("its description is no text")
    keys = Keys(json.loads(bytes(raw.flatten().tolist())), "quant_state")
    sizes = keys.raw("shape")
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n < 1 << 24 for n in sizes):
        raise ValueError(f"its shape is {shown(sizes)}")
    kind = keys.text("quant_type", "nf4")
    if kind not in ("nf4", "fp4"):
        raise ValueError(f"its quant_type is {shown(kind)}")
    block, nested = keys.whole("blocksize", 64, most=1 << 16), keys.whole("nested_blocksize", 256, most=1 << 16)
    return FourBit(kind, sizes[0], sizes[1], block, nested, keys.number("nested_offset", 0.0, least=-1e6))
