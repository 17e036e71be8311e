"""Conversations as prompts: a checkpoint's chat template, rendered in a process of its own, and the ids of its text.

A message's text never becomes a control token unless that is asked for (`markup`): what is written like one is broken
by a marker before the template sees it, the control tokens in what the template wrote are then its own, and the marker
is taken out again. The model's own answers may keep the ids that they were written with, so that the next prompt
begins with what the KV cache holds, token by token.
"""

import json
import re
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Event, Lock, Timer
from types import TracebackType
from typing import Any, Self

from tokenwright.errors import RequestError
from tokenwright.text.control import ControlTokens, unused_characters
from tokenwright.text.tokenizer import Tokenizer, check_text

Message = Mapping[str, str]  # "role" and "content"

MOST_MESSAGES = 100_000
SECONDS = 2.0  # of work for one prompt
MEMORY = 512 * 2**20  # bytes of address space of the process
MOST_CHARACTERS = 4 * 2**20  # of a prompt beyond twice the messages
_START_SECONDS = 60.0  # to start Python and import jinja2, on a busy machine
_CURE = "; put one that works into chat_template.jinja, in the model's folder"
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_WORKER = str(Path(__file__).with_name("template.py"))
_PROBE = "9f1c6e"  # an answer that no template has an opinion about


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as a prompt.

    text: as it can be shown; control tokens by their names. ids: of the whole prompt; the tokenizer adds nothing more.
    unknown: what the template writes like control tokens (<|...|>) though the vocabulary has no such token: they are
    read as text, so the template and the tokenizer hardly belong together.
    """

    text: str
    ids: tuple[int, ...]
    unknown: tuple[str, ...]


class ChatTemplate:
    """The chat template of a checkpoint. Thread-safe; the process is started when first needed, and kept.

    Raises RequestError for a tokenizer without one. `seconds`: for the rendering of one prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, seconds: float = SECONDS) -> None:
        if tokenizer.chat_template is None:
            raise RequestError(
                "this model has no chat template: it was not made for conversations; continue a text instead, "
                "or put a chat_template.jinja into its folder"
            )
        self._tokenizer = tokenizer
        self._source = tokenizer.chat_template
        names = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
        values = {name: tokenizer.token_text(at) for name, at in names.items() if at is not None}
        self._process = Renderer(self._source, values, seconds)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        markup: bool = False,
        answers: Mapping[int, Sequence[int]] | None = None,
    ) -> Rendered:
        """The prompt of a conversation.

        add_generation_prompt: end where the model's answer begins. markup: control tokens that are written in the
        messages count as such. answers: for the index of an assistant's message, the ids that the model wrote; they
        stand in the prompt as they are, where their text is the message's and the template keeps it.

        Raises RequestError for messages that are malformed or that the template refuses, and for a template that
        fails or takes too long.
        """
        checked = check_messages(messages)
        texts = [text for message in checked for text in message.values()]
        marker, border = unused_characters((*texts, self._source, *self._tokenizer.control.ids), 2)
        if not markup:
            checked = [self._broken(message, marker) for message in checked]
        try:
            text = self._process.render(checked, add_generation_prompt)
        except RequestError as error:
            raise RequestError(str(error).replace(marker, "")) from None
        kept = {at: own for at, ids in (answers or {}).items() if (own := self._own(checked, at, ids, marker))}
        if kept:
            bordered = self._process.render(_bordered(checked, kept, border), add_generation_prompt)
            if re.sub(f"{border}(?:[0-9]+{border})?", "", bordered) == text:  # the borders were none to the template
                return self._encoded(bordered, marker, border, kept)
        return self._encoded(text, marker, border, {})

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The control token that the template writes behind an answer, with which a model is taught to end it.

        Found by rendering a small conversation; empty where no control token follows, or the template fails.
        """
        probe = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _PROBE}]
        try:
            _, found, rest = self._process.render(probe, False).rpartition(_PROBE)
        except RequestError:  # a conversation will tell; other texts need no template
            return ()
        first = next((part for part in self._control.split(rest) if isinstance(part, int) or part.strip()), "")
        return (first,) if found and isinstance(first, int) else ()

    def start(self) -> None:
        """Start the process ahead of the first prompt, and do not wait for it."""
        self._process.start()

    def close(self) -> None:
        """End the process; rendering starts another one."""
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def _control(self) -> ControlTokens:
        return self._tokenizer.control

    @cached_property
    def _special(self) -> ControlTokens:
        """The control tokens less the tags, which answers hold and templates look for in them, as <think>."""
        special = self._tokenizer.special_ids
        return ControlTokens({name: at for name, at in self._control.ids.items() if at in special})

    def _broken(self, message: Message, marker: str) -> dict[str, str]:
        """The message with no control token in it, nor in what the template may build around it."""
        role, content = message["role"], message["content"]
        if role not in _ROLES and f"'{role}'" not in self._source and f'"{role}"' not in self._source:
            role = self._control.broken(role, marker)
        tokens = self._special if role == "assistant" else self._control
        return {"role": role, "content": tokens.broken(content, marker)}

    def _own(self, messages: Sequence[Message], at: int, ids: Sequence[int], marker: str) -> "_Own | None":
        """The answer that a message is by its ids, an end token left out; None where the ids say something else."""
        if not 0 <= at < len(messages) or messages[at]["role"] != "assistant":
            raise RequestError(f"answers has ids for message {at}, which is no message of the assistant")
        body = list(ids)
        while body and body[-1] in self._tokenizer.special_ids:
            body.pop()
        if not self._tokenizer.special_ids.isdisjoint(body):
            return None
        pieces = [self._tokenizer.token_bytes(token, first=False) or b"" for token in body]
        text = b"".join(pieces).decode("utf-8", errors="replace")
        core = text.strip()
        if not core or core != messages[at]["content"].replace(marker, "").strip():
            return None
        before, _, after = text.partition(core)
        return _Own(tuple(body), before, core, after)

    def _encoded(self, text: str, marker: str, border: str, kept: Mapping[int, "_Own"]) -> Rendered:
        """The prompt of a rendered text, in which the answers of `kept` stand between borders."""
        text = text.replace(json.dumps(marker)[1:-1], marker)  # as a template's tojson may have escaped it
        ids: list[int] = []
        unknown: dict[str, None] = {}

        def encode(part: str) -> None:
            parts = self._control.split(re.sub(f"{border}(?:[0-9]+{border})?", "", part), marker)
            for written in parts:
                if isinstance(written, str):
                    unknown.update(dict.fromkeys(re.findall(rf"<\|[^<>|\s{marker}]+\|>", written)))
            ids.extend(
                self._tokenizer.encode_parts(
                    [part.replace(marker, "") if isinstance(part, str) else part for part in parts]
                )
            )

        done = 0
        for match in re.finditer(f"{border}([0-9]+){border}([^{border}]*){border}", text):
            own = kept[int(match[1])]
            start, stop = match.start() - len(own.before), match.end() + len(own.after)
            whole = text[start : match.start()] == own.before and text[match.end() : stop] == own.after
            follows = self._control.split(text[stop : stop + 256], marker)[:1]
            if start < done or not whole or match[2].replace(marker, "") != own.core:
                continue
            if not (follows and isinstance(follows[0], int)):
                continue  # text that follows might be cut together with the answer's
            encode(text[done:start])
            ids.extend(own.ids)
            done = stop
        encode(text[done:])
        shown = re.sub(f"{border}(?:[0-9]+{border})?|{marker}", "", text)
        return Rendered(shown, tuple(ids), tuple(unknown))


@dataclass(frozen=True, slots=True)
class _Own:
    """An answer with the ids it was written with: its text, and the white space around, which templates trim."""

    ids: tuple[int, ...]
    before: str
    core: str
    after: str


class Renderer:
    """A template in its process (`template`), which is started when it is needed and killed when it takes too long.

    values: what the template knows beside the messages.
    """

    def __init__(self, source: str, values: Mapping[str, str], seconds: float) -> None:
        self._start = {"template": source, "values": dict(values), "seconds": seconds, "memory": MEMORY}
        self._seconds = seconds
        self._lock = Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._ready = False  # it has answered that it has the template
        self._ending: weakref.finalize[..., Any] | None = None

    def start(self) -> None:
        """Start the process ahead of the first prompt, and do not wait for it."""
        with self._lock:
            if self._running is None:
                with suppress(RequestError):  # which the first prompt then meets
                    self._open()

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """What the template makes of the messages. Raises RequestError."""
        most = MOST_CHARACTERS + 2 * sum(len(text) for message in messages for text in message.values())
        ask = {"messages": messages, "add_generation_prompt": add_generation_prompt, "most": most}
        with self._lock:
            try:
                if self._running is None or self._running.poll() is not None:
                    self._open()
                if not self._ready:
                    self._ask(None, _START_SECONDS, 1_000)
                    self._ready = True
                answer = self._ask(ask, self._seconds, 6 * most)
            except BaseException:  # an interrupt too: the answer may still come, and would be taken for the next one's
                self._stop()
                raise
        if "error" in answer:
            cure = "" if answer["error"].startswith("refuses") else _CURE
            raise RequestError(f"the model's chat template {answer['error']}{cure}")
        try:
            check_text(answer["text"])
        except RequestError as error:
            raise RequestError(f"what the model's chat template writes is no text: {error}") from error
        return answer["text"]

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
                start_new_session=True,  # a Ctrl-C on the terminal is for the program, not for this
            )
        except OSError as error:
            raise RequestError(f"the chat template's process cannot be started: {error}") from error
        self._running, self._ready = process, False
        self._ending = weakref.finalize(self, _end, process)
        self._say(self._start)

    def _say(self, question: Mapping[str, Any]) -> None:
        assert self._running is not None and self._running.stdin is not None, "who is asked is there"
        with suppress(BrokenPipeError):  # it has died, and will not answer
            self._running.stdin.write(json.dumps(question).encode() + b"\n")
            self._running.stdin.flush()

    def _ask(self, question: Mapping[str, Any] | None, seconds: float, most: int) -> dict[str, str]:
        """The answer to a line, or to what was said before; at most so many bytes of it."""
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
        answer: dict[str, str] = json.loads(line)
        return answer

    def _stop(self) -> None:
        if self._ending is not None:
            self._ending()
        self._running = self._ending = None


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()  # reaps it, and closes the pipes


def check_messages(messages: object) -> list[dict[str, str]]:
    """A copy of the messages, if they are what they should be. Raises RequestError."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f'messages must be a list of {{"role", "content"}}, not {type(messages).__name__}')
    if not 0 < len(messages) <= MOST_MESSAGES:
        raise RequestError(f"there are {len(messages):,} messages; a conversation has 1 to {MOST_MESSAGES:,}")
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            what = f"the keys {sorted(map(str, message))}" if isinstance(message, Mapping) else type(message).__name__
            raise RequestError(f'message {at} must have "role" and "content" and nothing else; it is {what}'[:500])
        for name, text in message.items():
            if not isinstance(text, str):
                raise RequestError(f"the {name} of message {at} must be text, not {type(text).__name__}")
            check_text(text)
        if not message["role"]:
            raise RequestError(f"the role of message {at} is empty; it is system, user or assistant")
    return [dict(message) for message in messages]


def _bordered(messages: Sequence[Message], kept: Mapping[int, _Own], border: str) -> list[Message]:
    """The messages, with borders and the index around each kept answer, inside of what a template may trim."""
    found = list(messages)
    for at in kept:
        content = found[at]["content"]
        core = content.strip()
        before, _, after = content.partition(core)
        found[at] = {**found[at], "content": f"{before}{border}{at}{border}{core}{border}{after}"}
    return found
