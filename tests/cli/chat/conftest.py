"""A model that talks, and `chat` with lines that are typed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

APPENDS = """\
{{ bos_token }}{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ eos_token }}{% endfor %}
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}
"""
GREEDY = ("--temperature", 0)


def with_template(model: Path, folder: Path, source: str) -> Path:
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def talker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model, with a template to which each turn appends."""
    return with_template(model, tmp_path_factory.mktemp("chat") / "talker", APPENDS)


@pytest.fixture
def chat(run: Run, talker: Path) -> Callable[..., Any]:
    def go(*lines: str, options: tuple[object, ...] = GREEDY, new_tokens: int = 6) -> Any:
        text = "".join(f"{line}\n" for line in lines)
        return run("chat", "--model", talker, "-n", new_tokens, *options, input=text)

    return go
