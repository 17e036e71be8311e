"""`tokenwright race`: the same tokens with the KV cache, without it and with a prefix hit, and what each costs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenwright.cli.options import shared as opt
from tokenwright.cli.terminal.output import show_anything, write, write_json
from tokenwright.cli.terminal.statistics import rate, seconds
from tokenwright.errors import ContextError, RequestError
from tokenwright.sampling_params import SamplingParams
from tokenwright.units import binary

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tokenwright.llm.llm import LLM
    from tokenwright.llm.outputs import Completion
    from tokenwright.models.cost import Cost

CACHED, NAIVE, PREFIX = "cached", "naive", "prefix"

Row = tuple[str, ...]
Seed = Annotated[
    int, typer.Option(help="The seed of random draws, for a --temperature above 0.", rich_help_panel=opt.SAMPLING)
]
WARM_UP = "warm-up"  # a salt, so that its texts share no pages with the race


@dataclass(frozen=True, slots=True)
class LaneReport:
    name: str  # one of those above
    completion: "Completion"
    cost: "Cost"  # from shapes
    kv_bytes: int

    @property
    def step_s(self) -> tuple[float, ...]:
        return self.completion.usage.step_s

    @property
    def work(self) -> tuple[int, str]:
        usage = self.completion.usage
        prompt, written, reused = usage.prompt_tokens, usage.completion_tokens, usage.reused_tokens
        tokens = forward_tokens(prompt, written, cache=self.name != NAIVE, reused=reused)
        if self.name == NAIVE:
            return tokens, "the sum of t = N .. N + T - 1"
        return tokens, f"N + T - 1 - R, R = {reused:,} found" if self.name == PREFIX else "N + T - 1"


@dataclass(frozen=True, slots=True)
class Result:
    lanes: tuple[LaneReport, ...]  # the cached one first, then the naive one
    about: str  # model, dtype and device
    layers: int
    page_size: int
    busy: str = ""

    @property
    def cached(self) -> "Completion":
        return self.lanes[0].completion

    @property
    def naive(self) -> "Completion":
        return self.lanes[1].completion

    @property
    def faults(self) -> list[LaneReport]:
        return [lane for lane in self.lanes if self.parts_at(lane) is not None]

    @property
    def ratio(self) -> float:
        return self.naive.usage.total_s / max(self.cached.usage.total_s, 1e-9)

    def parts_at(self, lane: LaneReport) -> int | None:
        """The number (from 1) of the first token that differs from the cached lane's, or None."""
        ours, theirs = self.cached.token_ids, lane.completion.token_ids
        if ours == theirs:
            return None
        pairs = enumerate(zip(ours, theirs, strict=False), 1)
        return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)) + 1)


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
    llm: "LLM", ids: Sequence[int], params: SamplingParams, page_size: int, *, show: bool
) -> tuple[tuple[LaneReport, ...], str]:
    """Returns the lanes, and a note on other processes' load."""
    from tokenwright.backends.spare_machine import read_times
    from tokenwright.planner.machine_load import load_between

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
        others = load_between(before, read_times())
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
    llm: "LLM", cache: bool, ids: Sequence[int], params: SamplingParams, bars: "Progress", task: "TaskID"
) -> "Completion":
    before = time.perf_counter()
    with llm.stream(ids, params, cache=cache) as stream:
        for _ in stream:
            now = time.perf_counter()
            bars.update(task, advance=1, pace=f"{(now - before) * 1000:.1f} ms/step")
            before = now
    return stream.completion


def forward_tokens(prompt: int, written: int, *, cache: bool, reused: int = 0) -> int:
    """The number of tokens computed: `written` >= 1 after `prompt`, of which `reused` were cached."""
    return prompt + written - 1 - reused if cache else written * prompt + written * (written - 1) // 2


def report(result: Result) -> str:
    from tokenwright.planner.machine_load import busy_warning

    usage = result.cached.usage
    naive, cached = result.naive.usage.forward_tokens, usage.forward_tokens
    measured = ("measured", "first token", "median step", "last step", "total", "tok/s")
    counted = ("counted", "forward tokens", "layer-tokens", "K and V", "formula of the tokens")
    derived = ("by shapes", "GFLOP", "K and V read", "K and V at the end")
    first = f"N = {usage.prompt_tokens} prompt tokens, T = {usage.completion_tokens} new ones ({result.about})."
    last = f"naive took {result.ratio:.2f} times as long, for {naive / cached:.1f} times the forward tokens"
    parts = [
        [first, *_agreement(result)],
        _table([measured, *_times(result)], 6),
        _sparks(result),
        _table([counted, *_counted(result)], 4),
        _table([derived, *_derived(result)], 3),
        [last, *([busy_warning(result.busy)] if result.busy else [])],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _agreement(result: Result) -> list[str]:
    same = [lane.name for lane in result.lanes[1:] if lane not in result.faults]
    lines = [f"The same tokens as cached: {', '.join(same)}."] if same else []
    lines += [f"THE LANES WROTE DIFFERENT TOKENS: {_parted(result)}."] if result.faults else []
    if all(lane.name != PREFIX for lane in result.lanes):
        prompt, needed = result.cached.usage.prompt_tokens, result.page_size + 1
        lines.append(
            f"No prefix lane: texts share full pages of a prompt, so it takes a prompt of {needed} tokens or more; "
            f"this one has {prompt}."
        )
    return lines


def _parted(result: Result) -> str:
    return ", ".join(f"{lane.name} from token {result.parts_at(lane)} on" for lane in result.faults)


def fault(result: Result) -> str:
    return (
        f"the lanes wrote different tokens: {_parted(result)}. In 16 bits two logits can be so near that the order of "
        "additions decides; try --dtype float32. If they part there too, it is a bug."
    )


def _times(result: Result) -> list[Row]:
    rows: list[Row] = []
    for lane in result.lanes:
        steps, usage = lane.step_s, lane.completion.usage
        times = [seconds(time_s) for time_s in (steps[0], median(steps), steps[-1], usage.total_s)]
        rows.append((lane.name, *times, rate(len(steps) / usage.total_s)))
    return rows


def _counted(result: Result) -> list[Row]:
    rows: list[Row] = []
    for lane in result.lanes:
        usage, (asked, words) = lane.completion.usage, lane.work
        sign = "=" if usage.forward_tokens == asked else f"NOT {asked:,} ="
        counts = (f"{usage.forward_tokens:,}", f"{usage.layer_tokens:,}", binary(usage.kv_bytes))
        rows.append((lane.name, *counts, f"{sign} {words}"))
    return rows


def _derived(result: Result) -> list[Row]:
    rows: list[Row] = []
    for lane in result.lanes:
        usage = lane.completion.usage
        tokens = usage.prompt_tokens + usage.completion_tokens - 1
        words = "nothing is kept" if lane.name == NAIVE else f"after N + T - 1 = {tokens:,} tokens"
        sign = "=" if usage.kv_bytes == lane.kv_bytes else f"NOT {binary(usage.kv_bytes)} ="
        flops = f"{lane.cost.flops / 1e9:,.4g}"
        rows.append((lane.name, flops, binary(lane.cost.kv_read), f"{sign} {binary(lane.kv_bytes)}: {words}"))
    return rows


def _sparks(result: Result) -> list[str]:
    every = sorted(step for lane in result.lanes for step in lane.step_s)
    peak = every[int(len(every) * 0.98)]
    width = max(len(lane.name) for lane in result.lanes)
    return [f"{lane.name:>{width}}  {_spark(lane.step_s, peak)}" for lane in result.lanes]


def _table(rows: list[Row], numbers: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[numbers:] = [0] * len(widths[numbers:])
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def _spark(values: Sequence[float], peak: float, width: int = 60) -> str:
    """A sparkline scaled to `peak`: the medians of at most `width` equal ranges of the values."""
    cells = min(width, len(values))
    stretches = [values[len(values) * i // cells : len(values) * (i + 1) // cells] for i in range(cells)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * median(stretch) / peak))] for stretch in stretches)


def as_json(result: Result) -> dict[str, Any]:
    """`derived` and `formula` are calculated; the engine gave the rest."""
    return {
        "text": result.cached.text,
        "token_ids": list(result.cached.token_ids),
        "prompt_tokens": result.cached.usage.prompt_tokens,
        "same_tokens": not result.faults,
        "ratio": result.ratio,
        "busy": result.busy,
        **{lane.name: _lane_json(lane, result.parts_at(lane), result.layers) for lane in result.lanes},
    }


def _lane_json(lane: LaneReport, parts_at: int | None, layers: int) -> dict[str, Any]:
    usage, (asked, words) = lane.completion.usage, lane.work
    formula = {"forward_tokens": asked, "layer_tokens": asked * layers, "words": words, "kv_bytes": lane.kv_bytes}
    counts = ("forward_tokens", "layer_tokens", "reused_tokens", "kv_bytes", "preemptions")
    return {
        "name": lane.name,
        "parts_at": parts_at,
        "total_s": usage.total_s,
        "step_s": list(lane.step_s),
        "median_step_s": median(lane.step_s),
        **{name: getattr(usage, name) for name in counts},
        "derived": {"flops": lane.cost.flops, "kv_read_bytes": lane.cost.kv_read},
        "formula": formula,
    }
