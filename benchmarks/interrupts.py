"""Interrupts requests at random moments, and checks that concurrent texts are correct.

    python benchmarks/interrupts.py [--signals 10000] [--cancels 1000] [--tasks 300] [--closes 200] [--forks 50]
                                    [--threads 1] [--seed 0]

Three other texts run in threads of their own meanwhile, in a pool too small for all, so that texts are preempted:

    signals   a timer's signal (setitimer) raises KeyboardInterrupt in the main thread during generate, stream, beam
              search, n > 1 or score, until the given number of signals have hit one of them
    cancels   another thread closes a stream that is being read
    tasks     asyncio tasks that read astream are cancelled; concurrent tasks continue
    closes    LLM.close while texts run: each of them ends, with a part of its text or an error
    forks     os.fork while texts run: the child gets an error, or generates the correct text

After each trial the engine must be idle, and it checks its invariants. Counted faults:

    wrong     an undisturbed text has other tokens than when run alone (a shortened text: is no prefix of it)
    short     an undisturbed text ended early                   failed   or with an error
    hang      an operation took more than 20 seconds            broken   an invariant of the engine is violated
    left      the engine still has a sequence without a client

The trials run in a process that is restarted after a hang, and with a new LLM after any other fault. The exit code is 1
if there was a fault. Only `idle` and `prove` use an edition's internals; the rest is the public API, so the file runs
with any edition: choose the interpreter.
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

HANG_S = 20.0  # limit of any operation; a trial takes some milliseconds
IDLE_S = 1.0  # limit until the engine is idle
MOST_DEATHS = 20  # of workers in one case
HUNG = 3  # exit code of a worker that detected a hang
FAULTS = ("wrong", "short", "failed", "hang", "broken", "left")


def idle(llm: LLM) -> bool:
    """Whether the engine has no sequence."""
    return llm.inspect(lambda engine: not engine.scheduler.sequences)  # first edition: llm.engine.scheduler


def prove(llm: LLM) -> None:
    """Run the idle engine's own check of its invariants. Raises AssertionError."""
    llm.inspect(lambda engine: engine.scheduler.check())


def open_llm() -> LLM:
    """An LLM with a page pool too small for the concurrent texts."""
    return LLM("stories", device="cpu", page_size=4, pages=20, token_budget=16)


class Trials:
    """An LLM, its texts when nothing disturbs them, and the counts of faults."""

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
        """Seconds of an operation while the neighbours run."""
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
        """Wait until the undisturbed texts have ended, and count their faults."""
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
        """End the process, the only way to end a thread that hangs."""
        self.counts["hang"] += 1
        self.counts["trials"] += 1
        faulthandler.dump_traceback()
        print(json.dumps(self.counts), flush=True)
        os._exit(HUNG)

    def settle(self) -> None:
        """Check that the engine is idle and its invariants hold; open a new LLM after a fault."""
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
        """Run trials until the count `counted` is `times`. Prints all counts so far as JSON after each trial."""
        while self.counts[counted] < times:
            faulthandler.dump_traceback_later(2 * HANG_S, exit=True)
            before = self.faults()
            trial(self)
            self.counts["trials"] += 1
            if self.faults() > before:
                self.llm = open_llm()  # do not close the old one: that might hang
            print(json.dumps(self.counts), flush=True)
        os._exit(0)  # do not wait for threads of broken engines


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


CASES: Mapping[str, tuple[Callable[[Trials], None], str]] = {  # the trial, and the count that ends the case
    "signals": (signals, "met"),
    "cancels": (cancels, "trials"),
    "tasks": (tasks, "trials"),
    "closes": (closes, "trials"),
    "forks": (forks, "trials"),
}


def work(case: str, times: int, seed: int) -> None:
    """The worker's main function."""
    warnings.simplefilter("ignore", DeprecationWarning)  # os.fork with threads, which is the case under test
    trial, counted = CASES[case]
    Trials(seed).run(trial, times, counted)


def run_case(case: str, times: int, threads: int, seed: int) -> Counter[str]:
    """Run all trials of a case, in a new process after each death; gives up after MOST_DEATHS of them."""
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
        if worker.returncode not in (0, HUNG):  # the watchdog killed it, or it crashed
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
