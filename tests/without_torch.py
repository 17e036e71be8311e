"""A plugin for pytest: `pytest -p tests.without_torch` runs the tests that need no torch, where none can be imported.

It leaves out the files that import torch, or a library that stands on it, at their top or through a helper of tests/.
"""

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ON_TORCH = {"torch", "transformers", "peft", "safetensors.torch"}

for _name in ON_TORCH:
    sys.modules[_name] = None  # type: ignore[assignment]  # any import of it raises ImportError


@cache
def imports_torch(path: Path) -> bool:
    """Whether a file of tests/, or a file of tests/ that it imports, imports torch at its top."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    if any(name in ON_TORCH or name.startswith(("torch.", "tokenwright.backends.torch")) for name in names):
        return True
    helpers = (ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests."))
    return any(helper.exists() and imports_torch(helper) for helper in helpers)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.suffix == ".py" and imports_torch(collection_path) else None
