"""`tokenwright chat`: a conversation whose earlier turns stay in the KV cache."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tokenwright.cli.chat.conversation import Conversation, counted
from tokenwright.cli.chat.conversation import load as load_conversation
from tokenwright.cli.chat.conversation import save as save_conversation
from tokenwright.cli.chat.input_reader import exits_when_asked, keep_from_threads
from tokenwright.cli.options import shared as opt
from tokenwright.cli.options.sampling import sampled
from tokenwright.cli.options.talking import Talking, ThinkingOption, ToolsFile
from tokenwright.cli.terminal.interrupt import interruptible
from tokenwright.cli.terminal.output import remark
from tokenwright.errors import RequestError

Message = Annotated[
    str | None,
    typer.Argument(
        metavar="[MESSAGE]",
        help="Answer this message and exit; - reads it from standard input. Without it, start a conversation.",
    ),
]
System = Annotated[str | None, typer.Option("--system", "-s", help="The system message, which instructs the model.")]
LoadFile = Annotated[Path | None, typer.Option("--load", help="Continue a conversation that /save or --save wrote.")]
SaveFile = Annotated[Path | None, typer.Option("--save", help="Write the conversation to this file on exit (JSON).")]
Force = Annotated[bool, typer.Option("--force", help="Let --save overwrite a file that exists.")]
Shift = Annotated[bool, typer.Option("--shift", help="When the context is full, drop the oldest turns.")]
Plain = Annotated[bool, typer.Option("--plain", help="Show answers as plain text, not as Markdown.")]
Markup = Annotated[
    bool,
    typer.Option(
        "--markup", help="Read control tokens in messages, such as <|im_end|>, as control tokens and not as text."
    ),
]


@sampled()
@opt.with_engine()
def chat(
    message: Message = None,
    system: System = None,
    load: LoadFile = None,
    save: SaveFile = None,
    force: Force = False,
    shift: Shift = False,
    plain: Plain = False,
    markup: Markup = False,
    thinking: ThinkingOption = None,
    tools: ToolsFile = None,
    chosen: dict[str, Any] = {"max_tokens": 512},  # noqa: B006  (the options of SamplingParams, see `sampled`)
    model: opt.Model = None,
    engine: dict[str, Any] = {},  # noqa: B006  (the options that open the model, see `with_engine`)
    quiet: opt.Quiet = False,
) -> None:
    """Talk with the model: each line is a message, and the answer is streamed. /help lists the commands.

    Each turn computes only its new tokens: the K and V of earlier turns are in the KV cache. With MESSAGE it answers
    once and exits.
    """
    from tokenwright.cli.chat.session import ChatOptions, Session

    engine = opt.of_engine(engine)
    keep_from_threads()  # before threads of torch and the kernels start
    talking = Talking.read(thinking, tools)
    question = None if message is None else _question(message)
    talk = Conversation() if load is None else load_conversation(load)
    if save is not None:
        _check_target(save, load, force)
    if system is not None:
        talk = talk.with_system(system)
    with opt.opened(model, quiet=quiet, max_sequences=1, **engine) as llm:
        session = Session(llm, talk, chosen, ChatOptions(markup, shift, quiet, plain, talking))
        session.files |= {file.resolve() for file in (load, save) if file is not None}
        session.open(greet=question is None)
        with interruptible(ends=False), exits_when_asked():
            try:
                session.go() if question is None else session.ask(question)
            finally:
                if save is not None:
                    _save(session.talk, save, quiet)
    if question is not None and session.stopped:
        raise typer.Exit(130)
    if session.failure:
        raise typer.Exit(session.failure)


def _question(message: str) -> str:
    text = opt.read_prompt(message, None)
    if not text.strip():
        raise RequestError("the message is empty; leave it out for a conversation")
    return text


def _check_target(save: Path, load: Path | None, force: bool) -> None:
    if save.is_dir() or not save.parent.is_dir():
        raise RequestError(f"the conversation cannot be saved to {save}: give --save a file in a folder that exists")
    if save.exists() and not force and (load is None or save.resolve() != load.resolve()):
        raise RequestError(f"{save} exists and is not overwritten; give --save another file, or add --force")


def _save(talk: Conversation, path: Path, quiet: bool) -> None:
    if len(talk.messages) > len(talk.system):
        save_conversation(talk, path)
        if not quiet:
            remark(f"{counted(talk)} saved to {path}")
