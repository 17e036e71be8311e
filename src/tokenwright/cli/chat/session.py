"""A conversation with a model: reads messages, streams answers, and handles Ctrl-C."""

import sys
import time
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenwright.cli.chat.conversation import Conversation, answer_text, counted
from tokenwright.cli.chat.input_reader import InputReader, Typed
from tokenwright.cli.chat.slash_commands import SPOKEN, ChatCommands
from tokenwright.cli.options.foreign import spoken
from tokenwright.cli.options.talking import Talking, calls_of, seen_by
from tokenwright.cli.terminal.output import remark, show_anything
from tokenwright.cli.terminal.statistics import ENDED, from_disk, memory_line, rate, seconds
from tokenwright.errors import ContextError, EngineError, RequestError, TokenwrightError

if TYPE_CHECKING:
    from tokenwright.cli.chat.answer_view import AnswerView
    from tokenwright.llm.llm import LLM
    from tokenwright.llm.outputs import Completion
    from tokenwright.text import Rendered

FULL = (
    "save the conversation with /save FILE and start anew with /reset, drop its oldest turns with /shift on, or start "
    "with --window N, which has no limit"
)

IN_A_ROW = 1.0  # seconds between two Ctrl-C that leave a conversation in a pipe


@dataclass
class ChatOptions:
    markup: bool = False
    shift: bool = False  # can be changed in the conversation
    quiet: bool = False
    plain: bool = False
    talking: Talking = field(default_factory=Talking)


class Session:
    def __init__(self, llm: "LLM", talk: Conversation, chosen: dict[str, Any], options: ChatOptions) -> None:
        self.llm = llm
        self.talk = talk
        self.chosen, self.params = (
            chosen,
            llm.sampling(**chosen),
        )  # what the user set, and that with the model's defaults
        self.options = options
        self.ended = False
        self.files: set[Path] = set()  # files that /save may overwrite
        self.failure = 0
        self.stopped = 0.0  # time.monotonic() of the last Ctrl-C, or 0
        self.reader = InputReader()
        self._repeated = 0  # how often the last question was answered again
        self._commands = ChatCommands(self)

    def open(self, *, greet: bool = True) -> None:
        unknown = self.render(self.talk, "Hello").unknown
        show_anything()
        if self.options.quiet:
            return
        if unknown:
            lacks = f"the chat template writes {', '.join(unknown)}, which the vocabulary lacks"
            remark(f"note: {lacks}; these are read as text")
        if self.talk.messages and self.talk.messages != self.talk.system:
            remark(f"{counted(self.talk)} loaded")
        if greet and self.reader.terminal:
            remark(memory_line(self.llm))
            remark("/help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves")

    def go(self) -> None:
        while not self.ended:
            try:
                typed = self.reader.read()
                if typed is None:
                    return
                if self.reader.terminal:
                    self.stopped = 0.0
                if typed.text.strip():
                    self._handle(typed)
            except RequestError as error:  # from the reader
                self._refuse(error)
                self.ended = not self.reader.terminal
            except KeyboardInterrupt:
                if self._again():
                    return
                self.stopped = time.monotonic()
                remark("\nCtrl-C again leaves")

    def _again(self) -> bool:
        """Whether this Ctrl-C follows another one: without a line between them, or in a pipe within IN_A_ROW."""
        within = float("inf") if self.reader.terminal else IN_A_ROW
        return self.stopped > 0 and time.monotonic() - self.stopped < within

    def _handle(self, typed: Typed) -> None:
        text = typed.text
        try:
            if not typed.verbatim and text.startswith("/") and not text.startswith("//"):
                self._commands.run(text)
            else:
                text = text.removeprefix("/") if text.startswith("//") and not typed.verbatim else text
                pictures, self._commands.pictures = self._commands.pictures, []
                self.ask(seen_by(pictures, text))
        except TokenwrightError as error:
            self._refuse(error)

    def _refuse(self, error: TokenwrightError) -> None:
        remark(f"tokenwright: {spoken(error, SPOKEN)}")
        if not self.reader.terminal:
            self.failure = 1 if isinstance(error, EngineError) else 2

    def render(self, talk: Conversation, question: str | None = None) -> "Rendered":
        more = [] if question is None else [{"role": "user", "content": question}]
        own = self.options
        return self.llm.render([*talk.messages, *more], own.markup, answers=talk.answers, **own.talking.options)

    def ask(self, question: str, talk: Conversation | None = None, *, again: bool = False) -> None:
        """Answer a question, with another seed if `again`. TokenwrightError leaves the conversation unchanged."""
        talk, rendered = self._fitted(self.talk if talk is None else talk, question)
        self._repeated = self._repeated + 1 if again else 0
        pairs = zip(rendered.ids, self.render(talk, "").ids, strict=False) if talk.held else ()
        earlier = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        done = self._answered(talk, question)
        if done is None:
            return
        self._commands.report = done.cache
        computed_again = max(0, min(talk.held, earlier) - done.usage.reused_tokens)
        held = done.usage.prompt_tokens + max(0, len(done.token_ids) - 1)
        self.talk = talk.with_turn(question, answer_text(done, self.llm.tokenizer), done.token_ids, held)
        if not self.options.quiet:
            remark(turn_line(done, computed_again))
        if done.finish_reason == "context":
            cure = "the next message drops the oldest turns" if self.options.shift else FULL
            remark(f"the context of {self.llm.context:,} tokens is full, so the answer ends here: {cure}")

    def _fitted(self, talk: Conversation, question: str) -> "tuple[Conversation, Rendered]":
        rendered, context, dropped = self.render(talk, question), self.llm.context, 0
        room = context - min(self.params.max_tokens, context // 2)
        while self.options.shift and len(rendered.ids) > room and (shorter := talk.without_first_turn()) is not None:
            talk, rendered, dropped = shorter, self.render(shorter, question), dropped + 1
        if len(rendered.ids) >= context:
            raise RequestError(self._too_long(len(rendered.ids), context))
        if dropped and not self.options.quiet:
            remark(f"the context is full: the {dropped} oldest turns were dropped")
        return talk, rendered

    def _answered(self, talk: Conversation, question: str) -> "Completion | None":
        params = self.params
        if self._repeated and params.seed is not None:
            params = replace(params, seed=params.seed + self._repeated)
        try:
            own, messages = self.options, [*talk.messages, {"role": "user", "content": question}]
            more = {"markup": own.markup, "answers": talk.answers, **own.talking.options}
            stream = self.llm.chat_stream(messages, params, **more)
        except ContextError as error:
            raise RequestError(self._too_long(error.tokens, error.context)) from error
        with stream, self._answer() as show:
            try:
                for piece in stream:
                    if not show(own.talking.shown(piece)):
                        self.ended = True
                        return None
                if own.talking.tools:
                    show(calls_of(stream.completion))
            except KeyboardInterrupt:
                if self._again():  # a pipe had the next message ready
                    raise
                self.stopped = time.monotonic()
        return stream.completion

    def _answer(self) -> "AnswerView":
        from rich.console import Console

        from tokenwright.cli.chat.answer_view import MarkdownAnswer, PlainAnswer

        console = Console()
        if self.options.plain or not sys.stdout.isatty() or console.is_dumb_terminal:
            return PlainAnswer()
        return MarkdownAnswer(console)

    def _too_long(self, tokens: int, context: int) -> str:
        return (
            f"with this message the conversation has {tokens:,} tokens, and the model's context {context:,}; "
            f"it was not added: shorten it{'' if self.options.shift else f', or {FULL}'}"
        )


def turn_line(done: "Completion", again: int) -> str:
    usage = done.usage
    computed = max(0, usage.prompt_tokens - usage.reused_tokens)
    parts = [
        f"{usage.prompt_tokens:,} prompt tokens: {usage.reused_tokens:,} reused{from_disk(usage)}, "
        f"{computed:,} computed, {again:,} of them again"
    ]
    if usage.ttft_s is not None:
        parts.append(f"first token after {seconds(usage.ttft_s)}")
    if usage.tokens_per_second:
        parts.append(f"{rate(usage.tokens_per_second)} tok/s")
    if usage.seed is not None:
        parts.append(f"seed {usage.seed}")
    return " · ".join([*parts, ENDED[str(done.finish_reason)]])
