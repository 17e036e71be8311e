"""`tokenwright race`: the same tokens with the KV cache, without it and with a prefix hit, and what each costs."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenwright.backends.spare_machine import read_times
from tokenwright.cli.options import shared as opt
from tokenwright.cli.reports.race_report import CACHED, NAIVE, PREFIX, LaneReport, Result, as_json, fault, report
from tokenwright.cli.terminal.output import show_anything, write, write_json
from tokenwright.errors import ContextError, RequestError
from tokenwright.planner import machine_load

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tokenwright.llm.llm import LLM
    from tokenwright.llm.outputs import Completion
    from tokenwright.sampling_params import SamplingParams

Seed = Annotated[
    int, typer.Option(help="The seed of random draws, for a --temperature above 0.", rich_help_panel=opt.SAMPLING)
]
WARM_UP = "warm-up"  # a salt, so that its texts share no pages with the race


@opt.with_engine(
    but=(
        *("threads", "tensor_parallel", "kv", "kv_memory", "kv_disk", "kv_disk_size", "window", "sinks"),
        *("speculate", "mmproj", "draft", "draft_weights"),
    )
)
def race(
    prompt: opt.Prompt = None,
    file: opt.PromptFile = None,
    new_tokens: opt.NewTokens = 200,
    temperature: opt.Temperature = 0.0,
    seed: Seed = 0,
    model: opt.Model = "stories",
    engine: dict[str, Any] = {},  # noqa: B006  (the options that open the model, see `with_engine`)
    json_: opt.Json = False,
) -> None:
    """Generate the same tokens with the KV cache, without it and with a prefix hit, and compare the cost.

    End tokens do not stop a lane, so all lanes run to -n. A short warm-up comes first.
    """
    from tokenwright.sampling_params import SamplingParams

    engine = opt.of_engine(engine)
    text = opt.read_prompt(prompt, file)
    params = SamplingParams(temperature=temperature or 0.0, seed=seed, max_tokens=new_tokens, ignore_eos=True)
    if new_tokens < 1:
        raise RequestError(f"a race needs at least one new token, not -n {new_tokens}")
    with opt.opened(model, quiet=json_, speculate="off", **engine) as llm:
        quantised = f", {llm.weights} weights" if llm.weights.quantised else ""
        about = f"{model}, {llm.dtype} on {llm.device} ({llm.kernels} kernels){quantised}"
        lanes, others = _run(llm, llm.tokenizer.encode(text), params, engine["page_size"], show=not json_)
        result = Result(lanes, about, llm.config.layers, engine["page_size"], others)
    if json_:
        write_json({"model": model, "prompt": text, **as_json(result)})
    else:
        show_anything()
        write(report(result) + "\n")
    if result.faults:
        typer.echo(f"tokenwright: {fault(result)}", err=True)
        raise typer.Exit(1)


def _finished(lane: str, llm: "LLM", completion: "Completion") -> LaneReport:
    usage, cache = completion.usage, lane != NAIVE
    prompt, written = usage.prompt_tokens, usage.completion_tokens
    cost = llm.costs.run(prompt, written, cache=cache, reused=usage.reused_tokens)
    return LaneReport(lane, completion, cost, llm.kv_bytes(prompt + written - 1) if cache else 0)


def _run(
    llm: "LLM", ids: Sequence[int], params: "SamplingParams", page_size: int, *, show: bool
) -> tuple[tuple[LaneReport, ...], str]:
    """Returns the lanes, and a note on other processes' load."""
    room = llm.context - len(ids)
    if room < 0:
        raise ContextError(len(ids), llm.context)
    if room == 0:
        raise RequestError(f"the prompt fills the model's context of {llm.context} tokens; shorten it by a token")
    params = replace(params, max_tokens=min(params.max_tokens, room))
    lanes = [CACHED, NAIVE]
    if len(ids) > page_size:  # the prompt's last token is always computed
        lanes.append(PREFIX)
    few = replace(params, max_tokens=min(2, params.max_tokens))
    for cache in (True, False):
        llm.generate([ids], few, cache=cache, salt=WARM_UP)
    with _bars(max(map(len, lanes)), show) as bars:
        tasks = [bars.add_task(lane, total=params.max_tokens, pace="", start=False) for lane in lanes]
        reports, before = [], read_times()
        for lane, task in zip(lanes, tasks, strict=True):
            bars.start_task(task)
            written = _written(llm, lane != NAIVE, ids, params, bars, task)
            reports.append(_finished(lane, llm, written))
            bars.stop_task(task)
        others = machine_load.load_between(before, read_times())
    return tuple(reports), others


def _bars(width: int, show: bool) -> "Progress":
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


def _written(
    llm: "LLM", cache: bool, ids: Sequence[int], params: "SamplingParams", bars: "Progress", task: "TaskID"
) -> "Completion":
    before = time.perf_counter()
    with llm.stream(ids, params, cache=cache) as stream:
        for _ in stream:
            now = time.perf_counter()
            bars.update(task, advance=1, pace=f"{(now - before) * 1000:.1f} ms/step")
            before = now
    return stream.completion
