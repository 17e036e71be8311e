"""Compile and trim the Python files of the live page: run in Pyodide, whose Python reads what it compiles.

scripts/site runs it by tests/backends/cpp/run_pyodide.mjs, with /source as the repository. It reads the archives in
build/wasm/modules/in and writes them to build/wasm/modules/out: as .pyc, which a page need not compile, without the
docstrings of functions and modules; of the standard library and NumPy the modules that the package may import.
"""

import ast
import importlib
import importlib.util
import marshal
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/source/build/wasm/modules")
LIBRARY, NUMPY, PACKAGE = "python_stdlib.zip", "numpy.zip", "package.zip"
# Modules that only a function imports, or that a cell of the course may.
ALSO = (
    "bisect", "collections.abc", "copy", "encodings.idna", "encodings.latin_1", "encodings.unicode_escape", "fractions",
    "functools", "heapq", "itertools", "linecache", "math", "numpy.linalg", "numpy.random", "pprint", "queue", "random",
    "shutil", "statistics", "string", "tempfile", "textwrap", "timeit", "tokenize", "traceback", "zipfile",
)  # fmt: skip
DATE = (1980, 1, 1, 0, 0, 0)


def imported(source: str) -> Iterator[str]:
    """The modules that a file names in its imports, also within functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


def needed() -> set[str]:
    """The files, without .py, of the modules that are loaded once all that the package names is imported."""
    with zipfile.ZipFile(FOLDER / "in" / PACKAGE) as archive:
        sources = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")]
    names = {name for source in sources for name in imported(source)}
    for name in sorted({*names, *ALSO}):
        if name.partition(".")[0] in sys.stdlib_module_names or name.startswith("numpy"):
            module, _, attribute = name.rpartition(".")
            try:
                importlib.import_module(name)
            except ImportError:  # a name in a module, which may load another one, or a module that Pyodide lacks
                getattr(sys.modules.get(module), attribute, None)
    return {file.rpartition(".")[0] for one in tuple(sys.modules.values()) if (file := getattr(one, "__file__", None))}


def stripped(source: str) -> ast.Module:
    """The tree with empty docstrings of functions, which NumPy reads; dataclasses make up one where it is missing."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        if ast.get_docstring(node, clean=False):
            node.body[0] = ast.copy_location(ast.Expr(ast.copy_location(ast.Constant(""), node.body[0])), node.body[0])
    return tree


def compiled(name: str, source: bytes) -> bytes:
    """The bytes of a .pyc file whose source is not looked for."""
    code = compile(stripped(source.decode()), name, "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def write(name: str, root: str, keep: set[str] | None) -> None:
    """An archive compiled. root: the folder that it is unpacked in; keep: the files to keep, None for all."""
    with (
        zipfile.ZipFile(FOLDER / "in" / name) as old,
        zipfile.ZipFile(FOLDER / "out" / name, "w", zipfile.ZIP_STORED) as new,
    ):
        for path in sorted(old.namelist()):
            stem, _, suffix = f"{root}/{path}".rpartition(".")
            if suffix in ("pyi", "pxd") or (keep is not None and stem not in keep and ".dist-info/LICENSE" not in path):
                continue
            content, given = old.read(path), path
            if suffix == "py":
                content, given = compiled(path, content), f"{path}c"
            new.writestr(zipfile.ZipInfo(given, DATE), content)


def main() -> None:
    import numpy

    keep = needed()
    library = next(path for path in sys.path if path.endswith(".zip"))
    write(LIBRARY, library, keep)
    write(NUMPY, str(Path(numpy.__file__).parents[1]), keep)
    write(PACKAGE, "", None)


main()
