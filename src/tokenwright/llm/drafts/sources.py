"""Opens the sources of drafts. A draft model's layers follow the model's in one KV store, as further page groups."""

import json
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

from tokenwright.backends.device import asked_threads, resolve_dtype, threads_of
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.backends.native.ranks import SplitDecoder
from tokenwright.backends.runner import DraftRunner, ModelRunner, NextLayerRunner, backend_over
from tokenwright.backends.towers.picture_memory import PictureMemory
from tokenwright.cache import KVStore, LayerSpec, layer_specs
from tokenwright.checkpoints.fingerprint import about
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.next_layer import next_layer_of
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.config import EngineConfig
from tokenwright.decode.drafts.draft_model import DraftModel, DraftProposer
from tokenwright.decode.drafts.layer_drafts import NextLayer
from tokenwright.decode.drafts.speculate import SuffixProposer
from tokenwright.decode.drafts.step_costs import StepCosts, costs_of, measured
from tokenwright.engine import PagePool, Proposer, one_chunk
from tokenwright.engine.layer_group import PageTable
from tokenwright.environment import Environment
from tokenwright.errors import RequestError
from tokenwright.formats import DType, WeightFormat
from tokenwright.llm.model import LoadedModel, PreparedModel, make_decoder
from tokenwright.models.graph import Graph
from tokenwright.regular_file import draft_file, read_regular

log = logging.getLogger(__name__)

SMALLEST = 1 << 26  # bytes of weights; the steps of smaller models are too short for a table of their own
ROWS = (1, 2, 4, 8, 16, 32)
ROUNDS = 5
APART = 1.1  # the most that the second shortest time may exceed the shortest, as a factor
FASTER = 1.05  # the most that fewer rows may take longer than more rows, as a factor
LONGEST = 1.5  # seconds after which no further round begins
PAGE_SIZE = 32


def step_times(
    decoder: NativeDecoder, specs: Sequence[LayerSpec], form: str, threads: int
) -> Mapping[int, float] | None:
    """The seconds of steps by their rows, stored or measured; None where a busy machine disturbs that.

    Each step is timed several times, in turn with others, and the least counts. If the two least differ or more rows
    are faster than fewer, nothing is stored, and the next engine measures again.
    """
    about = [repr(decoder.graph), form, decoder.kernels.isa, threads, os.cpu_count(), platform.machine(), repr(specs)]
    name = sha256(json.dumps(about).encode()).hexdigest()[:40]
    try:
        file = Environment.read().cache_folder("steps") / f"{name}.json"
    except RequestError:  # there is no home
        return measure(decoder, specs, threads)
    if (kept := read_times(file)) is not None:
        return kept
    if (times := measure(decoder, specs, threads)) is None:
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
    """The least seconds of steps by rows: of one text, with logits at each row. None: they were disturbed."""
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


LEAST = 0.2  # the least cost of a draft model's step, relative to the model's, if they were not measured
LEAST_SMALL = 0.9  # the same if the engine's own work dominates; measured on stories
OWN_WORK = 0.0003  # seconds of engine work for each guessed token


@dataclass(frozen=True)
class Draft:
    """A loaded draft model, with the cache specs of its layers. context: the most tokens of a text that it reads."""

    checkpoint: Checkpoint
    decoder: Any
    specs: tuple[LayerSpec, ...]
    form: str
    context: int

    def about(self, page_size: int) -> str:
        """A digest of all that its K and V depend on, except the tokens."""
        found = about(self.checkpoint, {"form": self.form}, self.specs, page_size)
        return sha256(json.dumps(dict(found), sort_keys=True).encode()).hexdigest()


def open_draft(loaded: LoadedModel, options: EngineConfig) -> Draft | None:
    """Load an engine's draft model, if any. Raises RequestError for another tokenizer, or a recurrent model."""
    if _drafts_itself(loaded, options):
        own, decoder, specs = open_next_layer(loaded, options)
        return Draft(own, decoder, specs, f"next layer {loaded.facts.weights} {loaded.facts.dtype}", own.config.context)
    checkpoint = _checkpoint(loaded, options)
    if checkpoint is None:
        return None
    dtype, specs = _layers(checkpoint, loaded, options)
    form = WeightFormat.parse(options.draft_weights)
    decoder = make_decoder(checkpoint, form, dtype, loaded.facts.device)
    return Draft(checkpoint, decoder, specs, f"{form} {dtype}", checkpoint.config.context)


def draft_specs(loaded: PreparedModel, options: EngineConfig) -> tuple[LayerSpec, ...]:
    """The cache of the draft model's layers. Raises as `open_draft`."""
    if _drafts_itself(loaded, options):
        return _specs(next_layer_of(loaded.checkpoint, ends=False).graph, loaded, options)
    checkpoint = _checkpoint(loaded, options)
    return () if checkpoint is None else _layers(checkpoint, loaded, options)[1]


def _drafts_itself(loaded: PreparedModel, options: EngineConfig) -> bool:
    return options.speculate == "mtp" and not loaded.traced


def _checkpoint(loaded: PreparedModel, options: EngineConfig) -> Checkpoint | None:
    if options.draft is None or options.speculate == "off" or loaded.traced:
        return None
    checkpoint = Checkpoint.open(options.draft)
    if (other := loaded.facts.tokenizer.first_other(checkpoint.tokenizer())) is not None:
        raise RequestError(
            f"a draft model has the tokenizer of the model, and {options.draft} has another: token {other} is not the "
            "same; give a smaller model of the same family",
            "draft",
        )
    if checkpoint.graph.recurrent:
        raise RequestError(
            f"{options.draft} keeps a state of each text, which cannot go back token by token where drafts fail; give "
            "a draft model without recurrent layers",
            "draft",
        )
    return checkpoint


def _layers(
    checkpoint: Checkpoint, loaded: PreparedModel, options: EngineConfig
) -> tuple[DType, tuple[LayerSpec, ...]]:
    native = loaded.facts.device.type == "cpu" and find_kernels() is not None
    dtype: DType = resolve_dtype("auto", checkpoint.config.dtype, loaded.facts.device, native)
    return dtype, layer_specs(checkpoint.graph, dtype, window=options.window, sinks=options.sinks)


def drafted(
    loaded: LoadedModel,
    options: EngineConfig,
    specs: tuple[LayerSpec, ...],
    store: KVStore,
    pool: PagePool,
    draft: Draft | None,
    pictures: PictureMemory,
) -> tuple[Any, Proposer | None]:
    """The engine's runner, and its proposer if it speculates. store: of the layers of both models."""
    own = ModelRunner(loaded.decoder, store if draft is None else store.of_layers(0, len(specs)), pictures)
    if options.speculate == "off" or loaded.traced:  # a recorded run shows one token a step
        return own, None
    costs, seconds = _costs(
        loaded.decoder, loaded.facts.graph, specs, str(loaded.facts.weights), loaded.facts.weights.name
    )
    if draft is None:
        return own, SuffixProposer(costs)
    at, decoder = len(specs), draft.decoder
    layers = store.of_layers(at, at + len(draft.specs))
    if _drafts_itself(loaded, options):
        layer = NextLayer(own, NextLayerRunner(decoder, layers), pool, draft.context, loaded.facts.graph.width)
        return layer, DraftProposer(costs, layer, _layer_costs(loaded, draft))
    runner = DraftRunner(decoder, layers, loaded.facts.graph.vocab_size)
    form = WeightFormat.parse(options.draft_weights)
    draft_costs, draft_seconds = _costs(
        decoder, draft.checkpoint.graph, draft.specs, draft.form, form.name, always=seconds is not None
    )
    least = LEAST_SMALL if loaded.decoder.weight_bytes < SMALLEST else LEAST
    share = max(least, decoder.weight_bytes / loaded.decoder.weight_bytes)
    if seconds is not None and draft_seconds is not None:
        share = (draft_seconds + OWN_WORK) / seconds
    model = DraftModel(own, runner, pool, draft.context)
    return model, DraftProposer(costs, model, draft_costs.times(share))


def costs_of_steps(loaded: LoadedModel, specs: Sequence[LayerSpec]) -> StepCosts:
    """The costs by which an engine weighs drafts. It may measure them, so call it in the engine's thread."""
    return _costs(loaded.decoder, loaded.facts.graph, specs, str(loaded.facts.weights), loaded.facts.weights.name)[0]


def _layer_costs(loaded: LoadedModel, draft: Draft) -> StepCosts:
    """The costs of a next layer's steps by the bytes read, relative to a one-row step of the model."""
    layer, every = (sum(map(prod, graph.read(1).values())) for graph in (draft.decoder.graph, loaded.facts.graph))
    return _counted(draft.decoder, draft.decoder.graph, draft.specs, loaded.facts.weights.name).times(layer / every)


def _costs(
    decoder: Any, graph: Graph, specs: Sequence[LayerSpec], form: str, name: str, *, always: bool = False
) -> tuple[StepCosts, float | None]:
    measurable = isinstance(decoder, NativeDecoder) and not isinstance(decoder, SplitDecoder)
    if measurable and (always or decoder.weight_bytes >= SMALLEST):
        times = step_times(decoder, specs, form, asked_threads(native=True))
        if times is not None:
            return measured(times, *_kept(decoder, specs)), times[1]
    return _counted(decoder, graph, specs, name), None


def _counted(decoder: Any, graph: Graph, specs: Sequence[LayerSpec], name: str) -> StepCosts:
    kernels = decoder.kernels.isa if isinstance(decoder, NativeDecoder) else ""
    small = decoder.weight_bytes < SMALLEST

    def read(rows: int) -> float:
        return sum(map(prod, graph.read(rows).values()))

    return costs_of(kernels, name, read, *_kept(decoder, specs), small=small)


def _kept(decoder: Any, specs: Sequence[LayerSpec]) -> tuple[float, float]:
    """Bytes of a token's K and V, and of a text's states, relative to the bytes of the weights."""
    weights, states = float(decoder.weight_bytes), sum(spec.state_bytes for spec in specs)
    return (sum(spec.nbytes(1) for spec in specs) - states) / weights, states / weights


def open_next_layer(loaded: LoadedModel, options: EngineConfig) -> tuple[Checkpoint, Any, tuple[LayerSpec, ...]]:
    """Load the next layer of a model, in the format of its other layers. Raises RequestError where it cannot draft."""
    own = loaded.decoder
    if loaded.team is not None:
        raise RequestError(
            "speculate mtp needs a model that one process computes; leave it or tensor_parallel out", "speculate"
        )
    form = WeightFormat("native") if loaded.copies else loaded.facts.weights
    checkpoint = next_layer_of(loaded.checkpoint, ends=not isinstance(own, NativeDecoder))
    if isinstance(own, NativeDecoder):
        weights = load_packed(checkpoint, form, loaded.facts.dtype)
        ends = {one.name for op in (own.graph.embed, own.graph.head) for one in op.matrices} | {*own.graph.embed.shapes}
        weights |= {name: own.weights[name] for name in ends if name in own.weights}
        decoder: Any = NativeDecoder(checkpoint.graph, own.kernels, weights)
    else:
        decoder = make_decoder(checkpoint, form, loaded.facts.dtype, loaded.facts.device)
    return checkpoint, decoder, _specs(checkpoint.graph, loaded, options)


def _specs(graph: Graph, loaded: PreparedModel, options: EngineConfig) -> tuple[LayerSpec, ...]:
    return layer_specs(graph, loaded.facts.dtype, window=options.window, sinks=options.sinks)
