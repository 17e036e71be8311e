"""The package's structure as facts: names that occur twice, crowded folders, wide classes, circles of imports.

`scripts/size` prints them, `tests/test_layers.py` holds them. A behaviour class is any class but a frozen dataclass and
a class without methods of its own, such as the body of a request: those are values. A class's attributes are the names
that it annotates, except class variables, and those assigned to `self`.
"""

from __future__ import annotations

import ast
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "tokenwright"
CROWDED = 18  # files of one kind in a folder
TOPS = ("src", "tests", "web", "benchmarks", "scripts", "recipes", "examples")  # the folders of the code
MADE = ("node_modules", "dist", "__pycache__")  # folders that tools write
CODE = (".py", ".ts", ".tsx", ".css", ".cpp", ".h")
LEFT_OVER = (".orig", ".rej", ".bak")
LOOSE = 10  # modules at the top of the package
WIDE = 12  # attributes of a behaviour class

# File names that mean the same in every room that has them.
ROLES: dict[str, str] = {
    "__init__.py": "a room's door",
    "routes.py": "the routes of an API",
    "bodies.py": "the requests of an API",
    "replies.py": "the replies of an API",
}
# A panel of the page is named alike on each side, and after the command or the part of the package that it shows.
PANELS = ("explorer/panels",)
SHOWN = ("cli/commands", "decode/sampler.py")

Trees = Mapping[str, ast.Module]


def parsed(package: Path = PACKAGE) -> dict[str, ast.Module]:
    """Every module of the package, by its path in it."""
    return {
        path.relative_to(package).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }


def twice(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names with several places, of (name, place)."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, place in pairs:
        found[name].append(place)
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def classes(trees: Trees) -> Iterator[tuple[str, ast.ClassDef]]:
    for name, tree in trees.items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def class_names_twice(trees: Trees) -> dict[str, list[str]]:
    return twice((node.name, place) for place, node in classes(trees))


def file_names_twice(trees: Trees) -> dict[str, list[str]]:
    """File names in several rooms that are neither a role nor a panel with what it shows."""
    found = twice((name.rpartition("/")[2], name) for name in trees)
    return {name: places for name, places in found.items() if name not in ROLES and not panel(places)}


def panel(places: list[str]) -> bool:
    return any(one.startswith(PANELS) for one in places) and all(one.startswith((*PANELS, *SHOWN)) for one in places)


def repository(root: Path = PACKAGE.parents[1]) -> list[str]:
    """The paths of the repository's code, and of what editors and merges left beside it."""
    found: list[str] = []
    for top in TOPS:
        for folder, folders, names in os.walk(root / top):
            folders[:] = [one for one in folders if one not in MADE and Path(folder, one) != PACKAGE / "web"]
            found += (Path(folder, name).relative_to(root).as_posix() for name in names)
    return sorted(path for path in found if path.endswith((*CODE, *LEFT_OVER)))


def left_over(files: Iterable[str]) -> list[str]:
    """The files that editors and merges left behind."""
    return [name for name in files if name.endswith(LEFT_OVER)]


def crowded_folders(files: Iterable[str]) -> dict[tuple[str, str], int]:
    """Folders with more than CROWDED files of one ending."""
    counts = Counter((name.rpartition("/")[0], Path(name).suffix) for name in files)
    return {folder: count for folder, count in sorted(counts.items()) if count > CROWDED}


def loose_modules(trees: Trees) -> list[str]:
    """The modules at the top of the package, without its door."""
    return [name for name in trees if "/" not in name and not name.startswith("__")]


def is_values(node: ast.ClassDef) -> bool:
    frozen = any("frozen=True" in ast.unparse(one) for one in node.decorator_list)
    methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozen or not any(method.name == "__init__" or not method.decorator_list for method in methods)


def attributes(node: ast.ClassDef) -> set[str]:
    names = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for inner in ast.walk(node):
        targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                    names.add(part.attr)
    return names


def widths(trees: Trees) -> list[tuple[int, str]]:
    """The number of attributes of each behaviour class."""
    return [(len(attributes(node)), f"{name}:{node.name}") for name, node in classes(trees) if not is_values(node)]


def runtime_imports(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when a module is loaded: not those in functions, nor those for type checking."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from runtime_imports(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            parts = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            parts += [handler.body for handler in getattr(node, "handlers", [])]
            for part in parts:
                yield from runtime_imports(part)


def import_graph(trees: Trees, package: str = "tokenwright") -> dict[str, set[str]]:
    """By module, the modules of the package that it imports when it is loaded."""

    def module(name: str) -> str:
        return ".".join([package, *Path(name).with_suffix("").parts]).removesuffix(".__init__")

    modules = {module(name) for name in trees}
    graph: dict[str, set[str]] = {one: set() for one in modules}
    for name, tree in trees.items():
        for node in runtime_imports(tree.body):
            if isinstance(node, ast.ImportFrom):
                named = [f"{node.module}.{alias.name}" for alias in node.names]
                found = {one if one in modules else str(node.module) for one in named}
            else:
                found = {alias.name for alias in node.names}
            graph[module(name)] |= found & modules
    return graph


def import_circles(trees: Trees) -> list[list[str]]:
    """Modules that import each other when they are loaded."""
    graph = import_graph(trees)
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set(), list(graph[start])
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                todo += graph[one]
        reached[start] = seen
    found = {
        tuple(sorted({start, *(one for one in reached[start] if start in reached[one])}))
        for start in graph
        if start in reached[start]
    }
    return [list(circle) for circle in sorted(found)]
