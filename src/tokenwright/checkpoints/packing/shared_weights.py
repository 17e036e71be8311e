"""Packed weights that several processes map: a nameless file that they inherit, and that the first one fills.

[ length of the index, 0 while it is written | index: JSON | tensors, each at a multiple of 64 bytes ]
"""

import json
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

import numpy as np

from tokenwright.arrays import Array, as_bytes
from tokenwright.backends.layout import Weights
from tokenwright.backends.packed import Packed
from tokenwright.checkpoints.packed_file import named_tensors

_HEAD = 8
_APART = 64  # bytes: kernels load from such addresses
_DTYPES = {np.dtype(one).name: np.dtype(one) for one in (np.uint8, np.float16, np.float32)}


def new_shared_file() -> int:
    return os.memfd_create("tokenwright weights")


def load_shared(descriptor: int, load: Callable[[], Weights]) -> Weights:
    with _locked(descriptor):
        if not _is_written(descriptor):
            weights = load()
            _write(descriptor, weights)
            del weights  # the mapped weights replace them
    return _mapped(descriptor)


def is_shared(descriptor: int) -> bool:
    """Whether the file has the weights, so that loading takes no memory. Waits while they are being written."""
    with _locked(descriptor):
        return _is_written(descriptor)


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Exclude other processes; the lock of a killed process is released."""
    import fcntl

    fcntl.lockf(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN)


def _is_written(descriptor: int) -> bool:
    return int.from_bytes(os.pread(descriptor, _HEAD, 0), "little") > 0


def _write(descriptor: int, weights: Weights) -> None:
    tensors, at, places = dict(named_tensors(weights)), 0, {}
    for name, one in tensors.items():
        places[name] = (at, one.dtype.name, list(one.shape))
        at += -(-one.nbytes // _APART) * _APART
    forms = {name: _form(one) for name, one in weights.items() if isinstance(one, Packed)}
    index = json.dumps({"tensors": places, "packed": forms, "order": list(weights)}).encode()
    start = _start(len(index))
    os.ftruncate(descriptor, start + max(at, 1))
    with mmap.mmap(descriptor, 0) as memory:
        memory[_HEAD : _HEAD + len(index)] = index
        for name, one in tensors.items():
            place = start + places[name][0]
            memory[place : place + one.nbytes] = as_bytes(np.ascontiguousarray(one)).data
        memory[:_HEAD] = len(index).to_bytes(_HEAD, "little")  # written last: the file is complete now


def _start(index: int) -> int:
    return -(-(_HEAD + index) // mmap.PAGESIZE) * mmap.PAGESIZE


def _form(one: Packed) -> dict[str, object]:
    names = ("out", "inner", "format", "group", "super", "minima")
    return {name: getattr(one, name) for name in names}


def _mapped(descriptor: int) -> Weights:
    size = int.from_bytes(os.pread(descriptor, _HEAD, 0), "little")
    index = json.loads(os.pread(descriptor, size, _HEAD))
    memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    start = _start(size)

    def tensor(name: str) -> Array:
        at, dtype, shape = index["tensors"][name]
        flat = np.frombuffer(memory, _DTYPES[dtype], prod(shape), start + at if prod(shape) else 0)
        return flat.reshape(shape)

    found: Weights = {}
    for name in index["order"]:
        if name not in index["packed"]:
            found[name] = tensor(name)
            continue
        form = index["packed"][name]
        scales = tensor(f"{name}.scales") if form["group"] else np.empty(0, np.float16)
        more = {one: tensor(f"{name}.{one}") for one in ("bias", "factors") if f"{name}.{one}" in index["tensors"]}
        found[name] = Packed(codes=tensor(f"{name}.codes"), scales=scales, **form | more)
    return found
