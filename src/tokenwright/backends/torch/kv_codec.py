"""The formats of `cache/codec.py` in torch, with the same bytes as the native kernels."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, cast

import torch

from tokenwright.backends.torch.border import TORCH_DTYPES, tensor
from tokenwright.cache import Side
from tokenwright.cache.codec import GROUP, LEVEL_DIVISORS, LEVELS
from tokenwright.formats import DType

MOST_SCALE: Final = 65504.0
MOST_FP8: Final = 448.0

Parts = tuple[torch.Tensor, ...]


def write(side: Side, slots: torch.Tensor, x: torch.Tensor) -> None:
    """Encode rows x [n, G, D] into the slots [n]."""
    for memory, part in zip(map(tensor, side.memory), encode(side.codec.name, x), strict=True):
        memory[tensor(slots)] = part


def read(side: Side, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A decoded copy of the slots [n]: [n, G, D] in `dtype`."""
    parts = tuple(tensor(memory).index_select(0, tensor(slots)) for memory in side.memory)
    return decode(side.codec.name, parts, side.size, dtype)


def encode(codec: str, x: torch.Tensor) -> Parts:
    """Rows x [..., D] of any floating-point dtype -> parts [..., n_i]."""
    if codec in TORCH_DTYPES:
        return (x.to(TORCH_DTYPES[cast(DType, codec)]),)
    return _QUANTISED[codec].encode(x)


def decode(codec: str, parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Parts [..., n_i] -> rows [..., `count`] in `dtype`."""
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
    groups[...] = _hadamard_row(groups, x.shape[-1])
    high, low = groups.amax(-1), groups.amin(-1)
    extremes = torch.where(high > -low, high, low)
    tried = _scales(torch.stack([extremes / -divisor for divisor in LEVEL_DIVISORS]))  # [divisors, ..., n]
    each, errors = _nearest_levels(groups, tried)
    best = errors.argmin(0, keepdim=True)  # the first of equal ones, or of NaNs
    scales = tried.gather(0, best)[0]
    codes = each.gather(0, best[..., None].expand(1, *each.shape[1:]))[0]
    codes = codes.flatten(-2)  # padded to an even count
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed[..., : -(-x.shape[-1] // 2)], scales


def _decode_int4(parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
    packed, scales = parts
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :count]
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=codes.device)[codes.long()]
    sums = _hadamard_row(_grouped(levels), count, divided=True).flatten(-2)[..., :count]  # exact, and so is the product
    return (sums * _spread(scales, count)).to(dtype)


def _nearest_levels(groups: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes [..., n, GROUP] of the nearest levels, and squared errors [..., n], added in a fixed order."""
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=groups.device)
    steps = scales.float()[..., None]
    usable = steps.abs() > 0
    units = torch.where(usable, groups * torch.where(usable, steps, 1.0).reciprocal(), 0.0)
    codes = torch.bucketize(units, (levels[1:] + levels[:-1]) / 2)
    squares = (groups - levels[codes] * steps).square_()
    while squares.shape[-1] > 1:
        first, second = squares.chunk(2, -1)
        squares = first + second
    return codes.to(torch.uint8), squares[..., 0]


def _hadamard_row(groups: torch.Tensor, count: int, divided: bool = False) -> torch.Tensor:
    """Groups [..., n, GROUP] of rows of `count` numbers times the Hadamard matrix, a shorter last group in blocks."""
    whole, rest = divmod(count, GROUP)
    if not rest:
        return _hadamard(groups, divided)
    size = rest & -rest
    blocks = groups[..., whole:, :rest].reshape(*groups.shape[:-2], 1, rest // size, size)
    last = torch.nn.functional.pad(_hadamard(blocks, divided).flatten(-2), (0, GROUP - rest))
    return torch.cat((_hadamard(groups[..., :whole, :], divided), last), -2)


def _hadamard(x: torch.Tensor, divided: bool) -> torch.Tensor:
    """Blocks [..., n] times the Hadamard matrix: sums and differences at distances of n / 2, n / 4, .. 1."""
    size = x.shape[-1]
    apart = size // 2
    while apart:
        first, second = x.reshape(*x.shape[:-1], size // (2 * apart), 2, apart).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        apart //= 2
    return x / size if divided else x


def _encode_fp8(x: torch.Tensor) -> Parts:
    within = x.float().clamp(-MOST_FP8, MOST_FP8).masked_fill(~x.isfinite(), torch.nan)
    return (within.to(torch.float8_e4m3fn).view(torch.uint8),)


class _Arithmetic(NamedTuple):
    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[[Parts, int, torch.dtype], torch.Tensor]


_QUANTISED: Mapping[str, _Arithmetic] = {
    "int8": _Arithmetic(_encode_int8, _decode_int8),
    "int4": _Arithmetic(_encode_int4, _decode_int4),
    "fp8": _Arithmetic(_encode_fp8, lambda parts, count, to: parts[0][..., :count].view(torch.float8_e4m3fn).to(to)),
}


def _grouped(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., D] as groups [..., D / GROUP, GROUP] in fp32, padded with zeros."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % GROUP))
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // GROUP, GROUP)


def _scales(exact: torch.Tensor) -> torch.Tensor:
    scales = exact.clamp(-MOST_SCALE, MOST_SCALE).masked_fill(~exact.isfinite(), torch.nan)
    return scales.to(torch.float16)


def _codes(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """round(x / scale) [..., n, GROUP]; 0 where the scale is 0 (all zeros, or an underflow) or NaN."""
    steps = scales.float()[..., None]
    usable = steps.abs() > 0
    return torch.where(usable, groups / torch.where(usable, steps, 1.0), 0.0).round_()


def _spread(scales: torch.Tensor, count: int) -> torch.Tensor:
    """The scale of each of `count` numbers, in fp32: code times scale is exact."""
    return scales.float().repeat_interleave(GROUP, -1)[..., :count]
