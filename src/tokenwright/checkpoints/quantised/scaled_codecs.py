"""Codecs of numbers with scales: fp8, int8 of two tools, MXFP4 and NVFP4, BitNet, MLX's codes, nf4 and fp4."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from tokenwright.arrays import Array, Bytes, Floats, widened
from tokenwright.checkpoints.files.json_keys import JsonKeys, shown
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.gguf.blocks import with_factors
from tokenwright.checkpoints.quantised.codecs import WORD, Decoded, Parts, unpacked
from tokenwright.formats import TABLES, WeightFormat

_LONGEST_STATE = 1 << 16  # bytes of bitsandbytes' description of a matrix


@dataclass(frozen=True, slots=True)
class Scaled(Decoded):
    """fp8 or int8 numbers with a scale for the matrix, each output, or blocks of outputs and inputs."""

    title: str
    dtype: str  # of the numbers, safetensors' name
    scale: str  # the part with the scales
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale
    factor: float = 1.0  # of every scale
    small: tuple[str, ...] = ()

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        weight, scale, zero = parts["weight"], parts.get(self.scale), parts.get("weight_zero_point")
        if scale is None or "F" not in scale.dtype[:2] or weight.dtype != self.dtype or len(weight.shape) != 2:
            return None
        fits = self._blocks(scale.shape, weight.shape) is not None
        return weight.shape if fits and (zero is None or zero.shape == scale.shape) else None

    def numbers(self, parts: Parts) -> Floats:
        weight: Floats = parts["weight"].astype(np.float32)
        if "weight_zero_point" in parts:
            weight = weight - self._spread(parts["weight_zero_point"].astype(np.float32), weight.shape)
        return weight * self._spread(parts[self.scale].astype(np.float32) * np.float32(self.factor), weight.shape)

    def _blocks(self, scales: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int] | None:
        out, inner = shape
        if prod(scales) == 1:
            return out, inner
        if scales in ((out,), (out, 1)):
            return 1, inner
        if len(scales) != 2 or 0 in scales:
            return None
        found = []
        for axis, (size, count) in enumerate(zip(shape, scales, strict=True)):
            whole = (size // count,) if size % count == 0 else ()
            said = () if self.block is None else (self.block[axis],)
            found.append(next((one for one in (*said, 128, *whole, 64, 32) if -(-size // one) == count), 0))
        return (found[0], found[1]) if all(found) else None

    def _spread(self, scale: Floats, shape: tuple[int, ...]) -> Floats:
        blocks = self._blocks(scale.shape, shape)
        assert blocks is not None, "the shapes were checked"
        if scale.ndim < 2:
            return scale.reshape(-1, 1)
        rows = scale.repeat(blocks[0], 0)[: shape[0]]
        return rows if blocks[1] >= shape[1] else rows.repeat(blocks[1], 1)[:, : shape[1]]


@dataclass(frozen=True, slots=True)
class Fp4:
    """4-bit floats, two to a byte, the lower first. MXFP4: 32 share a power of two, NVFP4: 16 share an E4M3 scale.

    packed: uint8 [out, in / 2], of experts [experts, out, groups, 16]; scales: [..., out, groups]. factor: of the
    matrix; if `divides`, the scales are divided by it.
    """

    title: str = "MXFP4"
    group: int = 32
    packed: str = "blocks"
    scales: str = "scales"
    factor: str = ""
    divides: bool = False

    @property
    def small(self) -> tuple[str, ...]:
        return (self.scales,)

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        codes, scales = parts[self.packed], parts[self.scales]
        kinds = ("U8", "F8_E8M0") if self.group == 32 else ("F8_E4M3",)
        lone = (
            scales.dtype in kinds and codes.dtype == "U8" and prod(codes.shape) * 2 == prod(scales.shape) * self.group
        )
        alike = len(scales.shape) > 1 and codes.shape[: len(scales.shape) - 1] == scales.shape[:-1]
        factored = not self.factor or prod(parts[self.factor].shape) == 1
        return (prod(scales.shape[:-1]), scales.shape[-1] * self.group) if lone and alike and factored else None

    def form(self, small: Parts, inner: int) -> WeightFormat | None:  # noqa: ARG002
        halved = self._halved(small)
        with np.errstate(over="ignore"):
            fits = bool((halved.astype(np.float16) == halved).all())
        return WeightFormat("fp4", self.group, factors=self.group == 16) if fits else None

    def numbers(self, parts: Parts) -> Floats:
        numbers = np.array(TABLES["fp4"], np.float32)[self._indices(parts)]
        return numbers * self._halved(parts).repeat(self.group, 1) * self._factor(parts)

    def codes(self, parts: Parts, form: WeightFormat) -> tuple[Bytes, Array]:
        halves, indices = self._halved(parts).astype(np.float16), self._indices(parts)
        if not form.factors:
            return indices, halves
        return indices, with_factors(halves.view(np.uint8), np.full(len(halves), self._factor(parts), np.float32))

    def _halved(self, parts: Parts) -> Floats:
        scales = parts[self.scales].reshape(-1, parts[self.scales].shape[-1])
        if scales.dtype == np.uint8:
            return np.ldexp(np.float32(1), scales.astype(np.int32) - 128)
        wide: Floats = widened(scales) if scales.dtype.kind == "V" else scales
        return wide / np.float32(2)

    def _factor(self, parts: Parts) -> np.float32:
        factor = np.float32(parts[self.factor].reshape(-1)[0]) if self.factor else np.float32(1)
        return np.float32(1) / factor if self.divides else factor

    def _indices(self, parts: Parts) -> Bytes:
        both = parts[self.packed].reshape(prod(parts[self.scales].shape[:-1]), -1)
        return np.stack((both & 15, both >> 4), -1).reshape(len(both), -1)


@dataclass(frozen=True, slots=True)
class Mlx(Decoded):
    """MLX: scale code + bias, [out, groups] each. Our forms' zeros are whole steps, so matrices are decoded."""

    bits: int
    group: int
    small: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"MLX int{self.bits}"

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        words, scales, biases = parts["weight"], parts["scales"], parts["biases"]
        if words.dtype != "U32" or len(words.shape) != 2 or scales.shape != biases.shape or len(scales.shape) != 2:
            return None
        out, inner = words.shape[0], scales.shape[1] * self.group
        return (out, inner) if scales.shape[0] == out and words.shape[1] * WORD == inner * self.bits else None

    def numbers(self, parts: Parts) -> Floats:
        codes = unpacked(parts["weight"], self.bits)
        wide = (np.repeat(parts[name].astype(np.float32), self.group, 1) for name in ("scales", "biases"))
        scales, biases = wide
        return codes.astype(np.float32) * scales + biases


@dataclass(frozen=True, slots=True)
class FourBit(Decoded):
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

    def numbers(self, parts: Parts) -> Floats:
        both = parts["weight"].reshape(-1)
        index = np.stack((both >> 4, both & 15), -1).reshape(-1)  # the first number in the high bits
        numbers = parts["quant_map"].astype(np.float32)[index]
        absmax = parts["absmax"]
        if absmax.dtype == np.uint8:
            largest = parts["nested_absmax"].astype(np.float32).repeat(self.nested_block)[: len(absmax)]
            absmax = parts["nested_quant_map"].astype(np.float32)[absmax] * largest + np.float32(self.nested_offset)
        steps = absmax.astype(np.float32).repeat(self.block)[: len(numbers)]
        matrix: Floats = (numbers * steps).reshape(self.out, self.inner)
        return matrix


def four_bit(parts: Parts) -> FourBit:
    """Read bitsandbytes' description of a matrix. Raises ValueError."""
    [raw] = parts.values()
    if raw.dtype != np.uint8 or raw.size > _LONGEST_STATE:
        raise ValueError("its description is no text")
    try:
        state = json.loads(raw.tobytes())
    except RecursionError as error:
        raise ValueError("its description is nested too deeply") from error
    if not isinstance(state, dict):
        raise ValueError(f"its description is {shown(state)}, not an object")
    keys = JsonKeys(state, "quant_state")
    sizes = keys.raw("shape")
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n < 1 << 24 for n in sizes):
        raise ValueError(f"its shape is {shown(sizes)}")
    kind = keys.text("quant_type", "nf4")
    if kind not in ("nf4", "fp4"):
        raise ValueError(f"its quant_type is {shown(kind)}")
    block, nested = keys.whole("blocksize", 64, most=1 << 16), keys.whole("nested_blocksize", 256, most=1 << 16)
    return FourBit(kind, sizes[0], sizes[1], block, nested, keys.number("nested_offset", 0.0, least=-1e6))
