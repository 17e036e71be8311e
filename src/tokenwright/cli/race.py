"""`tokenwright race`: the same tokens written with the KV cache and without it, and what each cost.

Both lanes are the same engine and the same path; without the cache a sequence is computed anew for every
token. With a prompt of N tokens and T new ones the cached lane sends N + T - 1 tokens through the layers (the
last one is written and never computed), the naive one the sum of t for t = N .. N + T - 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import typer

from tokenwright.cli import options as opt
from tokenwright.cli.chart import Line, chart
from tokenwright.cli.facts import seconds
from tokenwright.cli.output import show_anything, write, write_json
from tokenwright.errors import RequestError

if TYPE_CHECKING:
    from tokenwright.completion import Completion
    from tokenwright.engine.sequence import SamplingParams
    from tokenwright.llm import LLM
    from tokenwright.trace.cost import Cost

CACHED, NAIVE = "cached", "naive"
Row = tuple[str, ...]
COLOURS = {CACHED: "#0072B2", NAIVE: "#D55E00"}


def race(
    prompt: opt.Prompt = None,
    file: opt.PromptFile = None,
    new_tokens: opt.NewTokens = 200,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    model: opt.Model = "stories",
    revision: opt.Revision = None,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    page_size: opt.PageSize = 16,
    token_budget: opt.TokenBudget = 512,
    out: opt.Chart = Path("race.svg"),
    json_: opt.Json = False,
) -> None:
    """Write the same tokens with the KV cache and without it, one after the other, and compare.

    End tokens are written like any other, so that both lanes run to -n. A short warm-up comes first.
    """
    from tokenwright.engine.sequence import SamplingParams

    text = opt.read_prompt(prompt, file)
    params = SamplingParams(temperature=temperature or 0.0, seed=seed, max_tokens=new_tokens, ignore_eos=True)
    if new_tokens < 1:
        raise RequestError(f"a race needs at least one new token, not -n {new_tokens}")
    if out.is_dir() or not out.parent.is_dir():
        raise RequestError(f"the chart cannot be saved to {out}: give --out a file in a folder that exists")
    with opt.opened(
        model,
        quiet=json_,
        revision=revision,
        device=device,
        dtype=dtype,
        page_size=page_size,
        token_budget=token_budget,
    ) as llm:
        ids = llm.tokenizer.encode(text)
        result = _run(llm, ids, params, show=not json_)
        costs = {name: llm.costs.run(len(ids), new_tokens, cache=name == CACHED) for name in COLOURS}
        about = f"{model}, {llm.dtype} on {llm.device}"
        layers = llm.config.layers
    _save(out, _picture(result, about))
    if json_:
        write_json({"model": model, "prompt": text, **_as_json(result, layers, costs), "chart": str(out)})
    else:
        show_anything()
        write(f"{_report(result, about, costs)}\nchart: {out}\n")
    if result.parted is not None:
        typer.echo(
            f"tokenwright: the lanes wrote different tokens from token {result.parted + 1} on. In 16 bits two logits "
            "can be so near that the order of additions decides; try --dtype float32. If they part there too, it is "
            "a bug.",
            err=True,
        )
        raise typer.Exit(1)


def _save(out: Path, picture: str) -> None:
    try:
        out.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"the chart cannot be saved to {out}: {error.strerror}; give another --out") from error


@dataclass(frozen=True, slots=True)
class Result:
    """Both lanes after the race. `parted`: the first step at which they wrote different tokens, or None."""

    cached: Completion
    naive: Completion

    @property
    def parted(self) -> int | None:
        ours, theirs = self.cached.token_ids, self.naive.token_ids
        if ours == theirs:
            return None
        pairs = zip(ours, theirs, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))

    @property
    def lanes(self) -> dict[str, Completion]:
        return {CACHED: self.cached, NAIVE: self.naive}

    @property
    def ratio(self) -> float:
        """How many times as long the naive lane took."""
        return self.naive.usage.total_s / max(self.cached.usage.total_s, 1e-9)


def forward_tokens(prompt: int, written: int, *, cache: bool) -> int:
    """Tokens sent through the layers for `written` >= 1 tokens after `prompt` tokens, by formula."""
    if cache:
        return prompt + written - 1
    return written * prompt + written * (written - 1) // 2


def _run(llm: LLM, ids: Sequence[int], params: SamplingParams, *, show: bool) -> Result:
    """Both lanes on the same ids; with `show`, a bar for each on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    bars = Progress(
        TextColumn("{task.description:>6}"),
        BarColumn(None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]:>12}"),
        TimeElapsedColumn(),
        console=console,
        disable=not (show and console.is_terminal),
    )

    def run(name: str, task: TaskID) -> Completion:
        bars.start_task(task)
        lane = _lane(llm, ids, params, name == CACHED, lambda pace: bars.update(task, advance=1, pace=pace))
        bars.stop_task(task)
        return lane

    for cache in (True, False):  # the warm-up: other ids, so that nothing of the race is prepared
        llm.generate([list(reversed(ids))], replace(params, max_tokens=2), cache=cache)
    with bars:
        tasks = {name: bars.add_task(name, total=params.max_tokens, pace="", start=False) for name in COLOURS}
        return Result(**{name: run(name, task) for name, task in tasks.items()})


def _lane(
    llm: LLM, ids: Sequence[int], params: SamplingParams, cache: bool, tick: Callable[[str], object]
) -> Completion:
    """One lane; `tick` is told each token's pace for the bar. The report's times are the engine's own."""
    before = time.perf_counter()
    with llm.stream(ids, params, cache=cache) as stream:
        for _ in stream:
            now = time.perf_counter()
            tick(f"{(now - before) * 1000:.1f} ms/step")
            before = now
    return stream.completion


def _work(lane: Completion, *, cache: bool) -> tuple[int, str]:
    """The forward tokens that the formula asks for, and the formula in words."""
    prompt, written = lane.usage.prompt_tokens, lane.usage.completion_tokens
    words = "N + T - 1" if cache else "the sum of t for t = N .. N + T - 1"
    return forward_tokens(prompt, written, cache=cache), words


def _report(result: Result, about: str, costs: Mapping[str, Cost]) -> str:
    """The race in words and numbers, for a terminal or a file."""
    usage = result.cached.usage
    agree = "Both lanes wrote the same tokens." if result.parted is None else "THE LANES WROTE DIFFERENT TOKENS."
    every = sorted(step for lane in result.lanes.values() for step in lane.usage.step_s)
    peak = every[int(len(every) * 0.98)]  # a hiccup must not flatten the rest
    times: list[Row] = [("", "first token", "median step", "last step", "total", "tok/s")]
    work: list[Row] = [("", "forward tokens", "layer-tokens", "GFLOP by shapes", "formula of the forward tokens")]
    sparks = []
    for name, lane in result.lanes.items():
        steps, total = lane.usage.step_s, lane.usage.total_s
        told = [seconds(time_s) for time_s in (steps[0], median(steps), steps[-1], total)]
        times.append((name, *told, f"{len(steps) / total:,.3g}"))
        asked, words = _work(lane, cache=name == CACHED)
        counted = lane.usage.forward_tokens
        sign = "=" if counted == asked else f"NOT {asked:,} ="
        flops = f"{costs[name].flops / 1e9:,.4g}"
        work.append((name, f"{counted:,}", f"{lane.usage.layer_tokens:,}", flops, f"{sign} {words}"))
        sparks.append(f"{name:>6}  {_spark(steps, peak)}")
    heading = f"N = {usage.prompt_tokens} prompt tokens, T = {usage.completion_tokens} new ones ({about}). {agree}"
    naive, cached = result.naive.usage.forward_tokens, result.cached.usage.forward_tokens
    ratio = f"naive took {result.ratio:.2f} times as long, for {naive / cached:.1f} times the forward tokens"
    return "\n".join([heading, "", *_table(times, 6), "", *sparks, "", *_table(work, 4), "", ratio])


def _table(rows: list[Row], numbers: int) -> list[str]:
    """The rows as lines; the first `numbers` columns are aligned to the right, what follows them stays as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[numbers:] = [0] * len(widths[numbers:])
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def _spark(values: Sequence[float], peak: float, width: int = 60) -> str:
    """The values as a row of little bars against `peak`: the median of each of at most `width` stretches."""
    cells = min(width, len(values))
    stretches = [values[len(values) * i // cells : len(values) * (i + 1) // cells] for i in range(cells)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * median(stretch) / peak))] for stretch in stretches)


def _picture(result: Result, about: str) -> str:
    usage = result.cached.usage
    lines = []
    for name, lane in result.lanes.items():
        note = f"{seconds(lane.usage.total_s)} in all"
        lines.append(Line(name, note, COLOURS[name], [step * 1000 for step in lane.usage.step_s]))
    return chart(
        "The same text with the KV cache and without it",
        f"{usage.completion_tokens} tokens after a prompt of {usage.prompt_tokens} · {about} · "
        f"naive takes {result.ratio:.1f}x as long",
        lines,
    )


def _as_json(result: Result, layers: int, costs: Mapping[str, Cost]) -> dict[str, Any]:
    lanes: dict[str, Any] = {}
    for name, lane in result.lanes.items():
        asked, words = _work(lane, cache=name == CACHED)
        lanes[name] = {
            "total_s": lane.usage.total_s,
            "step_s": list(lane.usage.step_s),
            "median_step_s": median(lane.usage.step_s),
            "forward_tokens": lane.usage.forward_tokens,
            "layer_tokens": lane.usage.layer_tokens,
            "preemptions": lane.usage.preemptions,
            "derived": {"flops": costs[name].flops, "kv_read_bytes": costs[name].kv_read},
            "formula": {"forward_tokens": asked, "layer_tokens": asked * layers, "words": words},
        }
    return {
        "text": result.cached.text,
        "token_ids": list(result.cached.token_ids),
        "prompt_tokens": result.cached.usage.prompt_tokens,
        "same_tokens": result.parted is None,
        "ratio": result.ratio,
        **lanes,
    }
