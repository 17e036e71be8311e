"""Conversations as prompts: a checkpoint's chat template, rendered in a separate process, and the ids of its text.

The text of a message never becomes a control token unless the caller sets `markup`. `render` inserts a marker into
every control token that is written in a message, renders the template, encodes the control tokens of its output, which
are then the template's own, and removes the marker. The model's answers can keep the ids that it generated, so that the
next prompt begins with exactly the tokens whose pages are cached.
"""

import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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

# "role" and "content" (text, or a list of parts {"type": "text", "text": ...}), and perhaps what OPTIONAL names
Message = Mapping[str, Any]
OPTIONAL = frozenset(("tool_calls", "tool_call_id", "name", "reasoning_content"))  # of a message

MOST_MESSAGES = 100_000
MOST_LEVELS = 64  # of objects and lists in tools and their arguments
SECONDS = 2.0  # to render one prompt
MEMORY = 512 * 2**20  # bytes of address space of the process
MOST_CHARACTERS = 4 * 2**20  # of a rendered prompt, in addition to twice the messages' length
_START_SECONDS = 60.0  # to start Python and import jinja2, on a busy machine
_CURE = "; put one that works into chat_template.jinja, in the model's folder"
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_WORKER = str(Path(__file__).with_name("template.py"))
_PROBE = "9f1c6e"  # an answer that no template treats specially


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as a prompt.

    text: for display, with control tokens by name. ids: the whole prompt; the tokenizer adds nothing. unknown: strings
    of the form <|...|> that the template writes and the vocabulary lacks: they are encoded as text, so the template
    and the tokenizer probably do not belong together.
    """

    text: str
    ids: tuple[int, ...]
    unknown: tuple[str, ...]


class ChatTemplate:
    """The chat template of a checkpoint. Thread-safe; the first prompt starts the process, later ones reuse it.

    Raises RequestError for a tokenizer without a template. `seconds`: time limit to render one prompt.
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
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, bool] | None = None,
    ) -> Rendered:
        """The prompt of a conversation.

        add_generation_prompt: end where the model's answer begins. markup: encode control tokens that are written in
        the messages as control tokens. answers: index of an assistant message -> the ids that the model generated;
        the prompt contains these ids unchanged if they decode to the message's text and the template keeps it.
        tools: the functions that the model may call, as templates expect them: {"type": "function", "function":
        {"name", "description", "parameters"}}. variables: further variables of the template, such as enable_thinking.

        Raises RequestError for messages that are malformed or that the template refuses, and for a template that
        fails or exceeds its limits.
        """
        checked = check_messages(messages)
        texts = [*_strings(checked, 0), *_strings(tools or [], 0)]
        marker, border = unused_characters((*texts, self._source, *self._control.ids), 2)
        if not markup:
            checked = [self._broken(message, marker) for message in checked]
            tools = None if tools is None else _mapped(tools, lambda text: self._control.broken(text, marker))
        more = {"tools": tools, "variables": dict(variables or {})}
        try:
            text = self._process.render(checked, add_generation_prompt, more)
        except RequestError as error:
            raise RequestError(str(error).replace(marker, "")) from None
        kept = {at: own for at, ids in (answers or {}).items() if (own := self._own(checked, at, ids, marker))}
        if kept:
            bordered = self._process.render(_bordered(checked, kept, border), add_generation_prompt, more)
            if re.sub(f"{border}(?:[0-9]+{border})?", "", bordered) == text:  # the borders changed nothing
                return self._encoded(bordered, marker, border, kept)
        return self._encoded(text, marker, border, {})

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The control token that the template writes after an answer, with which the model was trained to end it.

        Found by rendering a short conversation; empty if no control token follows, or if the template fails.
        """
        probe = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _PROBE}]
        try:
            _, found, rest = self._process.render(probe, False).rpartition(_PROBE)
        except RequestError:  # `render` raises it for conversations; other texts need no template
            return ()
        first = next((part for part in self._control.split(rest) if isinstance(part, int) or part.strip()), "")
        return (first,) if found and isinstance(first, int) else ()

    def start(self) -> None:
        """Start the process before the first prompt, without waiting for it."""
        self._process.start()

    def close(self) -> None:
        """End the process; a later `render` starts a new one."""
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
        """The control tokens without tags such as <think>, which answers contain and templates search for."""
        special = self._tokenizer.special_ids
        return ControlTokens({name: at for name, at in self._control.ids.items() if at in special})

    def _broken(self, message: Message, marker: str) -> dict[str, Any]:
        """The message with markers, so that neither it nor its concatenation with template text has control tokens."""
        role = message["role"]
        if role not in _ROLES and f"'{role}'" not in self._source and f'"{role}"' not in self._source:
            role = self._control.broken(role, marker)
        tokens = self._special if role == "assistant" else self._control
        rest = {name: value for name, value in message.items() if name != "role"}
        return {"role": role, **_mapped(rest, lambda text: tokens.broken(text, marker))}

    def _own(self, messages: Sequence[Message], at: int, ids: Sequence[int], marker: str) -> "_Own | None":
        """The answer of these ids without its end token; None if the ids do not decode to the message's text."""
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
        """The prompt of a rendered text, in which borders enclose the answers of `kept`."""
        text = text.replace(json.dumps(marker)[1:-1], marker)  # a template's tojson may have escaped it
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
                continue  # a token could span the end of the answer and the text after it
            encode(text[done:start])
            ids.extend(own.ids)
            done = stop
        encode(text[done:])
        shown = re.sub(f"{border}(?:[0-9]+{border})?|{marker}", "", text)
        return Rendered(shown, tuple(ids), tuple(unknown))


@dataclass(frozen=True, slots=True)
class _Own:
    """An answer with its generated ids: its text, and the white space around it, which templates trim."""

    ids: tuple[int, ...]
    before: str
    core: str
    after: str


class Renderer:
    """A template and its process (`text/template.py`), started on demand and killed when it exceeds its time limit.

    values: the template's variables besides the messages. Thread-safe.
    """

    def __init__(self, source: str, values: Mapping[str, str], seconds: float) -> None:
        self._start = {"template": source, "values": dict(values), "seconds": seconds, "memory": MEMORY}
        self._seconds = seconds
        self._lock = Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._ready = False  # whether the process has answered its start message
        self._ending: weakref.finalize[..., Any] | None = None

    def start(self) -> None:
        """Start the process before the first prompt, without waiting for it."""
        with self._lock:
            if self._running is None:
                with suppress(RequestError):  # the first `render` raises it again
                    self._open()

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool, more: Mapping[str, Any] | None = None
    ) -> str:
        """The text that the template renders; `more`: "tools" and "variables". Raises RequestError."""
        more = more or {}
        most = MOST_CHARACTERS + 2 * sum(map(len, _strings([messages, more], 0)))
        ask = {"messages": messages, "add_generation_prompt": add_generation_prompt, "most": most, **more}
        with self._lock:
            try:
                if self._running is None or self._running.poll() is not None:
                    self._open()
                if not self._ready:
                    self._ask(None, _START_SECONDS, 1_000)
                    self._ready = True
                answer = self._ask(ask, self._seconds, 6 * most)
            except BaseException:  # interrupts too: the next question would receive the answer still to come
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

    def _ask(self, question: Mapping[str, Any] | None, seconds: float, most: int) -> dict[str, str]:
        """The answer to `question`, or (None) to the message already sent; at most about `most` bytes of it."""
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


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """End a process of ours; in a fork of `owner`, which started it, leave it alone."""
    if os.getpid() != owner:
        return
    process.kill()
    process.communicate()  # reaps the process and closes the pipes


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of the messages, checked. Raises RequestError for anything but a list of messages in text.

    The content may be None beside "tool_calls", and is then empty.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f'messages must be a list of {{"role", "content"}}, not {type(messages).__name__}')
    if not 0 < len(messages) <= MOST_MESSAGES:
        raise RequestError(f"there are {len(messages):,} messages; a conversation has 1 to {MOST_MESSAGES:,}")
    return [_checked(at, message) for at, message in enumerate(messages)]


def _checked(at: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.keys() - OPTIONAL != {"role", "content"}:
        what = f"the keys {sorted(map(str, message))}" if isinstance(message, Mapping) else type(message).__name__
        raise RequestError(f'message {at} must have "role" and "content" and nothing else; it is {what}'[:500])
    found = {**message, "content": _content(at, message["content"])}
    if found["content"] is None and found.get("tool_calls"):
        found["content"] = ""
    for name, value in found.items():
        if name != "tool_calls" and not isinstance(value, str):
            raise RequestError(f"the {name} of message {at} must be text, not {type(value).__name__}")
        for text in _strings(value, 0):
            check_text(text)
    if not found["role"]:
        raise RequestError(f"the role of message {at} is empty; it is system, user or assistant")
    return found


def _strings(value: object, depth: int) -> Iterator[str]:
    """All strings in a value of JSON, the names of fields included. Raises RequestError beyond MOST_LEVELS."""
    if depth > MOST_LEVELS:
        raise RequestError(f"the messages and tools are nested in more than {MOST_LEVELS} levels; flatten them")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield name
            yield from _strings(one, depth + 1)
    elif isinstance(value, Sequence):
        for one in value:
            yield from _strings(one, depth + 1)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a value of JSON with every string changed, but for names of fields that templates may ask for."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {n if n.isidentifier() else change(n): _mapped(one, change) for n, one in value.items()}
    return [_mapped(one, change) for one in value] if isinstance(value, Sequence) else value


def _content(at: int, content: Any) -> Any:
    """The text of a content in parts, which are joined by line breaks; any other value as it is."""
    if not isinstance(content, list | tuple):
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"the content of message {at} has a part that is no text ({kind!r}); give text, or parts of the form "
                '{"type": "text", "text": "..."}'
            )
    return "\n".join(part["text"] for part in content)


def _bordered(messages: Sequence[Message], kept: Mapping[int, _Own], border: str) -> list[Message]:
    """The messages with borders and index around each kept answer, inside the white space that a template may trim."""
    found = list(messages)
    for at in kept:
        content = found[at]["content"]
        core = content.strip()
        before, _, after = content.partition(core)
        found[at] = {**found[at], "content": f"{before}{border}{at}{border}{core}{border}{after}"}
    return found
