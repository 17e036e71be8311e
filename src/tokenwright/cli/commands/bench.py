"""`tokenwright bench`: measure the CPU's limits, and a model's speed as a share of them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from tokenwright.cli.options import shared as opt
from tokenwright.cli.terminal.output import bar, remark, show_anything, write, write_json
from tokenwright.errors import RequestError
from tokenwright.units import binary

if TYPE_CHECKING:
    from tokenwright.bench.limits import MachineLimits, Rate
    from tokenwright.bench.model_speed import Figure


Shape = Annotated[
    str | None,
    Option(
        help="Use a model with random weights: tiny, gpt2, qwen05, llama1b, deepseek2, granite350m or qwen35. It is "
        "made once and kept in the cache folder.",
        rich_help_panel=opt.MODEL,
    ),
]


def bench(
    named: opt.ModelName = None,
    model: opt.Model = None,
    revision: opt.Revision = None,
    shape: Shape = None,
    weights: opt.Weights = "native",
    lora: opt.Lora = None,
    json_: opt.Json = False,
) -> None:
    """Measure this machine's limits, and the share of them that prefill, decode and many streams of a model reach.

    The limit of a measure is the time to read its weights, K and V, or the time to multiply, whichever is longer.
    Run nothing else meanwhile: figures of a busy machine are measured again, and left out if it stays busy.
    """
    if shape is None:
        opened = name = opt.the_model(named, model)
    elif (named, model, revision, lora) == (None, None, None, None):
        opened, name = _made(shape, json_), shape
    else:
        raise RequestError(
            "--shape is a model without adapters; leave out --shape, or the model, --revision and --lora"
        )
    options: dict[str, Any] = {"revision": revision, "weights": weights, "lora": lora or (), "speculate": "off"}
    with opt.opened(opened, quiet=json_, device="cpu", **options) as llm:
        from tokenwright.bench.limits import measure_limits, processor
        from tokenwright.bench.model_speed import Benchmark

        benchmark = Benchmark(llm)
        with bar("limits", json_) as report:
            limits = measure_limits(report=report)
        with bar(f"measuring {name}", json_) as report:
            figures = benchmark.figures(report)
        facts = {
            "processor": processor(),
            "threads": limits.threads,
            "kernels": llm.kernels,
            "limits": _limits(limits),
            "model": name,
            "dtype": llm.dtype,
            "weights": str(llm.weights),
            "weight_bytes": llm.weight_bytes,
            "measures": {one.name: _without_name(one) for one in figures},
        }
    if json_:
        write_json(facts, indent=2)
    else:
        show_anything()
        write(_page(facts, limits, figures) + "\n")


def _made(shape: str, quiet: bool) -> str:
    from tokenwright.bench import shapes

    folder = shapes.default_root() / shape
    if shape in shapes.SHAPES and not folder.exists() and not quiet:
        remark(f"making {shape} with random weights in {folder}")
    with bar(f"making {shape}", quiet) as report:
        return str(shapes.ready(shape, shapes.default_root(), report))


def _limits(limits: "MachineLimits") -> dict[str, Any]:
    return {
        "kind": limits.kind,
        "memory": _rate(limits.memory),
        "cache": limits.cache and {"bytes": limits.cache_bytes, **_rate(limits.cache)},
        "multiplications": {form: _rate(rate) for form, rate in limits.multiplications.items()},
    }


def _rate(rate: "Rate") -> dict[str, Any]:
    return asdict(rate) | (dict.fromkeys(("all_threads", "one_thread")) if rate.busy else {})


def _without_name(figure: "Figure") -> dict[str, Any]:
    facts = asdict(figure) | (dict.fromkeys(("value", "limit", "share")) if figure.busy else {})
    del facts["name"]
    return facts


def _page(facts: dict[str, Any], limits: "MachineLimits", figures: "Sequence[Figure]") -> str:
    from tokenwright.planner.machine_load import busy_warning

    counted = f"{limits.threads} thread{'s' if limits.threads > 1 else ''}"
    size = f"{binary(facts['weight_bytes'])} of {facts['weights']} weights"
    rows = [("limits", counted, "1 thread"), ("memory", *_speeds(limits.memory, "GB"))]
    if limits.cache is not None:
        rows.append((f"cache ({binary(limits.cache_bytes)})", *_speeds(limits.cache, "GB")))
    rows += [(f"{form} products", *_speeds(rate, "G")) for form, rate in limits.multiplications.items()]
    near = [("how near", "measured", "limit", "share", ""), *map(_near, figures)]
    cache = [] if limits.cache is None else [limits.cache]
    every: list[Rate | Figure] = [*cache, limits.memory, *limits.multiplications.values(), *figures]
    busy = busy_warning(*(one.busy for one in every))
    by = "the native kernels" if limits.kind == "native" else "torch (there are no native kernels)"
    measured = f"{facts['processor']}, {facts['kernels']} kernels; limits measured by {by}."
    parts = [[measured], _table(rows), [f"{facts['model']}, {size}, on {counted}."], _table(near)]
    return "\n\n".join("\n".join(part) for part in parts) + (f"\n\n{busy}" if busy else "")


def _speeds(rate: "Rate", unit: str) -> tuple[str, str]:
    if rate.busy:
        return _verdict(rate), ""
    return f"{rate.all_threads / 1e9:,.1f} {unit}/s", f"{rate.one_thread / 1e9:,.1f} {unit}/s"


def _verdict(measured: "Rate | Figure") -> str:
    from tokenwright.planner.machine_load import verdict

    return verdict(measured.busy)


def _near(figure: "Figure") -> tuple[str, ...]:
    names = {
        "prefill": f"prefill of {figure.prompt} tokens",
        "decode": f"decode after {figure.prompt}",
        "first": f"first token after {figure.prompt}",
    }
    name = names.get(figure.name, f"{figure.streams} streams")
    if figure.busy:
        return name, _verdict(figure), "", "", ""
    value, limit = (f"{one:,.1f} {figure.unit}" for one in (figure.value, figure.limit))
    return name, value, limit, f"{figure.share:.0%}", f"of {'reading' if figure.bound == 'memory' else 'multiplying'}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0], cells[4:] = row[0].ljust(widths[0]), row[4:]
        lines.append("  ".join(cells).rstrip())
    return lines
