"""A reader's code: the functions in it, hints about it, what it prints, and where it failed."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from traceback import walk_tb

MOST = 4000  # characters of a cell's output that are kept


class Hint(Exception):
    """The code is wrong; the message names what to look at."""


def expect(right: object, hint: str) -> None:
    """Raises Hint."""
    if not right:
        raise Hint(hint)


@dataclass(frozen=True)
class Cell:
    """parts: the names in the file of the functions that it must have, as Class.name or name."""

    lesson: str
    code: str
    parts: tuple[str, ...]

    @cached_property
    def _body(self) -> list[ast.stmt]:
        return ast.parse(self.code, "your cell").body

    def check(self) -> None:
        """Raises SyntaxError, or Hint where a function is missing or occurs twice."""
        names = [node.name for node in self._body if isinstance(node, ast.FunctionDef)]
        for part in self.parts:
            name = part.rpartition(".")[2]
            found = names.count(name)
            expect(found, f"The cell has no function {name} any more; define it at the beginning of a line.")
            expect(found == 1, f"The cell defines {name} twice; keep one of them.")

    def helpers(self) -> set[str]:
        """The names of its other functions and classes."""
        defined = {one.name for one in self._body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
        return defined - {part.rpartition(".")[2] for part in self.parts}

    def functions(self) -> Iterator[tuple[str, int, list[str]]]:
        """The parts: the name in the file, the number of the first line, the lines."""
        for part in self.parts:
            for node in self._body:
                if isinstance(node, ast.FunctionDef) and node.name == part.rpartition(".")[2]:
                    yield part, *self._lines(node)

    def others(self) -> Iterator[tuple[bool, int, list[str]]]:
        """What is no part: whether it is an import, the number of the first line, the lines."""
        own = {part.rpartition(".")[2] for part in self.parts}
        for node in self._body:
            if not (isinstance(node, ast.FunctionDef) and node.name in own):
                yield isinstance(node, ast.Import | ast.ImportFrom), *self._lines(node)

    def _lines(self, node: ast.stmt) -> tuple[int, list[str]]:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        return first, self.code.splitlines()[first - 1 : node.end_lineno]


class Output(StringIO):
    """What code prints, up to a size: code may print for ever."""

    def write(self, text: str) -> int:
        if self.tell() < MOST:
            super().write(text[:MOST])
            if self.tell() >= MOST:
                super().write("\n… and more")
        return len(text)


def failure(error: BaseException, where: Callable[[int], tuple[Cell, int] | None], file: str) -> str:
    """A sentence for an error: the last line of a cell that it went through. where: of a line of the file."""
    kind, said = type(error).__name__, str(error)
    if isinstance(error, SyntaxError) and error.filename == "your cell":
        return f"Line {error.lineno} is no Python: {error.msg}."
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    found: list[tuple[Cell, int]] = [place for line in lines if (place := where(line)) is not None]
    told = f"{kind}: {said}" if said else kind
    if not found:
        return f"The rest of the file fails with what your code is, or leaves behind. {told}"
    cell, line = found[-1]
    code = cell.code.splitlines()[line - 1].strip()
    return f"Line {line}, “{code}”, fails. {told}"
