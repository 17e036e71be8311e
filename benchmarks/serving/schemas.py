"""How many JSON schemas of other people a grammar enforces in full, and whether its texts are right.

    python -m benchmarks.serving.schemas FOLDER [--each 30] [--seed 1] [--texts 3] [--json FILE]

FOLDER holds files as maskbench has them (github.com/guidance-ai/jsonschemabench, maskbench/data): each has a schema
and instances, right ones and wrong ones. `--each` files of each kind are drawn; a kind is what a name begins with.

A schema is enforced if nothing of it is left out, its grammar compiles, no wrong instance can be written, and random
texts follow it (by the package jsonschema). Right instances that cannot be written are listed: each is a text that the
grammar forbids and the schema allows.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jsonschema

from tokenwright.decode.grammars.grammar import Grammars, GrammarState
from tokenwright.decode.schemas import enforceable
from tokenwright.engine import Grammar
from tokenwright.errors import EngineError, RequestError

END = 256  # the token that ends a text; the others are bytes
CLOSING = (END, *b'"}],:0')  # what a long text takes first
MOST_BYTES = 400  # of a random text
_KIND = re.compile(r"([A-Za-z]+(?:_[a-z]+(?=---))?2?K?)")


@dataclass
class Verdict:
    """The result of one schema: what is left out, the compiler's error, and instances on the wrong side."""

    name: str
    left_out: list[str] = field(default_factory=list)
    error: str = ""
    wrong_taken: list[str] = field(default_factory=list)
    right_refused: list[str] = field(default_factory=list)
    invalid_texts: list[str] = field(default_factory=list)
    texts: int = 0

    @property
    def enforced(self) -> bool:
        return not (self.left_out or self.error or self.wrong_taken or self.invalid_texts)


def kind_of(name: str) -> str:
    found = _KIND.match(name)
    return found[1] if found else name


def drawn(folder: Path, each: int, seed: int) -> Iterator[Path]:
    kinds: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.json")):
        kinds.setdefault(kind_of(path.name), []).append(path)
    for kind, paths in sorted(kinds.items()):
        yield from random.Random(f"{seed} {kind}").sample(paths, min(each, len(paths)))


def judged(grammars: Grammars, path: Path, texts: int) -> Verdict:
    case = json.loads(path.read_text())
    schema, verdict = case["schema"], Verdict(path.stem)
    made, verdict.left_out = enforceable(schema) if isinstance(schema, Mapping) else (schema, [])
    try:
        start = grammars.compile(Grammar.json_schema(made))
    except RequestError as error:
        verdict.error = str(error)
        return verdict
    check = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for test in case.get("tests", ()):
        text = json.dumps(test["data"], ensure_ascii=False)
        if written(start.fork(), text) == test["valid"]:
            continue
        if test["valid"]:
            verdict.right_refused.append(text)
        elif not check.is_valid(test["data"]):  # else only a `format` is against it, which is an annotation
            verdict.wrong_taken.append(text)
    if verdict.left_out:
        return verdict
    for n in range(texts):
        drawn = at_random(start.fork(), random.Random(f"{path.name} {n}"))
        if drawn is not None:
            verdict.texts += 1
            verdict.invalid_texts += [] if check.is_valid(json.loads(drawn)) else [drawn]
    return verdict


def written(state: GrammarState, text: str) -> bool:
    """Whether a text can be written as a whole."""
    for byte in text.encode():
        try:
            state.advance(byte)
        except EngineError:
            return False
    return state.accepting


def at_random(state: GrammarState, rng: random.Random) -> str | None:
    """A text of random bytes; None if it does not end in time."""
    text = b""
    with suppress(EngineError):
        while len(text) < MOST_BYTES:
            mask = state.mask()
            able = [byte for byte in (*range(32, 127), END) if int(mask[byte // 32]) >> byte % 32 & 1]
            if not able:
                return None
            late = len(text) > MOST_BYTES // 4 and rng.random() < 0.9
            closing = [byte for byte in CLOSING if byte in able] if late else []
            byte = END if END in closing else rng.choice(closing or able)
            text += bytes([byte]) if byte != END else b""
            if state.advance(byte):
                return text.decode()
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.schemas", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    grammars = Grammars(lambda token, first: bytes([token]) if token < END else None, END + 1, [END])  # noqa: ARG005
    verdicts = []
    for path in drawn(args.folder, args.each, args.seed):
        verdicts.append(one := judged(grammars, path, args.texts))
        if not one.enforced or one.right_refused:
            print(one.name, one.left_out or one.error or "", file=sys.stderr, flush=True)
    grammars.close()
    report(verdicts)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in verdicts], indent=1))


def report(verdicts: list[Verdict]) -> None:
    for kind, number in Counter(kind_of(one.name) for one in verdicts).items():
        good = sum(one.enforced for one in verdicts if kind_of(one.name) == kind)
        print(f"{kind:16} {good:4} of {number}")
    enforced = sum(one.enforced for one in verdicts)
    print(f"enforced {enforced} of {len(verdicts)} ({enforced / len(verdicts):.1%})")
    print(
        f"random texts {sum(one.texts for one in verdicts)}, invalid {sum(len(one.invalid_texts) for one in verdicts)}"
    )
    print(f"wrong instances taken where all is enforced {sum(len(one.wrong_taken) for one in _whole(verdicts))}")
    print(f"right instances refused {sum(len(one.right_refused) for one in verdicts)}")
    causes = Counter(
        name.rpartition(".")[2] for one in verdicts for name in {p.rpartition(".")[2] for p in one.left_out}
    )
    print("left out:", dict(causes.most_common()), "do not compile:", sum(bool(one.error) for one in verdicts))


def _whole(verdicts: list[Verdict]) -> list[Verdict]:
    return [one for one in verdicts if not one.left_out and not one.error]


if __name__ == "__main__":
    main()
