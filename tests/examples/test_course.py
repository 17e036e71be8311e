"""The course's checks: right answers pass, wrong ones get their hint, and errors of a reader's code are told."""

import ast

import pytest

from tests.examples.course_answers import WRONG, wrong_answers
from web.course.answers import LESSONS, answer, check
from web.course.cell import Cell
from web.course.one_file import original, text, with_parts

FILE_PARTS = {name: answer(name) for name in LESSONS if name != "loop"}


def checked(lesson, code, solved=()):
    return list(check(lesson, code, dict(solved)))[-1]


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_lesson_knows_right_from_wrong(lesson):
    """The last lesson runs the file with all parts beside the real engine."""
    found = checked(lesson, answer(lesson), {name: answer(name) for name in LESSONS})
    assert found["passed"] and found["output"], found["message"]
    assert (found["file"] != "") == (lesson == "preemption")
    for code, hint in wrong_answers(lesson):
        found = checked(lesson, code)
        assert not found["passed"] and hint in found["message"], (hint, found["message"])
    start = checked(lesson, LESSONS[lesson].START)
    assert not start["passed"] and "fails." not in start["message"], start["message"]


def test_the_cells_begin_with_the_functions_of_the_file():
    assert [*WRONG] == [*LESSONS]
    for name, lesson in LESSONS.items():
        begun, right = (
            [(one.name, [argument.arg for argument in one.args.args]) for one in ast.parse(code).body]
            for code in (lesson.START, answer(name))
        )
        assert begun == right
        assert max(map(len, lesson.START.splitlines())) <= 84, "the width of a cell"


def test_all_right_answers_together_are_the_file():
    cells = [Cell(name, code, LESSONS[name].PARTS) for name, code in FILE_PARTS.items()]
    file = with_parts(cells)
    assert file.text == text()
    assert vars(file.run()).keys() == vars(original()).keys()


def test_the_engine_with_a_wrong_part_is_told_from_the_real_one():
    """A cell that counts as solved, and whose fault only the whole engine shows."""
    unchained = answer("prefixes").replace("sha256(before + tokens)", "sha256(tokens[:4])")
    found = checked("preemption", answer("preemption"), {**FILE_PARTS, "prefixes": unchained})
    assert not found["passed"] and "look at what two of them share" in found["message"], found["message"]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def generate(forward, tokens, count, end_ids)\n    return tokens\n", "Line 1 is no Python"),
        (
            "\ndef generate(forward, tokens, count, end_ids):\n    return token\n",
            "Line 3, “return token”, fails. NameError",
        ),
        (
            "import sys\n\ndef generate(forward, tokens, count, end_ids):\n    sys.exit(3)\n",
            "Line 4, “sys.exit(3)”, fails.",
        ),
        ("def generate(forward, tokens):\n    return tokens\n", "TypeError: generate() takes 2"),
        ("def other():\n    pass\n", "no function generate any more"),
        (
            "raise SystemExit\n\ndef generate(forward, tokens, count, end_ids):\n    pass\n",
            "Line 1, “raise SystemExit”",
        ),
    ],
)
def test_errors_of_the_code_are_told_with_their_line(code, told):
    found = checked("loop", code)
    assert not found["passed"] and told in found["message"]


def test_output_is_kept_up_to_a_size():
    code = 'def generate(forward, tokens, count, end_ids):\n    for _ in range(50_000): print("again")\n'
    found = checked("loop", code)
    assert found["output"].startswith("again\nagain") and len(found["output"]) < 5000


def test_cells_with_the_same_helper_are_told():
    helper = "\ndef helper():\n    pass\n"
    solved = {"pages": answer("pages") + helper, "chunks": answer("chunks") + helper}
    found = checked("preemption", answer("preemption"), solved)
    assert not found["passed"] and "pages and chunks both define helper" in found["message"]
