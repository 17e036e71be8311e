"""Tokens for the vocabularies of small models."""

import json
from pathlib import Path


def add_tokens(path: Path, *names: str) -> None:
    """Add special tokens to a folder's tokenizer.json; the model has spare rows for 46 of them."""
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    first = 1 + max(*tokenizer["model"]["vocab"].values(), *(one["id"] for one in tokenizer["added_tokens"]))
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": first + at, "content": name, **form} for at, name in enumerate(names)]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
