"""Reads tool calls in any form from a text while it is written."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenwright.llm.chat.chat_options import Tool
from tokenwright.llm.chat.output_parser import Delta, ToolCallDelta, new_hex
from tokenwright.llm.chat.tool_forms.form import ToolForm
from tokenwright.llm.chat.tool_forms.source import Cut, NoCall, Steps, TextSource

HALF = "\N{REPLACEMENT CHARACTER}"  # replaces the bytes of a character that was cut off


class FormReader:
    """A `CallReader`, and the sink of its calls. A mark without a valid call is text, unless the call was cut off."""

    def __init__(self, form: ToolForm, tools: Sequence[Tool], opened: bool = False) -> None:
        self._form = form
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._source = TextSource()
        self._delta = Delta(0)
        self._index = -1
        self._name = ""
        self._call = ""  # "", begun or whole: the last call of a section
        self._half = ""  # HALF at the end of the text so far, held back
        self._space = ""  # white space, held back because it is dropped before a mark
        self._said = self._bare = False  # bare: nothing but white space since the last call
        self._steps = self._read(opened)

    @property
    def called(self) -> bool:
        return self._index >= 0

    @property
    def unfinished(self) -> bool:
        return self._call == "begun"

    @property
    def held(self) -> int:
        return sum(map(len, (self._space, self._source.raw, self._source.text, self._half)))

    def push(self, text: str, token: int | None, delta: Delta) -> None:  # noqa: ARG002  (part of the protocol)
        if text:
            text, self._half = self._half + text, ""
            if text.endswith(HALF):
                text, self._half = text[:-1], HALF
            self._source.text += text
            self._advance(delta)

    def finish(self, delta: Delta, cut: bool = False) -> None:
        # HALF may belong to a mark, if other text is held back, or if a mark begins with it.
        marked = cut and (self._source.raw or self._source.text or not self._form.mark[:1].isascii())
        if self._half and not marked:
            self._source.text += self._half
            self._advance(delta)
        self._source.ended = True
        self._delta = delta
        try:
            next(self._steps, None)
        except Cut:
            if not self._call and not cut:
                self.say(self._source.raw + self._source.text)
        else:
            self.say("" if cut and self._source.text else self._source.text)
        if self._space and not self._bare:
            self._put(self._space)

    def _advance(self, delta: Delta) -> None:
        self._delta = delta
        next(self._steps)

    def _read(self, opened: bool) -> Steps[None]:
        form = self._form
        if not form.open:
            yield from self._attempt(self._at_start())
        elif opened:
            yield from self._attempt(self._section())
        while True:
            yield from self._text()
            yield from self._attempt(self._section())

    def _text(self) -> Steps[None]:
        form = self._form
        if not form.open:
            while True:
                self.say(self._source.take(len(self._source.text)))
                if self._source.ended:
                    return (yield from self._source.more())
                yield
        self._source.stop_recording()
        yield from self._source.until(form.mark, give=self.say)
        self._source.record(form.mark)

    def _attempt(self, steps: Steps[None]) -> Steps[None]:
        self._call = ""
        try:
            yield from steps
        except _Spoken:
            pass
        except NoCall:
            if not self._call:
                self.say(self._source.raw)
        self._source.stop_recording()
        self._call = "" if self._call == "whole" else self._call

    def _at_start(self) -> Steps[None]:
        self._source.record()
        yield from self._source.space()
        first = (self._form.lead + self._form.call.first).strip()[:1]
        if self._form.tag and (yield from self._source.begins(self._form.tag, first)) == self._form.tag:
            self._source.take(len(self._form.tag))
            yield from self._source.space()
        yield from self._section()

    def _section(self) -> Steps[None]:
        form, source = self._form, self._source
        lead, sep, trail, close = (one.strip() for one in (form.lead, form.sep, form.trail, form.close))
        if lead:
            yield from source.space()
            yield from source.expect(lead)
        while True:
            yield from source.space()
            yield from self._one_call()
            yield from source.space()
            first = form.call.first if form.many else ""
            marks = tuple(filter(None, (sep, trail, close, first)))
            found = yield from source.begins(*marks)
            if found is None and source.ended and any(mark.startswith(source.text) for mark in marks):
                raise Cut
            if found is None and form.many and not first and not sep and source.text:
                continue  # each call has its own line
            if found is None or found == close:
                break
            if found == trail:
                source.take(len(trail))
                yield from source.space()
                break
            source.take(len(sep) if found == sep else 0)
        yield from self._close(close)

    def _close(self, close: str) -> Steps[None]:
        if close:
            if (yield from self._source.begins(close)) is not None:
                self._source.take(len(close))
            elif self._source.ended and close.startswith(self._source.text):
                self._source.take(len(self._source.text))

    def _one_call(self) -> Steps[None]:
        if self._call:  # the previous call is whole: a call or text follows
            self._call = ""
            self._source.record()
        yield from self._form.call.read(self._source, self, self._form.close)
        self._bare, self._call = True, "whole"

    def begin(self, name: str) -> None:
        if self._form.spoken and name == self._form.spoken:
            raise _Spoken
        if name not in self._schemas:
            raise NoCall
        self._source.stop_recording()
        self._space, self._call, self._bare = "", "begun", True
        self._name = name
        self._index += 1
        identity = f"call_{new_hex(12)}"[-self._form.id_length :]
        self._delta.tool_calls.append(ToolCallDelta(self._index, identity, name))

    def arguments(self, text: str) -> None:
        calls = self._delta.tool_calls
        if calls and calls[-1].index == self._index:
            calls[-1].arguments += text
        elif text:
            calls.append(ToolCallDelta(self._index, arguments=text))

    @property
    def schema(self) -> Mapping[str, Any]:
        return self._schemas[self._name]

    def say(self, text: str) -> None:
        """Add text of the answer; after a call it starts a new line if there is text before the call."""
        text = self._space + text
        text = text.lstrip() if self._bare else text
        core = text.rstrip() if self._form.open else text
        self._space = text[len(core) :]
        if core:
            self._put(f"\n{core}" if self._bare and self._said else core)

    def _put(self, text: str) -> None:
        self._delta.text += text
        self._said, self._bare = True, False


class _Spoken(NoCall):
    """The call's argument is the text of the answer."""
