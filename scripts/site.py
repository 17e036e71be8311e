"""Hooks of mkdocs.yml: two pages that docs/ lacks, the README and the API reference, and links out of docs/.

A link to a file beside docs/ leads to the repository (`repo_url`); without an address it becomes text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[(?P<text>[^]]*)\]\((?P<path>[^):#\s]+)(?P<anchor>#[^)]*)?\)")
PUBLIC = (
    "llm.llm.LLM",
    "sampling_params.SamplingParams",
    "sampling_params.Grammar",
    "llm.outputs.Completion",
    "llm.outputs.Piece",
    "llm.run_trace.show",
    "planner.plan",
    "errors",
)


def on_files(files: Any, config: Any) -> Any:
    """Add the start page and the reference."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = re.sub(r"\]\(docs/", "](", readme)
    reference = "# Reference\n\n" + "\n\n".join(f"::: tokenwright.{name}" for name in PUBLIC) + "\n"
    for name, content in (("index.md", readme), ("reference.md", reference)):
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A page whose links out of docs/ lead to the repository."""
    folder = "" if page.file.src_uri == "index.md" else "docs"

    def replaced(found: re.Match[str]) -> str:
        if files.get_file_from_path(found["path"]):
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, found["path"]))
        if not (ROOT / path).exists():
            return found[0]  # which mkdocs warns of
        url = config.repo_url
        return f"[{found['text']}]({url.rstrip('/')}/blob/main/{path}{found['anchor'] or ''})" if url else found["text"]

    return LINK.sub(replaced, markdown)
