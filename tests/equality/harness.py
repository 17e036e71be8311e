"""What the equality matrix is made of: kinds of models, cache specs, and the ways in which a text may come about.

The oracle of each text is the naive run under the same spec: everything anew for every token, through one page table,
in one chunk. A way of running is a function that writes the same text otherwise and answers with what it saw: rows of
logits by position, and the tokens. `Case.differences` compares.

With native kernels, a step as one call (`Program`), every row is equal to the bit, whatever the weights' format. With
the reference, rows are equal within `TOLERANCE`; its sums run in fp64 here (`ReferenceKernels(wide=torch.float64)`): a
quantised cache turns a difference of 1e-7, which neighbours in a product leave, into another code. Activations stay
fp32.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.engine.invariants import check_invariants
from tests.equality.kinds import ALL_KINDS
from tests.models.fixtures import make_checkpoint, write_tokenizer
from tests.models.random_models import PLAIN, plain_model
from tests.models.weights import make_model
from tests.oracle.harness import CPU, DEVICE, Recorder, Subject, prompt_of
from tests.poison import poison
from tests.tensors import tensors_of
from tokenwright.backends.device import Device
from tokenwright.backends.kv_sizing import memory_of
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.backends.runner import ModelRunner
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.kernels import Kernels
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.cache import KVStore, LayerSpec, layer_specs
from tokenwright.cache.snapshot import Snapshot, load, save
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.engine import (
    Engine,
    Failed,
    Group,
    PagePool,
    Proposer,
    Request,
    Runner,
    SamplingParams,
    Scheduler,
    Step,
)
from tokenwright.engine import Sequence as Text
from tokenwright.engine.layer_group import AttentionWindow, StateWindow
from tokenwright.formats import DType, KVFormat, WeightFormat

TOLERANCE = 1e-5
PROMPT, NEW = 40, 12
CONTEXT = 512

EVERY = 24  # tokens between the kept states, so that short texts find some


FORMATS = ("native", "int8", "int4", "fp8")
MIXED = "k=int8,v=int4,first=10,native=-1"  # all that a format can ask for at once
WEIGHTS = ("float32", "bfloat16", "int8", "int4")  # of the native kernels
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NEW),
    "seeded": SamplingParams(temperature=0.9, seed=11, max_tokens=NEW),
    "adaptive": SamplingParams(seed=11, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.5, max_tokens=NEW),
    "excluding": SamplingParams(
        seed=11, xtc_probability=0.5, xtc_threshold=0.001, dry_multiplier=5.0, dry_allowed_length=1, max_tokens=NEW
    ),
}


@cache
def checkpoint_of(kind: str) -> tuple[Checkpoint, Any, tempfile.TemporaryDirectory[str]]:
    """A kind's checkpoint, transformers' model of it, and the folder that holds it as long as it is used."""
    one, folder = ALL_KINDS[kind], tempfile.TemporaryDirectory()
    path = Path(folder.name) / "model"
    if isinstance(one.fixture, str) and one.fixture not in PLAIN:
        oracle = make_checkpoint(path, one.fixture, changes=dict(one.changes)).model
        return Checkpoint.open(path), oracle, folder
    oracle = make_model(plain_model(one.fixture) if isinstance(one.fixture, str) else one.fixture(Random(3)))
    oracle.save_pretrained(path)
    write_tokenizer(path)
    return Checkpoint.open(path), oracle, folder


@cache
def make_subject(kind: str) -> Subject:
    checkpoint, oracle, _ = checkpoint_of(kind)
    weights = tensors_of(checkpoint, torch.float32)
    return Subject(kind, checkpoint.config, checkpoint.graph, weights, "float32", oracle)


@dataclass
class Bench:
    """An engine whose parts can be reached: one spec, one fresh pool, memory full of NaN."""

    engine: Engine
    store: KVStore
    sampler: Recorder

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    def run(self, between: Callable[[], object] = lambda: None) -> None:
        """Turn the engine to the end, checking the books; `between` is called after each step."""
        while self.engine.busy:
            for event in self.engine.step():
                if isinstance(event, Failed):
                    raise event.error
            check_invariants(self.scheduler)
            between()

    def rows(self, text: Text) -> dict[int, torch.Tensor]:
        return self.sampler.rows[text.id]


@dataclass(frozen=True)
class Case:
    """One cell but for the way: a kind, a format, a sampling; and the weights' format, or the reference with fp32."""

    kind: str
    kv: str
    sampling: str
    weights: str = "reference"

    @property
    def subject(self) -> Subject:
        return make_subject(self.kind)

    @property
    def device(self) -> Device:
        return DEVICE if self.weights == "reference" else CPU

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return specs_of(self.kind, self.kv, self.dtype)

    @property
    def states(self) -> StateWindow | None:
        """The window of layers that keep a state, if there are some."""
        return next((one.window for one in self.specs if isinstance(one.window, StateWindow)), None)

    def found(self, tokens: int, page_size: int) -> int:
        """How many of so many tokens another text finds: whole pages, and up to a state that was kept."""
        pages = range(tokens // page_size, 0, -1)
        kept = (page for page in pages if self.states is None or self.states.cached(page - 1, page_size))
        return next(kept, 0) * page_size

    @property
    def dtype(self) -> DType:
        """What a native cache is kept in."""
        return "bfloat16" if self.weights == "bfloat16" else "float32"

    @property
    def params(self) -> SamplingParams:
        return SAMPLINGS[self.sampling]

    def request(self, prompt: Sequence[int] | None = None, most: int = NEW, **options: Any) -> Request:
        params = replace(self.params, max_tokens=most)
        return Request(prompt_of(PROMPT) if prompt is None else tuple(prompt), params, **options)

    def bench(
        self,
        *,
        page_size: int = 16,
        pages: int | None = None,
        budget: int = CONTEXT,
        sequences: int = 64,
        kernels: Kernels | None = None,
        around: Callable[[ModelRunner], Runner[Any]] = lambda runner: runner,
        forced: Mapping[int, Sequence[int]] | None = None,
        scheduler: type[Scheduler] = Scheduler,
        proposer: Proposer | None = None,
        store: type[KVStore] = KVStore,
    ) -> Bench:
        pages = pages or -(-CONTEXT // page_size)
        memory = store(self.specs, pages, page_size, memory_of(self.device))
        poison(memory)
        groups = [
            Group(count, group.window, group.page_bytes(page_size))
            for count, group in zip(memory.pages, memory.groups, strict=True)
        ]
        sampler = Recorder(forced)
        runner = ModelRunner(self.decoder(kernels), memory)
        pool = PagePool(groups, page_size, memory)
        scheduling = scheduler(pool, budget, sequences, proposer=proposer)
        engine = Engine(around(runner), sampler, scheduling, CONTEXT)
        return Bench(engine, memory, sampler)

    def decoder(self, kernels: Kernels | None) -> Decoder:
        """The one that all benches share, or one of its own over given kernels."""
        if kernels is not None:
            return self.subject.decoder(kernels)
        return plain_decoder(self.kind) if self.weights == "reference" else native_decoder(self.kind, self.weights)

    def naive(self, prompt: Sequence[int] | None = None, forced: Sequence[int] | None = None) -> "Seen":
        """The oracle: everything anew for every token."""
        prompt = prompt_of(PROMPT) if prompt is None else prompt
        key = (self, tuple(prompt), None if forced is None else tuple(forced))
        if key not in _NAIVE:
            bench = self.bench(forced={0: forced} if forced else None)
            text = bench.engine.submit(self.request(prompt, cache=False))
            bench.run()
            assert text.counts.forwarded == sum(range(len(prompt), len(text.tokens)))
            _NAIVE[key] = Seen(bench.rows(text), list(text.tokens))
        return _NAIVE[key]


_NAIVE: dict[Any, "Seen"] = {}


@cache
def specs_of(name: str, kv: str, dtype: DType) -> tuple[LayerSpec, ...]:
    """The specs of a kind's layers, whose states are kept at every EVERY tokens."""
    kind, subject = ALL_KINDS[name], make_subject(name)
    if subject.config.latent is not None:
        kv = kv.replace("k=int8,v=int4", "int8")  # a latent has one format
    specs = layer_specs(subject.graph, dtype, KVFormat.parse(kv), kind.window, kind.sinks)
    return tuple(replace(one, window=StateWindow(every=EVERY)) if one.state_bytes else one for one in specs)


@cache
def plain_decoder(kind: str) -> Decoder:
    return make_subject(kind).decoder(ReferenceKernels(wide=torch.float64))


@cache
def native_decoder(kind: str, weights: str) -> Decoder:
    kernels = find_kernels("native")
    assert kernels is not None, "what is asked for is there, or refused"
    packed = load_packed(checkpoint_of(kind)[0], WeightFormat.parse(weights), "float32")
    return NativeDecoder(make_subject(kind).graph, kernels, packed)


@dataclass(frozen=True)
class Seen:
    """What a run has shown of one text: rows of logits by position, and all its tokens."""

    rows: Mapping[int, torch.Tensor]
    tokens: Sequence[int]

    def first(self, written: int) -> "Seen":
        """As if only so many tokens had been written after the prompt."""
        length = len(self.tokens) - NEW + written
        return Seen({place: row for place, row in self.rows.items() if place < length - 1}, self.tokens[:length])


def compare(case: Case, way: str, seen: Seen, oracle: Seen) -> None:
    """The same tokens, and wherever both have them the same rows of logits: to the bit with native kernels."""
    shared = sorted(seen.rows.keys() & oracle.rows.keys())
    assert shared == sorted(oracle.rows), "the last rows of the text are there to be compared"
    worst = max(float((seen.rows[place] - oracle.rows[place]).abs().max()) for place in shared)
    equal = sum(torch.equal(seen.rows[place], oracle.rows[place]) for place in shared)
    assert worst <= TOLERANCE, f"{way}: a logit differs by {worst:.1e}"
    if case.weights != "reference":
        assert equal == len(shared), (
            f"{way}: {len(shared) - equal} of {len(shared)} rows differ, by {worst:.1e} at most"
        )
    assert list(seen.tokens) == list(oracle.tokens)


class Drafts:
    """A proposer that knows the texts: its drafts hold for a while and then fail, or hold."""

    MOST = 5

    def __init__(self, *texts: Sequence[int]) -> None:
        self.texts = sorted((list(text) for text in texts), key=len)

    def propose(
        self,
        sequences: Sequence[Text],
        most: Sequence[int],
        step: Step,
    ) -> list[list[int]]:
        return [self._drafts(*each) for each in zip(sequences, most, strict=True)]

    def end(self, sequence: Text) -> None: ...

    def _drafts(self, sequence: Text, most: int) -> list[int]:
        known = len(sequence.tokens)
        draw = Random(f"{sequence.id} {known}")
        text = next((text for text in self.texts if text[:known] == sequence.tokens), [])
        right = text[known : known + draw.randint(0, min(most, self.MOST))]
        held = draw.randint(0, len(right))
        return [token if place < held else (token + 1) % 300 + 5 for place, token in enumerate(right)]


def alone(case: Case, bench: Bench, **options: Any) -> Seen:
    text = bench.engine.submit(case.request(**options))
    bench.run()
    return Seen(bench.rows(text), text.tokens)


Way = Callable[[Case, Path], None]
WAYS: dict[str, Way] = {}


def way(name: str) -> Callable[[Way], Way]:
    def register(one: Way) -> Way:
        WAYS[name] = one
        return one

    return register


def restored(bench: Bench, donor: Bench, tokens: Sequence[int], file: Path) -> int:
    """Save what `donor` has of a text and put it into `bench`; how many tokens that spares."""
    prefixes = donor.engine.prefixes
    spared, held = prefixes.find_pages(prefixes.hashes(), tokens)
    contents = [donor.store.read(group, list(table.values())) for group, table in enumerate(held)]
    save(file, Snapshot(tuple(tokens[:spared]), [list(table) for table in held], contents), {"spec": "same"})
    shapes = [bench.store.read(group, [0]) for group in range(len(held))]
    found = load(file, {"spec": "same"}, shapes, bench.store.page_size)
    prefixes = bench.engine.prefixes
    missing = prefixes.missing_pages(prefixes.hashes(), found.tokens, found.pages)
    assert missing == [list(pages) for pages in found.pages]
    prefixes.insert_pages(prefixes.hashes(), found.tokens, found.pages, found.contents)
    return spared


def full(case: Case) -> bool:
    return all(spec.window == AttentionWindow() for spec in case.specs)
