"""Starts a chat template's process and asks it to render, with limits on time, memory and length."""

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Timer
from typing import Any, NamedTuple

from tokenwright.errors import RequestError
from tokenwright.text.messages import Message, strings
from tokenwright.text.tokenizer import check_text

SECONDS = 2.0
MEMORY = 512 * 2**20  # address space of the process
MOST_CHARACTERS = 4 * 2**20  # of a rendered prompt, plus twice the messages' length
_START_SECONDS = 60.0  # to start Python and import jinja2, on a busy machine
_CURE = "; put one that works into chat_template.jinja, in the model's folder"
_WORKER = str(Path(__file__).with_name("template_process.py"))


class TextSpan(NamedTuple):
    """Characters [start, stop) of a prompt that come from a request: the message (-1: tools), its field, and place."""

    start: int
    stop: int
    message: int
    field: str
    source: int


def question(messages: Sequence[Message], add_generation_prompt: bool, more: Mapping[str, Any]) -> dict[str, Any]:
    most = MOST_CHARACTERS + 2 * sum(map(len, strings([messages, more])))
    return {"messages": messages, "add_generation_prompt": add_generation_prompt, "most": most, **more}


def read(answer: Mapping[str, Any]) -> tuple[str, list[TextSpan]]:
    if "error" in answer:
        cure = "" if answer["error"].startswith("refuses") else _CURE
        raise RequestError(f"the model's chat template {answer['error']}{cure}")
    try:
        check_text(answer["text"])
    except RequestError as error:
        raise RequestError(f"what the model's chat template writes is no text: {error}") from error
    return answer["text"], [TextSpan(*span) for span in answer["spans"]]


class Renderer:
    """A template and its process, started on demand, and killed at its time limit. Thread-safe."""

    def __init__(self, source: str, values: Mapping[str, str | tuple[str, ...]], seconds: float) -> None:
        self._start = {"template": source, "values": dict(values), "seconds": seconds, "memory": MEMORY}
        self._seconds = seconds
        self._lock = Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._ending: weakref.finalize[..., Any] | None = None

    def start(self) -> None:
        with self._lock:
            if self._running is None:
                with suppress(RequestError):  # the first `render` raises it again
                    self._open()

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool, more: Mapping[str, Any] | None = None
    ) -> tuple[str, list[TextSpan]]:
        """The rendered text, and the spans of it that come from the request, in order. Raises RequestError."""
        ask = question(messages, add_generation_prompt, more or {})
        with self._lock:
            try:
                if self._running is None or self._running.poll() is not None:
                    self._open()
                if not self._ready:
                    self._ask(None, _START_SECONDS, 1_000)
                    self._ready = True
                answer = self._ask(ask, self._seconds, 6 * ask["most"])
            except BaseException:  # interrupts too: the next question would receive the answer still to come
                self._stop()
                raise
        return read(answer)

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _open(self) -> None:
        self._stop()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal does not interrupt it
            )
        except OSError as error:
            raise RequestError(f"the chat template's process cannot be started: {error}") from error
        self._running, self._ready = process, False
        self._ending = weakref.finalize(self, _end, process, os.getpid())
        self._say(self._start)

    def _say(self, question: Mapping[str, Any]) -> None:
        assert self._running is not None and self._running.stdin is not None, "who is asked is there"
        with suppress(BrokenPipeError):  # the process has died; `_ask` reports it
            self._running.stdin.write(json.dumps(question).encode() + b"\n")
            self._running.stdin.flush()

    def _ask(self, question: Mapping[str, Any] | None, seconds: float, most: int) -> dict[str, Any]:
        """The answer, of at most about `most` bytes, to `question`; None: to the message already sent."""
        process = self._running
        assert process is not None and process.stdout is not None, "who answers is there"
        late = Event()

        def expire() -> None:
            late.set()
            process.kill()

        timer = Timer(seconds, expire)
        timer.start()
        try:
            if question is not None:
                self._say(question)
            line = process.stdout.readline(most + 1_000)
        finally:
            timer.cancel()
            timer.join()
        if late.is_set() or not line.endswith(b"\n"):
            does = f"takes more than {seconds:g} s for these messages" if late.is_set() else "breaks its process"
            raise RequestError(f"the model's chat template {does}{_CURE}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _stop(self) -> None:
        if self._ending is not None:
            self._ending()
        self._running = self._ending = None


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """In a fork of `owner`, which started the process, leave it alone."""
    if os.getpid() != owner:
        return
    process.kill()
    process.communicate()  # reaps the process and closes the pipes
