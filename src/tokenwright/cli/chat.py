"""`tokenwright chat`: a conversation, turn by turn; the KV cache keeps the earlier turns."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenwright.cli import options as opt
from tokenwright.cli.facts import memory_line, seconds
from tokenwright.cli.interrupt import interruptible
from tokenwright.cli.output import remark, show_anything, write
from tokenwright.cli.sampling import sampled
from tokenwright.errors import ContextError, EngineError, RequestError, TokenwrightError

if TYPE_CHECKING:
    from tokenwright.completion import Completion
    from tokenwright.llm import LLM
    from tokenwright.sampling_params import SamplingParams
    from tokenwright.text import Rendered

HELP = """\
/help           these lines
/reset          forget what was said; the system message stays
/system TEXT    what the model is to know or be; without TEXT there is none any more
/save FILE      write the conversation to a file (JSON)
/load FILE      go on with a conversation from a file
/prompt         show the prompt that the model reads, control tokens and all
/quit           leave; so does the end of the input (Ctrl-D)
Ctrl-C stops an answer; where none is being written, twice leaves.
A message that begins with a slash is written with two."""
FULL = "say it shorter, or keep the conversation with /save FILE and begin anew with /reset"

System = Annotated[
    str | None, typer.Option("--system", "-s", help="The system message: what the model is to know or be.")
]
LoadFile = Annotated[Path | None, typer.Option("--load", help="Go on with a conversation that /save wrote.")]
Markup = Annotated[
    bool,
    typer.Option("--markup", help="Let control tokens that are typed, as <|im_end|>, be control tokens."),
]


@sampled()
def chat(
    system: System = None,
    load: LoadFile = None,
    markup: Markup = False,
    chosen: dict[str, Any] = {"max_tokens": 512},  # noqa: B006  (the options of SamplingParams, see `sampled`)
    model: opt.Model = "stories",
    revision: opt.Revision = None,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    weights: opt.Weights = "native",
    kv: opt.Kv = "native",
    window: opt.Window = None,
    sinks: opt.Sinks = 0,
    page_size: opt.PageSize = 16,
    token_budget: opt.TokenBudget = 512,
    quiet: opt.Quiet = False,
) -> None:
    """Talk with the model: each line is a message, and the answer is streamed. /help lists the commands.

    Each turn computes only its new tokens: the K and V of earlier turns are in the KV cache.
    """
    talk = Conversation() if load is None else loaded(load)
    if system is not None:
        talk.set_system(system)
    with opt.opened(
        model,
        quiet=quiet,
        revision=revision,
        device=device,
        dtype=dtype,
        weights=weights,
        kv=kv,
        window=window,
        sinks=sinks,
        page_size=page_size,
        token_budget=token_budget,
        max_sequences=1,
    ) as llm:
        session = Session(llm, llm.sampling(**chosen), talk, markup=markup, quiet=quiet)
        session.open()
        with interruptible(ends=False):
            session.go()
    if session.failure:
        raise typer.Exit(session.failure)


@dataclass
class Conversation:
    """The messages of a conversation.

    answers: the token ids of each answer, by the index of its message. held: the number of leading tokens whose K and
    V earlier turns have computed.
    """

    messages: list[dict[str, str]] = field(default_factory=list)
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    held: int = 0

    @property
    def system(self) -> list[dict[str, str]]:
        """The system message as a list of one, or an empty list."""
        return [message for message in self.messages[:1] if message["role"] == "system"]

    def set_system(self, text: str) -> None:
        """Set or replace the system message; '' removes it."""
        before = len(self.system)
        self.messages[:before] = [{"role": "system", "content": text}] if text else []
        moved = len(self.system) - before
        self.answers = {at + moved: ids for at, ids in self.answers.items()}

    def add(self, question: str, answer: str, ids: tuple[int, ...]) -> None:
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        self.answers[len(self.messages) - 1] = ids


def loaded(path: Path) -> Conversation:
    """Read a conversation from a file. Raises RequestError."""
    from tokenwright.text.chat import check_messages

    try:
        messages = json.loads(path.read_bytes())
    except OSError as error:
        raise RequestError(f"the conversation cannot be read from {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} holds no conversation: it is not JSON ({error})") from error
    try:
        return Conversation(check_messages(messages))
    except RequestError as error:
        raise RequestError(f"{path} holds no conversation: {error}") from error


def save(talk: Conversation, path: Path) -> None:
    """Write the messages to a file atomically. Raises RequestError."""
    draft: Path | None = None
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            draft = Path(file.name)
            json.dump(talk.messages, file, ensure_ascii=False, indent=1)
            file.write("\n")
        draft.replace(path)
        draft = None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RequestError(f"the conversation cannot be saved to {path}: {reason}") from error
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)


class Session:
    """A conversation in a terminal or a pipe. `failure`: the exit code after a pipe gave a line that was refused."""

    def __init__(self, llm: LLM, params: SamplingParams, talk: Conversation, *, markup: bool, quiet: bool) -> None:
        self.llm = llm
        self.params = params
        self.talk = talk
        self.markup = markup
        self.quiet = quiet
        self.failure = 0
        self._person = sys.stdin.isatty() and sys.stdout.isatty()
        self._leaving = False  # set by a Ctrl-C while no answer is being written
        self._ended = False
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: remark(HELP),
            "reset": self._reset,
            "system": self._system,
            "save": self._save,
            "load": self._load,
            "prompt": self._prompt,
            "quit": self._quit,
        }

    def open(self) -> None:
        """Print the opening remarks. Raises RequestError for a model without a chat template."""
        messages = [*self.talk.messages, {"role": "user", "content": "Hello"}]
        unknown = self._render(messages).unknown
        show_anything()
        if self.quiet:
            return
        if unknown:
            remark(
                f"note: the chat template writes {', '.join(unknown)}, which the vocabulary lacks: it is read as text"
            )
        if self._person:
            remark(memory_line(self.llm))
            remark("/help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves")

    def go(self) -> None:
        """Run one turn per line until the input ends."""
        if self._person:
            import readline  # noqa: F401 - gives input() a history and line editing
        while not self._ended:
            try:
                if (line := self._read()) is None:
                    return
                if line.strip():
                    self._answer(line)
            except KeyboardInterrupt:
                if self._leaving:
                    return
                self._leaving = True
                remark("\nCtrl-C again leaves")

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        try:
            return input("> " if self._person else "")
        except EOFError:
            if self._person:
                write("\n")
            return None
        except UnicodeDecodeError as error:
            self._refuse(RequestError(f"a line of the input is not UTF-8 text: {error.reason}"))
            return None

    def _answer(self, line: str) -> None:
        """Handle one line: a command or a message. A failure is printed and leaves the conversation unchanged."""
        self._leaving = False
        try:
            if line.startswith("/") and not line.startswith("//"):
                name, _, text = line[1:].partition(" ")
                command = self._commands.get(name)
                if command is None:
                    raise RequestError(f"there is no command /{name[:40]}; /help shows them")
                command(text.strip())
            else:
                self._turn(line.removeprefix("/") if line.startswith("//") else line)
        except TokenwrightError as error:
            self._refuse(error)

    def _refuse(self, error: TokenwrightError) -> None:
        remark(f"tokenwright: {error}")
        if not self._person:
            self.failure = 1 if isinstance(error, EngineError) else 2

    def _turn(self, question: str) -> None:
        talk = self.talk
        rendered = self._render([*talk.messages, {"role": "user", "content": question}])
        if len(rendered.ids) >= self.llm.context:
            raise RequestError(_too_long(len(rendered.ids), self.llm.context))
        blank = self._render([*talk.messages, {"role": "user", "content": ""}]) if talk.held else None
        try:
            stream = self.llm.stream(rendered.ids, self.params)
        except ContextError as error:
            raise RequestError(_too_long(error.tokens, error.context)) from error
        with stream:
            try:
                for piece in stream:
                    if not write(piece.text):  # stdout is closed
                        self._ended = True
                        return
            except KeyboardInterrupt:
                self._leaving = True
            finally:
                write("\n")
        done = stream.completion
        again = 0 if blank is None else max(0, min(talk.held, len(blank.ids)) - done.usage.reused_tokens)
        plain = self.llm.tokenizer.decode(done.token_ids)
        talk.add(question, plain if plain.strip() == done.text.strip() else done.text, done.token_ids)
        talk.held = done.usage.prompt_tokens + max(0, len(done.token_ids) - 1)
        if not self.quiet:
            remark(turn_line(done, again))
        if done.finish_reason == "context":
            remark(f"the context of {self.llm.context:,} tokens is full, so the answer ends here: {FULL}")

    def _render(self, messages: list[dict[str, str]]) -> Rendered:
        answers = {at: ids for at, ids in self.talk.answers.items() if at < len(messages)}
        return self.llm.template.render(messages, markup=self.markup, answers=answers)

    def _system(self, text: str) -> None:
        self.talk.set_system(text)

    def _reset(self, _: str) -> None:
        self.talk = Conversation(self.talk.system)

    def _save(self, name: str) -> None:
        save(self.talk, _path(name, "save"))
        count = len(self.talk.messages)
        remark(f"{count} message{'s' if count != 1 else ''} saved to {name}")

    def _load(self, name: str) -> None:
        self.talk = loaded(_path(name, "load"))
        count = len(self.talk.messages)
        remark(f"{count} message{'s' if count != 1 else ''} loaded from {name}")

    def _prompt(self, _: str) -> None:
        if not self.talk.messages:
            raise RequestError("nothing was said yet, so there is no prompt to show")
        write(self._render(self.talk.messages).text + "\n")

    def _quit(self, _: str) -> None:
        self._ended = True


def _path(name: str, command: str) -> Path:
    if not name or "\0" in name:
        raise RequestError(f"/{command} needs the name of a file behind it")
    return Path(name).expanduser()


def _too_long(tokens: int, context: int) -> str:
    return (
        f"with this message the conversation is {tokens:,} tokens long, and the model's context is {context:,}; "
        f"it was not added: {FULL}"
    )


def turn_line(done: Completion, again: int) -> str:
    """The cost of a turn as one line; `again`: the number of earlier turns' tokens that were recomputed."""
    usage = done.usage
    computed = max(0, usage.prompt_tokens - usage.reused_tokens)
    parts = [
        f"{usage.prompt_tokens:,} prompt tokens: {usage.reused_tokens:,} reused, {computed:,} computed, "
        f"{again:,} of them again"
    ]
    if usage.ttft_s is not None:
        parts.append(f"TTFT {seconds(usage.ttft_s)}")
    if usage.tokens_per_second:
        parts.append(f"{usage.tokens_per_second:,.3g} tok/s")
    return " · ".join([*parts, str(done.finish_reason)])
