"""Reads rows of a stored tensor: as numbers, whatever their stored form, or as codes and scales."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from tokenwright.arrays import DTYPES as ARRAYS
from tokenwright.arrays import FLOAT8_E4M3, FLOAT8_E5M2, FLOAT8_E8M0, Array, Bytes, as_bytes, empty, widened
from tokenwright.checkpoints.families.family import TensorSource
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.gguf.blocks import FORMS, IF_SCALES_FIT, codes_and_scales, dequantised, scales_fit
from tokenwright.checkpoints.gguf.header import BLOCKS
from tokenwright.checkpoints.quantised.codecs import Compound
from tokenwright.errors import CheckpointError, fetch_again
from tokenwright.formats import DType, WeightFormat
from tokenwright.regular_file import open_regular

DTYPES: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # tensors that need no codec
_OF_PARTS: dict[str, Any] = {
    "I8": np.int8, "U8": np.uint8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "U32": np.int32,
    "F8_E4M3": FLOAT8_E4M3, "F8_E5M2": FLOAT8_E5M2, "F8_E8M0": FLOAT8_E8M0, "F64": np.float64, "BOOL": np.bool_,
    **{name: ARRAYS[dtype] for name, dtype in DTYPES.items()},
}  # fmt: skip

_AT_ONCE = 1 << 20  # bytes of a tensor whose scales are read together


def read_rows(one: Stored, first: int, last: int) -> Array:
    """Rows [first, last), decoded to fp32; copied, since a mapped file could shrink. Raises CheckpointError."""
    if isinstance(one, Compound):
        assert (first, last) == (0, one.shape[0]), "a matrix of several tensors is read as a whole"
        return read_whole(one)
    if one.dtype in BLOCKS:
        numbers = dequantised(_read_blocks(one, first, last), one.dtype)
        return numbers if one.scale is None else numbers * _factors(one, first, last)[:, None]
    return _read_bytes(one, first, empty((last - first, *one.shape[1:]), ARRAYS[DTYPES[one.dtype]]))


def read_codes(one: Stored, first: int, last: int, form: WeightFormat) -> tuple[Bytes, Array]:
    """Rows [first, last) in one of the tensor's `forms_of`: codes and scales as `Packed.put_codes` takes them."""
    if isinstance(one, Compound):
        assert form == one.form and (first, last) == (0, one.shape[0]), "it was offered, and is read as a whole"
        return one.codec.codes(_parts(one), form)
    codes, scales = codes_and_scales(_read_blocks(one, first, last), one.dtype, form)
    if one.scale is not None:
        scales[:, -4:] = _factors(one, first, last)[:, None].view(np.uint8)
    return codes, scales


def _factors(one: Stored, first: int, last: int) -> Array:
    assert one.scale is not None, "its blocks have a scale besides theirs"
    scale = read_whole(one.scale).reshape(-1)
    return scale[np.arange(first, last) * len(scale) // one.shape[0]]


def forms_of(one: Stored) -> tuple[WeightFormat, ...]:
    """The packed forms that hold a tensor without loss, the smallest first. Reads it if its scales decide."""
    if isinstance(one, Compound):
        return () if one.form is None else (one.form,)
    if one.dtype in IF_SCALES_FIT:
        step = max(1, _AT_ONCE * one.shape[0] // one.nbytes)
        pieces = ((at, min(at + step, one.shape[0])) for at in range(0, one.shape[0], step))
        if not all(scales_fit(_read_blocks(one, *piece), one.dtype) for piece in pieces):
            return ()
    return tuple(form for form in FORMS.get(one.dtype, ()) if one.scale is None or form.factors)


def read_whole(one: Stored) -> Array:
    """All rows of a tensor. Raises CheckpointError for a dtype without a codec."""
    if isinstance(one, Compound):
        return one.codec.numbers(_parts(one))
    if one.dtype not in _OF_PARTS:
        raise CheckpointError(f"{one.file} has a tensor of dtype {one.dtype}, which Tokenwright does not read")
    return _read_bytes(one, 0, empty(one.shape, _OF_PARTS[one.dtype]))


def _parts(one: Compound) -> dict[str, Array]:
    found = ((name, read_whole(part)) for name, part in one.parts.items())
    return {name: widened(part) if part.dtype.kind == "V" else part for name, part in found}


def _read_blocks(one: Stored, first: int, last: int) -> Bytes:
    return _read_bytes(one, first, empty((last - first, one.nbytes // one.shape[0]), np.uint8))


def _read_bytes(one: Stored, first: int, raw: Array) -> Array:
    with opened(one.file) as stream:
        stream.seek(one.start + (first * one.nbytes // one.shape[0] if first else 0))
        if stream.readinto(as_bytes(raw).data) != raw.nbytes:
            raise CheckpointError(f"{one.file} became shorter while it was read; {fetch_again(one.file)}")
    return raw


def piece_of(raw: Array, source: TensorSource) -> Array:
    if source.rows is not None and source.stacked:
        raw = raw[source.rows[0] : source.rows[1]]
    piece = raw.T if source.transpose else raw  # [out, in]
    if source.rows is not None and not source.stacked:
        piece = piece[source.rows[0] : source.rows[1]]
    if source.order is not None:
        blocks = piece.reshape(-1, source.order.block, *piece.shape[1:])  # [blocks, block, in]
        picked = blocks[:, list(source.order.rows)]
        turned = picked.swapaxes(1, 2) if source.order.turned else picked
        piece = turned.reshape(-1, *turned.shape[2:])
    if source.log:
        return np.log(-widened(piece))
    return widened(piece) + np.float32(source.plus) if source.plus else piece


@contextmanager
def opened(file: Path) -> Iterator[BufferedReader]:
    """The mapped file. Raises CheckpointError if it cannot be opened, or a disk fails while it is read."""
    try:
        with open_regular(file) as stream:
            yield stream
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
