"""How long a model's steps take by their rows: measured once for a model on a machine, and kept in the cache folder.

Drafts are weighed against these times (`decode/drafts/step_costs.py`). Each step is timed several times, in turn with
those of other numbers of rows, and the least counts. Where the two least differ, or more rows are faster than fewer, a
busy machine has disturbed the measurement: nothing is kept, and the next engine measures again.
"""

import json
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from tokenwright.backends.device import threads_of
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.backends.runner import backend_over
from tokenwright.cache import KVStore, LayerSpec
from tokenwright.engine import one_chunk
from tokenwright.engine.layer_group import PageTable
from tokenwright.environment import Environment
from tokenwright.errors import RequestError
from tokenwright.regular_file import draft_file, read_regular

log = logging.getLogger(__name__)

SMALLEST = 1 << 26  # bytes of weights; the steps of smaller models are too short to be worth a table of their own
ROWS = (1, 2, 4, 8, 16, 32)
ROUNDS = 5
APART = 1.1  # the second of the least times over the least, at most
FASTER = 1.05  # the time of a number of rows over that of more rows, at most
LONGEST = 1.5  # seconds in which rounds begin
PAGE_SIZE = 32


def step_times(
    decoder: NativeDecoder, specs: Sequence[LayerSpec], form: str, threads: int
) -> Mapping[int, float] | None:
    """The seconds of steps by their rows, kept or else measured; None where a busy machine disturbs that."""
    about = [repr(decoder.graph), form, decoder.kernels.isa, threads, os.cpu_count(), platform.machine(), repr(specs)]
    name = sha256(json.dumps(about).encode()).hexdigest()[:40]
    try:
        file = Environment.read().cache_folder("steps") / f"{name}.json"
    except RequestError:  # there is no home
        return measure(decoder, specs, threads)
    kept = read_times(file)
    if kept is not None:
        return kept
    times = measure(decoder, specs, threads)
    if times is None:
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with draft_file(file) as draft:
            draft.write_text(json.dumps({str(rows): seconds for rows, seconds in times.items()}), encoding="utf-8")
    except OSError as error:
        log.warning("the times of the model's steps cannot be kept in %s (%s)", file.parent, error.strerror or error)
    return times


def read_times(file: Path) -> Mapping[int, float] | None:
    with suppress(OSError, ValueError, AttributeError, TypeError):
        times = {int(rows): float(seconds) for rows, seconds in json.loads(read_regular(file)).items()}
        if set(times) == set(ROWS) and all(0 < seconds < 1e6 for seconds in times.values()):
            return times
    return None


def measure(
    decoder: NativeDecoder, specs: Sequence[LayerSpec], threads: int, clock: Callable[[], float] = perf_counter
) -> Mapping[int, float] | None:
    """The least seconds of steps by their rows: of one text, with logits at each row. None: they were disturbed."""
    store = KVStore(specs, 1, PAGE_SIZE)
    backend, tables = backend_over(decoder, store), [PageTable({0: 0})] * len(store.groups)
    ids = [place * 7919 % decoder.graph.vocab_size for place in range(max(ROWS))]
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    with threads_of(threads):
        began = clock()
        backend(one_chunk(ids[:1], 0, tables, PAGE_SIZE))  # weights come into memory
        for turn in range(ROUNDS):
            for rows in ROWS:
                batch = one_chunk(ids[:rows], 0, tables, PAGE_SIZE)
                start = clock()
                backend(batch)
                times[rows].append(clock() - start)
            if clock() - began > LONGEST and turn:
                break
    least = {rows: sorted(each)[:2] for rows, each in times.items()}
    firsts = [first for first, _ in least.values()]
    apart = any(second > APART * first for first, second in least.values())
    if apart or any(before > FASTER * after for before, after in pairwise(firsts)):
        return None
    return dict(zip(ROWS, firsts, strict=True))
