"""Interrupts at random moments, and whether the texts beside the interrupted one come out right.

    python benchmarks/interrupts.py [--signals 10000] [--cancels 1000] [--tasks 300] [--closes 200] [--forks 50]
                                    [--threads 1] [--seed 0]

Three other texts run in threads of their own meanwhile, in a pool too small for all, so that texts are preempted:

    signals   a timer's signal (setitimer) raises KeyboardInterrupt in the main thread while it is in generate, stream,
              beam search, n > 1 or score; so often that so many of them met it there
    cancels   another thread closes a stream while it is read
    tasks     asyncio tasks that read astream are cancelled; the others beside them go on
    closes    LLM.close while texts run: each of them ends, with a part of its text or an error
    forks     os.fork while texts run: the child is refused with an error, or writes the right text

After each trial nothing may be running, and the engine proves its invariants. What may not be, counted:

    wrong     a text that nobody interrupted has other tokens than alone (of one that was cut off: than a part of it)
    short     a text that nobody interrupted ended early        failed   or with an error
    hang      something did not end in 20 seconds               broken   an invariant of the engine does not hold
    left      the engine still holds a text for which nobody waits

The trials run in a process that is started anew after a hang, and with a new LLM after any other fault. Ends with 1 if
anything was counted. Only `idle` and `prove` know an edition's insides; all else is the public API, so that the file
runs with any edition: choose the interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import NoReturn

from interrupts_texts import (
    NEIGHBOURS,
    OPERATIONS,
    PARAMS,
    PROMPTS,
    Ids,
    Interrupter,
    Operation,
    Text,
    astream,
    generate,
    judged,
    stream,
)

from tokenwright import LLM, TokenwrightError

HANG_S = 20.0  # that anything may take; a trial takes some milliseconds
IDLE_S = 1.0  # until the engine has nothing left to do
MOST_DEATHS = 20  # of workers in one case
HUNG = 3  # exit code of a worker that found something hanging
FAULTS = ("wrong", "short", "failed", "hang", "broken", "left")


def idle(llm: LLM) -> bool:
    """Whether the engine holds no text."""
    return not llm.engine.scheduler.sequences


def prove(llm: LLM) -> None:
    """The engine's own proof of its invariants, at idle. Raises AssertionError."""
    llm.engine.scheduler.check()


def open_llm() -> LLM:
    """With a pool that the texts beside each other do not fit into."""
    return LLM("stories", device="cpu", page_size=4, pages=20, token_budget=16)


class Trials:
    """An LLM, what its texts are when nothing disturbs them, and what was counted."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.pool = ThreadPoolExecutor(len(NEIGHBOURS) + 1)
        self.interrupter = Interrupter()
        self.llm = open_llm()
        texts = [(name, prompt) for name in PARAMS for prompt in PROMPTS]
        self.right = {text: generate(self.llm, text) for text in texts}
        self.seconds = {operation[0]: self._undisturbed(operation) for operation in OPERATIONS}

    def _undisturbed(self, operation: Operation) -> float:
        """How long an operation takes beside the neighbours."""
        _, run, text = operation
        taken = []
        for _ in range(3):
            beside = self.neighbours()
            began = time.perf_counter()
            run(self.llm, text)
            taken.append(time.perf_counter() - began)
            for _, one in beside:
                one.result()
        return min(taken)

    def neighbours(self) -> list[tuple[Text, Future[Ids]]]:
        ways = (stream, generate, stream)
        return [(text, self.pool.submit(way, self.llm, text)) for way, text in zip(ways, NEIGHBOURS, strict=True)]

    def wait(self, beside: Sequence[tuple[Text, Future[Ids]]]) -> None:
        """Until the undisturbed texts have ended; counts what became of them."""
        for text, one in beside:
            self.counts["texts"] += 1
            try:
                self.counts[judged(one.result(HANG_S), self.right[text])] += 1
            except Late:
                self.hang()
            except Exception as error:
                self.failed(error)

    def failed(self, error: BaseException) -> None:
        print(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
        self.counts["failed"] += 1

    def hang(self) -> NoReturn:
        """Ends the process: what hangs in it cannot be ended otherwise."""
        self.counts["hang"] += 1
        self.counts["trials"] += 1
        faulthandler.dump_traceback()
        print(json.dumps(self.counts), flush=True)
        os._exit(HUNG)

    def settle(self) -> None:
        """Nothing may be running any more, and the invariants must hold; after a fault a new LLM is opened."""
        until = time.perf_counter() + IDLE_S
        while not idle(self.llm) and time.perf_counter() < until:
            time.sleep(0.001)
        self.counts["left"] += not idle(self.llm)
        try:
            prove(self.llm)
        except AssertionError as error:
            print(f"broken: {error}", file=sys.stderr)
            self.counts["broken"] += 1

    def faults(self) -> int:
        return sum(self.counts[fault] for fault in FAULTS)

    def run(self, trial: Callable[[Trials], None], times: int, counted: str) -> None:
        """Trials until `counted` of them are so many. A line of JSON after each has all counts so far."""
        while self.counts[counted] < times:
            faulthandler.dump_traceback_later(2 * HANG_S, exit=True)
            before = self.faults()
            trial(self)
            self.counts["trials"] += 1
            if self.faults() > before:
                self.llm = open_llm()  # the old one is dropped as it is: closing it might hang
            print(json.dumps(self.counts), flush=True)
        os._exit(0)  # whatever is left in threads of broken engines


def signals(trials: Trials) -> None:
    name, run, text = trials.random.choice(OPERATIONS)
    beside = trials.neighbours()
    delay = trials.random.uniform(0, 1.1) * trials.seconds[name]
    try:
        found = trials.interrupter.met(delay, lambda: run(trials.llm, text))
    except Exception as error:
        trials.failed(error)
    else:
        trials.counts["met"] += found is None
        if found:
            trials.counts[judged(found, trials.right[text])] += 1
    trials.wait(beside)
    trials.settle()


def cancels(trials: Trials) -> None:
    beside = trials.neighbours()
    name = trials.random.choice(("greedy", "seeded", "several"))
    text = (name, PROMPTS[0])
    pieces = trials.llm.stream(text[1], PARAMS[name])
    reader = trials.pool.submit(lambda: sum(1 for _ in pieces))
    time.sleep(trials.random.uniform(0, 1.1) * trials.seconds["stream"])
    pieces.close()
    try:
        reader.result(HANG_S)
        trials.counts["wrong"] += judged(ids_of(pieces), trials.right[text]) == "wrong"
    except Late:
        trials.hang()
    except Exception as error:
        trials.failed(error)
    trials.wait(beside)
    trials.settle()


def ids_of(pieces: object) -> Ids:
    return tuple(one.token_ids for one in pieces.completion.choices)  # type: ignore[attr-defined]


def tasks(trials: Trials) -> None:
    async def trial() -> list[Ids | BaseException]:
        running = [asyncio.create_task(astream(trials.llm, text)) for text in texts]
        for doomed in running[::2]:
            await asyncio.sleep(trials.random.uniform(0, 0.6) * trials.seconds["stream"])
            doomed.cancel()
        return await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), HANG_S)

    texts = [(("greedy", "seeded")[at % 2], PROMPTS[at % len(PROMPTS)]) for at in (0, 1, 3, 2, 4, 5)]
    try:
        found = asyncio.run(trial())
    except TimeoutError:
        trials.hang()
    for at, (text, one) in enumerate(zip(texts, found, strict=True)):
        trials.counts["texts"] += at % 2
        if not isinstance(one, BaseException):
            trials.counts[judged(one, trials.right[text])] += 1
        elif at % 2 or not isinstance(one, asyncio.CancelledError):
            trials.failed(one)
    trials.settle()


def closes(trials: Trials) -> None:
    beside = trials.neighbours()
    time.sleep(trials.random.uniform(0, 1.1) * trials.seconds["generate"])
    trials.llm.close()
    for text, one in beside:
        trials.counts["texts"] += 1
        try:
            trials.counts["wrong"] += judged(one.result(HANG_S), trials.right[text]) == "wrong"
        except Late:
            trials.hang()
        except TokenwrightError:
            trials.counts["refused"] += 1
        except Exception as error:
            trials.failed(error)
    trials.llm = open_llm()


def forks(trials: Trials) -> None:
    beside = trials.neighbours()
    time.sleep(trials.random.uniform(0, 1.1) * trials.seconds["generate"])
    text = ("greedy", PROMPTS[0])
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if generate(trials.llm, text) == trials.right[text] else 1)
        except TokenwrightError:
            os._exit(2)
        finally:
            os._exit(4)
    trials.wait(beside)
    until = time.perf_counter() + HANG_S / 4
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.perf_counter() < until:
        time.sleep(0.002)
    if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    trials.counts[{0: "right", 1: "wrong", 2: "refused", -signal.SIGKILL: "hang"}.get(code, "failed")] += 1
    trials.settle()


CASES: Mapping[str, tuple[Callable[[Trials], None], str]] = {  # and what is counted up to the number asked for
    "signals": (signals, "met"),
    "cancels": (cancels, "trials"),
    "tasks": (tasks, "trials"),
    "closes": (closes, "trials"),
    "forks": (forks, "trials"),
}


def work(case: str, times: int, seed: int) -> None:
    """What a worker does."""
    warnings.simplefilter("ignore", DeprecationWarning)  # of os.fork beside threads, which is the case
    trial, counted = CASES[case]
    Trials(seed).run(trial, times, counted)


def run_case(case: str, times: int, threads: int, seed: int) -> Counter[str]:
    """All trials of a case, in as many processes as it takes; after MOST_DEATHS of these it gives up."""
    counted, deaths = CASES[case][1], 0
    total: Counter[str] = Counter()
    while total[counted] < times and deaths < MOST_DEATHS:
        with tempfile.TemporaryFile("w+") as log:
            command = [sys.executable, __file__, "work", case, str(times - total[counted]), str(seed + total["trials"])]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as worker:
                assert worker.stdout is not None, "a pipe was asked for"
                last = "{}"
                for line in worker.stdout:
                    last = line
            its = Counter(json.loads(last))
            log.seek(0)
            said = log.read()
        if worker.returncode != 0:
            deaths += 1
        if worker.returncode not in (0, HUNG):  # the watchdog ended it, or it crashed
            its["hang" if "Timeout (" in said else "failed"] += 1
        if any(its[fault] for fault in FAULTS):
            print(said[-4000:], file=sys.stderr)
        total += its
    return total


def main() -> int:
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for case, times in (("signals", 10_000), ("cancels", 1000), ("tasks", 300), ("closes", 200), ("forks", 50)):
        parser.add_argument(f"--{case}", type=int, default=times)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    columns = ("trials", "met", "texts", "right", "refused", *FAULTS)
    print(f"{'':>10}" + "".join(f"{column:>9}" for column in columns) + f"{'seconds':>9}", flush=True)
    faults = 0
    for case in CASES:
        began = time.perf_counter()
        counts = run_case(case, getattr(arguments, case), arguments.threads, arguments.seed)
        cells = "".join(f"{counts[column]:>9,}" for column in columns)
        print(f"{case:>10}{cells}{time.perf_counter() - began:>9.0f}", flush=True)
        faults += sum(counts[fault] for fault in FAULTS)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
