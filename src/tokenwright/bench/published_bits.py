"""Hashes of the built-in model's logits, for `tokenwright verify`.

They are equal for all compilers, and for all processors whose kernels have the same arithmetic.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.packed import Packed
from tokenwright.errors import RequestError
from tokenwright.formats import FILE_FORMATS, WeightFormat
from tokenwright.llm.llm import LLM

PUBLISHED = Path(__file__).with_suffix(".json")
FORMATS: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "bfloat16": {"weights": "bfloat16", "kv": "bfloat16"},
    "int8": {"weights": "int8", "kv": "int8"},
    "int4": {"weights": "int4", "kv": "int4"},
    "files": {},  # products of matrices in all formats that only files have
}
_OUT, _INNER = 37, 512
PROMPT = "Once upon a time, in a land far away, there lived a little fox who had never seen the sea. One day"
STEPS = 12


def verified_kernels() -> str:
    """The native kernels' instruction set. Raises RequestError if there are no native kernels."""
    kernels = find_kernels()
    if kernels is None:
        raise RequestError("verify needs the native kernels; install Tokenwright again with a C++ compiler")
    return kernels.isa


def published() -> dict[str, dict[str, str]]:
    hashes: dict[str, dict[str, str]] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return hashes


def logits_hash(form: str, threads: int | None = None) -> str:
    """The SHA-256 of the fp32 logits [V] of every step of a greedy text, in a format of FORMATS."""
    if form == "files":
        return _hash_of_files()
    found = sha256()
    with LLM("stories", trace=True, dtype="float32", device="cpu", threads=threads, **FORMATS[form]) as llm:
        run = llm.run(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True)
        for step in range(STEPS):
            run.step()
            found.update(np.asarray(run.logits(step), dtype="<f4").tobytes())
        run.close()
    return found.hexdigest()


def _hash_of_files() -> str:
    kernels, found = find_kernels(), sha256()
    assert kernels is not None, "there are native kernels"
    for form in (WeightFormat(*one) for one in sorted(FILE_FORMATS)):
        packed = Packed.empty(_OUT, _INNER, form)
        packed.codes[:] = _noise(packed.codes.size) >> 8
        packed.scales.view(np.uint8)[:] = _noise(packed.scales.nbytes) >> 8 & 0x3B  # keeps float16 scales below 1
        if packed.factors is not None:
            packed.factors[:] = _noise(_OUT) / 4096
        for rows in (1, 3, 40):
            x = (_noise(rows * _INNER) / 8192 - 4).astype(np.float32).reshape(rows, _INNER)
            found.update(kernels.linear(x, packed).astype("<f4").tobytes())
    return found.hexdigest()


def _noise(count: int) -> NDArray[np.int64]:
    """Whole numbers below 65,536, the same everywhere."""
    return np.arange(1, count + 1, dtype=np.int64) ** 2 * 2654435761 % 4294967291 & 0xFFFF
