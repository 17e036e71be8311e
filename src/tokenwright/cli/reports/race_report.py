"""The tokens and the cost of a race's lanes, as text and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from tokenwright.cli.reports.statistics import rate, seconds
from tokenwright.planner.machine_load import busy_warning
from tokenwright.units import binary

if TYPE_CHECKING:
    from tokenwright.llm.outputs import Completion
    from tokenwright.models.cost import Cost

CACHED, NAIVE, PREFIX = "cached", "naive", "prefix"

Row = tuple[str, ...]


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


def forward_tokens(prompt: int, written: int, *, cache: bool, reused: int = 0) -> int:
    """The number of tokens computed: `written` >= 1 after `prompt`, of which `reused` were cached."""
    return prompt + written - 1 - reused if cache else written * prompt + written * (written - 1) // 2


def report(result: Result) -> str:
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
