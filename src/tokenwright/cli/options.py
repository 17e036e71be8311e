"""Options that several commands share, and helpers that read a prompt and open a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from tokenwright.cli.facts import binary
from tokenwright.cli.output import remark
from tokenwright.errors import RequestError

if TYPE_CHECKING:
    from tokenwright.llm import LLM

MODEL, SAMPLING, ENGINE, OUTPUT = "Model", "Sampling", "Engine", "Output"

Prompt = Annotated[str | None, Argument(help="The text to continue; - reads it from standard input.")]
PromptFile = Annotated[
    Path | None, Option("--file", "-f", help="Read the prompt from a file (a final newline is dropped).")
]
ModelName = Annotated[str, Argument(help="A Hugging Face name, a folder, or the model inside.")]

NewTokens = Annotated[int, Option("-n", "--new-tokens", help="The most tokens to write.", rich_help_panel=SAMPLING)]
Temperature = Annotated[
    float | None,
    Option(help="0 takes the most probable token; higher values spread the draws.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int | None,
    Option(help="Fixes the draws; without it a random one is used and printed.", rich_help_panel=SAMPLING),
]

Model = Annotated[
    str,
    Option("--model", "-m", help="A Hugging Face name, a folder, or the model inside.", rich_help_panel=MODEL),
]
Revision = Annotated[str | None, Option(help="A branch, tag or commit of a Hugging Face model.", rich_help_panel=MODEL)]
Device = Annotated[str, Option(help="auto, cpu, cuda, cuda:N or mps.", rich_help_panel=MODEL)]
DType = Annotated[
    str,
    Option(
        "--dtype",
        help="Of weights and cache: auto (the checkpoint's; float32 on a CPU without native kernels), float32, "
        "bfloat16 or float16.",
        rich_help_panel=MODEL,
    ),
]

NoCache = Annotated[bool, Option("--no-cache", help="Recompute every token at every step.", rich_help_panel=ENGINE)]
PageSize = Annotated[int, Option(help="Token slots of a page of the KV cache.", rich_help_panel=ENGINE)]
TokenBudget = Annotated[
    int, Option(help="Most tokens computed in one step: a longer prompt is cut.", rich_help_panel=ENGINE)
]

Weights = Annotated[
    str,
    Option(
        help="How matrices are kept: native (as --dtype says), float32, bfloat16, float16, int8, int4; or int8:32 with "
        "its group. What is quantised here is kept for the next time.",
        rich_help_panel=ENGINE,
    ),
]
Kv = Annotated[
    str,
    Option(
        "--kv",
        help="How K and V are kept: native, float32, bfloat16, float16, fp8, int8, int4; or k=int8,v=int4; "
        "first=64 after it keeps the first tokens native, native=0+-1 these layers.",
        rich_help_panel=ENGINE,
    ),
]
Window = Annotated[
    int | None,
    Option(help="Attention window in tokens, for all layers; pages behind it are freed.", rich_help_panel=ENGINE),
]
Sinks = Annotated[int, Option(help="First tokens that stay visible beyond the window.", rich_help_panel=ENGINE)]

Json = Annotated[bool, Option("--json", help="Write one JSON object instead.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Write the text alone.", rich_help_panel=OUTPUT)]
Chart = Annotated[Path, Option("--out", "-o", help="Where the chart goes (SVG).", rich_help_panel=OUTPUT)]


def given(**options: Any) -> dict[str, Any]:
    """The options that the user gave: those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Read the prompt from the argument, stdin (`-`) or a file; strip one final newline from the latter two.

    Raises RequestError if no prompt or two prompts are given, or if the prompt cannot be read.
    """
    if (prompt is None) == (file is None):
        raise RequestError("give one prompt: as an argument, as - for standard input, or with --file PATH")
    if file is None and prompt != "-":
        return prompt or ""
    try:
        data = sys.stdin.buffer.read() if file is None else file.read_bytes()
    except OSError as error:
        raise RequestError(f"the prompt cannot be read from {file}: {error.strerror}") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = "standard input" if file is None else str(file)
        raise RequestError(f"the prompt in {where} is not UTF-8 text (byte {error.start} is wrong)") from error
    return text.removesuffix("\n").removesuffix("\r")


@contextmanager
def opened(model: str, *, quiet: bool = False, **options: Any) -> Iterator[LLM]:
    """Open the model as an LLM, with a progress bar on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    shown = console.is_terminal and not quiet
    bar = Progress(
        TextColumn("loading {task.description}", style="dim", markup=False),
        BarColumn(),
        TextColumn("{task.fields[size]}", style="dim", markup=False),
        console=console,
        transient=True,
        disable=not shown,
    )
    with bar:
        task = bar.add_task(model, total=None, size="")
        from tokenwright.llm import LLM  # imports torch, which takes a second or two

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, size=binary(total))

        llm = LLM(model, report=report if shown else None, **options)
    if llm.generation.unsupported and not quiet:
        names = ", ".join(llm.generation.unsupported)
        remark(f"note: the model's generation_config.json also asks for {names}, which Tokenwright does not have yet")
    with llm:
        yield llm
