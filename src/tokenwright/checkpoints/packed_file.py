"""Reads and writes safetensors files with matrices in the kernels' layout, and a CRC-32 of each tensor.

A matrix is `name.codes` (U8), `name.scales` (F16) and `name.bias` (F32), if it has them; other tensors are F32.
"""

import json
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np

from tokenwright.arrays import Array, as_bytes
from tokenwright.backends.device import each_done
from tokenwright.backends.layout import Formats, Weights, empty_weights, form_of
from tokenwright.backends.packed import OnDisk, Packed, packed_sizes
from tokenwright.checkpoints.files.json_keys import shown
from tokenwright.checkpoints.files.safetensors import Stored, read_header_and_metadata
from tokenwright.checkpoints.tensor_reader import opened
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.formats import DType, WeightFormat
from tokenwright.models.graph import Graph
from tokenwright.regular_file import draft_file

if TYPE_CHECKING:
    from tokenwright.checkpoints.folder import Report

METHOD = "tokenwright"  # quantization_config.quant_method, and `format` in the metadata
VERSION = "1"  # of the layout, and of the choice of a format for each matrix
THREADS = 2
_PIECE = 1 << 24  # bytes read or written at a time
Entry = tuple[str, tuple[int, ...]]  # the dtype and the shape of a tensor
_NONE: Formats = MappingProxyType({})
_NAMES: Mapping[np.dtype[Any], str] = {
    np.dtype(kind): name for kind, name in ((np.uint8, "U8"), (np.float16, "F16"), (np.float32, "F32"))
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def own_quantisation(settings: dict[str, Any], where: str) -> tuple[WeightFormat, DType] | None:
    """Remove our quantization_config; the weights' format and original dtype, or None. Raises CheckpointError."""
    said = settings.get("quantization_config")
    if not isinstance(said, dict) or said.get("quant_method") != METHOD:
        return None
    if said.get("version") != VERSION:
        raise CheckpointError(
            f"{where}: the weights are packed in version {shown(said.get('version'))}, and this Tokenwright reads "
            f"version {VERSION}; quantise the model again"
        )
    dtype = said.get("dtype")
    if dtype not in get_args(DType):
        raise CheckpointError(f"{where}: quantization_config.dtype = {shown(dtype)} is not one of {get_args(DType)}")
    try:
        form = WeightFormat.parse(str(said.get("weights")))
    except RequestError as error:
        raise CheckpointError(f"{where}: quantization_config: {error}") from None
    del settings["quantization_config"]
    return form, cast(DType, dtype)


def quantisation(form: WeightFormat, dtype: DType) -> dict[str, str]:
    return {"quant_method": METHOD, "version": VERSION, "weights": str(form), "dtype": dtype}


def read_packed_header(file: Path, graph: Graph, form: WeightFormat) -> dict[str, Stored]:
    """The tensors of a packed file. Raises CheckpointError unless they are exactly the graph's in `form`."""
    return _read_header(file, graph, form)[0]


def read_weights(
    file: Path,
    graph: Graph,
    form: WeightFormat,
    report: "Report | None" = None,
    kept: Formats = _NONE,
    paged: Collection[str] = (),
) -> Weights:
    """Read and verify a file's weights. paged: matrices whose codes and scales stay in the file, unverified.

    Raises CheckpointError if it is damaged or does not fit the graph.
    """
    stored, sums = _read_header(file, graph, form, kept)
    weights = empty_weights(graph, form, kept, paged)
    tensors = dict(named_tensors(weights))
    for name in paged:
        codes, scales = stored.pop(f"{name}.codes"), stored.pop(f"{name}.scales", None)
        place = OnDisk(file, codes.start, 0 if scales is None else scales.start)
        weights[name] = replace(cast(Packed, weights[name]), on_disk=place)
    done, total = 0, sum(one.nbytes for one in stored.values())
    reads = (partial(_read, one, tensors[name], name, sums[name]) for name, one in stored.items())
    for nbytes in each_done(reads, THREADS, "read"):
        done += nbytes
        if report is not None:
            report(done, total)
    return weights


def write_weights(file: Path, weights: Weights, form: WeightFormat, report: "Report | None" = None) -> None:
    entries = {name: (_NAMES[one.dtype], one.shape) for name, one in named_tensors(weights)}
    write_in_parts(file, entries, form, (weights,), report)


def write_in_parts(
    file: Path,
    entries: Mapping[str, Entry],
    form: WeightFormat,
    parts: Iterable[Weights],
    report: "Report | None" = None,
) -> None:
    """Write a file atomically, of weights that memory may not hold at once. Raises OSError, and leaves no draft then.

    It does not map the file: a full disk would end the process by a signal.
    """
    space = len(_header(entries, form, dict.fromkeys(entries, 1 << 32)))
    ends = [*accumulate((_nbytes(*one) for one in entries.values()), initial=space)]
    starts, sums, done = dict(zip(entries, ends, strict=False)), dict.fromkeys(entries, 0), 0
    with draft_file(file) as draft, draft.open("r+b") as stream:
        if hasattr(os, "posix_fallocate"):  # a full disk is found before anything is packed
            os.posix_fallocate(stream.fileno(), 0, ends[-1])
        for part in parts:
            for name, tensor in named_tensors(part):
                memory = as_bytes(tensor).data
                sums[name] = zlib.crc32(memory)
                stream.seek(starts[name])
                for at in range(0, len(memory), _PIECE):
                    done += stream.write(memory[at : at + _PIECE])
                    if report is not None:
                        report(done, ends[-1] - space)
        stream.seek(0)
        stream.write(_header(entries, form, sums, space))
        stream.flush()
        os.fsync(stream.fileno())


def named_tensors(weights: Weights) -> Iterator[tuple[str, Array]]:
    for name, one in weights.items():
        if not isinstance(one, Packed):
            yield name, one
        else:
            yield f"{name}.codes", one.codes
            if one.group:
                yield f"{name}.scales", one.scales
            for part, vector in (("bias", one.bias), ("factors", one.factors)):
                if vector is not None:
                    yield f"{name}.{part}", vector


def entries_of(graph: Graph, form: WeightFormat, kept: Formats) -> dict[str, Entry]:
    """The tensors of a file. Codes come first, so that they are aligned."""
    found: dict[str, Entry] = {}
    for name, matrix in graph.matrices.items():
        own = form_of(matrix, form, kept)
        codes, scales = packed_sizes(matrix.out, matrix.inner, own)
        found[f"{name}.codes"] = ("U8", (codes,))
        if scales:
            found[f"{name}.scales"] = ("F16", (scales,))
        parts = {"bias": matrix.bias, "factors": own.factors}
        found |= {f"{name}.{part}": ("F32", (matrix.out,)) for part, there in parts.items() if there}
    found |= {name: ("F32", graph.shapes[name]) for name in graph.dense}
    return dict(sorted(found.items(), key=lambda item: item[1][0] != "U8"))


def _nbytes(kind: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * _DTYPES[kind].itemsize


def _read_header(
    file: Path, graph: Graph, form: WeightFormat, kept: Formats = _NONE
) -> tuple[dict[str, Stored], Mapping[str, int]]:
    stored, about = read_header_and_metadata(file, "quantise the model again")
    said = (about.get("format"), about.get("version"), about.get("weights"))
    if said != (METHOD, VERSION, str(form)):
        why = f"{file} holds no {form} weights packed by this version of Tokenwright"
        raise CheckpointError(f"{why}; quantise the model again")
    expected, found = entries_of(graph, form, kept), {name: (one.dtype, one.shape) for name, one in stored.items()}
    wrong = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    sums = _sums(about.get("crc32", ""))
    if wrong or sums.keys() != stored.keys():
        named = shown(wrong[0]) if wrong else "the list of its checksums"
        why = f"{file} does not fit config.json: {named} is not as it should be"
        raise CheckpointError(f"{why}; quantise the model again")
    return stored, sums


def _sums(text: str) -> Mapping[str, int]:
    try:
        sums = json.loads(text)
    except ValueError:
        return {}
    sound = isinstance(sums, dict) and all(type(one) is int for one in sums.values())
    return sums if sound else {}


def _read(one: Stored, tensor: Array, name: str, expected: int) -> int:
    memory, total = as_bytes(tensor).data, 0
    with opened(one.file) as stream:
        stream.seek(one.start)
        for at in range(0, len(memory), _PIECE):
            piece = memory[at : at + _PIECE]
            if stream.readinto(piece) != len(piece):
                raise CheckpointError(f"{one.file} became shorter while it was read; quantise the model again")
            total = zlib.crc32(piece, total)
    if total != expected:
        raise CheckpointError(f"{name} in {one.file} is damaged: its checksum is another; quantise the model again")
    return len(memory)


def _header(entries: Mapping[str, Entry], form: WeightFormat, sums: Mapping[str, int], space: int = 0) -> bytes:
    """The header, padded to `space` bytes, or so that the data begin at a multiple of 64 bytes."""
    about = {"format": METHOD, "version": VERSION, "weights": str(form), "crc32": json.dumps(sums)}
    header: dict[str, Any] = {"__metadata__": about}
    start = 0
    for name, (kind, shape) in entries.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, start + _nbytes(kind, shape)]}
        start += _nbytes(kind, shape)
    text = json.dumps(header).encode()
    text += b" " * (space - 8 - len(text) if space else -(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text
