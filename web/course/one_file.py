"""examples/one_file_engine.py: the text of its parts, and the file as a module with other parts in it."""

import ast
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .cell import Cell

HERE = Path(__file__).parent
NAME = "one_file_engine.py"


class Place(NamedTuple):
    """Lines of a cell within the file: both counted from 1."""

    cell: Cell
    line: int  # in the file
    first: int  # in the cell
    length: int


@dataclass(frozen=True)
class File:
    """The file with the parts of cells."""

    text: str
    places: tuple[Place, ...]

    def run(self) -> Any:
        """The file as a module."""
        module = ModuleType(NAME.removesuffix(".py"))
        exec(compile(self.text, NAME, "exec", dont_inherit=True), vars(module))
        return module

    def found(self, line: int) -> tuple[Cell, int] | None:
        """The cell that a line of the file is from, and its number there."""
        for cell, start, first, length in self.places:
            if start <= line < start + length:
                return cell, first + line - start
        return None


@cache
def text() -> str:
    """The file's text. It lies beside this module in a page, and in examples/ of the repository."""
    place = HERE / NAME
    return (place if place.exists() else HERE.parents[1] / "examples" / NAME).read_text(encoding="utf-8")


@cache
def original() -> Any:
    return File(text(), ()).run()


@cache
def _nodes() -> dict[str, ast.stmt]:
    """The functions and classes of the file, methods as Class.name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}": one for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


def part(name: str) -> str:
    """The text of a function of the file, not indented."""
    node = _nodes()[name]
    return textwrap.dedent("\n".join(text().splitlines()[node.lineno - 1 : node.end_lineno]))


def with_parts(cells: Iterable[Cell]) -> File:
    """The file with the functions of cells in the places of its own.

    What else a cell has stands before `main`, where all classes are known; its imports stand first.
    """
    lines, nodes = text().splitlines(), _nodes()
    first, last = nodes["Sampling"].lineno, nodes["main"].lineno
    edits: list[tuple[int, int, Cell, int, list[str]]] = []  # lines [from, to) of the file become these of a cell
    for cell in cells:
        for name, start, own in cell.functions():
            inner = [f"    {line}" if line else line for line in own] if "." in name else own
            node = nodes.get(name)  # the loop of the first lesson is not in the file
            begin, end = (last, last) if node is None else (node.lineno, (node.end_lineno or 0) + 1)
            edits.append((begin, end, cell, start, inner))
        for imports, start, own in cell.others():
            at = first if imports else last
            edits.append((at, at, cell, start, own))
    new, places, at = list[str](), list[Place](), 1
    for begin, end, cell, start, own in sorted(edits, key=lambda edit: edit[:2]):
        new += lines[at - 1 : begin - 1]
        places.append(Place(cell, len(new) + 1, start, len(own)))
        new += own
        at = end
    return File("\n".join([*new, *lines[at - 1 :]]) + "\n", tuple(places))
