"""Bit equality: the results of two editions, compared by ==.

    python benchmarks/bits.py record FILE     # run the requests with this interpreter's Tokenwright
    python benchmarks/bits.py compare FILE    # run them again and compare with a recording
    python benchmarks/bits.py compare FILE --with OTHER    # compare two recordings

200 requests (`bits_requests.py`: greedy, seeded with many processors, n and best_of, beams, grammars, stop strings,
log-probabilities of prompts; alone, in batches of 2, 8 and 17, with preemption, swapping, shared prefixes, chunks,
windows and without the cache) run in each environment: the native kernels with every instruction set that the processor
has, and the reference kernels, each in a process of its own; twice, with other formats of weights, K and V. The file
uses only the public API, so it runs unchanged with any edition: choose the interpreter. Both recordings must come from
one machine, since torch's own sums depend on the processor.

A recording has the text, the ids, every log-probability to the last bit, the finish reason, the prompt's
log-probabilities and the tree of a beam search. `compare` prints every difference and exits with 1 if there is one, or
if a request is in one recording alone. It also prints how often texts were preempted and prefixes were cached in both:
if a count fell to zero, the requests prove less than before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bits_models import write
from bits_requests import Call, Session, sessions

from tokenwright import LLM, Completion, Piece, RequestError

ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "portable": {"TOKENWRIGHT_KERNELS": "native", "TOKENWRIGHT_ISA": "portable"},
    "avx2": {"TOKENWRIGHT_KERNELS": "native", "TOKENWRIGHT_ISA": "avx2"},
    "avx512": {"TOKENWRIGHT_KERNELS": "native", "TOKENWRIGHT_ISA": "avx512"},
    "amx": {"TOKENWRIGHT_KERNELS": "native", "TOKENWRIGHT_ISA": "amx"},
    "reference": {"TOKENWRIGHT_KERNELS": "reference"},
}
TURNS = 2  # runs of every request in an environment, each with other formats of weights, K and V
ABSENT = 3  # exit code of a worker whose processor lacks the instruction set

Recording = dict[str, Any]


def exact(value: object) -> object:
    """Encode a value as JSON that is equal if and only if the values are, to the last bit: floats in hexadecimal."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, list | tuple):
        return [exact(one) for one in value]
    return str(value) if isinstance(value, str) else value


def recorded(done: Completion) -> dict[str, object]:
    """All fields of a completion but times and counts of work."""
    names = ("text", "token_ids", "logprobs", "sampler_logprobs", "finish_reason", "stopped", "score",
             "prompt_logprobs", "ends")  # fmt: skip
    found = {name: exact(getattr(done, name)) for name in names}
    for name in ("top_logprobs", "prompt_top_logprobs"):
        rows = getattr(done, name)
        found[name] = exact([[(one.token, one.logprob, one.sampler_logprob) for one in row] for row in rows])
    found["tree"] = exact([(one.parent, one.token_id, one.logprob, one.score, one.reason) for one in done.tree])
    found["seed"], found["prompt_tokens"] = done.usage.seed, done.usage.prompt_tokens
    found["others"] = [recorded(other) for other in done.others]
    return found


def streamed(pieces: Sequence[Piece]) -> list[object]:
    """The pieces of each text, in the order of the texts: the order between texts is not compared."""
    return [
        [_piece(one) for one in pieces if one.choice == choice] for choice in sorted({one.choice for one in pieces})
    ]


def _piece(piece: Piece) -> object:
    top = [(one.token, one.logprob, one.sampler_logprob) for one in piece.top]
    return exact([piece.text, piece.token_id, piece.logprob, piece.sampler_logprob, top])


def run_call(llm: LLM, call: Call, happened: Counter[str]) -> list[dict[str, object]]:
    """The results of one call, for each of its requests."""
    prompt, params = call.prompts[0], call.params[0]
    if call.how == "score":
        whole, parts = llm.score(prompt), llm.score(prompt, [" and", ", she saw a cat"])
        return [
            {"scores": exact(list(map(float, whole))), "continuations": exact([list(map(float, one)) for one in parts])}
        ]
    if call.how == "astream":

        async def collect() -> list[Piece]:
            return [piece async for piece in llm.astream(prompt, params, cache=call.cache, salt=call.salt)]

        return [{"pieces": streamed(asyncio.run(collect()))}]
    if call.how == "stream":
        stream = llm.stream(prompt, params, cache=call.cache, salt=call.salt)
        return [{"pieces": streamed(list(stream)), **recorded(stream.completion)}]
    done = llm.generate(list(call.prompts), list(call.params), cache=call.cache, salt=call.salt)
    for one in done:
        happened["texts"] += len(one.choices)
        happened["preemptions"] += one.usage.preemptions
        happened["reused tokens"] += one.usage.reused_tokens
        happened["endings by " + str(one.finish_reason)] += 1
    return [recorded(one) for one in done]


def run_session(session: Session, setting: int, models: Path, happened: Counter[str]) -> Iterator[tuple[str, Any]]:
    """The name and the result of every request. The name includes the options of the LLM."""
    opened = session.opened(setting)
    model = session.model if session.model == "stories" else models / session.model
    about = f"{session.model} {opened['weights']} {opened['dtype']} kv {opened['kv']}"
    with LLM(model, device="cpu", **opened) as llm:
        for call in session.calls:
            for name, result in zip(call.names, run_call(llm, call, happened), strict=True):
                yield f"{name} {call.how} of {len(call.names)}: {about}", result


def work(environment: str, models: Path, only: Sequence[int]) -> int:
    """The worker's main function: print the results of its environment as JSON."""
    number = list(ENVIRONMENTS).index(environment)
    try:
        with LLM("stories", device="cpu", pages=1) as llm:
            kernels = llm.kernels
    except RequestError as error:
        print(error, file=sys.stderr)
        return ABSENT
    if kernels != environment:
        print(f"{environment} was asked for, but the kernels are {kernels}", file=sys.stderr)
        return ABSENT
    happened: Counter[str] = Counter()
    requests: dict[str, Any] = {}
    for session in sessions():
        for turn in range(TURNS):
            if session.number in only:
                requests |= run_session(session, TURNS * number + turn, models, happened)
    json.dump({"requests": requests, "happened": happened}, sys.stdout)
    return 0


def record(environments: Sequence[str], only: Sequence[int], threads: int) -> Recording:
    """Run every environment in a process of its own. Reports and skips those that the processor lacks."""
    found: Recording = {"environments": {}}
    with TemporaryDirectory() as folder:
        found["models"] = write(Path(folder) / "models")
        for name in environments:
            began = time.perf_counter()
            variables = {"TOKENWRIGHT_CACHE": f"{folder}/cache", "OMP_NUM_THREADS": str(threads), **ENVIRONMENTS[name]}
            kept = {key: value for key, value in os.environ.items() if key != "TOKENWRIGHT_ISA"}
            command = [sys.executable, __file__, "work", name, f"{folder}/models", *map(str, only)]
            done = subprocess.run(command, env={**kept, **variables}, stdout=subprocess.PIPE, check=False)
            if done.returncode == ABSENT:
                print(f"{name}: not here", flush=True)
                continue
            done.check_returncode()
            result = found["environments"][name] = json.loads(done.stdout)
            seconds = time.perf_counter() - began
            print(f"{name}: {len(result['requests'])} requests in {seconds:.0f} s, {result['happened']}", flush=True)
    return found


def differing(old: object, new: object, place: str = "") -> Iterator[str]:
    """The differences of two results: each field with the first place that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differing(old.get(key), new.get(key), f"{place}.{key}" if place else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, (one, other) in enumerate(zip(old, new, strict=True)):
            if one != other:
                yield from differing(one, other, f"{place}[{at}]")
                return
    elif old != new:
        yield f"{place}: {str(old)[:120]!r} became {str(new)[:120]!r}"


def selected(recording: Recording, environments: Sequence[str], only: Sequence[int]) -> Recording:
    """The part of a recording that `record` with the same arguments would make."""
    kept = {name: part for name, part in recording["environments"].items() if name in environments}
    for part in kept.values():
        part["requests"] = {name: one for name, one in part["requests"].items() if int(name.partition(".")[0]) in only}
    return {**recording, "environments": kept}


def compare(old: Recording, new: Recording) -> bool:
    """Print every difference. Returns True if there is none."""
    good = old["models"] == new["models"]
    if not good:
        print("the random models are not the same; the recordings cannot be compared")
    for name in dict.fromkeys([*old["environments"], *new["environments"]]):
        sides = [one["environments"].get(name, {"requests": {}, "happened": {}}) for one in (old, new)]
        before, after = (side["requests"] for side in sides)
        equal = sum(before[request] == after[request] for request in before.keys() & after.keys())
        print(f"{name}: {equal} of {len(before.keys() | after.keys())} equal")
        good = good and equal == len(before.keys() | after.keys()) > 0
        for request in sorted(before.keys() | after.keys()):
            if request not in before or request not in after:
                print(f"  {request}: only in the {'old' if request in before else 'new'} recording")
                continue
            for line in differing(before[request], after[request]):
                print(f"  {request}: {line}")
        for what in sorted({key for side in sides for key in side["happened"]}):
            counts = [side["happened"].get(what, 0) for side in sides]
            if counts[0] != counts[1]:
                print(f"  counts that may differ: {what}, {counts[0]} before and {counts[1]} now")
    return good and bool(old["environments"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--with", type=Path, dest="other", metavar="OTHER", help="a recording; do not run anything")
    parser.add_argument("--environments", nargs="+", choices=list(ENVIRONMENTS), default=list(ENVIRONMENTS))
    parser.add_argument("--sessions", nargs="+", type=int, default=list(range(20)), help="numbers from 0 to 19")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="with compare: keep the new recording here")
    return parser.parse_args()


def main() -> int:
    if sys.argv[1:2] == ["work"]:
        return work(sys.argv[2], Path(sys.argv[3]), [int(one) for one in sys.argv[4:]])
    arguments = parse()
    if arguments.other is not None:
        new = json.loads(arguments.other.read_text(encoding="utf-8"))
    else:
        new = record(arguments.environments, arguments.sessions, arguments.threads)
    keep = arguments.file if arguments.do == "record" else arguments.out
    if keep is not None:
        keep.write_text(json.dumps(new), encoding="utf-8")
    if arguments.do == "record":
        return 0
    old, new = (
        selected(one, arguments.environments, arguments.sessions)
        for one in (json.loads(arguments.file.read_text(encoding="utf-8")), new)
    )
    return 0 if compare(old, new) else 1


if __name__ == "__main__":
    sys.exit(main())
