"""The documents speak of things that are there: files, links, commands, options; and the README's Python runs."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenwright.cli import app

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tokenwright"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", ["structure.md", "decisions.md", "glossary.md"])
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = re.findall(r"`([\w./]+(?:\.py|\.txt|\.toml|/))`", text)
    missing = [name for name in named if not any((base / name).exists() for base in (PACKAGE, ROOT, PACKAGE.parent))]
    assert not missing


def test_the_first_block_is_the_two_commands() -> None:
    first, second = blocks(README, "sh")[0].splitlines()
    assert first == 'scripts/install && .venv/bin/tokenwright generate "Once upon a time"'
    assert second == "scripts/test"


@pytest.mark.parametrize(
    "line",
    [
        line.split("#")[0].split("|")[-1].strip()
        for block in blocks(README, "sh")
        for line in block.splitlines()
        if re.search(r"(^|\| )tokenwright ", line)
    ],
)
def test_commands_and_options_exist(line: str) -> None:
    _, command, *arguments = shlex.split(line)
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.exit_code == 0, line
    for argument in arguments:
        if re.match(r"--?[a-z]", argument):
            assert re.search(rf"(^|\s){argument}\s", shown.output), f"{argument} in: {line}"


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(README, "python"):
        exec(block, {})
    assert capsys.readouterr().out.strip()
