"""Long texts with an attention window: the loss of a model with a small cache, and the size of that cache.

    python -m benchmarks.stream --text FILE... [--tokens 20000] [--json FILE] [--out docs/pictures/stream.svg]

Documents are joined to one stream as in training (`benchmarks.quality` reads them; give it held-out text), and its
tokens are scored in several ways:

    window and sinks   by the engine: each row attends to the last W tokens, and to the first S
    window alone       by the engine: the last W tokens
    read anew          without a cache: for every `--every`th token the W + S before it, as a text of its own
    anew after BOS     the same, with BOS as the first token: every row in training began with it
    context            without a window: the first tokens up to the context; from there on blocks of one context, each
                       shifted by a half and after BOS, so that every token has at least half a context before it

Standard errors are those of means over blocks of 64 tokens. The loss of the tokens read anew is reported as the loss
with window and sinks over all tokens, plus the difference at the tokens read anew. The first two ways also run with
smaller windows over a part of the stream, to show where sinks matter.

Then the engine generates as many tokens as the stream has, with window and sinks, and the output gives the memory of
its cache and of the process (the latter on Linux alone). Its pool is the smallest that one text fits into: a larger one
keeps expired pages cached until all its pages are used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.quality import COLOURS, GREY, Numbers, canvas, documents, in_turn, save, table
from tokenwright import LLM, SamplingParams
from tokenwright.engine.window import AttentionWindow

PAGE = 16  # tokens
BLOCK = 64  # tokens; means of blocks count as independent
BIN = 1000  # tokens per point of the picture
BOUNDS = (1, 256, 1024, 2048, 4096, 8192)  # positions at which the table's ranges begin
SINKS, WINDOW, ANEW, AFTER_BOS, CONTEXT = "window and sinks", "window alone", "read anew", "anew after BOS", "context"
WINDOWS = (8, 16, 32, 64, 128)
PART = 6000  # tokens that run with each of them
PROMPT = "Once upon a time"


Mask = NDArray[np.bool_]


def note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def stream_of(paths: Sequence[Path], llm: LLM, tokens: int) -> list[int]:
    """BOS, and `tokens` tokens after it."""
    ids = list(chain.from_iterable(text.ids for text in in_turn(documents(paths, llm))))
    if len(ids) <= tokens:
        raise SystemExit(f"the text has {len(ids)} tokens; give more of it, or --tokens {len(ids) - 1}")
    return ids[: tokens + 1]


def scored(llm: LLM, ids: list[int]) -> Numbers:
    """The loss of each token in nats, NaN for the first; the engine computes it in chunks of its token budget."""
    return np.array([np.nan, *(-logprob for logprob in llm.score(ids))])


def last_loss(llm: LLM, text: list[int], token: int) -> float:
    return -float(llm.model(text)[0][-1].double().log_softmax(-1)[token])


def anew(llm: LLM, ids: list[int], window: int, every: int, bos: int | None = None) -> Numbers:
    """The loss of every `every`th token after the `window` tokens before it, at positions from 0; NaN elsewhere."""
    losses = np.full(len(ids), np.nan)
    for at in range(every, len(ids), every):
        text = ids[max(0, at - window) : at]
        if bos is not None:
            text[0] = bos
        losses[at] = last_loss(llm, text, ids[at])
        if at % (100 * every) == 0:
            note(f"read anew: token {at} of {len(ids)}")
    return losses


def in_context(llm: LLM, ids: list[int], bos: int) -> Numbers:
    """The loss of each token after all tokens before it, within the context; beyond it, after at least half of it."""
    losses, context = np.full(len(ids), np.nan), llm.config.context
    half = context // 2
    for start in range(0, max(1, len(ids) - half), half):
        block = ids[start : start + context]
        logits, _ = llm.model([bos, *block[1:]])
        first = half if start else 1
        rows = logits[first - 1 : len(block) - 1].double().log_softmax(-1)
        found = -rows.gather(1, torch.tensor(block[first:])[:, None])[:, 0]
        losses[start + first : start + len(block)] = found.numpy()
        note(f"context: token {start + len(block)} of {len(ids)}")
    return losses


def read(llm: LLM, ids: list[int], window: int, sinks: int, every: int) -> dict[str, Numbers]:
    """The losses of each way of reading."""
    bos = ids[0]
    ways: dict[str, Callable[[], Numbers]] = {
        SINKS: lambda: scored(LLM(llm.loaded, window=window, sinks=sinks, page_size=PAGE), ids),
        WINDOW: lambda: scored(LLM(llm.loaded, window=window, page_size=PAGE), ids),
        CONTEXT: lambda: in_context(llm, ids, bos),
        ANEW: lambda: anew(llm, ids, window + sinks, every),
        AFTER_BOS: lambda: anew(llm, ids, window + sinks, every, bos),
    }
    found = {}
    for name, way in ways.items():
        found[name] = way()
        note(f"{name}: {np.nanmean(found[name]):.4f} nats a token")
    return found


def by_window(llm: LLM, ids: list[int], sinks: int) -> list[dict[str, Any]]:
    """The effect of sinks at smaller windows: the loss with them, without them, and the difference."""
    found = []
    for window in WINDOWS:
        with_sinks, without = (
            scored(LLM(llm.loaded, window=window, sinks=most, page_size=PAGE), ids) for most in (sinks, 0)
        )
        each = (with_sinks, without, without - with_sinks)
        found.append({"window": window, "losses": [mean_error(values) for values in each]})
        note(f"window {window}: {found[-1]['losses']}")
    return found


def anonymous() -> int | None:
    """Bytes of the process's anonymous resident memory; None if the system does not report it."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")]
    return found[0] if found else None


def writer(llm: LLM, window: int, sinks: int, tokens: int) -> LLM:
    """An engine whose pool has as many pages as one text needs at most."""
    pages = AttentionWindow(window, sinks).max_pages(tokens, llm.options.token_budget, PAGE)
    return LLM(
        llm.loaded, window=window, sinks=sinks, page_size=PAGE, pages=pages, token_budget=llm.options.token_budget
    )


def write(llm: LLM, tokens: int) -> dict[str, Any]:
    """Memory while the engine generates: pages at each token, bytes at every 100th, the process at every 1,000th."""
    pool = llm.engine.pool
    params = SamplingParams(temperature=0.7, top_p=0.95, seed=0, max_tokens=tokens + 1, ignore_eos=True)
    pages, kv_bytes, process, logprobs = [], [], [anonymous()], []
    with llm.stream(PROMPT, params) as stream:
        for number, piece in zip(range(1, tokens + 1), stream, strict=False):
            pages.append(pool.pages - pool.available)
            logprobs.append(piece.logprob)
            if number % 100 == 0:
                kv_bytes.append(stream.completion.usage.kv_bytes)
            if number % 1000 == 0:
                process.append(anonymous())
                note(f"written: {number} of {tokens} tokens, {pages[-1]} pages")
        usage, ids = stream.completion.usage, stream.completion.token_ids
    return {
        "prompt tokens": usage.prompt_tokens,
        "pages of the pool": pool.pages,
        "pages": pages,
        "kv bytes, every 100": kv_bytes,
        "process bytes, every 1000": process,
        "logprob, by 1000": [float(np.mean(logprobs[at : at + 1000])) for at in range(0, tokens, 1000)],
        "different tokens, by 1000": [len(set(ids[at : at + 1000])) for at in range(0, tokens, 1000)],
        "median step seconds, by 1000": [median(usage.step_s[at + 1 : at + 1000]) for at in range(0, tokens, 1000)],
    }


def mean_error(values: Numbers) -> tuple[float, float]:
    """The mean and its standard error, over blocks of adjacent tokens; NaN do not count."""
    blocks = [values[at : at + BLOCK] for at in range(0, len(values), BLOCK)]
    means = np.array([np.nanmean(block) for block in blocks if not np.isnan(block).all()])
    error = means.std(ddof=1) / len(means) ** 0.5 if len(means) > 1 else np.nan
    return float(np.nanmean(values)), float(error)


def level(values: Numbers, whole: Numbers, mask: Mask) -> tuple[float, float]:
    """The mean of a part and its error; with few measured tokens, the mean of `whole` plus the difference at these.

    Tokens differ far more from each other than one way from another, so the few tokens alone would have a large error.
    """
    values, whole = (np.where(mask, each, np.nan) for each in (values, whole))
    if np.isnan(values).sum() == np.isnan(whole).sum():
        return mean_error(values)
    base, above = mean_error(whole), mean_error(values - whole)
    return base[0] + above[0], float(np.hypot(base[1], above[1]))


def parts_of(ids: list[int], window: int) -> dict[str, Mask]:
    """Masks of tokens by position; beyond the window, also by whether a document begins within it."""
    places = np.arange(len(ids))
    ends = [bound for bound in BOUNDS if bound < len(ids)] + [len(ids)]
    parts = {f"{start:,} to {stop - 1:,}": (places >= start) & (places < stop) for start, stop in pairwise(ends)}
    begins = np.maximum.accumulate(np.where(np.array(ids) == ids[0], places, 0))  # start of each token's document
    seen = begins[places - 1] >= places - window  # by the row that predicts the token
    beyond = places > window
    return parts | {"a BOS in the window": beyond & seen, "no BOS in the window": beyond & ~seen, "all": places > 0}


def cells(values: Sequence[tuple[float, float]], sign: str = "") -> list[str]:
    return ["" if np.isnan(mean) else f"{mean:{sign}.3f} ± {error:.3f}" for mean, error in values]


def report(ids: list[int], losses: dict[str, Numbers], window: int) -> dict[str, Any]:
    """Mean loss and its error by part of the stream, and the difference of each way from window and sinks."""
    found: dict[str, Any] = {"counts": {}, "loss": {}, "above window and sinks": {}}
    for name, mask in parts_of(ids, window).items():
        if not mask.any():
            continue
        found["counts"][name] = int(mask.sum())
        found["loss"][name] = {way: level(each, losses[SINKS], mask) for way, each in losses.items()}
        found["above window and sinks"][name] = {
            way: mean_error(np.where(mask, each - losses[SINKS], np.nan))
            for way, each in losses.items()
            if way != SINKS
        }
    return found


def tables(found: dict[str, Any]) -> str:
    ways = list(found["loss"]["all"])
    means = [
        (name, f"{found['counts'][name]:,}", *cells([each[way] for way in ways]))
        for name, each in found["loss"].items()
    ]
    above = [
        (name, *cells([each[way] for way in ways if way != SINKS], "+"))
        for name, each in found["above window and sinks"].items()
    ]
    smaller = [
        (str(each["window"]), *cells(each["losses"][:2]), *cells(each["losses"][2:], "+"))
        for each in found["smaller windows"]
    ]
    return "\n".join(
        [
            "Loss in nats a token, ± its standard error:\n",
            table(("tokens at", "tokens", *ways), means),
            f"Loss above that with {SINKS}, token by token:\n",
            table(("tokens at", *(way for way in ways if way != SINKS)), above),
            f"Smaller windows, on the first {min(PART, found['tokens']):,} tokens:\n",
            table(("window", SINKS, WINDOW, "above"), smaller),
        ]
    )


def held(found: dict[str, Any], window: int) -> str:
    """The memory of the cache and of the process during generation, as text."""
    pages, kv = found["pages"][window:], found["kv bytes, every 100"][window // 100 + 1 :]
    text = (
        f"Written: {len(found['pages']):,} tokens. After the first {window}: {min(pages)} to {max(pages)} pages of "
        f"{PAGE} tokens held, of {found['pages of the pool']}; KV bytes that are read: {min(kv):,} to {max(kv):,}."
    )
    fewest, most = min(found["different tokens, by 1000"]), max(found["different tokens, by 1000"])
    text += f" Of each 1,000 tokens {fewest} to {most} are different ones."
    process = [value / 2**20 for value in found["process bytes, every 1000"] if value is not None]
    if len(process) > 2:
        first, *later = process
        text += (
            f" Memory of the process (RssAnon): {first:.1f} MiB before, {min(later):.1f} to {max(later):.1f} MiB at "
            f"every 1,000 tokens, {later[-1]:.1f} MiB at the end."
        )
    return text


def binned(values: Numbers) -> Numbers:
    """Means of `BIN` adjacent tokens."""
    return np.array([np.nanmean(values[at : at + BIN]) for at in range(0, len(values) - 1, BIN)])


def picture(record: dict[str, Any], losses: dict[str, Numbers], path: Path) -> None:
    """Draw the loss by position, its difference from the loss with window and sinks, and the pages in use."""
    size = {"figsize": (8.5, 7.5), "gridspec_kw": {"height_ratios": [5, 4, 2.5]}}
    figure, (top, middle, low) = canvas(nrows=3, sharex=True, **size)
    colours = dict(zip((ANEW, WINDOW, SINKS, AFTER_BOS, CONTEXT), (*COLOURS[:2], *COLOURS[3:5], GREY), strict=True))
    tokens, window, context = record["tokens"], record["window"], record["context"]
    for way, each in losses.items():
        places = np.minimum(np.arange(0, tokens, BIN) + BIN / 2, tokens)
        style = {"color": colours[way], "linewidth": 1.6, "linestyle": "--" if way == CONTEXT else "-"}
        top.plot(places, binned(losses[SINKS]) + binned(each - losses[SINKS]), label=way, **style)
        middle.plot(places, binned(each - losses[SINKS]), **style)
    for axes in (top, middle, low):
        for place, name in ((window, "window"), (context, "context")):
            axes.axvline(place, color=GREY, linewidth=0.8, linestyle=":")
            if axes is top:
                axes.annotate(f" {name}", (place, 0.03), xycoords=axes.get_xaxis_transform(), rotation=90, va="bottom",
                              ha="left", fontsize=7)  # fmt: skip
    top.set_ylabel("loss, nats a token")
    top.set_title(
        f"{tokens:,} held-out tokens through a window of {window} with {record['sinks']} sinks: {record['model']}, "
        f"means of {BIN:,} tokens", fontsize=10,
    )  # fmt: skip
    figure.legend(*top.get_legend_handles_labels(), ncols=len(losses), loc="outside lower center", fontsize=8)
    middle.set_ylabel(f"above {SINKS}")
    pages = record["written"]["pages"]
    places = np.arange(len(pages)) + record["written"]["prompt tokens"]
    some = slice(None, None, 10)
    low.plot(places[some], pages[some], color=colours[SINKS], linewidth=1.6, label=f"{SINKS}: {max(pages)} at most")
    low.plot(places[some], -(-places[some] // PAGE), color=GREY, linestyle="--", label="if nothing were given back")
    low.set_ylabel("pages held")
    low.set_xlabel("position in the stream, tokens")
    low.set_xlim(0, tokens)
    low.legend(loc="upper left", fontsize=8)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="stories")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/stream.svg"))
    arguments = parser.parse_args()
    window, sinks = arguments.window, arguments.sinks
    with LLM(arguments.model, pages=256) as llm:
        record: dict[str, Any] = {"model": Path(arguments.model).name, "context": llm.config.context}
        record |= {"tokens": arguments.tokens, "window": window, "sinks": sinks, "every": arguments.every}
        ids = stream_of(arguments.text, llm, arguments.tokens)
        record["written"] = write(writer(llm, window, sinks, arguments.tokens), arguments.tokens)
        losses = read(llm, ids, window, sinks, arguments.every)
        record["smaller windows"] = by_window(llm, ids[: PART + 1], sinks)
    record |= report(ids, losses, window)
    title = f"`{record['model']}`, {arguments.tokens:,} tokens, window {window}, {sinks} sinks"
    print(f"{title}, read anew for every {arguments.every}th.\n")
    print(tables(record))
    print(held(record["written"], window))
    if arguments.json:
        lists = {way: [None if np.isnan(one) else one for one in each.tolist()] for way, each in losses.items()}
        arguments.json.write_text(json.dumps(record | {"losses": lists}) + "\n", encoding="utf-8")
    picture(record, losses, arguments.out)


if __name__ == "__main__":
    main()
