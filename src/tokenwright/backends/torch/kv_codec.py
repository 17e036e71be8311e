"""The arithmetic of the cache's codecs in torch: how rows of K and V are encoded and decoded.

The formats are those of `cache/codec.py`; the native kernels write and read the same bytes.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, cast

import torch

from tokenwright.backends.torch.border import TORCH_DTYPES, tensor
from tokenwright.cache import Side
from tokenwright.cache.codec import GROUP
from tokenwright.formats import DType

MOST_SCALE: Final = 65504.0  # of float16
MOST_FP8: Final = 448.0  # of e4m3

Parts = tuple[torch.Tensor, ...]


def write(side: Side, slots: torch.Tensor, x: torch.Tensor) -> None:
    """Encode rows x [n, G, D] into the slots [n] of K or V of a layer."""
    for memory, part in zip(map(tensor, side.memory), encode(side.codec.name, x), strict=True):
        memory[tensor(slots)] = part


def read(side: Side, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The decoded rows of the slots [n] of K or V of a layer: [n, G, D] in `dtype`, copied from the memory."""
    parts = tuple(tensor(memory).index_select(0, tensor(slots)) for memory in side.memory)
    return decode(side.codec.name, parts, side.size, dtype)


def encode(codec: str, x: torch.Tensor) -> Parts:
    """Encode rows x [..., D] of any floating-point dtype to parts [..., n_i]."""
    if codec in TORCH_DTYPES:
        return (x.to(TORCH_DTYPES[cast(DType, codec)]),)
    return _QUANTISED[codec].encode(x)


def decode(codec: str, parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode parts [..., n_i] to rows [..., `count`] in `dtype`."""
    return parts[0].to(dtype) if codec in TORCH_DTYPES else _QUANTISED[codec].decode(parts, count, dtype)


def _encode_int8(x: torch.Tensor) -> Parts:
    groups = _grouped(x)
    scales = _scales(groups.abs().amax(-1) / 127)
    codes = _codes(groups, scales).clamp_(-127, 127).to(torch.int8)
    return codes.flatten(-2)[..., : x.shape[-1]], scales


def _decode_int8(parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
    codes, scales = parts
    return (codes * _spread(scales, count)).to(dtype)


def _encode_int4(x: torch.Tensor) -> Parts:
    groups = _grouped(x)
    high, low = groups.amax(-1), groups.amin(-1)
    scales = _scales(torch.where(high > -low, high, low) / -8)
    codes = (_codes(groups, scales).clamp_(-8, 7) + 8).to(torch.uint8).flatten(-2)  # padded to an even count
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed[..., : -(-x.shape[-1] // 2)], scales


def _decode_int4(parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
    packed, scales = parts
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :count].to(torch.int8) - 8
    return (codes * _spread(scales, count)).to(dtype)


def _encode_fp8(x: torch.Tensor) -> Parts:
    within = x.float().clamp(-MOST_FP8, MOST_FP8).masked_fill(~x.isfinite(), torch.nan)
    return (within.to(torch.float8_e4m3fn).view(torch.uint8),)


def _decode_fp8(parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
    return parts[0][..., :count].view(torch.float8_e4m3fn).to(dtype)


class _Arithmetic(NamedTuple):
    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[[Parts, int, torch.dtype], torch.Tensor]


_QUANTISED: Mapping[str, _Arithmetic] = {
    "int8": _Arithmetic(_encode_int8, _decode_int8),
    "int4": _Arithmetic(_encode_int4, _decode_int4),
    "fp8": _Arithmetic(_encode_fp8, _decode_fp8),
}


def _grouped(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., D] as groups [..., D / GROUP, GROUP] in fp32, the last group padded with zeros."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % GROUP))
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // GROUP, GROUP)


def _scales(exact: torch.Tensor) -> torch.Tensor:
    """Stored scales: the nearest finite float16; NaN where the exact scale is not finite."""
    scales = exact.clamp(-MOST_SCALE, MOST_SCALE).masked_fill(~exact.isfinite(), torch.nan)
    return scales.to(torch.float16)


def _codes(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """round(x / scale) [..., n, GROUP] in fp32; 0 where the scale is 0 (all zeros, or an underflow) or NaN."""
    steps = scales.float()[..., None]
    usable = steps.abs() > 0
    return torch.where(usable, groups / torch.where(usable, steps, 1.0), 0.0).round_()


def _spread(scales: torch.Tensor, count: int) -> torch.Tensor:
    """The scale of each of `count` numbers in fp32, in which code times scale is exact."""
    return scales.float().repeat_interleave(GROUP, -1)[..., :count]
