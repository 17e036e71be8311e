"""A model that a visitor brings: what it takes, said before it is kept, from its header alone."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenwright import plan
from tokenwright.errors import TokenwrightError

MOST_BYTES = 2 * 10**9  # of weights and K and V: a page has 4 GiB of addresses, and a copy of a matrix while it loads
KV_MEMORY = 256 * 2**20  # bytes of K and V, at most
TOKENS = 2048  # of one text, for which the memory is said


def path_of(folder: str, names: Sequence[str]) -> str:
    """The path by which a model opens: of a single file, or of a folder."""
    return f"{folder}/{names[0]}" if len(names) == 1 else folder


def offered(folder: str, names: Sequence[str]) -> str:
    """JSON of what the model takes, in bytes, or of the reason why it cannot run: {"refused"}."""
    path = Path(path_of(folder, list(names)))
    if path.is_file() and path.suffix.lower() != ".gguf":
        return _refused(f"{path.name} is not a GGUF file; drop one, or all files of a folder of safetensors")
    try:
        found = plan(path)
        found = plan(path, context=min(found.context, TOKENS))
    except TokenwrightError as error:
        return _refused(str(error).replace(f"{folder}/", "").replace(folder, "the folder"))
    if found.total_bytes > MOST_BYTES:
        return _refused(
            f"it takes {found.total_bytes / 1e9:.1f} GB of memory, and a page can use {MOST_BYTES / 1e9:.0f} GB; "
            "bring a smaller one, or one with fewer bits"
        )
    figures = {"weights": found.weight_bytes, "kv": found.kv_bytes_total, "tokens": found.context}
    return json.dumps(figures | {"context": found.graph.context, "layers": found.graph.layers})


def _refused(why: str) -> str:
    return json.dumps({"refused": why})
