"""A chart of a race as SVG: milliseconds per step over the step number, one line per lane.

The colours are Okabe and Ito's; text and grid follow the viewer's light or dark scheme.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import median

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 102, 56  # margins around the plot; the right one holds the lines' names

STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #57606a }
  .title { font-size: 17px; font-weight: 600; fill: #1f2328 }
  .grid { stroke: #8c959f; stroke-opacity: .25 }
  .axis { stroke: #8c959f }
  .line { fill: none; stroke-width: 2.5; stroke-linejoin: round }
  .dots { stroke-width: 3; stroke-linecap: round; stroke-opacity: .35 }
  .name { font-weight: 600 }
  @media (prefers-color-scheme: dark) { text { fill: #9198a1 } .title { fill: #f0f6fc } }
"""


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    note: str
    colour: str
    values: Sequence[float]


def smooth(values: Sequence[float], reach: int = 4) -> list[float]:
    """The running median over 2 x reach + 1 steps, fewer at the ends."""
    return [median(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def ticks(most: float, about: int = 5) -> list[float]:
    """Round numbers from 0 to at least `most`: steps of 1, 2 or 5 times a power of ten."""
    rough = max(most, 1e-9) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * size for size in (1, 2, 5, 10) if power * size >= rough * 0.999)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def chart(title: str, subtitle: str, lines: Sequence[Line]) -> str:
    """The SVG text. Dots: measured steps (those beyond the plot are left out); lines: their running median."""
    steps = max(len(line.values) for line in lines)
    y_ticks = ticks(top(lines))
    x_ticks = [tick for tick in ticks(steps, 6) if tick <= steps and tick == int(tick)]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(step: float) -> float:
        return LEFT + (right - LEFT) * step / max(steps, 1)

    def y(ms: float) -> float:
        return bottom - (bottom - TOP) * ms / y_ticks[-1]

    parts = [
        *heading(title, subtitle),
        f'<clipPath id="plot"><path d="M{LEFT} {TOP}H{right}V{bottom}H{LEFT}Z"/></clipPath>',
    ]
    for tick in y_ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts += [f'<text x="{x(at):.1f}" y="{bottom + 20}" text-anchor="middle">{at:g}</text>' for at in x_ticks]
    parts += [
        f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>',
        f'<text x="{LEFT - 44}" y="{TOP - 18}">ms per step</text>',
        f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle">tokens written</text>',
    ]
    names = _apart([min(max(TOP, y(smooth(line.values)[-1])), bottom - 22) for line in lines], 40)
    for line, at in zip(lines, names, strict=True):
        parts += _drawn(line, [(x(i + 1), y(value)) for i, value in enumerate(line.values)], at, right)
    return "\n".join([*parts, "</svg>", ""])


def heading(title: str, subtitle: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(f"{title}. {subtitle}", quote=True)}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT - 44}" y="30">{escape(title)}</text>',
        f'<text x="{LEFT - 44}" y="52">{escape(subtitle)}</text>',
    ]


def top(lines: Sequence[Line]) -> float:
    return max(_usual(smooth(line.values)) for line in lines)


def _usual(values: list[float]) -> float:
    """The end of a straight rise from 0, estimated from the 95th percentile, so outliers do not count."""
    return sorted(values)[math.ceil(len(values) * 0.95) - 1] / 0.95


def _drawn(line: Line, points: list[tuple[float, float]], label_y: float, right: int) -> list[str]:
    dots = "".join(f"M{px:.1f} {py:.1f}h0" for px, py in points if py >= TOP)
    median_y = smooth([py for _, py in points])
    path = "L".join(f"{px:.1f} {py:.1f}" for (px, _), py in zip(points, median_y, strict=True))
    fill, stroke = f'style="fill:{line.colour}"', f'stroke="{line.colour}"'
    return [
        f'<path class="dots" {stroke} d="{dots}"/>',
        f'<path class="line" {stroke} d="M{path}" clip-path="url(#plot)"/>',
        f'<text class="name" x="{right + 10}" y="{label_y:.1f}" {fill}>{escape(line.name)}</text>',
        f'<text x="{right + 10}" y="{label_y + 17:.1f}">{escape(line.note)}</text>',
    ]


def _apart(places: list[float], gap: float) -> list[float]:
    """Label positions, moved up where two are nearer than `gap`, so labels do not overlap; none above the plot."""
    moved = list(places)
    order = sorted(range(len(places)), key=lambda i: -places[i])
    for below, above in pairwise(order):
        moved[above] = min(moved[above], moved[below] - gap)
    least = float(TOP)
    for index in reversed(order):
        moved[index] = max(moved[index], least)
        least = moved[index] + gap
    return moved
