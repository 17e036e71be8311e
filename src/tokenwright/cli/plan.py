"""`tokenwright plan`: a model's memory and the cost of its steps, from its config.json alone."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from tokenwright.cli import options as opt
from tokenwright.cli.chart import BOTTOM, HEIGHT, LEFT, RIGHT, STYLE, TOP, WIDTH, ticks
from tokenwright.cli.chart_file import Force, check_chart_file
from tokenwright.cli.output import show_anything, write, write_json
from tokenwright.config import KVFormat
from tokenwright.errors import RequestError
from tokenwright.units import read_bytes, read_count, read_rate, read_tokens

if TYPE_CHECKING:
    from tokenwright.planner import Plan

PLANNED, MACHINE = "What to plan", "Machine"
CACHE, WEIGHTS = "#0072B2", "#D55E00"  # colours of the chart's lines

Name = Annotated[
    str | None,
    Argument(
        metavar="[MODEL]",
        help="A known name (llama-3.1-8b), a config.json, a folder, a GGUF file, a Hugging Face name, or stories.",
        show_default=False,
    ),
]
Context = Annotated[
    str | None,
    Option(help="Tokens of each sequence: 8192, 8k (k = 1024); else the model's own.", rich_help_panel=PLANNED),
]
Batch = Annotated[int, Option(help="Sequences at once.", rich_help_panel=PLANNED)]
Kv = Annotated[
    str,
    Option(
        "--kv",
        help="How K and V are kept: native, float32, bfloat16, float16, fp8, int8, int4; or k=int8,v=int4; "
        "first=64 after it keeps the first tokens native, native=0+-1 these layers.",
        rich_help_panel=PLANNED,
    ),
]
Weights = Annotated[
    str,
    Option(
        help="How matrices are kept: native, float32, bfloat16, float16, int8, int4; or int8:32 with its group.",
        rich_help_panel=PLANNED,
    ),
]
Window = Annotated[
    str | None,
    Option(
        help="Attention window in tokens, for all layers, such as 4k; pages behind it are freed.",
        rich_help_panel=PLANNED,
        show_default=False,
    ),
]
Sinks = Annotated[
    int, Option(help="First tokens that every token still attends to, on top of its window.", rich_help_panel=PLANNED)
]
Memory = Annotated[
    str | None,
    Option(help="What must hold weights and cache: 24GB, 24GiB (2^30), or here.", rich_help_panel=MACHINE),
]
Speed = Annotated[
    str | None, Option(help="Bytes read per second: 30GB/s; else measured here.", rich_help_panel=MACHINE)
]
Out = Annotated[
    Path | None,
    Option("--out", "-o", help="Draw cache and weights over the context (SVG).", rich_help_panel=opt.OUTPUT),
]


def plan(
    named: Name = None,
    model: opt.Model = None,
    context: Context = None,
    batch: Batch = 1,
    kv: Kv = "native",
    weights: Weights = "native",
    window: Window = None,
    sinks: Sinks = 0,
    memory: Memory = None,
    bandwidth: Speed = None,
    out: Out = None,
    force: Force = False,
    json_: opt.Json = False,
) -> None:
    """Calculate the memory that a model needs and the speed that it can reach, without loading it.

    A dozen models are known offline; for others only config.json is read.
    """
    chosen = opt.the_model(named, model)
    opt.check_engine(weights=weights, kv=kv, sinks=sinks)
    tokens = None if context is None else read_tokens(context, "context")
    limit = None if window is None else read_tokens(window, "window")
    room = None if memory is None else read_bytes(memory, "memory")
    rate = "measured" if bandwidth is None else read_rate(bandwidth, "bandwidth")
    if out is not None:
        check_chart_file(out, force, (".svg",))
    from tokenwright import planner

    found = planner.plan(
        chosen,
        context=tokens,
        batch=read_count(batch, "batch"),
        kv=kv,
        weights=weights,
        window=limit,
        sinks=sinks,
        memory=room,
        bandwidth=rate,
    )
    if out is not None:
        _save(out, picture(found))
    if json_:
        write_json({**found.facts(), **({} if out is None else {"chart": str(out)})}, indent=2)
    else:
        show_anything()
        write(page(found) + "\n" + ("" if out is None else f"chart: {out}\n"))


def _save(out: Path, drawn: str) -> None:
    try:
        out.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"the chart cannot be saved to {out}: {error.strerror}; give another --out") from error


def page(plan: Plan) -> str:
    """The plan as text: sizes, work, speed, and remarks."""
    graph = plan.graph
    of = f" of {graph.context:,}" if plan.context < graph.context else ""
    heading = f"{plan.model} ({graph.architecture})\n{plan.context:,}{of} tokens, batch {plan.batch:,}"
    return "\n".join([heading, "", *_memory(plan), "", *_work(plan), "", *_words(plan)])


def _memory(plan: Plan) -> list[str]:
    """The sizes in both units, and how each is composed."""
    rows = {
        "weights": (plan.weight_bytes, _parameters(plan)),
        "KV of a token": (plan.kv_bytes_per_token, _kept(plan)),
        "KV of a sequence": (plan.kv_bytes_per_sequence, [_kept_tokens(plan)]),
        "KV in all": (plan.kv_bytes_total, [f"batch {plan.batch:,}"]),
        "together": (plan.total_bytes, ["without activations and torch itself"]),
        "a decode reads": (plan.decode_bytes, [f"{decimal(plan.weight_bytes_read)} of weights, and the KV"]),
    }
    lines = [f"{'memory (derived)':<16} {'2^n':>12}  {'10^n':>11}"]
    for name, (count, words) in rows.items():
        lines.append(f"{name:<16} {binary(count):>12}  {decimal(count):>11}  {words[0]}")
        lines += [" " * 44 + more for more in words[1:]]
    return lines


def _parameters(plan: Plan) -> list[str]:
    """How many parameters there are, and how many of them a token meets if there are experts."""
    graph = plan.graph
    met = [f"a token meets {graph.active_parameters:,}"] if graph.active_parameters < graph.parameters else []
    return [f"{graph.parameters:,} parameters, {plan.weights}", *met]


def _kept(plan: Plan) -> list[str]:
    """How the bytes of a token are composed: layers, heads, and the rows of K and of V with their scales."""
    from tokenwright.config import Heads

    parts = []
    for (layout, k, v), count in Counter((spec.layout, spec.k, spec.v) for spec in plan.specs).items():
        if isinstance(layout, Heads):
            rows, heads = [k.nbytes(layout.head_size), v.nbytes(layout.head_size)], f"{layout.kv_heads} heads x "
        else:
            rows, heads = [k.nbytes(layout.rank), k.nbytes(layout.rope)], ""
        parts.append(f"{_layers(count)} x {heads}({rows[0]:,} + {rows[1]:,} B)")
    return parts


def _kept_tokens(plan: Plan) -> str:
    """The number of tokens that a sequence keeps in the cache, and the layers that keep fewer."""
    windows = Counter(
        window for window in plan.attention_windows if window.kept(plan.context - 1, plan.context) < plan.context
    )
    fewer = []
    for window, count in windows.items():
        who = (
            "all layers keep"
            if count == len(plan.attention_windows)
            else f"{_layers(count)} keep{'s' if count == 1 else ''}"
        )
        sinks = f" and {window.sinks:,} sink{'s' if window.sinks > 1 else ''}" if window.sinks else ""
        fewer.append(f"{who} {window.size:,}{sinks}")
    return ", ".join([f"{plan.context:,} tokens", *fewer])


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _work(plan: Plan) -> list[str]:
    whole, each = ("one sequence", "its") if plan.batch == 1 else (f"{plan.batch:,} sequences", "each one's")
    lines = [
        f"{'work (derived)':<16} {'10^n':>12}",
        f"{'prefill':<16} {flop(plan.prefill_flops):>12}  {whole} of {plan.context:,} tokens",
        f"{'a decode':<16} {flop(plan.decode_flops):>12}  {each} next token",
    ]
    speed, rate = plan.bandwidth, plan.tokens_per_second
    if speed is not None and rate is not None:
        shared = "" if plan.batch == 1 else f"in all, {three(rate / plan.batch)} each, "
        where = f" of this machine ({speed.place})" if speed.kind == "measured" else ""
        reads, writes = f"{three(speed.bytes_per_second / 1e9)} GB/s", f"{three(rate)} tok/s"
        lines += [
            "",
            f"{f'speed ({speed.kind})':<16} {reads:>12}  reading memory{where}",
            f"{'at most':<16} {writes:>12}  {shared}if reading alone limits",
        ]
    return lines


def _words(plan: Plan) -> list[str]:
    """The plan's remarks, one paragraph each."""
    said = [("cache > weights", _crossing(plan))]
    if plan.memory is not None:
        said.append((f"in {decimal(plan.memory)}", _fit(plan, plan.memory)))
    said.append(("this engine", _engine(plan)))
    said += [("note", remark) for remark in plan.remarks]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    return [
        textwrap.fill(f"{name:<16} {words}", max(40, width), subsequent_indent=" " * 17, break_on_hyphens=False)
        for name, words in said
    ]


def _crossing(plan: Plan) -> str:
    at, batch = plan.cache_exceeds_weights_at, f" each, at batch {plan.batch:,}" if plan.batch > 1 else ""
    if at is None:
        return "never: every layer's window is limited"
    beyond = f", beyond the model's {plan.graph.context:,}" if at > plan.graph.context else ""
    return f"from {at:,} tokens{batch}{beyond}"


def _fit(plan: Plan, memory: int) -> str:
    spare = memory - plan.total_bytes
    if memory < plan.weight_bytes:
        return f"does not fit: the weights alone are {decimal(plan.weight_bytes - memory)} too much"
    verdict = f"fits, with {decimal(spare)} to spare" if plan.fits else f"does not fit: {decimal(-spare)} too much"
    longest, own = plan.most_context, plan.graph.context
    if plan.endless and longest is None:
        tokens = "texts without end"
    elif not plan.endless and (longest is None or longest >= own):
        tokens = f"all {own:,} tokens of the model's context"
    else:
        tokens = f"{longest:,} tokens"
    return (
        f"{verdict}. The most at batch {plan.batch:,}: {tokens}; at {plan.context:,} tokens: batch {plan.most_batch:,}"
    )


def _engine(plan: Plan) -> str:
    if plan.hindrances or plan.engine_kv_bytes is None:
        return f"cannot run this yet: {'; '.join(plan.hindrances)}"
    pages = " + ".join(f"{group.pages:,}" for group in plan.engine_groups)
    one = "one more" if len(plan.engine_groups) == 1 else "one more of each"
    options = [f"pages={plan.engine_pages}", f"max_sequences={plan.batch}"]
    if plan.weights.quantised and plan.blueprint.packed is None and not plan.blueprint.kept:
        options.append(f'weights="{plan.weights}"')
    wide = (
        "" if plan.native == "float32" else f"; without native kernels give --dtype {plan.native}, else it is float32"
    )
    if plan.kv != KVFormat():
        options.append(f'kv="{plan.kv}"')
    if plan.window is not None:
        options.append(f"window={plan.window}")
    if plan.sinks:
        options.append(f"sinks={plan.sinks}")
    size = binary(plan.engine_kv_bytes)
    return f"takes {size} for the KV with LLM({', '.join(options)}): {pages} pages and {one}{wide}"


def binary(count: int) -> str:
    """Format bytes in B, KiB, MiB or GiB (2^n) with two decimals."""
    return _scaled(count, 1024, ("KiB", "MiB", "GiB"))


def decimal(count: int) -> str:
    """Format bytes in B, kB, MB or GB (10^n) with two decimals."""
    return _scaled(count, 1000, ("kB", "MB", "GB"))


def _scaled(count: int, base: int, units: tuple[str, ...]) -> str:
    size, unit = float(count), "B"
    for larger in units:
        if size < base:
            break
        size, unit = size / base, larger
    return f"{count} B" if unit == "B" else f"{size:,.2f} {unit}"


def flop(count: int) -> str:
    """Format floating-point operations in MFLOP to EFLOP (10^n)."""
    size, unit = count / 1e6, "MFLOP"
    for larger in ("GFLOP", "TFLOP", "PFLOP", "EFLOP"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:,.2f} {unit}"


def three(value: float) -> str:
    """Format a number with three digits, or with all digits before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


@dataclass(frozen=True, slots=True)
class Frame:
    """The chart's plot area: `end` tokens wide, and at least `most` units of `scale` bytes high."""

    end: int
    most: float
    scale: int

    def x(self, tokens: float) -> float:
        return LEFT + (WIDTH - RIGHT - LEFT) * tokens / self.end

    def y(self, count: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * count / self.scale / ticks(self.most)[-1]

    def grid(self) -> list[str]:
        """The grid lines and the numbers on both axes."""
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        parts = []
        for tick in ticks(self.most):
            at = self.y(tick * self.scale)
            parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{right}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tick:,g}</text>')
        below = [(self.x(tick * 1024), tick) for tick in ticks(self.end / 1024, 6) if tick * 1024 <= self.end]
        parts += [
            f'<text x="{at:.1f}" y="{bottom + 20}" text-anchor="middle">{tick:,g}{"k" if tick else ""}</text>'
            for at, tick in below
        ]
        return [*parts, f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>']

    def line(self, name: str, colour: str, points: Sequence[tuple[int, int]], label_y: float) -> list[str]:
        """A line of bytes over tokens, with its name and its last value on its right."""
        path = "L".join(f"{self.x(tokens):.1f} {self.y(count):.1f}" for tokens, count in points)
        at = WIDTH - RIGHT + 10
        return [
            f'<path class="line" stroke="{colour}" d="M{path}"/>',
            f'<text class="name" x="{at}" y="{label_y:.1f}" style="fill:{colour}">{name}</text>',
            f'<text x="{at}" y="{label_y + 17:.1f}">{binary(points[-1][1])}</text>',
        ]


def picture(plan: Plan) -> str:
    """A chart as SVG: the bytes of the cache over the context, and a line for the weights."""
    own, crossing, weights = plan.graph.context, plan.cache_exceeds_weights_at, plan.weight_bytes
    end = max(plan.context, own, crossing * 5 // 4 if crossing else 0)
    corners = [*(knot for knot in plan.kv_memory.knots if knot < end), end]
    caches = [(tokens, plan.batch * plan.kv_bytes(tokens)) for tokens in corners]
    most = max(weights, *(count for _, count in caches))
    scale, unit = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    frame = Frame(end, most / scale, scale)
    above, below = sorted((weights, caches[-1][1]), reverse=True)
    places = {above: frame.y(above) - 4, below: min(max(frame.y(below), frame.y(above) + 40), HEIGHT - BOTTOM - 17)}
    parts = [
        *_heading(f"KV cache and weights of {plan.model}", _subtitle(plan)),
        f'<text x="{LEFT - 44}" y="{TOP - 18}">{unit}</text>',
        f'<text x="{frame.x(end / 2):.0f}" y="{HEIGHT - 14}" text-anchor="middle">context in tokens (k = 1024)</text>',
        *frame.grid(),
        *frame.line("weights", WEIGHTS, [(0, weights), (end, weights)], places[weights]),
        *frame.line("KV cache", CACHE, caches, places[caches[-1][1]]),
        *_mark(frame, own, f"the model's context: {own:,}"),
        *_kinks(frame, plan),
    ]
    if crossing is not None:
        parts.append(f'<circle cx="{frame.x(crossing):.1f}" cy="{frame.y(weights):.1f}" r="4" fill="{CACHE}"/>')
        parts.append(
            f'<text x="{frame.x(crossing) - 8:.1f}" y="{frame.y(weights) - 8:.1f}" text-anchor="end">'
            f"{crossing:,}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _heading(title: str, subtitle: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(f"{title}. {subtitle}", quote=True)}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT - 44}" y="30">{escape(title)}</text>',
        f'<text x="{LEFT - 44}" y="52">{escape(subtitle)}</text>',
    ]


def _subtitle(plan: Plan) -> str:
    kv = plan.k.name if plan.k == plan.v else f"{plan.k.name} and {plan.v.name}"
    window = "" if plan.window is None else f"window {plan.window:,} · "
    sinks = f"sinks {plan.sinks:,} · " if plan.sinks else ""
    return f"batch {plan.batch:,} · cache in {kv} · {window}{sinks}weights in {plan.weights} · derived from shapes"


def _kinks(frame: Frame, plan: Plan) -> list[str]:
    """A tick on the cache's line wherever an attention window is full, with a label on the line's free side."""
    parts = []
    for full in sorted({window.sinks + window.size for window in plan.attention_windows if window.size is not None}):
        if full < frame.end:
            x, y = frame.x(full), frame.y(plan.batch * plan.kv_bytes(full))
            left = full > frame.end / 2
            below = not left and plan.kv_bytes(frame.end) > plan.kv_bytes(full)
            place = min(y + 20, HEIGHT - BOTTOM - 5) if below else y - 10
            at = f'x="{x - 8 if left else x + 14:.1f}" y="{place:.1f}"'
            parts.append(f'<path class="kink" stroke="{CACHE}" stroke-width="2" d="M{x:.1f} {y - 5:.1f}V{y + 5:.1f}"/>')
            parts.append(f'<text {at} text-anchor="{"end" if left else "start"}">window full at {full:,}</text>')
    return parts


def _mark(frame: Frame, tokens: int, words: str) -> list[str]:
    """A dashed line at a number of tokens, with a label on the side that has more space."""
    at = frame.x(tokens)
    anchor, gap = ("end", -6) if tokens > frame.end / 2 else ("start", 6)
    return [
        f'<path class="axis" stroke-dasharray="4 4" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>',
        f'<text x="{at + gap:.1f}" y="{TOP - 6}" text-anchor="{anchor}">{words}</text>',
    ]
