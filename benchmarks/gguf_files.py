"""Real GGUF files against what others have published about them.

    python -m benchmarks.gguf_files FOLDER

FOLDER has `stories260K-f32.gguf`, `stories260K-q8_0.gguf` and `stories260K.expected.txt`
(what the fp32 weights write greedily from the BOS token, 200 steps; llama2.c's test_all.py), and in `vocab/` the
vocabularies of llama.cpp: `NAME.gguf`, `NAME.gguf.inp` (texts, separated by a line `__ggml_vocab_test__`) and
`NAME.gguf.out` (a line of ids each). Prints a line for each file and exits with 1 if one of them does not do as
expected: F32 writes the whole text, with cache and without, Q8_0 its first 250 characters; every text gives its ids,
and they the text.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenwright import LLM
from tokenwright.checkpoints.gguf.header import read_gguf
from tokenwright.text import Tokenizer
from tokenwright.text.metadata import read_metadata

ALIKE_Q8 = 250  # characters that Q8_0 must write as fp32 does
SEPARATOR = "\n__ggml_vocab_test__\n"


def alike(one: str, other: str) -> int:
    """The number of characters that two texts begin with in common."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def stories(folder: Path) -> Iterator[tuple[bool, str]]:
    expected = (folder / "stories260K.expected.txt").read_text(encoding="utf-8")
    for name, least in (("stories260K-f32.gguf", len(expected)), ("stories260K-q8_0.gguf", ALIKE_Q8)):
        with LLM(folder / name) as llm:
            for cache in (True, False):
                text = llm.generate("", max_tokens=200, temperature=0, cache=cache)[0].text
                same = alike(text, expected)
                good = text == expected if least == len(expected) else same >= least
                how = "with the cache" if cache else "without it"
                yield good, f"{name} {how}: {same} of {len(expected)} characters ({llm.weights}, {llm.kernels})"


def vocabulary(file: Path) -> tuple[bool, str]:
    tokenizer = Tokenizer(read_metadata(read_gguf(file).metadata, str(file)))
    texts = Path(f"{file}.inp").read_bytes().decode().split(SEPARATOR)
    lines = Path(f"{file}.out").read_text(encoding="utf-8").split("\n")
    expected = [[int(token) for token in line.split()] for line in lines[: len(texts)]]
    found = [tokenizer.encode(text, add_special=False, parse_special=False) for text in texts]
    same = sum(map(list.__eq__, found, expected))
    back = sum(tokenizer.decode(ids) == text for ids, text in zip(found, texts, strict=True))
    return same == back == len(texts), f"{file.name}: ids of {same} and text of {back} of {len(texts)} texts"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    results = [*stories(folder), *map(vocabulary, sorted((folder / "vocab").glob("*.gguf")))]
    for good, line in results:
        print("ok  " if good else "BAD ", line)
    return 0 if all(good for good, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
