"""What the page asks of the course: its lessons, and a check of a cell."""

from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Annotated, Any
from warnings import catch_warnings

from tokenwright.errors import RequestError
from tokenwright.explorer.dataclass_reader import Length
from tokenwright.explorer.explorer import Explorer
from tokenwright.explorer.table import PanelRoute

from .cell import Cell, Hint, Output, expect, failure
from .lessons import LESSONS
from .one_file import NAME, File, part, with_parts
from .real import compare

Code = Annotated[str, Length(0, 20_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCheck:
    """POST /course/check. solved: the cells of other lessons that were right, by lesson."""

    lesson: Annotated[str, Length(1, 20)]
    code: Code
    solved: dict[str, Code] = field(default_factory=dict)


def answer(lesson: str) -> str:
    """A right cell."""
    one = LESSONS[lesson]
    return getattr(one, "ANSWER", None) or "\n\n".join(map(part, one.PARTS)) + "\n"


def cell(lesson: str, code: str) -> Cell:
    return Cell(lesson, code, LESSONS[lesson].PARTS)


def _course(_: Explorer) -> dict[str, Any]:
    return {
        "lessons": [
            {
                "id": name,
                "title": one.TITLE,
                "text": [" ".join(words.split()) for words in one.TEXT.split("\n\n")],
                "start": one.START,
                "answer": answer(name),
            }
            for name, one in LESSONS.items()
        ]
    }


def _check(_: Explorer, body: NewCheck) -> Iterator[dict[str, Any] | None]:
    if unknown := next((name for name in (body.lesson, *body.solved) if name not in LESSONS), None):
        raise RequestError(f"lesson: there is no lesson {unknown}", "lesson")
    yield from check(body.lesson, body.code, body.solved)


def check(lesson: str, code: str, solved: dict[str, str]) -> Iterator[dict[str, Any] | None]:
    """Yields None between parts of the work, and last the answer, with the whole file if the engine is complete."""
    output, files = Output(), list[File]()
    work, passed, message, whole = _work(lesson, code, solved, files), False, "", ""
    while True:
        try:
            with redirect_stdout(output), catch_warnings(action="ignore"):
                next(work)
        except StopIteration:
            passed = True
            message, whole = _end(lesson, solved, files)
            break
        except Hint as hint:
            message = str(hint)
            break
        except BaseException as error:  # a reader's code may raise anything, SystemExit as well
            message = failure(error, files[-1].found if files else lambda _: None, NAME)
            break
        yield None
    yield {"passed": passed, "message": message, "output": output.getvalue(), "file": whole}


def _work(lesson: str, code: str, solved: dict[str, str], files: list[File]) -> Iterator[None]:
    """files: gets the file that runs."""
    own = cell(lesson, code)
    own.check()
    files.append(with_parts([own]))
    yield from LESSONS[lesson].check(files[-1].run())
    if lesson == [*LESSONS][-1]:
        cells = [cell(name, text) for name, text in solved.items() if name != lesson]
        seen = dict[str, str]()
        for one in (*cells, own):
            for name in one.helpers():
                hint = f"The cells of {seen.get(name)} and {one.lesson} both define {name}: rename one of them."
                expect(seen.setdefault(name, one.lesson) == one.lesson, hint)
        files.append(with_parts([*cells, own]))
        yield from compare(files[-1].run())


def _end(lesson: str, solved: dict[str, str], files: list[File]) -> tuple[str, str]:
    """The sentence of a right answer, and the file if it was the last one."""
    if lesson != [*LESSONS][-1]:
        return "The tests of this step pass.", ""
    own = len({*solved, lesson})
    return f"Your engine, with your parts of {own} lessons, writes the tokens of the real engine.", files[-1].text


ROUTES = (PanelRoute("GET", "/course", _course), PanelRoute("POST", "/course/check", _check))
