"""A plan as a chart: the bytes of the KV cache over the context, beside the bytes of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenwright.cli.reports.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, heading, ticks
from tokenwright.cli.reports.plan_page import binary

if TYPE_CHECKING:
    from tokenwright.planner import Plan

CACHE, WEIGHTS = "#0072B2", "#D55E00"  # colours of the chart's lines


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
        path = "L".join(f"{self.x(tokens):.1f} {self.y(count):.1f}" for tokens, count in points)
        at = WIDTH - RIGHT + 10
        return [
            f'<path class="line" stroke="{colour}" d="M{path}"/>',
            f'<text class="name" x="{at}" y="{label_y:.1f}" style="fill:{colour}">{name}</text>',
            f'<text x="{at}" y="{label_y + 17:.1f}">{binary(points[-1][1])}</text>',
        ]


def picture(plan: Plan) -> str:
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
        *heading(f"KV cache and weights of {plan.model}", _subtitle(plan)),
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
        at = f'x="{frame.x(crossing) - 8:.1f}" y="{frame.y(weights) - 8:.1f}"'
        parts.append(f'<text {at} text-anchor="end">{crossing:,}</text>')
    return "\n".join([*parts, "</svg>", ""])


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
