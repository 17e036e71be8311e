"""llama.cpp's ids of some texts, and the most probable token after each of them.

Reads {"model": PATH, "texts": [TEXT, ...]} on stdin, writes {"ids": [[...], ...], "next": [[...], ...]} to stdout.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import llama_cpp
from protocol import Job
from run_llama_cpp import BATCH, LlamaCpp


def ids_of(engine: LlamaCpp, text: str) -> list[int]:
    vocab, raw = llama_cpp.llama_model_get_vocab(engine.model), text.encode()
    tokens = (llama_cpp.llama_token * (len(raw) + 8))()
    count = llama_cpp.llama_tokenize(vocab, raw, len(raw), tokens, len(tokens), True, True)
    return list(tokens[:count])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the library prints to stdout
    asked = json.load(sys.stdin)
    engine = LlamaCpp(Job(Path(asked["model"]), "gguf", 2, 1, BATCH))
    ids = [ids_of(engine, text)[:BATCH] for text in asked["texts"]]
    following = []
    for each in ids:
        engine.prepare(1)
        rows = [(token, at, 0) for at, token in enumerate(each)]
        following.append(engine.decode(rows, list(range(len(rows)))))
    json.dump({"ids": ids, "next": following}, answers)


main()
