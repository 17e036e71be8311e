"""Tokenwright and other engines, in turn in one run, on the models of `bench/shapes.py`.

    python -m benchmarks.peers.peers_setup # once: installs the peers, converts the models
    python -m benchmarks.peers.peers [--shapes qwen05 ...] [--engines 'ours *' 'llama.cpp q8_0' ...] [--rounds 3]

In each round every engine has a turn, in an order that rotates from round to round: a fresh process loads the model,
warms up, and continues new prompts of random ids, greedily and past every end token.

    prefill      512 prompt tokens, from the time to first token          tokens/s
    decode       64 tokens of one stream after those 512                  tokens/s
    8, 16        that many streams of 128 tokens after 32, once all run   tokens/s of all together
    first        time to first token after 32                             ms
    peak         peak resident memory, weights included                   MB
    4,096, 8,192 prefill of that many tokens, with --long                   tokens/s
    agrees       first tokens equal to transformers' in bfloat16  a check that all compute the same model

A measurement is repeated until it has taken a second (at most ten times); a turn's value is the median of these, and
the output gives the medians of the rounds. A ratio compares two turns of one round, and has its lowest and highest. For
an engine that cannot run here the output gives the reason. Every engine has the same number of threads and CPUs; run
nothing else meanwhile.

`ours-avx2` and `llama.cpp-avx2` use only AVX2, as on most people's processors, and are compared with one another; the
other peers have no setting for it that works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from benchmarks.peers.peers_setup import PEERS, State
from tokenwright.bench import shapes
from tokenwright.bench.limits import processor
from tokenwright.bench.measures import MEASURES, Measure, repeated, warm_up

HERE = Path(__file__).parent
OURS, REFERENCE = "ours", "transformers"
AVX2 = "-avx2"  # ends the name of an engine that uses only AVX2
OUR_FORMATS = {"bf16": 16, "int8": 8, "int4": 4}
LONG = {"4,096": Measure(1, 4096, 1), "8,192": Measure(1, 8192, 1)}
BOTH = {**MEASURES, **LONG}


@dataclass(frozen=True)
class Contender:
    """An engine with one format of weights, and that format's bits per weight."""

    engine: str
    format: str
    bits: int

    @property
    def name(self) -> str:
        return f"{self.engine} {self.format}"

    @property
    def ours(self) -> bool:
        return self.engine.removesuffix(AVX2) == OURS

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its process, in addition to ours."""
        return {"TOKENWRIGHT_ISA": "avx2"} if self.engine == OURS + AVX2 else {}

    def command(self, root: Path) -> list[str]:
        """The command that starts the adapter in the engine's own environment."""
        python = sys.executable if self.ours else str(State.read(root, self.engine).python())
        return [python, str(HERE / "adapters" / f"run_{self.engine.removesuffix(AVX2).replace('.', '_')}.py")]

    def model(self, shape: str, root: Path) -> Path:
        return root / shape if self.ours else State.read(root, self.engine).model(shape, self.format)

    def why_not(self, shape: str, root: Path) -> str | None:
        return None if self.ours else State.read(root, self.engine).why_not(shape, self.format)


CONTENDERS = (
    *(Contender(engine, form, bits) for engine in (OURS, OURS + AVX2) for form, bits in OUR_FORMATS.items()),
    *(Contender(engine, form, bits) for engine, peer in PEERS.items() for form, bits in peer.formats.items()),
)


@dataclass(frozen=True)
class Turn:
    """The measurements of one process. first_ids: the first token of every stream of every first repetition."""

    shape: str
    contender: str
    round: int
    figures: dict[str, float]
    load_s: float
    peak_mb: float
    first_ids: list[int]


class EngineError(Exception):
    """An engine failed; the message has the engine's reason."""


class Process:
    """A running adapter; see adapters/protocol.py."""

    def __init__(self, contender: Contender, root: Path, threads: int, log: Path) -> None:
        self._log = log.open("w", encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **contender.environment}
        self._process = subprocess.Popen(
            contender.command(root),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def ask(self, do: str, **what: object) -> dict[str, Any]:
        """Send a request and return the answer. Raises EngineError."""
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes were asked for"
        try:
            self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended; the empty answer below reports it
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise EngineError(f"ended with code {code} on {do!r}; see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()  # closing its stdin ends it
        self._log.close()


def take_turn(
    contender: Contender, shape: str, turn: int, root: Path, threads: int, log: Path, measures: Mapping[str, Measure]
) -> Turn:
    """Run measurements of one engine in a process of its own. Raises EngineError."""
    vocab_size = shapes.SHAPES[shape]["vocab_size"]
    figures: dict[str, float] = {}
    first_ids: list[int] = []
    streams = max(measure.streams for measure in measures.values())
    length = max(measure.prompt + measure.tokens for measure in measures.values())
    with Process(contender, root, threads, log) as process:
        what = {"model": str(contender.model(shape, root)), "format": contender.format}
        loaded = process.ask("load", **what, threads=threads, streams=streams, length=length)
        written: list[list[list[int]]] = []  # the token ids of every run

        def write(asked: list[list[int]], tokens: int) -> list[list[float]]:
            answer = process.ask("run", prompts=asked, tokens=tokens)
            written.append(answer["ids"])
            seconds: list[list[float]] = answer["seconds"]
            return seconds

        warm_up(measures, write, vocab_size, shape)
        for name, measure in measures.items():
            written.clear()
            figures[name] = median(repeated(measure, write, vocab_size, shape, turn, name))
            first_ids += [ids[0] for ids in written[0]]
        peak_mb = process.ask("rss")["rss_bytes"] / 1e6
    return Turn(shape, contender.name, turn, figures, loaded["load_s"], peak_mb, first_ids)


def measure_all(
    contenders: list[Contender], wanted: list[str], rounds: int, root: Path, threads: int, logs: Path, long: bool
) -> tuple[list[Turn], dict[str, str]]:
    """The turns, and the reason for each missing one, by "shape: contender"."""
    turns: list[Turn] = []
    missing: dict[str, str] = {}
    for shape in wanted:
        shapes.ready(shape, root)
        able = []
        for one in contenders:
            why = one.why_not(shape, root)
            if why is None:
                able.append(one)
            else:
                missing[f"{shape}: {one.name}"] = why
        for turn in range(rounds):
            at = turn % max(1, len(able))
            for one in able[at:] + able[:at]:
                if f"{shape}: {one.name}" in missing:
                    continue
                try:
                    asked = (one, shape, turn, root, threads, logs / f"{shape}-{one.name}.log")
                    made = take_turn(*asked, MEASURES)
                    if long:  # apart: with as long a context for every stream some engines would need all memory
                        further = take_turn(*asked, LONG)
                        made.figures.update(further.figures)
                        made.first_ids.extend(further.first_ids)
                    turns.append(made)
                    print(f"{shape}, round {turn + 1}: {line(one.name, [turns[-1]])}", file=sys.stderr, flush=True)
                except EngineError as error:
                    missing[f"{shape}: {one.name}"] = str(error)
    return turns, missing


def line(name: str, turns: list[Turn], reference: Mapping[int, list[int]] | None = None) -> str:
    """A row of the table: medians of the turns of one contender."""
    figures = (median(turn.figures[what] for turn in turns) for what in turns[0].figures)
    cells = [f"{name:>18}", *(f"{figure:10,.1f}" for figure in figures)]
    cells.append(f"{max(turn.peak_mb for turn in turns):9,.0f}")
    if reference is not None:
        cells.append(f"{agreement(turns, reference):>9}")
    return " ".join(cells)


def agreement(turns: list[Turn], reference: Mapping[int, list[int]]) -> str:
    """How many first tokens equal the reference's, out of how many, over the rounds in which the reference ran."""
    pairs = [
        (ours, theirs)
        for turn in turns
        if turn.round in reference
        for ours, theirs in zip(turn.first_ids, reference[turn.round], strict=True)
    ]
    return f"{sum(ours == theirs for ours, theirs in pairs)}/{len(pairs)}" if pairs else "-"


def table(shape: str, turns: list[Turn]) -> str:
    units = [f"{name:>10}" for turn in turns[:1] for name in turn.figures]
    lines = [f"{shape:>18} {' '.join(units)} {'peak MB':>9} {'agrees':>9}"]
    reference = {turn.round: turn.first_ids for turn in turns if turn.contender.startswith(f"{REFERENCE} ")}
    lines += [line(name, its, reference) for name, its in by_contender(turns).items()]
    return "\n".join(lines)


def by_contender(turns: Iterable[Turn]) -> dict[str, list[Turn]]:
    found: dict[str, list[Turn]] = {}
    order = [one.name for one in CONTENDERS]
    for turn in sorted(turns, key=lambda turn: (order.index(turn.contender), turn.round)):
        found.setdefault(turn.contender, []).append(turn)
    return found


@dataclass(frozen=True)
class Ratio:
    """Our speed over the best peer's: the median of the rounds, and its lowest and highest."""

    shape: str
    measure: str
    ours: str
    peer: str
    among: str  # the peers compared
    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        spread = f"({self.low:.2f} to {self.high:.2f})"
        return f"{self.ours:>12} {self.measure:>8}: {self.middle:6.2f} {spread:>16} times {self.peer}, {self.among}"


def ratios(shape: str, turns: list[Turn]) -> list[Ratio]:
    """Each of our formats against the best peer at equal bits, and against the best at any; AVX2 apart."""
    found = by_contender(turns)
    able = [one for one in CONTENDERS if one.name in found]
    compared = []
    for one in (one for one in able if one.ours):
        rivals = [peer for peer in able if not peer.ours and peer.engine.endswith(AVX2) == one.engine.endswith(AVX2)]
        mine, peers = one.name, [peer.name for peer in rivals]
        equal = [peer.name for peer in rivals if peer.bits == one.bits]
        for name in found[mine][0].figures:
            for among, others in ((f"the best peer at {one.bits} bits", equal), ("the best peer", peers)):
                if others:
                    best = max(others, key=lambda peer: speed(name, found[peer]))
                    compared.append(ratio(shape, name, found[mine], found[best], among))
    return compared


def speed(measure: str, turns: list[Turn]) -> float:
    """The median figure, inverted where lower is better."""
    middle = median(turn.figures[measure] for turn in turns)
    return 1 / middle if BOTH[measure].lower_is_better else middle


def ratio(shape: str, measure: str, ours: list[Turn], peer: list[Turn], among: str) -> Ratio:
    theirs = {turn.round: turn for turn in peer}
    values = [speed(measure, [turn]) / speed(measure, [theirs[turn.round]]) for turn in ours if turn.round in theirs]
    return Ratio(shape, measure, ours[0].contender, peer[0].contender, among, median(values), min(values), max(values))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(shapes.SHAPES), default=list(shapes.SHAPES))
    parser.add_argument(
        "--engines", nargs="+", default=["*"], help="patterns of names such as 'ours int8', 'openvino *'"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", action="store_true", help="measure prefill of 4,096 and 8,192 tokens as well")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--root", type=Path, default=shapes.default_root())
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    if not 1 <= arguments.threads <= len(cpus) or arguments.rounds < 1:
        parser.error(f"a round or more, and 1 to {len(cpus)} threads, since so many CPUs are here")
    arguments.engines = [
        one for one in CONTENDERS if any(fnmatchcase(one.name, pattern) for pattern in arguments.engines)
    ]
    if not arguments.engines:
        parser.error(f"no engine has such a name; there are {', '.join(one.name for one in CONTENDERS)}")
    return arguments


def main() -> None:
    arguments = parse()
    root, out = arguments.root.expanduser(), arguments.out
    out.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])  # the engines inherit it
    before = os.getloadavg()[0]
    turns, missing = measure_all(
        arguments.engines, arguments.shapes, arguments.rounds, root, arguments.threads, out, arguments.long
    )
    title = f"{processor()}, {arguments.threads} threads, {arguments.rounds} rounds"
    print(f"{title}, load {before:.2f} before")
    compared = []
    for shape in arguments.shapes:
        its = [turn for turn in turns if turn.shape == shape]
        found = ratios(shape, its)
        compared += found
        print("\n" + "\n".join([table(shape, its), *map(str, found)]))
    for what, why in missing.items():
        print(f"not here: {what}: {why}")
    record = {
        "about": title,
        "load": before,
        "turns": [asdict(turn) for turn in turns],
        "ratios": [asdict(one) for one in compared],
        "missing": missing,
    }
    (out / "peers.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
