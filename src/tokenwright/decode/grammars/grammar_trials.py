"""Asks grammar workers about grammars and schemas within a budget, and turns llguidance's errors into remedies."""

import json
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, LifoQueue
from threading import BoundedSemaphore, Timer
from typing import Any, NamedTuple

from tokenwright.decode.grammars import grammar_worker
from tokenwright.errors import EngineError, RequestError

# Speeds as measured by llguidance. A large public schema (FHIR) takes 500,000 of the initial lexer fuel.
LIMITS = {
    "initial_lexer_fuel": 600_000,  # nodes of the regular expressions, 50,000 per ms
    "step_lexer_fuel": 100_000,  # for one mask, 14,000 per ms
    "step_max_items": 20_000,  # parser items for one mask, 20,000 per ms
    "max_items_in_row": 2_000,  # parser items at one position of the text
    "max_lexer_states": 20_000,  # of 1 to 2 KB each, over the whole text
    "max_grammar_size": 200_000,  # symbols
    "verbose_errors": False,
}
WORKERS = 2  # grammars checked at the same time; others wait
WORKER_SECONDS = 60.0  # wall-clock time; only a worker that hangs without computing takes this long
CPU_SECONDS = 0.8  # of a worker, for one question
REQUEST_SECONDS = 2.0
LEAST_SECONDS = 0.01
MOST_MESSAGE = 300  # characters

SIMPLER = "make it simpler: fewer alternatives, smaller bounds"
_MEANINGS = (  # (a phrase in llguidance's message, our message)
    ("NoExtensionBias", "no text that the model's tokens can spell follows it"),
    ("oneOf constraints", "oneOf is only supported where its schemas exclude each other by their types; use anyOf"),
    ("is not present in a registry", "$ref to another document is not followed; put the schema under $defs"),
    ("too big", f"it is too large; {SIMPLER}"),
    ("too large", f"it is too large; {SIMPLER}"),
    ("too many states", f"its regular expressions take too much memory; {SIMPLER}"),
    ("too many expressions", f"its regular expressions are too large; {SIMPLER}"),
    ("Current row has", f"too many of its alternatives are open at one place; {SIMPLER}"),
    ("Too many items", f"too many of its alternatives are open at one place; {SIMPLER}"),
    ("panic", f"llguidance fails on it; {SIMPLER}"),
)
_TOO_LONG = f"to compile it takes more than {CPU_SECONDS} s; {SIMPLER}"
_TOO_LARGE = (
    f"to compile it takes more than {grammar_worker.MEMORY_BYTES >> 20} MiB, or it is nested too deeply; {SIMPLER}"
)
_EXCERPT = re.compile(r"\n *\d+ \|.*|\n *\^+|^at \d+\(\d+\): ", re.MULTILINE)  # a source line and its ^
_REST = re.compile(r"\n?<(non-verbose|backtrace|state).*", re.DOTALL)


def shortened(error: str) -> str:
    for sign, meaning in _MEANINGS:
        if sign in error:
            return meaning
    line = " ".join(_EXCERPT.sub("", _REST.sub("", error)).split())
    return line if len(line) <= MOST_MESSAGE else line[:MOST_MESSAGE] + " ..."


@dataclass
class Budget:
    """The workers' processor time for all grammars of a request, in seconds. `kept` are for the last compilation."""

    left: float = REQUEST_SECONDS
    kept: float = CPU_SECONDS
    cancelled: bool = False

    def limit(self, kept: float = 0.0) -> float:
        """The seconds that the next question may take, with `kept` left after it. Raises RequestError if cancelled."""
        if self.cancelled:
            raise RequestError("the client has disconnected")
        return min(CPU_SECONDS, self.left - kept)


class WorkerAnswer(NamedTuple):
    said: Any
    error: str = ""


class GrammarWorkers:
    """At most WORKERS processes that run `grammar_worker`, started on demand and reused."""

    def __init__(self, tokens: list[bytes]) -> None:
        texts = [token.decode("latin-1") for token in tokens]
        self._setting = {"path": sys.path, "tokens": texts, "limits": LIMITS}
        self._turns = BoundedSemaphore(WORKERS)
        self._idle: LifoQueue[subprocess.Popen[bytes]] = LifoQueue()
        weakref.finalize(self, _end_all, self._idle, os.getpid())

    def complaint(self, source: str, budget: Budget, kept: float = 0.0) -> str:
        """The error of a grammar, "" if it has none. Raises EngineError if no worker can be started."""
        answer = self.ask({"grammar": source}, budget, kept)
        return answer.error or shortened(answer.said)

    def ask(self, question: Mapping[str, Any], budget: Budget, kept: float = 0.0) -> WorkerAnswer:
        """A worker's answer; `kept` seconds stay. Raises EngineError without a worker, RequestError if cancelled."""
        with self._turns:
            seconds = budget.limit(kept)
            if seconds < LEAST_SECONDS:
                return WorkerAnswer(None, _TOO_LONG)
            worker = self._take()
            reply = _ask(worker, {**question, "seconds": seconds})
            if reply is None:
                return WorkerAnswer(None, f"the process that tries it has ended after {WORKER_SECONDS:g} s; try again")
            self._idle.put(worker)
        budget.left -= reply["seconds"]
        if reply["said"] is not None:
            return WorkerAnswer(reply["said"])
        return WorkerAnswer(None, _TOO_LONG if reply["signal"] == signal.SIGPROF else _TOO_LARGE)

    def close(self) -> None:
        _end_all(self._idle, os.getpid())

    def _take(self) -> "subprocess.Popen[bytes]":
        try:
            while (worker := self._idle.get_nowait()).poll() is not None:
                _end(worker)  # another process has killed it
        except Empty:
            worker = subprocess.Popen(
                [sys.executable, "-I", grammar_worker.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal does not interrupt it
            )
            if _ask(worker, self._setting) is None:
                raise EngineError(
                    "the process that tries grammars does not start; check that llguidance is installed and that the "
                    "machine has memory left"
                ) from None
        return worker


def _ask(worker: "subprocess.Popen[bytes]", question: object) -> dict[str, Any] | None:
    assert worker.stdin is not None and worker.stdout is not None, "a worker has pipes"
    timer = Timer(WORKER_SECONDS, worker.kill)
    timer.start()
    try:
        worker.stdin.write(json.dumps(question).encode() + b"\n")
        worker.stdin.flush()
        return dict(json.loads(worker.stdout.readline()))
    except (OSError, ValueError, RecursionError):
        _end(worker)
        return None
    finally:
        timer.cancel()


def _end(worker: "subprocess.Popen[bytes]") -> None:
    worker.kill()
    with suppress(OSError), worker:  # closes the pipes and reaps the process
        pass


def _end_all(workers: "LifoQueue[subprocess.Popen[bytes]]", owner: int) -> None:
    """In a fork of `owner`, which started the workers, leave them alone."""
    if os.getpid() != owner:
        return
    with suppress(Empty):
        while True:
            _end(workers.get_nowait())
