"""A plugin for pytest: `pytest -p tests.without_torch` runs the tests that need no torch, where none can be imported.

It leaves out what imports torch, a library that stands on it, or one that is not installed (`scripts/install dev`):
files at their top or through a helper of tests/, and tests in their own bodies; it prints how many. Random checkpoints
come from a process that has torch, and a test that asks for their oracle is skipped. Neither the package nor a process
that a test starts can import torch: trying fails.
"""

import ast
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
ON_TORCH = {"torch", "transformers", "peft", "safetensors.torch"}
BLOCK = f"import sys\nsys.modules.update(dict.fromkeys({sorted(ON_TORCH)}))\n"  # any import of them raises ImportError


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Block torch here, and in processes that inherit the environment, before anything of tests/ is imported."""
    exec(BLOCK, {})
    folder = tempfile.TemporaryDirectory()
    early_config.add_cleanup(folder.cleanup)
    Path(folder.name, "sitecustomize.py").write_text(BLOCK, encoding="utf-8")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder.name, os.environ.get("PYTHONPATH"))))


def blocked() -> bool:
    return "torch" in sys.modules and sys.modules["torch"] is None


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
    if any(find_spec(name.partition(".")[0]) is None for name in names):
        return True
    helpers = (ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests."))
    return any(helper.exists() and imports_torch(helper) for helper in helpers)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.suffix == ".py" and imports_torch(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that import torch in their own bodies, or in functions of their file that they call."""
    own = [item for item in items if _calls_torch(getattr(item, "function", None))]
    config.hook.pytest_deselected(items=own)
    items[:] = [item for item in items if item not in own]


def _calls_torch(test: Any) -> bool:
    seen, left = set(), [inspect.unwrap(test)]
    while left:
        function = left.pop()
        if not inspect.isfunction(function) or function in seen:
            continue
        seen.add(function)
        names = set(function.__code__.co_names)
        if ON_TORCH & names:
            return True
        called = (inspect.unwrap(one) for one in map(function.__globals__.get, names) if callable(one))
        left += [one for one in called if getattr(one, "__module__", "") == function.__module__]
    return False


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    files = [path for path in _asked(config) if imports_torch(path)]
    tests = [
        node
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    terminalreporter.write_line(
        f"left out, because they import torch or what is not installed: {len(tests)} tests in {len(files)} files"
    )


def _asked(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.partition("::")[0])
        yield from sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


class Absent:
    """In the place of an oracle."""

    def __getattr__(self, name: str) -> NoReturn:
        pytest.skip("the oracle needs torch")

    __call__ = __getattr__


def made_elsewhere(folder: Path, *arguments: object) -> None:
    """Have the other process write a checkpoint. Skips the test where there is no torch at all."""
    maker = _maker()
    assert maker.stdin is not None and maker.stdout is not None
    maker.stdin.write(json.dumps([str(folder), *arguments]) + "\n")
    if maker.stdout.readline() != "made\n":
        pytest.skip("no random checkpoints without torch")


@cache
def _maker() -> subprocess.Popen[str]:
    """`tests/models/weights.py` in a process that has torch; it ends with this one."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "tests.models.weights"]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def pytest_unconfigure() -> None:
    if _maker.cache_info().currsize:
        _maker().communicate()
