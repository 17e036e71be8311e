"""A run as a file for other programs: the page's trace, and a Chrome trace."""

from collections.abc import Generator, Iterable, Iterator
from typing import Any

from tokenwright.explorer.explorer import Download, Explorer
from tokenwright.explorer.panels.times import run_halves
from tokenwright.trace.schema import RunCard, StepFrame


def trace(explorer: Explorer, identity: str, halves: bool = False) -> Generator[Download | None, None, None]:
    player, found = explorer.player(identity), None
    player.renew()
    if halves:
        with explorer.runs.guests([player.run]):  # the other lane needs as much again
            for part in run_halves(player.run):
                found = part
                yield None
    yield Download(explorer.trace(player, found or ()), f"trace-{identity}.json")


def perfetto(explorer: Explorer, identity: str) -> Download:
    player = explorer.player(identity)
    return Download(chrome_trace(player.card, list(player.run.frames)), f"perfetto-{identity}.json")


Event = dict[str, Any]

PROCESS = 1
STEPS, PARTS = 1, 2  # rows
COUNTERS = {
    "KV cache (bytes)": ("kv_resident", "kv_allocated"),
    "text (tokens)": ("seq_len",),
    "work (layer-tokens)": ("layer_tokens",),
    "work (FLOP)": ("flops",),
}


def chrome_trace(card: RunCard, frames: Iterable[StepFrame]) -> dict[str, Any]:
    """The trace as JSON values, for https://ui.perfetto.dev. The durations of category "step" sum to the engine time.

    Parts follow each other from the step's begin, and an unmeasured rest follows.
    Times are microseconds from the acceptance of the run.
    """
    about = {"model": card.model, "run": card.run, "seed": card.seed, "prompt_tokens": len(card.tokens)}
    events = [*_rows(card), *(event for frame in frames for event in _of_step(frame))]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _rows(card: RunCard) -> Iterator[Event]:
    yield _named("process_name", f"tokenwright: {card.model}")
    yield _named("thread_name", "steps", STEPS)
    yield _named("thread_name", "parts of a step", PARTS)


def _named(kind: str, name: str, row: int = 0) -> Event:
    return {"ph": "M", "pid": PROCESS, "tid": row, "name": kind, "args": {"name": name}}


def _of_step(frame: StepFrame) -> Iterator[Event]:
    about = {"computed": frame.length, "computed again": frame.recomputed, "KV cache": frame.cache, "text": frame.text}
    name = f"step {frame.step + 1}: {frame.length} {'token' if frame.length == 1 else 'tokens'}"
    yield _slice(name, "step", STEPS, frame.began_us, frame.step_us, about)
    at = frame.began_us
    for part, duration in _parts(frame):
        yield _slice(part, "part", PARTS, at, duration)
        at += duration
    for counter, names in COUNTERS.items():
        values = {name: getattr(frame, name) for name in names}
        end = frame.began_us + frame.step_us
        yield {"ph": "C", "pid": PROCESS, "name": counter, "ts": end, "args": values}


def _parts(frame: StepFrame) -> Iterator[tuple[str, int]]:
    for number, layer in enumerate(frame.layers):
        yield f"layer {number}: attention", layer.attention_us
        yield f"layer {number}: MLP", layer.mlp_us
    yield "LM head", frame.head_us
    yield "choosing the token", frame.sampling_us


def _slice(name: str, category: str, row: int, at: int, duration: int, about: Event | None = None) -> Event:
    found: Event = {"ph": "X", "pid": PROCESS, "tid": row, "name": name, "cat": category, "ts": at, "dur": duration}
    return found if about is None else found | {"args": about}
