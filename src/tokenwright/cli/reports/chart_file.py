"""The file of a chart: only where the user says, in the format of its ending, overwriting nothing unasked."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from tokenwright.cli.options.shared import OUTPUT
from tokenwright.errors import RequestError

if TYPE_CHECKING:
    from tokenwright.cli.reports.chart import Picture

FORMATS = (".svg", ".png")

Out = Annotated[
    Path | None,
    Option("--out", "-o", help="Draw a chart into this file: FILE.svg, or FILE.png with matplotlib.",
           rich_help_panel=OUTPUT),
]  # fmt: skip
Force = Annotated[bool, Option("--force", help="Let --out overwrite a file that exists.", rich_help_panel=OUTPUT)]


def check_chart_file(out: Path, force: bool, formats: tuple[str, ...] = FORMATS) -> None:
    """Raises RequestError, before any work."""
    if out.is_dir() or not out.parent.is_dir():
        raise RequestError(f"the chart cannot be saved to {out}: give --out a file in a folder that exists")
    if out.suffix.lower() not in formats:
        ends = " or ".join(formats)
        raise RequestError(f"the chart cannot be saved to {out}: --out takes a name that ends in {ends}")
    if out.exists() and not force:
        raise RequestError(f"{out} exists and is not overwritten; give --out another file, or add --force")
    if out.suffix.lower() == ".png" and find_spec("matplotlib") is None:
        raise RequestError("matplotlib draws PNG: pip install matplotlib, or give --out a name in .svg")


def save_chart(out: Path, picture: Picture) -> None:
    data = png(picture) if out.suffix.lower() == ".png" else picture.svg().encode()
    try:
        out.write_bytes(data)
    except OSError as error:
        raise RequestError(f"the chart cannot be saved to {out}: {error.strerror}; give another --out") from error


def png(picture: Picture) -> bytes:
    """Drawn by matplotlib, with the same dots and running medians as in the SVG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from tokenwright.cli.reports.chart import smooth, top

    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for line in picture.lines:
        steps = range(1, len(line.values) + 1)
        axes.plot(steps, line.values, ".", color=line.colour, alpha=0.35)
        axes.plot(steps, smooth(line.values), color=line.colour, label=f"{line.name}\n{line.note}")
    axes.set(xlabel="tokens written", ylabel="ms per step", ylim=(0, top(picture.lines)))
    axes.set_title(picture.subtitle, fontsize=8, loc="left")
    figure.suptitle(picture.title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    axes.grid(alpha=0.25)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    written = BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()
