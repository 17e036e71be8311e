"""`tokenwright explore --tty`: a run step by step, on a terminal's screen with keys, else a line a step."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from select import select
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenwright.cli.reports.plan_page import flop
from tokenwright.cli.reports.statistics import seconds
from tokenwright.cli.terminal.interrupt import interruptible, undone_if_killed
from tokenwright.cli.terminal.output import write
from tokenwright.units import binary

if TYPE_CHECKING:
    from tokenwright.llm.llm import LLM
    from tokenwright.llm.run import Run
    from tokenwright.trace.schema import StepFrame

PACE = 4.0  # tokens per second while it plays
CANDIDATES = 6  # rows of next tokens
OTHER_ROWS = 18  # of the screen, without the cache's
KEPT, FRESH, AGAIN, EMPTY = "█", "▓", "▒", "·"  # cells differ in shape and colour
STYLES = {KEPT: "blue", FRESH: "green", AGAIN: "red", EMPTY: "dim"}
KEYS = {" ": "toggle", "\x1b[C": "step", "l": "step", "n": "cache", "q": "quit", "\x03": "quit", "\x04": "quit"}


def explore_tty(llm: LLM, run: Run) -> None:
    console = Console()
    with interruptible(), run:
        try:
            if sys.stdin.isatty() and console.is_terminal and not console.is_dumb_terminal:
                _Screen(llm, run, console).keep()
            else:
                _lines(run)
        except KeyboardInterrupt:
            return


def _lines(run: Run) -> None:
    while not run.ended:
        for frame in run.step():
            if not write(line(frame) + "\n"):
                return


def line(frame: StepFrame) -> str:
    computed = f"computed {frame.length}" + (f" ({frame.recomputed} again)" if frame.recomputed else "")
    parts = (
        f"step {frame.step + 1}",
        f"SEQ_LEN {frame.seq_len}",
        f"{computed}, {frame.layer_tokens:,} layer-tokens",
        flop(frame.flops),
        seconds(frame.step_us / 1e6),
        f"KV_CACHE {binary(frame.kv_resident)}",
        "cache on" if frame.cache else "cache off",
        repr(frame.text),
    )
    return " | ".join(parts)


class _Screen:
    def __init__(self, llm: LLM, run: Run, console: Console) -> None:
        self.llm, self.run, self.console = llm, run, console
        self.playing = True
        self.next_at = 0.0  # time.monotonic() of the next step

    def keep(self) -> None:
        with screen(self.console) as live:
            while True:
                live.update(self.view(), refresh=True)
                wait = max(0.0, self.next_at - time.monotonic()) if self.playing and not self.run.ended else None
                action = KEYS.get(key(wait) or "", "")
                if action == "quit":
                    break
                self._act(action)
        if self.run.frames:
            self.console.print(Text(self.run.completion.text))
            self.console.print(Text(line(self.run.frames[-1]), style="dim"))

    def _act(self, action: str) -> None:
        due = self.playing and time.monotonic() >= self.next_at
        if action == "toggle":
            self.playing = not self.playing
        elif action == "cache":
            self.run.cache = not self.run.cache
        elif (action == "step" or due) and not self.run.ended:
            self.playing = self.playing and action != "step"
            self.next_at = time.monotonic() + 1 / PACE
            self.run.step()

    def view(self) -> Group:
        frame = self.run.frames[-1] if self.run.frames else None
        tokens = self.run.tokens
        room = max(8, self.console.width - 6)
        first = max(0, len(tokens) - room)
        parts: list[Text | Table] = [self._text(tokens), Text()]
        if frame is not None:
            rows = max(3, self.console.height - OTHER_ROWS)
            parts += [*cache_rows(frame, self.llm.config.layers, len(tokens), first, rows), Text(), _figures(frame)]
            parts += [Text(), self._candidates(frame)]
        return Group(*parts, Text(), self._foot())

    def _text(self, tokens: tuple[int, ...]) -> Text:
        start, tokenizer = len(self.run.start.prompt), self.llm.tokenizer
        head = f"{self.llm.loaded.name}  prompt {start} tokens, generated {len(tokens) - start}"
        text = Text().append(head, style="bold").append("\n")
        shown = max(0, len(tokens) - 3 * self.console.width // 4)
        for at in range(shown, len(tokens)):
            piece = tokenizer.token_text(tokens[at]).replace("\n", "⏎")
            newest = at == len(tokens) - 1 and at >= start
            text.append(piece, style="reverse" if newest else "dim" if at < start else "")
        return text

    def _candidates(self, frame: StepFrame) -> Table:
        table = Table.grid(padding=(0, 1))
        for candidate in frame.candidates[:CANDIDATES]:
            share = math.exp(candidate.logprob)
            mark = "▸" if candidate.token == frame.token else " "
            name = self.llm.tokenizer.token_text(candidate.token).replace("\n", "⏎")
            sampled = f"sampler {100 * candidate.sampled:5.1f} %" if candidate.sampled else "cut by the sampler"
            table.add_row(
                mark, Text(repr(name)), Text("▇" * round(30 * share), style="yellow"), f"{100 * share:5.1f} %", sampled
            )
        return table

    def _foot(self) -> Text:
        reason = self.run.reason
        state = f"ended: {reason.value}" if reason else "playing" if self.playing else "paused"
        cache = "on" if self.run.cache else "off"
        return Text(f"{state}   cache {cache}   keys: space play/pause · → step · n cache · q quit", style="dim")


def cache_rows(frame: StepFrame, layers: int, tokens: int, first: int, rows: int) -> list[Text]:
    """A row for each layer (each k-th, to fit `rows`), a column for each token from `first`."""
    every = -(-layers // rows)
    columns = "".join(cell(frame, at, tokens) for at in range(first, tokens))
    found = []
    for layer in range(0, layers, every):
        row = Text().append(f"L{layer:<5}", style="dim")
        for letter in columns:
            row.append(letter, style=STYLES[letter])
        found.append(row)
    legend = Text("      ")
    names = {KEPT: "kept", FRESH: "computed now", AGAIN: "computed again", EMPTY: "the newest: next step"}
    for letter, name in names.items():
        legend.append(f"{letter} ", style=STYLES[letter]).append(f"{name}   ", style="dim")
    if every > 1:
        legend.append(f"each row stands for {every} layers", style="dim")
    return [*found, legend]


def cell(frame: StepFrame, position: int, tokens: int) -> str:
    if position >= frame.start + frame.length or position >= tokens:
        return EMPTY
    if position < frame.start:
        return KEPT
    return AGAIN if position < frame.start + frame.recomputed else FRESH


def _figures(frame: StepFrame) -> Table:
    table = Table.grid(padding=(0, 2))
    again = f", {frame.recomputed} of them again" if frame.recomputed else ""
    work = f"{frame.layer_tokens:,} layer-tokens, {flop(frame.flops)} (counted)"
    through = f"{frame.length} of {frame.start + frame.length} tokens went through the layers{again}"
    table.add_row(Text("COMPUTE", style="bold"), f"{through}: {work}, {seconds(frame.step_us / 1e6)} (measured)")
    kept = f"{binary(frame.kv_resident)} kept, {binary(frame.kv_allocated)} in pages (counted)"
    table.add_row(Text("KV_CACHE", style="bold"), kept)
    table.add_row(Text("SEQ_LEN", style="bold"), f"{frame.seq_len} tokens")
    return table


@contextmanager
def screen(console: Console) -> Iterator[Live]:
    """A screen that gets keys at once, without echo; Ctrl-C stays a signal. Restores the terminal at its end."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def leave() -> None:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
        os.write(console.file.fileno(), b"\x1b[?1049l\x1b[?25h")  # restores the screen and the cursor

    with undone_if_killed(leave), Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            tty.setcbreak(sys.stdin)
            yield live
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def key(wait: float | None) -> str | None:
    """The next key, an arrow as its escape sequence; None where none comes within `wait` seconds (None: for ever)."""
    number = sys.stdin.fileno()
    if not select([number], [], [], wait)[0]:
        return None
    data = os.read(number, 1)
    while data.startswith(b"\x1b") and len(data) < 3 and select([number], [], [], 0.05)[0]:
        data += os.read(number, 1)
    return data.decode("utf-8", errors="replace") or "q"  # nothing: the terminal has gone
