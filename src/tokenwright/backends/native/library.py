"""The compiled native library: its path and its functions."""

import ctypes
import sys
from collections.abc import Iterable
from ctypes import c_char_p, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tokenwright.arrays import Array, place_of
from tokenwright.backends.native.structs import OPS, STRUCTS
from tokenwright.cache.disk_pages import Unpack
from tokenwright.cache.page_folder import ROW
from tokenwright.errors import RequestError

NAME = "_native.so"

# Result and argument types of the functions of library.cpp. `k`: kernels, `w`: workspace, `p`: another pointer,
# `s`: C string, `n`: integer, `d`: double.
_FUNCTIONS = {
    "tw_size": ("n", "s"),
    "tw_kernels": ("k", "s"),
    "tw_workspace_new": ("w", ""),
    "tw_workspace_free": ("", "w"),
    "tw_workspaces": ("n", ""),
    "tw_experts_new": ("p", "p"),
    "tw_experts_free": ("", "p"),
    "tw_exact_threads": ("n", "n"),
    "tw_last_team": ("n", ""),
    "tw_last_barriers": ("n", ""),
    "tw_forward": ("n", "kwppn"),
    "tw_linear": ("n", "kwpnppn"),
    "tw_attend": ("n", "kwppnpnpn"),
    "tw_shared_runs": ("n", "ppnpnp"),
    "tw_weigh": ("", "knpp"),
    "tw_recur": ("n", "kwppnpnnppn"),
    "tw_store_kv": ("", "kppnpnpp"),
    "tw_norm": ("", "kpnnpp"),
    "tw_activate": ("", "knnpp"),
    "tw_xielu": ("", "kpnpp"),
    "tw_restore": ("", "nnpp"),
    "tw_sparsify": ("", "nndp"),
    "tw_gated": ("", "knnnpp"),
    "tw_soft_cap": ("", "kdnp"),
    "tw_rotate": ("", "knnnppp"),
    "tw_route": ("", "pnppp"),
    "tw_summarise": ("n", "kwnnpppn"),
    "tw_pack": ("n", "kpnpnnnn"),
    "tw_read": ("n", "kpnnn"),
    "tw_multiply": ("n", "knnn"),
}
_TYPES = {"k": c_void_p, "w": c_void_p, "p": c_void_p, "s": c_char_p, "n": c_int64, "d": c_double, "": None}


def find(folders: Iterable[str] | None = None) -> Path | None:
    roots = sys.modules["tokenwright"].__path__ if folders is None else folders
    return next((file for root in roots if (file := Path(root, "backends", "native", NAME)).exists()), None)


@cache
def load(file: Path) -> ctypes.CDLL:
    """Load the library and declare its functions. Raises RequestError if it was compiled from other sources."""
    library = ctypes.CDLL(str(file))
    foreign = RequestError(f"{file} was compiled from other sources than these; install Tokenwright again")
    try:
        for name, (result, takes) in _FUNCTIONS.items():
            function: Any = library[name]
            function.restype, function.argtypes = _TYPES[result], tuple(_TYPES[one] for one in takes)
            setattr(library, name, function)
    except AttributeError:
        raise foreign from None
    sizes = {name: library.tw_size(name.encode()) for name in STRUCTS}
    differ = [name for name, size in sizes.items() if size not in (0, ctypes.sizeof(STRUCTS[name]))]
    if differ or not all(sizes[f"{op}Op"] for op in OPS):
        raise foreign
    return library


def page_unpacker() -> Unpack | None:
    """A function that copies and hashes a page in one pass; None without such a library."""
    if (file := find()) is None or (hash_page := getattr(load(file), "tw_hash_page", None)) is None:
        return None
    hash_page.restype, hash_page.argtypes = None, tuple(_TYPES[one] for one in "pnnppp")

    def unpack(contents: memoryview, places: Array, key: Array) -> Array:
        data = np.frombuffer(contents, np.uint8)
        sums: Array = np.empty((len(data) // ROW, len(key)), np.uint64)
        hash_page(place_of(data), len(data), len(places), place_of(places), place_of(key), place_of(sums))
        return sums

    return unpack
