"""Small models that rank documents: one that answers yes or no, and files of sentence-transformers for another."""

import json
from pathlib import Path
from typing import Any

from tests.models.fixtures import make_checkpoint


def make_reranker(folder: Path) -> Path:
    """A random model of Qwen3's form with single tokens for yes and no; its folder's name is that of a reranker."""
    path, _ = make_checkpoint(folder / "tiny-reranker", "qwen3")
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    for first, second in (("y", "e"), ("ye", "s"), ("n", "o")):
        model["vocab"][first + second] = len(model["vocab"])
        model["merges"].append([first, second])
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return path


def write_modules(path: Path, *names: str, **pooling: Any) -> None:
    """Write modules.json with these modules, and the config of the pooling."""
    kinds = [{"idx": at, "path": f"{at}_{name}" if at else "", "type": f"a.b.{name}"} for at, name in enumerate(names)]
    (path / "modules.json").write_text(json.dumps(kinds), encoding="utf-8")
    if "Pooling" in names:
        folder = path / f"{names.index('Pooling')}_Pooling"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"word_embedding_dimension": 64} | pooling), encoding="utf-8")
