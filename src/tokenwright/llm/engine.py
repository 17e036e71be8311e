"""The engine over a loaded model, in this process, with which `LLM` generates text."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import finalize

from tokenwright.backends.device import asked_threads, compute_here
from tokenwright.backends.kv_sizing import memory_of, size_groups
from tokenwright.backends.native.native_kernels import NUMERICS, arithmetic
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.backends.observation import device_clock
from tokenwright.backends.runner import Model, ModelRunner, store_over
from tokenwright.backends.spare_machine import MACHINE
from tokenwright.backends.towers.picture_memory import PictureMemory
from tokenwright.cache import KVStore, LayerSpec, layer_specs
from tokenwright.cache.disk_pages import DiskPages
from tokenwright.checkpoints.fingerprint import about
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import EngineConfig, Learned, ModelConfig, angle_length
from tokenwright.decode import RowSampler
from tokenwright.engine import Engine, PagePool, PrefixIndex, Request, Scheduler
from tokenwright.engine.driver import CallersThread
from tokenwright.engine.loop import CLOSED, EngineHandle, EngineLoop, Inbox
from tokenwright.engine.pins import Pins
from tokenwright.engine.port import Listener, Occupancy
from tokenwright.engine.warming import WarmRules
from tokenwright.errors import CapacityError, RequestError
from tokenwright.formats import DType
from tokenwright.llm.asking import AsyncStreams, cached_model
from tokenwright.llm.cache_file import StepClock, load_pages, open_disk, save_pages
from tokenwright.llm.drafts.sources import Draft, drafted, open_draft
from tokenwright.llm.input_processor import InputProcessor, Prompt
from tokenwright.llm.model import LoadedModel
from tokenwright.llm.outputs import Completion
from tokenwright.llm.prompts.kept import KeptText, KeptTokens, kept_in
from tokenwright.llm.prompts.memory import PromptMemory
from tokenwright.llm.prompts.watch import Watching
from tokenwright.llm.ranks.tensor_parallel import refuse_files, refuse_undivided
from tokenwright.models.cost import CostModel
from tokenwright.models.graph import Graph
from tokenwright.units import binary

if TYPE_CHECKING:
    from tokenwright.trace.recorder import Recorder
    from tokenwright.trace.replay import AttentionReplay

T = TypeVar("T")


@dataclass(frozen=True)
class Recording:
    recorder: "Recorder"
    replay: "AttentionReplay"


@dataclass(frozen=True)
class _Owned:
    loaded: LoadedModel
    store: KVStore
    model: Model
    loop: EngineLoop
    inputs: InputProcessor
    recording: Recording | None
    disk: DiskPages | None
    draft: Draft | None


class LLMEngine:
    """The engine over a loaded model: its KV memory, its thread, its recorder. Thread-safe.

    threads: how many compute; None: as many as the submitting thread asks for; 0: waiting threads compute, so only one
    may use the engine. `facts`, `specs` and `context` stay after `close`. Raises CapacityError if the memory does not
    suffice, RequestError for options that the model does not support.
    """

    ranks = 1

    def __init__(self, loaded: LoadedModel, options: EngineConfig, threads: int | None = None) -> None:
        self.facts, self.options = loaded.facts, options
        self.specs = specs_of(options, loaded.facts.graph, loaded.facts.dtype)
        if loaded.facts.device.type == "gpu":  # its shaders store keys with their bias
            on_host = range(loaded.decoder.first)  # type: ignore[union-attr]
            self.specs = tuple(replace(spec, unbiased=False, on_host=i in on_host) for i, spec in enumerate(self.specs))
        layers = self.specs if loaded.team is None else specs_of(options, loaded.decoder.graph, loaded.facts.dtype)
        if loaded.team is not None:
            self.ranks = loaded.team.count
            refuse_undivided(options, self.specs, layers)
        self.context = context_of(options, loaded.facts.config)
        draft = open_draft(loaded, options)
        self._specs = specs = self.specs if draft is None else (*self.specs, *draft.specs)
        groups = size_groups(specs, options, self.context, loaded.facts.device)
        own = (*layers, *specs[len(layers) :])
        pages, memory = [group.pages for group in groups], memory_of(loaded.facts.device)
        store = store_over(loaded.decoder, own, pages, options.page_size, memory)
        pool = PagePool(groups, options.page_size, store)
        prefixes = PrefixIndex(pool, repr(specs).encode())
        pins = Pins(prefixes, options.pinned)
        pictures = PictureMemory(loaded.tower)
        runner, proposer = drafted(loaded, options, layers, store, pool, draft, pictures)
        limits = options.token_budget, options.max_sequences
        scheduler = Scheduler(pool, *limits, prefixes, proposer, pins, pictures)
        model = Model(loaded.decoder, layers, loaded.facts.device)
        inputs = InputProcessor(loaded, self.context)
        sampler: Any = RowSampler()
        recording = end_step = None
        if loaded.traced:
            recording = _recording(loaded, self.specs, self.costs, runner, sampler)
            runner = sampler = recording.recorder
            end_step = recording.recorder.end_step
        disk = None
        if options.kv_disk is not None:  # last: nothing that it holds is left behind by an error above
            disk = open_disk(options.kv_disk, options, store, _about(loaded, self.specs, options.page_size, draft))
        if disk is not None:
            prefixes.secret, prefixes.tier = disk.secret or prefixes.secret, disk
            runner = times = StepClock(runner, disk, end_step)
            end_step = times.end_step
        driven = CallersThread if threads == 0 else loaded.driven
        loop = EngineLoop(Engine(runner, sampler, scheduler, self.context), end_step=end_step, make_driver=driven)
        self._owned: _Owned | None = _Owned(loaded, store, model, loop, inputs, recording, disk, draft)
        self.streams, self.prompts = AsyncStreams(), PromptMemory()
        # `_threads`: the number that the last submitting thread asked for.
        self._given_threads, self._threads = threads if threads is None else max(1, threads), 0
        loaded.enter()
        if loaded.team is not None:
            loaded.team.watched.append(loop.end)
        self._abandon = finalize(self, _abandon, loop, loaded, self.streams, disk)
        self._abandon.atexit = False  # at exit the loop ends by itself

    def __str__(self) -> str:
        if self._owned is None:
            return "closed"
        facts, weights = self.facts, f"{self.facts.weights} weights of {binary(self.weight_bytes)}"
        cache = f"KV cache {self.kv_format} of {binary(self.kv_memory)}"
        where = f"{facts.kernels} kernels on {facts.device}"
        if (team := self._owned.loaded.team) is not None:
            most = max(team.weight_bytes)
            where += f"; {self.ranks} processes with weights of {binary(most)} each"
        return f"{facts.name}: {facts.graph.architecture}, {weights}; {cache}; {where}"

    def _open(self) -> _Owned:
        if self._owned is None:
            raise RequestError(CLOSED)
        return self._owned

    @property
    def loaded(self) -> LoadedModel:
        """The model. Raises RequestError if the engine is closed, as do the following properties."""
        return self._open().loaded

    @property
    def prepared(self) -> LoadedModel:
        return self.loaded

    @property
    def store(self) -> KVStore:
        return self._open().store

    @property
    def loop(self) -> EngineLoop:
        loop = self._open().loop
        loop.refuse_forked()
        return loop

    @property
    def inputs(self) -> InputProcessor:
        owned = self._open()
        owned.loop.refuse_forked()  # before it waits for a lock that no thread of this process will release
        return owned.inputs

    def inbox(self, at_end: int = 0) -> Inbox:
        return Inbox(at_end, self.loop.driver)

    def local(self, name: str) -> "LLMEngine":  # noqa: ARG002  (of the port)
        return self

    @property
    def pool(self) -> PagePool:
        return self.loop.engine.pool

    @property
    def recording(self) -> Recording | None:
        """The recorder and its replay; None if the model was loaded without trace=True."""
        return self._open().recording

    @property
    def model(self) -> Model:
        """The model as a function: `logits, cache = model(tokens, cache)`. Raises EngineError in a forked process."""
        owned = self._open()
        owned.loop.refuse_forked()
        return owned.model

    @property
    def weight_bytes(self) -> int:
        return self.loaded.decoder.weight_bytes

    @property
    def kv_memory(self) -> int:
        return sum((group.pages + 1) * group.page_bytes for group in self._open().loop.engine.pool.groups)

    @cached_property
    def kv_format(self) -> str:
        options, native = self.options, self.facts.dtype
        k, v = (native if name == "native" else name for name in (options.kv.k, options.kv.v))
        form = replace(options.kv, k=k, v=v)
        window = f", window {options.window}" if options.window is not None else ""
        return f"{form}{window}" + (f" and {options.sinks} sinks" if options.sinks else "")

    @property
    def replicas(self) -> int:
        return 1

    @property
    def threads(self) -> int:
        asked = self._given_threads or asked_threads(isinstance(self.loaded.decoder, NativeDecoder))
        return max(1, asked // self.ranks)

    @property
    def occupancy(self) -> Occupancy:
        pool = self.loop.engine.pool
        return Occupancy(pool.pages, pool.available, pool.cached)

    @property
    def expert_counts(self) -> Mapping[str, int]:
        decoder = self.loaded.decoder
        pool = decoder.pool if isinstance(decoder, NativeDecoder) else None
        return {} if pool is None else pool.counts

    def kv_bytes(self, tokens: int) -> int:
        return sum(spec.nbytes(tokens) for spec in self._specs)

    @cached_property
    def watching(self) -> Watching:
        pool, model = self._open().loop.engine.pool, cached_model(self)
        return Watching(self.prompts, self.facts.tokenizer, model, bool(pool.states), pool.evictions.when)

    @property
    def costs(self) -> CostModel:
        return CostModel(self.facts.graph, self.specs)

    def save_cache(self, path: str | Path, tokens: Prompt) -> int:
        refuse_files(self.ranks)
        inputs, positions = self.inputs, self.facts.config.positions
        ids = inputs.ids(tokens)
        if angle_length(positions, len(ids)) != angle_length(positions, 1):
            return 0  # the RoPE angles depend on the request's length limit, which the file does not store
        return save_pages(Path(path), self.loop, self.store, ids, inputs.salt(len(ids)), self._about)

    def load_cache(self, path: str | Path) -> int:
        refuse_files(self.ranks)
        return load_pages(Path(path), self.loop, self.store, self.inputs.salt, self._about)

    @cached_property
    def _about(self) -> Mapping[str, str]:
        """The metadata that a cache file must match. Computed once, as it reads all weights."""
        return _about(self.loaded, self.specs, self.options.page_size, self._open().draft)

    def submit(self, requests: Sequence[Request], listener: Listener, *, paused: bool = False) -> list[EngineHandle]:
        owned = self._open()
        if (threads := self.threads) != self._threads:  # each submitting thread may ask for another number
            self._threads, native = threads, isinstance(owned.loaded.decoder, NativeDecoder)
            owned.loop.post(lambda _: compute_here(threads, native))
        return owned.loop.submit(requests, listener, paused=paused)

    def observed(self, request: Request, done: Completion, heads: Sequence[tuple[int, int]]) -> Completion:
        """A completion and its choices with the values computed inside the model. Raises RequestError without torch."""
        from tokenwright.trace.observed_text import observe_text
        from tokenwright.trace.replay import AttentionReplay

        facts, limit = self.facts, request.limit(self.context)
        replay = AttentionReplay(facts.config, self.loaded.decoder, self.specs, facts.device)

        def looked(one: Completion) -> Completion:
            tokens = [*request.prompt, *one.token_ids]
            return replace(one, observed=observe_text(replay, tokens, limit, heads))

        return replace(looked(done), others=tuple(map(looked, done.others)))

    def release(self, owner: str, session: str) -> None:
        def end(engine: Engine) -> None:
            engine.scheduler.kv.pins.release(owner, session)

        self.loop.post(end)

    def warm(self, request: Request, rules: WarmRules) -> None:
        allowed = rules.allowed
        if rules.spare:
            rules = replace(rules, allowed=lambda: allowed() and MACHINE.free)

        def warm(engine: Engine) -> None:
            with suppress(RequestError, CapacityError):  # there is no room for it
                engine.warm(request, rules)

        self.loop.post(warm)

    def kept(self, texts: Sequence[KeptText], owner: str) -> KeptTokens:
        return self.inspect(kept_in([one for text in texts if (one := self.prompts.hashes.of(text))], owner))

    def inspect(self, function: Callable[[Engine], T]) -> T:
        return self.loop.call(function)

    def check(self) -> None:
        self.loop.check()

    def close(self) -> None:
        owned, self._owned = self._owned, None
        if owned is not None:
            self._abandon.detach()
            if not owned.loop.forked:
                owned.loop.close()
                if owned.disk is not None:
                    owned.disk.close()
                self.streams.close()
                owned.loaded.leave()


def _about(loaded: LoadedModel, specs: tuple[LayerSpec, ...], page_size: int, draft: Draft | None) -> Mapping[str, str]:
    facts, copied = loaded.facts, f", {len(loaded.copies)} as they lie" if loaded.copies else ""
    rounding = facts.kernels if facts.kernels == "reference" else f"{arithmetic(facts.kernels)} {NUMERICS}"
    if facts.device.type == "gpu":
        rounding = f"wgsl on {memory_of(facts.device).name} from layer {loaded.decoder.first}"  # type: ignore[union-attr]
    form = {"dtype": facts.dtype, "weights' form": f"{facts.weights}{copied}", "kernels": rounding}
    form["draft model"] = "none" if draft is None else draft.about(page_size)
    return about(loaded.checkpoint, form, specs, page_size)


def specs_of(options: EngineConfig, graph: Graph, dtype: DType) -> tuple[LayerSpec, ...]:
    """The cache of each layer of a model. Raises RequestError for an option that it does not support."""
    return layer_specs(graph, dtype, options.kv, options.window, options.sinks)


def context_of(options: EngineConfig, config: ModelConfig) -> int:
    """The most tokens of one text: with a window in every layer more than the model was trained with."""
    endless = options.window is not None and not isinstance(config.positions, Learned)
    return MAX_TOKENS if endless else config.context


def _recording(
    loaded: LoadedModel, specs: tuple[LayerSpec, ...], costs: CostModel, runner: ModelRunner, sampler: RowSampler
) -> Recording:
    from tokenwright.trace.recorder import Recorder  # here: a tenth of our own import time
    from tokenwright.trace.replay import AttentionReplay

    recorder = Recorder(runner, sampler, costs, device_clock(loaded.facts.device))
    facts = loaded.facts
    replay = AttentionReplay(facts.config, loaded.decoder, specs, facts.device, runner.pictures)
    return Recording(recorder, replay)


def _abandon(loop: EngineLoop, loaded: LoadedModel, streams: AsyncStreams, disk: DiskPages | None) -> None:
    """`close` without waiting, for an engine that is garbage-collected unclosed."""
    if loop.forked:
        return
    loop.stop()
    if disk is not None:
        disk.writer.stop()
    streams.close()
    loaded.leave()
