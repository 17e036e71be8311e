"""Restores a file of bfloat16 weights that scripts/site has divided into exponents and fractions, each compressed."""

import zlib
from pathlib import Path

import numpy as np


def restore(packed: str, path: str) -> None:
    """Write the safetensors file `path` from the file `packed`, to the bit."""
    content, parts = memoryview(Path(packed).read_bytes()), []
    while content:
        size = 8 + int.from_bytes(content[:8], "little")
        parts.append(zlib.decompress(content[8:size]))
        content = content[size:]
    header, *planes = parts
    exponents, fractions = (np.frombuffer(plane, np.uint8).astype(np.uint16) for plane in planes)
    words = (exponents & 1) << 7 | fractions >> 1 | (exponents >> 1) << 8 | (fractions & 1) << 15
    with Path(path).open("wb") as file:
        file.write(header)
        file.write(words.astype("<u2").tobytes())
