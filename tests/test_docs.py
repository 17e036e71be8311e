"""The documents name what exists: files, links, commands, options, fields; and their Python runs."""

import re
import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenwright import SamplingParams
from tokenwright.cli import app

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tokenwright"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NATIVE = PACKAGE / "backends" / "native" / "cpp"
ROOMS = [NATIVE, *(path for path in NATIVE.rglob("*") if path.is_dir())]
FOLDERS = (PACKAGE, ROOT, PACKAGE.parent, *ROOMS, *(ROOT / "benchmarks").iterdir(), ROOT / "web" / "src")
MOST_WORDS = 500  # of the README
MOST_IN_DOCS = 35_000


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`([\w./]+(?:\.py|\.txt|\.toml|\.cpp|\.h|/))`", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not any((folder / name).exists() for folder in FOLDERS)]


def test_the_decisions_that_are_cited_are_there() -> None:
    """Numbers are those of old; a decision that is overturned has left the page, and its number with it."""
    page = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    numbers = re.findall(r"^\*\*(\d+)\. ", page, re.MULTILINE)
    assert len(numbers) == len(set(numbers)) > 50
    sources = [
        *GUIDES,
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
    ]
    cited = {
        (path.name, number)
        for path in sources
        for text in re.findall(r"\bdecisions?\b[\w() ,.\]]{,25}", path.read_text(encoding="utf-8"))
        for number in re.findall(r"\d+", text)
    }
    assert [one for one in sorted(cited) if one[1] not in numbers] == []


def test_the_readme_is_short() -> None:
    assert len(README.split()) < MOST_WORDS


def test_the_documents_are_short() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")) <= MOST_IN_DOCS


def test_the_sampling_page_has_every_option_in_order() -> None:
    """The fields of SamplingParams before `seed` act on a row of logits, in the order of their declaration."""
    page = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| ([^|]*) \|", page, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row) if not name.startswith("dry_")]
    declared = [field.name for field in fields(SamplingParams)]
    acting = [name for name in declared[: declared.index("seed")] if not name.startswith("dry_")]
    assert named == [name for name in acting if name != "repetition_window"]
    assert "`repetition_window`" in page


def commands() -> list[str]:
    """The lines of all guides' sh blocks that call tokenwright, what stands before a pipe left out."""
    lines = [
        line
        for page in GUIDES
        for block in blocks(page.read_text(encoding="utf-8"), "sh")
        for line in block.splitlines()
    ]
    called = [line.split(" #")[0].strip() for line in lines if re.search(r"(^|\| )tokenwright ", line)]
    return list(dict.fromkeys(re.sub(r"^.*\| (?=tokenwright )", "", line) for line in called))


@cache
def help_of(command: str) -> str:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.exit_code == 0, command
    return shown.output


@pytest.mark.parametrize("line", commands())
def test_commands_and_options_exist(line: str) -> None:
    _, command, *arguments = shlex.split(line.split(" > ")[0])
    shown = help_of(command)
    for argument in arguments:
        if re.match(r"--?[a-z]", argument):
            assert re.search(rf"(^|\s){argument}\s", shown), f"{argument} in: {line}"


@pytest.mark.parametrize("page", [p for p in GUIDES if blocks(p.read_text("utf-8"), "python")], ids=lambda p: p.name)
def test_the_python_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        exec(block, {})
        assert capsys.readouterr().out.strip()
