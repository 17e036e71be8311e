"""The quality cost of a quantised KV cache: the model's distributions with every format against the native one.

    python -m benchmarks.quality --text FILE... [--tokens 20000] [--json FILE] [--out docs/pictures/quality.svg]

Teacher-forced: the model runs over a given text once for each format; every row reads all K and V through the codec,
its own included. For each row: KL(native || format) in nats, and whether the most probable token differs. Means have a
95 % interval (2,000 resamples of whole documents).

`--text` names files of plain text, or folders of them, with lines of <|endoftext|> between documents. Documents are
read in order, each up to the model's context, the next from the file with the fewest tokens read so far. For `stories`
use held-out documents: `recipes.stories.data.read_sources(corpus)` has them as `held` of each source.

The random models read random ids. transformers creates them, so the test extra is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recipes.stories.data import documents_of
from tokenwright import LLM
from tokenwright.cache import LayerSpec, layer_specs
from tokenwright.decode.logits_processors import Doubles, log_softmax
from tokenwright.formats import DType, KVFormat

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (
    "native", "bfloat16", "float16", "fp8", "int8", "int4", "k=fp8", "v=fp8", "k=int8", "v=int8", "k=int4", "v=int4",
    "k=int8,v=int4", "k=int4,v=int8", "int4,first=4", "int4,first=16", "int4,first=64", "int4,native=0",
    "int4,native=-1", "int4,native=0+-1",
)  # fmt: skip
RANDOM = ("gpt2", "llama3", "mistral", "qwen2", "qwen3")  # families in tests/models/fixtures.py
RANDOM_LENGTH = 500  # tokens per text; the contexts are 512
SPECIAL = 5  # special ids of the random models
POSITIONS = (range(64), range(64, 256), range(256, 1024))
RESAMPLES = 2000
FAMILIES = ("K and V alike", "K alone", "V alone", "K and V apart", "int4, some native")
GREY = "#808080"  # readable on white and on black
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2")  # Okabe and Ito's

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Text:
    """The part of a document that is read, and the document's file."""

    source: str
    ids: list[int]


@dataclass
class Rows:
    """The results of one format on every row of every text, the texts concatenated."""

    kv: str
    lengths: list[int]  # rows per text
    kl: Numbers  # [rows], nats
    flips: Numbers  # [rows], 1 where the top token differs
    losses: Numbers  # [rows], nats; NaN for the last row of a text

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """The index of each row's text."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """The position of each row in its text."""
        return np.concatenate([np.arange(length) for length in self.lengths])


def documents(paths: Sequence[Path], llm: LLM) -> dict[str, list[list[int]]]:
    """The documents of each file as token ids, framed as in training: BOS, text, EOS."""
    files = [file for path in paths for file in (sorted(path.glob("*.txt")) if path.is_dir() else [path])]
    tokenizer = llm.tokenizer
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    found = {}
    for file in files:
        encoded = (tokenizer.encode(text, add_special=False, parse_special=False) for text in documents_of(file))
        found[file.stem] = [[*before, *ids, *tokenizer.eos_ids[:1]] for ids in encoded]
    return found


def in_turn(files: dict[str, list[list[int]]], longest: int | None = None) -> Iterator[Text]:
    """Documents, at most `longest` tokens each, the next from the file with the fewest tokens read, until all end."""
    left, given = {name: iter(texts) for name, texts in files.items()}, dict.fromkeys(files, 0)
    while left:
        name = min(left, key=lambda file: given[file])
        ids = next(left[name], None)
        if ids is None:
            del left[name]
            continue
        given[name] += len(ids[:longest])
        yield Text(name, ids[:longest])


def upto(texts: Iterable[Text], tokens: int) -> list[Text]:
    """The texts up to `tokens` tokens in all."""
    taken: list[Text] = []
    for text in texts:
        room = tokens - sum(len(one.ids) for one in taken)
        if room < 2:  # a single token predicts nothing of its text
            break
        taken.append(Text(text.source, text.ids[:room]))
    return taken


def logprobs(llm: LLM, ids: list[int]) -> Doubles:
    """Log-probabilities [n, vocabulary] in fp64."""
    return log_softmax(llm.model(ids)[0])


def compare(llm: LLM, texts: Sequence[Text], name: str, formats: Sequence[str] = FORMATS) -> list[Rows]:
    """Run every format on every text."""
    native = LLM(llm.loaded, pages=64)
    others = [LLM(llm.loaded, kv=kv, pages=64) for kv in formats]
    found: list[list[tuple[Numbers, ...]]] = [[] for _ in formats]
    for number, text in enumerate(texts):
        print(f"{name}: text {number + 1} of {len(texts)}, {len(text.ids)} tokens", file=sys.stderr, flush=True)
        exact = logprobs(native, text.ids)
        for rows, other in zip(found, others, strict=True):
            rows.append(beside(exact, logprobs(other, text.ids), text.ids))
    lengths = [len(text.ids) for text in texts]
    columns = [[np.concatenate(column) for column in zip(*rows, strict=True)] for rows in found]
    return [Rows(kv, lengths, *each) for kv, each in zip(formats, columns, strict=True)]


def beside(exact: Doubles, other: Doubles, ids: list[int]) -> tuple[Numbers, Numbers, Numbers]:
    """KL, flips and losses of log-probabilities [n, vocabulary] against the native ones."""
    kl = (np.exp(exact) * (exact - other)).sum(-1)
    flips = (exact.argmax(-1) != other.argmax(-1)).astype(np.float64)
    losses = -other[np.arange(len(ids) - 1), ids[1:]]
    return kl, flips, np.append(losses, np.nan)


def interval(values: Numbers, owners: NDArray[np.int64]) -> list[float]:
    """The mean over rows, and its 95 % interval over resampled texts; NaN rows do not count."""
    there = ~np.isnan(values)
    sums = np.bincount(owners, np.where(there, values, 0.0))
    counts = np.bincount(owners, there)
    drawn = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    return [float(sums.sum() / counts.sum()), *np.quantile(means, (0.025, 0.975)).tolist()]


def kept(specs: Sequence[LayerSpec], lengths: Sequence[int]) -> float:
    """Bytes of K and V per token, over texts of these lengths, without freeing expired pages."""
    return sum(spec.stored_bytes(range(length)) for spec in specs for length in lengths) / sum(lengths)


def sizes(llm: LLM, kv: str, lengths: Sequence[int]) -> dict[str, float]:
    """Bytes per token, for a model that computes in float32 and in bfloat16."""
    found: dict[str, float] = {}
    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        specs = layer_specs(llm.graph, dtype, KVFormat.parse(kv))
        found[f"bytes, {dtype}"] = kept(specs, lengths)
        found[f"bytes of one more, {dtype}"] = sum(spec.bytes_per_token for spec in specs)
    found["of native bfloat16"] = found["bytes, bfloat16"] / kept(layer_specs(llm.graph, "bfloat16"), lengths)
    return found


def figures(rows: Rows, native: Rows, sources: Sequence[str]) -> dict[str, Any]:
    """The reported figures of one format."""
    by_source = {name: np.isin(rows.owners, [i for i, s in enumerate(sources) if s == name]) for name in sources}
    whole = np.repeat(np.array(rows.lengths) == max(rows.lengths), rows.lengths)  # so all ranges have the same texts
    by_position = {f"{p.start} to {p.stop - 1:,}": whole & np.isin(rows.positions, p) for p in POSITIONS}
    return {
        "kv": rows.kv,
        "kl": interval(rows.kl, rows.owners),
        "kl 99th percentile": float(np.quantile(rows.kl, 0.99)),
        "kl max": float(rows.kl.max()),
        "flips": interval(rows.flips, rows.owners),
        "loss": float(np.nanmean(rows.losses)),
        "loss change": interval(rows.losses - native.losses, rows.owners),
        "kl by": {name: float(rows.kl[mask].mean()) for name, mask in (by_position | by_source).items() if mask.any()},
    }


def on_text(model: str, paths: Sequence[Path], tokens: int) -> dict[str, Any]:
    with LLM(model, pages=64, dtype="float32") as llm:
        texts = upto(in_turn(documents(paths, llm), llm.config.context), tokens)
        compared = compare(llm, texts, Path(model).name)
        lengths, sources = [len(text.ids) for text in texts], [text.source for text in texts]
        native = compared[0]
        return {
            "model": Path(model).name,
            "texts": len(texts),
            "tokens": sum(lengths),
            "longest": max(lengths),
            "tokens by file": {name: sum(len(t.ids) for t in texts if t.source == name) for name in sources},
            "formats": [figures(rows, native, sources) | sizes(llm, rows.kv, lengths) for rows in compared],
        }


def on_random(tokens: int) -> dict[str, Any]:
    """The same on random models with `tokens` in all: pooled, and the KL of each family."""
    from tests.models.fixtures import make_checkpoint

    count = max(1, tokens // (len(RANDOM) * RANDOM_LENGTH))
    pooled: list[list[Rows]] = []
    bytes_of: list[list[dict[str, float]]] = []
    heads: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in RANDOM:
            path = make_checkpoint(Path(folder, kind), kind).path
            with LLM(path, pages=64, dtype="float32") as llm:
                draw = np.random.default_rng(0)
                ids = draw.integers(SPECIAL, llm.config.vocab_size, (count, RANDOM_LENGTH)).tolist()
                pooled.append(compare(llm, [Text(kind, one) for one in ids], kind))
                lengths = [RANDOM_LENGTH] * count
                bytes_of.append([sizes(llm, kv, lengths) for kv in FORMATS])
                heads[kind] = llm.config.head_size
    joined = [join(rows) for rows in zip(*pooled, strict=True)]
    sources = [kind for kind in RANDOM for _ in range(count)]
    entries = []
    for rows, each in zip(joined, zip(*bytes_of, strict=True), strict=True):
        mean = {name: float(np.mean([one[name] for one in each])) for name in each[0]}
        entries.append(figures(rows, joined[0], sources) | mean)
    return {"kinds": RANDOM, "head sizes": heads, "tokens": sum(joined[0].lengths), "formats": entries}


def join(parts: Sequence[Rows]) -> Rows:
    """The rows of several models, concatenated."""
    lengths = [length for part in parts for length in part.lengths]
    kl, flips, losses = (np.concatenate([getattr(part, name) for part in parts]) for name in ("kl", "flips", "losses"))
    return Rows(parts[0].kv, lengths, kl, flips, losses)


def shown(value: float) -> str:
    """Format with three significant figures; small numbers with an exponent."""
    if value == 0:
        return "0"
    return f"{value:.3g}" if abs(value) < 1e-3 else f"{value:.{max(0, 2 - int(np.floor(np.log10(abs(value)))))}f}"


def ranged(three: Sequence[float], scale: float = 1.0, sign: str = "") -> str:
    """Format a mean and its interval."""
    mean, low, high = (scale * one for one in three)
    return "0" if not any(three) else f"{mean:{sign}.3g} ({low:{sign}.3g} to {high:{sign}.3g})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first align right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows)) + "\n"


def bytes_shown(entry: dict[str, Any], dtype: str) -> str:
    mean, more = entry[f"bytes, {dtype}"], entry[f"bytes of one more, {dtype}"]
    return f"{mean:,.0f}" if mean == more else f"{mean:,.0f} ({more:,.0f})"


def text_tables(found: dict[str, Any]) -> str:
    given = ", ".join(f"{count:,} of {name}" for name, count in found["tokens by file"].items())
    about = (
        f"`{found['model']}`, float32, {found['tokens']:,} tokens in {found['texts']} texts of at most "
        f"{found['longest']:,} ({given}). KL in nats a token; intervals are 95 % over texts. Bytes a token are means "
        "over these texts, and in brackets those of one token more.\n"
    )
    sizes = ("bytes, float32", "bytes, bfloat16", "of native bfloat16")
    head = ("K and V", *sizes, "KL", "99th percentile", "largest", "top-1 flips, %", "loss change, nats")
    main = table(
        head,
        [
            (
                entry["kv"],
                bytes_shown(entry, "float32"),
                bytes_shown(entry, "bfloat16"),
                f"{entry['of native bfloat16']:.3f}",
                ranged(entry["kl"]),
                shown(entry["kl 99th percentile"]),
                shown(entry["kl max"]),
                ranged(entry["flips"], 100),
                ranged(entry["loss change"], sign="+"),
            )
            for entry in found["formats"]
        ],
    )
    return f"{about}\n{main}\nNative loss: {found['formats'][0]['loss']:.4f} nats a token.\n\n{by_table(found)}"


def by_table(found: dict[str, Any]) -> str:
    """The mean KL by position, in the longest texts alone, and by source file."""
    names = list(found["formats"][0]["kl by"])
    rows = [(entry["kv"], *(shown(entry["kl by"][name]) for name in names)) for entry in found["formats"]]
    return table(("KL by position (longest texts) and by file", *names), rows)


def random_tables(found: dict[str, Any]) -> str:
    sizes = ", ".join(f"{kind} {size}" for kind, size in found["head sizes"].items())
    about = (
        f"Random models (head size: {sizes}), float32, {found['tokens']:,} random tokens in all, in texts of "
        f"{RANDOM_LENGTH}: over all of them, and the mean KL of each model. KL in nats a token.\n"
    )
    head = ("K and V", "of native bfloat16", "KL", "99th percentile", "largest", "top-1 flips, %", *found["kinds"])
    rows = [
        (
            entry["kv"],
            f"{entry['of native bfloat16']:.3f}",
            shown(entry["kl"][0]),
            shown(entry["kl 99th percentile"]),
            shown(entry["kl max"]),
            shown(100 * entry["flips"][0]),
            *(shown(entry["kl by"][kind]) for kind in found["kinds"]),
        )
        for entry in found["formats"]
    ]
    return f"{about}\n{table(head, rows)}"


def canvas(**options: Any) -> tuple[Figure, Any]:
    """A figure that is readable on light and on dark: transparent background, mid-grey text."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("svg")
    for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        pyplot.rcParams[name] = GREY
    pyplot.rcParams.update({"font.size": 9, "svg.hashsalt": "tokenwright", "legend.frameon": False})
    figure, axes = pyplot.subplots(layout="constrained", **options)
    for one in np.ravel(axes):
        one.patch.set_alpha(0)
        one.spines[["top", "right"]].set_visible(False)
        one.grid(color=GREY, alpha=0.2, linewidth=0.6)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)


def family(kv: str) -> int:
    """The index in COLOURS of a format's family."""
    form = KVFormat.parse(kv)
    if form.first or form.native:
        return 4
    if "native" in (form.k, form.v):
        return 1 if form.v == "native" else 2
    return 3 if form.k != form.v else 0


def picture(found: dict[str, Any], path: Path) -> None:
    """Draw KL over bytes per token: of all formats, and of those near int4 on a linear scale."""
    figure, (left, right) = canvas(figsize=(9.5, 4.8), ncols=2)
    for axes, formats in ((left, found["formats"]), (right, [one for one in found["formats"] if small(one)])):
        for entry in formats:
            dot(axes, entry, labelled=axes is right or not small(entry) or entry["kv"] == "int4")
        axes.set_xlabel("bytes of K and V a token, computed in float32")
    whole = found["formats"][0]["bytes, float32"]
    left.axvline(whole, color=GREY, linewidth=0.8, linestyle=":")
    left.annotate(f"native: {whole:,.0f} bytes, KL 0", (whole, 0.02), xycoords=left.get_xaxis_transform(),
                  textcoords="offset points", xytext=(-5, 0), ha="right", fontsize=8)  # fmt: skip
    left.set_yscale("log")
    left.set_xlim(0, whole * 1.04)
    left.set_ylabel("KL(native || format), nats a token")
    left.set_title(f"{found['model']}, {found['tokens']:,} tokens", fontsize=10)
    right.set_title("the formats near int4, on a linear scale", fontsize=10)
    right.set_ylim(0)
    right.margins(x=0.25)
    shades = [left.plot([], [], "o", color=colour)[0] for colour in COLOURS]
    figure.legend(shades[: len(FAMILIES)], FAMILIES, loc="outside lower center", ncols=len(FAMILIES))
    save(figure, path)


def small(entry: dict[str, Any]) -> bool:
    """Whether K and V are both quantised, at least one of them to int4."""
    form = KVFormat.parse(entry["kv"])
    return "int4" in (form.k, form.v) and "native" not in (form.k, form.v)


def dot(axes: Axes, entry: dict[str, Any], labelled: bool) -> None:
    mean, low, high = entry["kl"]
    if mean <= 0:
        return  # native: log 0 is undefined
    place, colour = entry["bytes, float32"], COLOURS[family(entry["kv"])]
    axes.errorbar(place, mean, ([mean - low], [high - mean]), fmt="o", color=colour, markersize=6, linewidth=1)
    if labelled:
        label, before = entry["kv"].removeprefix("int4,"), entry["kv"] == "int4"  # its neighbour is near
        offset, align = ((-7, -3), "right") if before else ((7, -3), "left")
        axes.annotate(label, (place, mean), textcoords="offset points", xytext=offset, ha=align, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="stories")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/quality.svg"))
    arguments = parser.parse_args()
    text = on_text(arguments.model, arguments.text, arguments.tokens)
    drawn = on_random(arguments.tokens)
    print(text_tables(text))
    print(random_tables(drawn), end="")
    if arguments.json:
        arguments.json.write_text(json.dumps({"text": text, "random": drawn}) + "\n", encoding="utf-8")
    picture(text, arguments.out)


if __name__ == "__main__":
    main()
