"""Tokens of small models: more in a vocabulary, texts of random ones, and how many to write. It needs no torch."""

import json
import random
from pathlib import Path

from tests.models.hybrids import VOCAB
from tokenwright import SamplingParams


def add_tokens(path: Path, *names: str) -> None:
    """Add special tokens to a folder's tokenizer.json; the model has spare rows for 46 of them."""
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    first = 1 + max(*tokenizer["model"]["vocab"].values(), *(one["id"] for one in tokenizer["added_tokens"]))
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": first + at, "content": name, **form} for at, name in enumerate(names)]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


def text_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, VOCAB) for _ in range(length)]


def most(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
