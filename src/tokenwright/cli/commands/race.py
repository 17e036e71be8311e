"""`tokenwright race`: generate the same tokens with and without the KV cache, and compare the cost.

For N prompt tokens and T new ones the cached lane computes N + T - 1 tokens (the last is never computed), the naive one
the sum of t from N to N + T - 1. A third lane repeats the prompt and finds R tokens in the prefix cache, so computes R
fewer. Other KV formats and windows get own engines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenwright.cli.options import shared as opt
from tokenwright.cli.reports.race_report import (
    CACHED,
    KV,
    NAIVE,
    PREFIX,
    WINDOW,
    LaneReport,
    Result,
    as_json,
    fault,
    report,
)
from tokenwright.cli.terminal.output import show_anything, write, write_json
from tokenwright.config import EngineConfig
from tokenwright.errors import ContextError, RequestError
from tokenwright.formats import KVFormat
from tokenwright.planner import machine_load

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tokenwright.explorer.panels.race import RaceSums
    from tokenwright.llm.llm import LLM
    from tokenwright.llm.outputs import Completion
    from tokenwright.sampling_params import SamplingParams

Agreement = Annotated[
    bool,
    typer.Option(
        "--agreement",
        help="Then run both lanes again, step by step over the same ids, and compare their logits.",
        rich_help_panel=opt.OUTPUT,
    ),
]
Seed = Annotated[int, typer.Option(help="Fixes the draws of a --temperature above 0.", rich_help_panel=opt.SAMPLING)]
WARM_UP = "warm-up"  # the salt of its texts: they share no pages with the race


@opt.with_engine(
    but=("threads", "tensor_parallel", "kv_memory", "kv_disk", "kv_disk_size", "speculate", "draft", "draft_weights")
)
def race(
    prompt: opt.Prompt = None,
    file: opt.PromptFile = None,
    new_tokens: opt.NewTokens = 200,
    temperature: opt.Temperature = 0.0,
    seed: Seed = 0,
    model: opt.Model = "stories",
    engine: dict[str, Any] = {},  # noqa: B006  (the options that open the model, see `with_engine`)
    agreement: Agreement = False,
    json_: opt.Json = False,
) -> None:
    """Generate the same tokens with the KV cache, without it and with a prefix hit, and compare the cost.

    --kv adds a lane with that KV format, --window (with --sinks) one with that attention window; these may generate
    other tokens. End tokens do not stop a lane, so all lanes run to -n. A short warm-up comes first. --agreement
    compares the logits of both lanes afterwards; for that the model is opened with tracing.
    """
    from tokenwright.sampling_params import SamplingParams

    of_lanes = {name: engine[name] for name in ("page_size", "token_budget", "window", "sinks")}
    other = EngineConfig(kv=KVFormat.parse(engine["kv"]), **of_lanes)
    engine = opt.of_engine(engine, but=("kv", "window", "sinks"))
    text = opt.read_prompt(prompt, file)
    params = SamplingParams(temperature=temperature or 0.0, seed=seed, max_tokens=new_tokens, ignore_eos=True)
    if new_tokens < 1:
        raise RequestError(f"a race needs at least one new token, not -n {new_tokens}")
    with opt.opened(model, quiet=json_, trace=agreement, speculate="off", **engine) as llm:
        quantised = f", {llm.weights} weights" if llm.weights.quantised else ""
        about = f"{model}, {llm.dtype} on {llm.device} ({llm.kernels} kernels){quantised}"
        lanes, others = _run(llm, llm.tokenizer.encode(text), params, other, show=not json_)
        sums = _compared(llm, lanes[0].completion, text, params) if agreement else None
        result = Result(lanes, about, llm.config.layers, other.page_size, others, sums)
    if json_:
        write_json({"model": model, "prompt": text, **as_json(result)})
    else:
        show_anything()
        write(report(result) + "\n")
    if result.faults:
        typer.echo(f"tokenwright: {fault(result)}", err=True)
        raise typer.Exit(1)


def _compared(llm: LLM, cached: Completion, prompt: str, params: SamplingParams) -> RaceSums:
    from tokenwright.explorer.views.lanes import Race

    with Race(llm, prompt, replace(params, max_tokens=len(cached.token_ids))) as raced:
        *_, last = raced
    return last.sums


@dataclass(frozen=True, slots=True)
class Entry:
    kind: str
    name: str
    llm: LLM

    @property
    def cache(self) -> bool:
        return self.kind != NAIVE

    def finished(self, completion: Completion) -> LaneReport:
        usage = completion.usage
        prompt, written = usage.prompt_tokens, usage.completion_tokens
        cost = self.llm.costs.run(prompt, written, cache=self.cache, reused=usage.reused_tokens)
        kept = self.llm.kv_bytes(prompt + written - 1) if self.cache else 0
        return LaneReport(self.kind, self.name, completion, cost, kept)


def _run(
    llm: LLM, ids: Sequence[int], params: SamplingParams, other: EngineConfig, *, show: bool
) -> tuple[tuple[LaneReport, ...], str]:
    """The lanes, and other users of the processors."""
    room = llm.context - len(ids)
    if room < 0:
        raise ContextError(len(ids), llm.context)
    if room == 0:
        raise RequestError(f"the prompt fills the model's context of {llm.context} tokens; shorten it by a token")
    params = replace(params, max_tokens=min(params.max_tokens, room))
    with ExitStack() as opened:
        entries = _entries(llm, len(ids), params.max_tokens, other, opened)
        for entry in entries:
            if entry.kind != PREFIX:  # it needs the cached lane's pages
                few = replace(params, max_tokens=min(2, params.max_tokens))
                entry.llm.generate([ids], few, cache=entry.cache, salt=WARM_UP)
        with _bars(max(len(entry.name) for entry in entries), show) as bars:
            tasks = [bars.add_task(entry.name, total=params.max_tokens, pace="", start=False) for entry in entries]
            lanes, before = [], machine_load.read_times()
            for entry, task in zip(entries, tasks, strict=True):
                bars.start_task(task)
                lanes.append(entry.finished(_written(entry, ids, params, bars, task)))
                bars.stop_task(task)
            others = machine_load.load_between(before, machine_load.read_times())
    return tuple(lanes), others


def _entries(llm: LLM, prompt: int, written: int, other: EngineConfig, opened: ExitStack) -> list[Entry]:
    """The lanes. `opened` closes engines with other caches, each with pages for one text."""
    entries = [Entry(CACHED, CACHED, llm), Entry(NAIVE, NAIVE, llm)]
    if prompt > other.page_size:  # the prompt's last token is always computed
        entries.append(Entry(PREFIX, PREFIX, llm))
    pages = -(-(prompt + written) // other.page_size)
    sizes: dict[str, Any] = {"page_size": other.page_size, "pages": pages, "token_budget": other.token_budget}
    second = partial(type(llm), llm.loaded, **sizes, speculate="off")
    if other.kv != KVFormat():
        entries.append(Entry(KV, str(other.kv), opened.enter_context(second(kv=other.kv))))
    if other.window is not None or other.sinks:
        name = "window" if other.window is None else f"window {other.window}"
        name += f" + {other.sinks} sinks" if other.sinks else ""
        engine = second(window=other.window, sinks=other.sinks)
        entries.append(Entry(WINDOW, name, opened.enter_context(engine)))
    return entries


def _bars(width: int, show: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn(f"{{task.description:>{width}}}"),
        BarColumn(None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]:>12}"),
        TimeElapsedColumn(),
        console=console,
        disable=not (show and console.is_terminal),
    )


def _written(entry: Entry, ids: Sequence[int], params: SamplingParams, bars: Progress, task: TaskID) -> Completion:
    before = time.perf_counter()
    with entry.llm.stream(ids, params, cache=entry.cache) as stream:
        for _ in stream:
            now = time.perf_counter()
            bars.update(task, advance=1, pace=f"{(now - before) * 1000:.1f} ms/step")
            before = now
    return stream.completion
