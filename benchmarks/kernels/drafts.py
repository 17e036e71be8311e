"""The speed of decoding with drafts over the speed without, on the same text: in turn in one run, with its interval.

    python -m benchmarks.kernels.drafts [--pairs 30] [--cases 'qwen05*' 'smollm2*'] [--threads 2]
                                       [--root build/models] [--out build/benchmarks/drafts.json]

Two engines share a model's weights, one of them with `speculate="off"`. In each pair both write the same text once, in
alternating order, each turn under a salt of its own, so that no earlier turn is read. A figure is tokens a second from
the first token to the last. Every pair's texts and log-probabilities must be equal, or the run ends with an error.

    qwen05 FORMAT A     random weights; guesses of a fixed chance A to hold, at most K of them (0: of 7; 0.5: of 3; 0.9:
                        of 7), which the proposer counts and weighs as its own
    smollm2 CASE        SmolLM2-135M-Instruct (`scripts/real_model`): repeated text, an edit with the client's
                        prediction, JSON by a schema, free text, chat; "by int4" adds a copy of it as the draft model
    stories CASE        the model of the package, likewise; its draft model is its copy in int4

The table gives tokens a step, the share of drafts that were kept, and the median ratio with its 95 % interval (order
statistics). Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kernels.pairs import interval, told
from tokenwright import LLM, Grammar, SamplingParams
from tokenwright.backends.device import compute_with
from tokenwright.bench import shapes
from tokenwright.decode.drafts.speculate import LENGTHS, SuffixProposer, repeated
from tokenwright.engine import Request
from tokenwright.environment import Environment
from tokenwright.llm.asking import finish
from tokenwright.llm.model import LoadedModel
from tokenwright.llm.outputs import Completion

REAL = Environment.read().cache_folder("real") / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = (
    "The harbour of Alesund opened its new breakwater on Monday. It is 640 metres long, cost 31 million and took four "
    "years to build. Fishing boats that sheltered behind the old pier may now stay at their berths in every wind. The "
    "mayor thanked the engineers, and a brass band from Molde played until the rain came at noon."
)
STORY = "Once upon a time there was a little girl named Lily. She loved to play in the park with her red ball. "
PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "first_name": {"type": "string", "maxLength": 12},
            "family_name": {"type": "string", "maxLength": 12},
            "favourite_animal": {"enum": ["a grey parrot", "a short-haired cat", "a golden retriever"]},
            "is_registered": {"type": "boolean"},
            "number_of_children": {"enum": [0, 1, 2, 3]},
        },
        "required": ["first_name", "family_name", "favourite_animal", "is_registered", "number_of_children"],
        "additionalProperties": False,
    }
)
SEEDED = {"temperature": 0.8, "seed": 7}
GREEDY = {"temperature": 0.0}


@dataclass(frozen=True)
class Case:
    """A text to be written. chat: its prompt is a message. chance, most: of guesses that hold, if they are forced."""

    model: str
    prompt: str
    tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)  # of the engine with drafts
    sampling: Mapping[str, Any] = field(default_factory=lambda: GREEDY)
    weights: str = "native"
    chat: bool = False
    prediction: str = ""
    chance: float | None = None
    most: int = 7


def forced(weights: str, chance: float, most: int) -> Case:
    return Case(
        "qwen05",
        "",
        40 if chance else 64,
        sampling=GREEDY | {"ignore_eos": True},
        weights=weights,
        chance=chance,
        most=most,
    )


EDIT = f"Write this text again without a change, but with Bergen for Molde:\n\n{TEXT}"
FREE = "Tell me in a few sentences why the sea is salt."
BY_INT4 = {"draft": str(REAL), "draft_weights": "int4"}
CASES: Mapping[str, Case] = {
    "qwen05 int8 0": forced("int8", 0.0, 7),
    "qwen05 int8 0.5": forced("int8", 0.5, 3),
    "qwen05 int8 0.9": forced("int8", 0.9, 7),
    "qwen05 bfloat16 0.9": forced("bfloat16", 0.9, 7),
    "smollm2 repeated": Case("smollm2", f"{TEXT}\n\n" * 3 + "The harbour of Alesund", 72),
    "smollm2 edit": Case("smollm2", EDIT, 72, chat=True, prediction=TEXT),
    "smollm2 json": Case("smollm2", "Invent a person.", 72, sampling=GREEDY | {"grammar": PERSON}, chat=True),
    "smollm2 free": Case("smollm2", "The history of the lighthouse begins", 72, sampling=SEEDED),
    "smollm2 chat": Case("smollm2", FREE, 72, chat=True),
    "smollm2 chat by int4": Case("smollm2", FREE, 72, BY_INT4, weights="bfloat16", chat=True),
    "stories repeated": Case("stories", STORY * 3, 120),
    "stories free": Case("stories", "Once upon a time", 120, sampling=SEEDED),
    "stories free by int4": Case(
        "stories", "Once upon a time", 120, {"draft": "stories", "draft_weights": "int4"}, SEEDED
    ),
}


class Forced(SuffixProposer):
    """Guesses that hold with a fixed chance, instead of what was repeated; the rest is the proposer's own."""

    def __init__(self, own: SuffixProposer, text: Sequence[int], chance: float, most: int) -> None:
        super().__init__(own.costs, earlier=0)
        self.text = text
        self.chance = chance
        self.most = most

    def _repeated(self, sequence: Any, own: Any, most: int) -> Any:  # noqa: ARG002  (the proposer's)
        known = len(sequence.tokens)
        draw = random.Random(known)
        right = self.text[known : known + min(most, self.most)]
        guess = [token if draw.random() < self.chance else (token + 1) % 1000 for token in right]
        return repeated(known, LENGTHS[-2], guess) if guess else None


@dataclass
class Measured:
    """Speeds of one case, a value for each pair, and what the last text with drafts cost."""

    on: list[float] = field(default_factory=list)
    off: list[float] = field(default_factory=list)
    steps: float = 0.0  # tokens a step
    kept: float = 0.0  # of drafts

    @property
    def ratios(self) -> list[float]:
        return [on / off for on, off in zip(self.on, self.off, strict=True)]


def request_of(llm: LLM, case: Case, turn: str) -> Request:
    params = SamplingParams(max_tokens=case.tokens, logprobs=0, **case.sampling)
    prompt: Any = case.prompt or [7919 * place % 1000 + 5 for place in range(32)]
    if case.chat:
        prompt = llm.render([{"role": "user", "content": case.prompt}]).ids
    return llm.prepare(prompt, params, salt=turn, prediction=case.prediction)


def write(llm: LLM, case: Case, turn: str) -> Completion:
    [done] = finish(llm.llm_engine, [request_of(llm, case, turn)])
    return done.completion()


def speed(done: Completion) -> float:
    times = done.usage.token_s
    return (len(times) - 1) / (times[-1] - times[0])


def steps_of(done: Completion) -> float:
    """Tokens a step: the tokens of one step come at one time."""
    return len(done.usage.token_s) / len(set(done.usage.token_s))


def measure(loaded: LoadedModel, case: Case, pairs: int) -> Measured:
    found = Measured()
    with LLM(loaded, pages=256, speculate="off") as off, LLM(loaded, pages=256, **case.options) as on:
        expected = write(off, case, "text")
        if case.chance is not None:
            ids = [*request_of(off, case, "text").prompt, *expected.token_ids]

            def force(engine: Any) -> None:
                engine.scheduler.proposer = Forced(engine.scheduler.proposer, ids, case.chance or 0.0, case.most)

            on.inspect(force)
        write(on, case, "warm")
        for turn in range(pairs):
            both = [(off, found.off), (on, found.on)]
            for llm, speeds in both if turn % 2 else both[::-1]:
                done = write(llm, case, f"{turn}")
                if (done.token_ids, done.logprobs) != (expected.token_ids, expected.logprobs):
                    raise SystemExit(f"{case} wrote another text with drafts than without")
                speeds.append(speed(done))
                if llm is on:
                    found.steps = steps_of(done)
                    found.kept = done.usage.accepted_tokens / max(1, done.usage.drafted_tokens)
    return found


def models(cases: Sequence[str], root: Path) -> Iterator[tuple[LoadedModel, list[str]]]:
    """Each model in each format, with the cases that it is measured in."""
    asked: dict[tuple[str, str], list[str]] = {}
    for name in cases:
        asked.setdefault((CASES[name].model, CASES[name].weights), []).append(name)
    for (model, weights), names in asked.items():
        path = str(REAL) if model == "smollm2" else model if model == "stories" else str(shapes.ready(model, root))
        yield LoadedModel(path, weights=weights), names


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--cases", nargs="+", default=["*"], help=f"names or patterns of {', '.join(CASES)}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--root", type=Path, default=Path("build/models"), help="of the models with random weights")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/drafts.json"))
    arguments = parser.parse_args()
    arguments.cases = [name for name in CASES if any(fnmatchcase(name, one) for one in arguments.cases)]
    if not REAL.exists() and any(name.startswith("smollm2") for name in arguments.cases):
        parser.error("scripts/real_model fetches the model that smollm2 needs; or leave its cases out")
    if not arguments.cases or arguments.pairs < 1:
        parser.error(f"a pair or more, and cases out of {', '.join(CASES)}")
    return arguments


def main() -> None:
    arguments = parse()
    compute_with(arguments.threads)
    figures: dict[str, Measured] = {}
    print(f"{arguments.pairs} pairs, {arguments.threads} threads, load {os.getloadavg()[0]:.1f}")
    print(f"{'':>22} {'off tok/s':>10} {'on tok/s':>10} {'a step':>7} {'kept':>5}  on / off")
    for loaded, names in models(arguments.cases, arguments.root):
        for name in names:
            one = figures[name] = measure(loaded, CASES[name], arguments.pairs)
            middles = f"{median(one.off):>10,.1f} {median(one.on):>10,.1f} {one.steps:>7.2f} {one.kept:>5.2f}"
            print(f"{name:>22} {middles}  {told(one.ratios)}", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    record = {name: {"ratio": interval(one.ratios), **vars(one)} for name, one in figures.items()}
    arguments.out.write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
