"""The channels of harmony (gpt-oss), where each message begins with a head that names its channel.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

Analysis is reasoning; a message to a function is a call; all others are text.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from tokenwright.engine import Grammar
from tokenwright.llm.chat.chat_options import Tool, ToolMode
from tokenwright.llm.chat.output_parser import Delta, ToolCallDelta, new_hex, stand_ins
from tokenwright.llm.chat.tool_forms.form import ToolForm
from tokenwright.llm.chat.tool_forms.json_calls import NamedCall
from tokenwright.llm.chat.tool_forms.lark import LarkRules
from tokenwright.llm.chat.tool_forms.source import Cut, Steps, TextSource

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
LAST = f"{CHANNEL}final{MESSAGE}"  # what stands before the answer
_TO = re.compile(r"to=functions\.([\w.\-]+)")


class ChannelReader:
    """An `OutputParser` for harmony. It shows marks that steer nothing, and the tokens of `shown`."""

    def __init__(
        self, names: Sequence[str], marks: Mapping[int, str], apart: bool = True, shown: Mapping[int, str] | None = None
    ) -> None:
        self.unfinished = False
        self.reasoning_tokens = self.pushed = self.said = 0
        stands = stand_ins(marks)
        self._marks = {**(shown or {})} | {token: stands[mark] for token, mark in marks.items()}
        self._spelled = str.maketrans({stand: mark for mark, stand in stands.items()})
        self._apart = apart  # whether reasoning is separated from the text
        self._source, self._delta = TextSource(), Delta(0)
        self._thinking = False
        self._index = -1
        self._steps = self._read(frozenset(names), {mark: stands.get(mark, mark) for mark in MARKS})

    @property
    def called(self) -> bool:
        return self._index >= 0

    @property
    def held(self) -> int:
        return len(self._source.text)

    def push(self, text: str, token: int | None, delta: Delta) -> None:
        if self._thinking and token is not None:
            self.reasoning_tokens += 1
        text += "" if token is None else self._marks.get(token, "")
        if text:
            self.pushed += len(text)
            self._source.text += text
            self._delta = delta
            next(self._steps)

    def finish(self, delta: Delta, cut: bool = False) -> None:
        self._source.ended, self._delta = True, delta
        with suppress(Cut):  # inside a message, or inside a head, which is not shown
            next(self._steps, None)
        self.unfinished = self.unfinished and cut

    def _read(self, names: Collection[str], stand: Mapping[str, str]) -> Steps[None]:
        starts = tuple(stand[mark] for mark in (START, CHANNEL, MESSAGE))
        ends = tuple(stand[mark] for mark in (END, CALL, RETURN))
        while True:
            if (yield from self._source.begins(*starts)) is None and self._source.text:
                yield from self._body("final", "", (*ends, starts[0], starts[1]))
                continue
            head: list[str] = []
            yield from self._source.until(stand[MESSAGE], give=head.append)
            written = "".join(head)
            channel = written.partition(stand[CHANNEL])[2].strip()
            found = _TO.search(written)
            name = "" if found is None or found[1] not in names else found[1]
            kind = re.match(r"\w*", channel)
            yield from self._body("" if kind is None else kind[0], name, (*ends, starts[0]))

    def _body(self, channel: str, name: str, ends: tuple[str, ...]) -> Steps[None]:
        calls = self.unfinished = bool(name)
        self._thinking = channel == "analysis" and not calls
        if calls:
            self._index += 1
            self._delta.tool_calls.append(ToolCallDelta(self._index, f"call_{new_hex(12)}", name))
        give = self._argue if calls else self._think if self._thinking and self._apart else self._say
        while not self._source.text and not self._source.ended:
            yield
        found = yield from self._source.until(*ends, give=give, keep=True)
        if found.translate(self._spelled) not in (START, CHANNEL):
            self._source.take(len(found))
        self._thinking = self.unfinished = False

    def _argue(self, text: str) -> None:
        calls, text = self._delta.tool_calls, text.translate(self._spelled)
        if calls and calls[-1].index == self._index:
            calls[-1].arguments += text
        else:
            calls.append(ToolCallDelta(self._index, arguments=text))

    def _think(self, text: str) -> None:
        self._delta.reasoning += text.translate(self._spelled)

    def _say(self, text: str) -> None:
        self.said += len(text)
        self._delta.text += text.translate(self._spelled)


def channel_grammar(
    tools: Sequence[Tool],
    choice: ToolMode,
    special: Mapping[str, int],
    ends: Sequence[int],
    answer: str | None,
    *,
    begun: bool = False,
) -> Grammar:
    """Any analysis and commentary, then the answer or a call. begun: the prompt ends inside the answer."""
    lark = LarkRules({mark: special[mark] for mark in MARKS if mark in special}, ends)
    kinds = f"({lark.literal('analysis')} | {lark.literal('commentary')})"
    tail = f"{lark.literal(END)} {lark.literal(f'{START}assistant')}"
    lark.add("before", f"{lark.literal(CHANNEL)} {kinds} {lark.literal(MESSAGE)} {lark.text()} {tail}")
    calls = [lark.fresh("call", _call(tool, lark)) for tool in tools]
    text = f"{lark.text() if answer is None else lark.add('answer', answer)} {_closed(lark, RETURN)}"
    if begun:
        called = f"{lark.text()} {tail} before? ({' | '.join(calls)})"
        either = [*([] if choice == "required" else [text]), *(calls and [called] if choice != "none" else [])]
        return Grammar.lark(lark.written(" | ".join(either)), special=lark.special)
    final = f"{lark.literal(LAST)} {text}"
    last = [*([] if choice == "required" else [final]), *(calls if choice != "none" else [])]
    before = "before?" if choice == "required" else "before*"  # else a model could delay the call for ever
    return Grammar.lark(lark.written(f"{before} ({' | '.join(last)})"), special=lark.special)


def _closed(lark: LarkRules, mark: str) -> str:
    written = lark.literal(mark) if mark in lark.special_names else ""
    return f"({written})?" if written else ""


def _call(tool: Tool, lark: LarkRules) -> str:
    to, channel = lark.literal(f" to=functions.{tool.name}"), lark.literal(CHANNEL)
    kind = f"{channel} ({lark.literal('analysis')} | {lark.literal('commentary')})"
    constrained = f"{lark.literal(CONSTRAIN)}? {lark.literal('json')}" if CONSTRAIN in lark.special_names else '"json"'
    form = f"({lark.space()} {constrained})?"
    return (
        f"({to} {kind} | {kind} {to}) {form} {lark.literal(MESSAGE)} {lark.json(tool.parameters)} {_closed(lark, CALL)}"
    )


# The form of calls for a template that prints none.
CHANNELS = ToolForm("channels", f"{CHANNEL}commentary to=functions.", NamedCall(f" {CONSTRAIN}json{MESSAGE}"), CALL)
