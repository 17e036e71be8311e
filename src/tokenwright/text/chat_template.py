"""Conversations as prompts: a checkpoint's chat template, rendered in a separate process, and the ids of its text.

The text of a message never becomes a control token unless the caller sets `markup`: `render` inserts a marker into
every control token in a message, encodes the others in the output, and removes the marker. Answers can keep the ids
that the model generated, so that the next prompt begins with the cached tokens.
"""

import json
import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from types import TracebackType
from typing import Any

from tokenwright.errors import RequestError
from tokenwright.text.control import ControlTokens, unused_characters
from tokenwright.text.messages import PICTURE, Message, check_messages, mapped, strings, text_of
from tokenwright.text.renderer import SECONDS, Renderer, TextSpan
from tokenwright.text.tokenizer import Tokenizer

Render = Callable[[Sequence[Message]], str]
_FIRST, _SECOND = "probe 9f1c6e", "probe 51d0a7"  # texts that no template treats specially
_PARTS = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]
_CALL: dict[str, Any] = {"id": "a12345678", "type": "function", "function": {"name": "probe", "arguments": {}}}
_USER, _CALLING = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}
# The messages that stand before and after one of a role.
_AROUND: Mapping[str, tuple[list[Message], list[Message]]] = {
    "user": ([], []),
    "assistant": ([_USER], [_USER]),
    "tool": ([_USER, _CALLING], []),
}


class ContentForms:
    """Fits the content of messages to one template. Thread-safe. `render` renders messages, or raises RequestError.

    A template that prints parts gets them; one that takes only text gets their texts, joined. A template that prints
    neither gets the content as it was sent.
    """

    def __init__(self, source: str) -> None:
        self._names_parts = "'text'" in source or '"text"' in source or ".text" in source
        self._names_pictures = "'image'" in source or '"image"' in source
        self._known: dict[tuple[str | bool, ...], bool] = {}

    def fitted(self, message: Message, render: Render) -> Message:
        """The message with its content in a form that the template prints, if there is one."""
        role, content = message["role"], message["content"]
        if content in (None, "") and message.get("tool_calls"):
            ways = ("", None) if content == "" else (..., "", None)  # ...: none at all, as transformers gives null
            return _with(message, next((one for one in ways if self._prints_calls(one, render)), ""))
        parts = not isinstance(content, str)
        if not parts and not (self._names_parts and content):
            return message
        if self._prints(role, parts, render) or not self._prints(role, not parts, render):
            return message
        return {**message, "content": text_of(content) if parts else [{"type": "text", "text": content}]}

    def with_pictures(self, message: Message, render: Render) -> Message:
        """The message with parts for its pictures, where the template prints such parts in messages of its role."""
        role, content = message["role"], text_of(message.get("content"))
        if PICTURE not in content or not self._names_pictures or not self._prints(role, True, render):
            return message
        parts: list[Mapping[str, Any]] = []
        for at, text in enumerate(content.split(PICTURE)):
            parts += [{"type": "image"}] if at else []
            text = text.removeprefix("\n") if at else text
            parts += [{"type": "text", "text": text}] if text else []
        return {**message, "content": parts}

    def _prints_calls(self, content: object, render: Render) -> bool:
        """Whether the template prints the calls of a message with this empty content, and no None."""
        key = "calls", content is None, content is ...
        if key not in self._known:
            both: tuple[object, ...] = ({}, "{}")  # arguments
            calls = ({**_CALL, "function": {**_CALL["function"], "arguments": one}} for one in both)
            probes = ([_USER, _with({**_CALLING, "tool_calls": [one]}, content)] for one in calls)
            texts, plain = [_tried(render, one) for one in probes], _tried(render, [_USER]).count("None")
            self._known[key] = any("probe" in one and one.count("None") <= plain for one in texts)
        return self._known[key]

    def _prints(self, role: str, parts: bool, render: Render) -> bool:
        """Whether the template prints two parts, or two lines, in messages of a role, and not as a Python list."""
        if (role, parts) not in self._known:
            before, after = _AROUND.get(role, ([], [_USER]))
            content: Any = _PARTS if parts else text_of(_PARTS)
            text = _tried(render, [*before, {"role": role, "content": content}, *after])
            between = text.partition(_FIRST)[2].partition(_SECOND)
            self._known[role, parts] = bool(between[1]) and "'type'" not in between[0]
        return self._known[role, parts]


def _with(message: Message, content: object) -> Message:
    return {n: content if n == "content" else v for n, v in message.items() if n != "content" or content is not ...}


def _tried(render: Render, messages: Sequence[Message]) -> str:
    try:
        return render(messages)
    except RequestError:
        return ""


log = logging.getLogger(__name__)

_FIELDS = frozenset(("role", "content", "tool_calls", "tool_call_id", "name", "thinking", "type", "text"))
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_IN_CHANNEL = "<|channel|>final<|message|>"
_PROBE = "9f1c6e"
# The texts that templates write after an answer: asking a template's process takes 0.1 s.
_ENDS: dict[tuple[object, ...], str] = {}
_MOST_ENDS = 100


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as a prompt.

    unknown: strings <|...|> that the template writes and the vocabulary lacks. spans: the text from messages and tools,
    in order. marks: (token, character) where some tokens begin, such as all control tokens, and the end.
    """

    text: str
    ids: tuple[int, ...]
    unknown: tuple[str, ...]
    spans: tuple[TextSpan, ...] = field(default=(), compare=False)
    marks: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    pictures: tuple[Any, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class PictureTexts:
    """The template writes `placeholder` for a picture, and `texts` has what replaces it, for each picture.

    around: the texts before and after PICTURE in a template without a part for pictures.
    """

    placeholder: str
    texts: tuple[str, ...]
    around: tuple[str, str] = ("", "")


class ChatTemplate(AbstractContextManager["ChatTemplate"]):
    """The chat template of a checkpoint. Thread-safe; the first prompt starts the process. seconds: for one prompt.

    Raises RequestError for a tokenizer without a template.
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
        own = {name: tokenizer.token_text(at) for name, at in names.items() if at is not None}
        values = {**tokenizer.template_variables, **own}
        self._process = Renderer(self._source, values, seconds)
        self.tools_source = tokenizer.tool_template or self._source
        apart = tokenizer.tool_template is not None
        self._for_tools = Renderer(self.tools_source, values, seconds) if apart else self._process
        self._contents = ContentForms(self._source), ContentForms(self.tools_source)
        self._unread: set[str] = set()
        self._key = (self._source, *values.items())

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        markup: bool = False,
        answers: Mapping[int, Sequence[int]] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        pictures: PictureTexts | None = None,
    ) -> Rendered:
        """The prompt of a conversation.

        add_generation_prompt: end where the model's answer begins. markup: encode control tokens written in the
        messages as control tokens. answers: {index of an assistant message: the ids that the model generated}, which
        the prompt contains if they decode to the message's text and the template keeps it. tools: as OpenAI's
        clients send them. variables: of the template, such as enable_thinking. pictures: of the messages, in whose
        contents PICTURE marks their places.

        Raises RequestError for malformed messages, and if the template refuses them, fails or exceeds its limits.
        """
        checked = check_messages(messages)
        texts = strings([checked, tools, dict(variables or {})], -1)
        marker, border = unused_characters((*texts, self._source, self.tools_source, *self._control.ids), 2)
        if not markup:
            checked = [self._broken(message, marker) for message in checked]
            tools, variables = mapped([tools, variables], partial(self._control.broken, marker=marker))
        more = {"tools": tools, "variables": dict(variables or {})}
        process = self._process if tools is None else self._for_tools

        forms = self._contents[tools is not None]

        def printed(messages: Sequence[Message]) -> tuple[str, list[TextSpan]]:
            fitted = [forms.fitted(one, lambda probe: process.render(probe, False)[0]) for one in messages]
            if pictures is not None:
                fitted = [forms.with_pictures(one, lambda probe: process.render(probe, False)[0]) for one in fitted]
            return process.render(fitted, add_generation_prompt, more)

        try:
            text, spans = printed(checked)
        except RequestError as error:
            raise RequestError(str(error).replace(marker, "")) from None
        self._warn_of_unread(checked, text)
        kept = {at: own for at, ids in (answers or {}).items() if (own := self._own(checked, at, ids, marker))}
        if kept:
            bordered, moved = printed(_bordered(checked, kept, border))
            if re.sub(f"{border}(?:[0-9]+{border})?", "", bordered) == text:  # the borders changed nothing
                return self._encoded(*_expanded(bordered, moved, pictures), marker, border, kept)
        return self._encoded(*_expanded(text, spans, pictures), marker, border, {})

    def _warn_of_unread(self, messages: Sequence[Message], text: str) -> None:
        """Warn once of each message field whose name neither the template nor its output has."""
        read = self._source + self.tools_source
        listed = [part for one in messages if isinstance(one["content"], list) for part in one["content"]]
        fields = {name for one in (*messages, *listed) for name, value in one.items() if value}
        calling = (text_of(one["content"]).strip() for one in messages if one.get("tool_calls"))
        if any(said not in text and json.dumps(said, ensure_ascii=False)[1:-1] not in text for said in calling):
            fields.add("content beside tool_calls")
        fields -= _FIELDS | self._unread
        if unread := sorted(name for name in fields if name not in read and name not in text):
            self._unread.update(unread)
            log.warning("the chat template reads no %s of messages, so the prompt lacks it", " and no ".join(unread))

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The control token that the template writes after an answer; empty if none follows."""
        try:
            rest = self._probed() if self._key not in _ENDS else _ENDS[self._key]
        except RequestError:
            return ()
        first = next((part for part in self._control.split(rest) if isinstance(part, int) or part.strip()), "")
        return (first,) if isinstance(first, int) else ()

    def _probed(self) -> str:
        """The text that the template writes after an answer; "" if it leaves out the answer. Raises RequestError."""
        probe = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _PROBE}]
        before, found, rest = self._process.render(probe, False)[0].rpartition(_PROBE)
        if before.endswith(_IN_CHANNEL):
            rest = ""  # the token after an answer also ends earlier messages, such as reasoning
        if len(_ENDS) == _MOST_ENDS:
            _ENDS.clear()
        return _ENDS.setdefault(self._key, rest if found else "")

    def start(self) -> None:
        if self._key not in _ENDS:
            self._process.start()

    def close(self) -> None:
        self._process.close()
        self._for_tools.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def _control(self) -> ControlTokens:
        return self._tokenizer.control

    @cached_property
    def _named(self) -> dict[int, str]:
        return {token: self._tokenizer.token_text(token) for token in self._control.ids.values()}

    def _broken(self, message: Message, marker: str) -> dict[str, Any]:
        """The message with markers, so that neither it nor template text around it makes a control token."""
        role = message["role"]
        if role not in _ROLES and f"'{role}'" not in self._source and f'"{role}"' not in self._source:
            role = self._control.broken(role, marker)
        tokens = self._tokenizer.special_control if role == "assistant" else self._control
        broken: dict[str, Any] = mapped(message, partial(tokens.broken, marker=marker))
        return {**broken, "role": role}

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
        content = messages[at]["content"]
        if not core or not isinstance(content, str) or core != content.replace(marker, "").strip():
            return None
        before, _, after = text.partition(core)
        return _Own(tuple(body), before, core, after)

    def _encoded(
        self, text: str, spans: Sequence[TextSpan], marker: str, border: str, kept: Mapping[int, "_Own"]
    ) -> Rendered:
        escaped = json.dumps(marker)[1:-1]  # a template's tojson may have escaped it
        removed = f"{border}(?:[0-9]+{border})?|{marker}|{re.escape(escaped)}"
        shown = re.sub(removed, "", text)
        if len(shown) < len(text):
            spans = _moved(spans, [(cut.start(), cut.start() - cut.end()) for cut in re.finditer(removed, text)])
        text = text.replace(escaped, marker)
        ids: list[int] = []
        marks: list[tuple[int, int]] = []
        unknown: dict[str, None] = {}
        written = 0

        def encode(part: str) -> None:
            nonlocal written
            parts = self._control.split(re.sub(f"{border}(?:[0-9]+{border})?", "", part), marker)
            for at, one in enumerate(parts):
                if isinstance(one, str):
                    unknown.update(dict.fromkeys(re.findall(rf"<\|[^<>|\s{marker}]+\|>", one)))
                    parts[at] = one.replace(marker, "")
            found = self._tokenizer.encode_parts(parts)
            place = -1
            for one in parts:
                if isinstance(one, int):
                    place = found.index(one, place + 1)
                    marks.append((len(ids) + place, written))
                written += len(one if isinstance(one, str) else self._named[one])
            ids.extend(found)

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
            marks.append((len(ids), written))
            ids.extend(own.ids)
            written += len(own.before) + len(own.core) + len(own.after)
            done = stop
        encode(text[done:])
        marks.append((len(ids), written))
        return Rendered(shown, tuple(ids), tuple(unknown), tuple(spans), tuple(marks))


def _expanded(text: str, spans: list[TextSpan], pictures: PictureTexts | None) -> tuple[str, list[TextSpan]]:
    """Put the pictures' texts in place of placeholders (a message's hold a marker). Raises RequestError."""
    if pictures is None:
        return text, spans
    mark = re.compile(f"{PICTURE}|{re.escape(pictures.placeholder)}")
    places = [match.span() for match in mark.finditer(text)]
    pairs = zip(places, pictures.texts, strict=False)
    news = [new if text[start] != PICTURE else new.join(pictures.around) for (start, _), new in pairs]
    if len(places) != len(pictures.texts):
        raise RequestError(
            f"messages have {len(pictures.texts)} pictures, and the model's chat template writes {len(places)} "
            f"places for them; leave U+FFFC out of texts, or give the model a template that prints pictures"
        )
    moved = _moved(spans, [(a, len(new) - (b - a)) for (a, b), new in zip(places, news, strict=True)])
    filling = iter(news)
    return mark.sub(lambda _: next(filling), text), moved


def _moved(spans: Iterable[TextSpan], places: Sequence[tuple[int, int]]) -> list[TextSpan]:
    """Spans of a text that grows at places (start, characters), in order. `source` still counts the text before."""
    starts, grown = [start for start, _ in places], [0, *accumulate(count for _, count in places)]

    def new(at: int) -> int:
        return at + grown[bisect_left(starts, at)]

    return [span._replace(start=new(span.start), stop=new(span.stop)) for span in spans]


@dataclass(frozen=True, slots=True)
class _Own:
    """An answer with its generated ids, and the white space around it, which templates trim."""

    ids: tuple[int, ...]
    before: str
    core: str
    after: str


def _bordered(messages: Sequence[Message], kept: Mapping[int, _Own], border: str) -> list[Message]:
    """Put borders and index around each kept answer, inside the white space that a template may trim."""
    found = list(messages)
    for at in kept:
        content = found[at]["content"]
        core = content.strip()
        before, _, after = content.partition(core)
        found[at] = {**found[at], "content": f"{before}{border}{at}{border}{core}{border}{after}"}
    return found
