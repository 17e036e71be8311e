"""An engine opened over a loaded model: its KV memory, its thread, and facts about both. LLM generates text with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import finalize

import torch

from tokenwright.backends.device import compute_beside_kernels, compute_with
from tokenwright.backends.kv_sizing import make_store
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.backends.observation import device_clock
from tokenwright.backends.runner import Model, ModelRunner
from tokenwright.cache import LayerSpec, layer_specs
from tokenwright.checkpoints.fingerprint import about
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import EngineConfig, Rope, angle_length
from tokenwright.decode import TorchSampler
from tokenwright.engine import Engine, PagePool, PrefixIndex, Request, Scheduler, SwapSpace
from tokenwright.engine.loop import CLOSED, EngineLoop, Inbox, Listener, RequestHandle
from tokenwright.errors import RequestError
from tokenwright.formats import DType
from tokenwright.llm.cache_file import load_pages, save_pages
from tokenwright.llm.input_processor import InputProcessor, Prompt
from tokenwright.llm.model import LoadedModel
from tokenwright.llm.output_processor import OutputProcessor
from tokenwright.llm.streams import AsyncStreams
from tokenwright.models.cost import CostModel
from tokenwright.models.graph import Graph
from tokenwright.progress import Report
from tokenwright.sampling_params import SamplingParams
from tokenwright.text import ChatTemplate
from tokenwright.units import binary

if TYPE_CHECKING:
    from tokenwright.trace.recorder import Recorder
    from tokenwright.trace.replay import AttentionReplay

T = TypeVar("T")


class LLMEngine:
    """A loaded model with an engine over it. Thread-safe; the engine batches the requests of all threads.

    Raises CapacityError if the memory does not suffice, RequestError for options that the model does not support.
    """

    def __init__(self, loaded: LoadedModel, options: EngineConfig) -> None:
        self.loaded, self.options = loaded, options
        self.config, self.graph = loaded.config, loaded.graph
        self.generation, self.tokenizer = loaded.generation, loaded.tokenizer
        self.device, self.dtype = str(loaded.device), loaded.dtype
        self.weights, self.kernels = loaded.weights, loaded.kernels
        self.specs = specs_of(options, loaded.graph, loaded.dtype)
        # With an attention window in every layer a text may exceed the context that the model was trained with.
        endless = options.window is not None and isinstance(loaded.config.positions, Rope)
        self.context = MAX_TOKENS if endless else loaded.config.context
        store, groups = make_store(self.specs, options, self.context, loaded.device)
        pool = PagePool(groups, options.page_size, store)
        prefixes, swap = PrefixIndex(pool, repr(self.specs).encode()), SwapSpace(pool, options.swap_memory)
        scheduler = Scheduler(pool, options.token_budget, options.max_sequences, prefixes, swap)
        self._store = store
        self._model = Model(loaded.decoder, self.specs, loaded.device)
        runner: Any = ModelRunner(loaded.decoder, store)
        sampler: Any = TorchSampler()
        self._recorder: Recorder | None = None
        self._replay: AttentionReplay | None = None
        if loaded.traced:
            from tokenwright.trace.recorder import Recorder  # here: a tenth of our own import time
            from tokenwright.trace.replay import AttentionReplay

            self._replay = AttentionReplay(loaded.config, loaded.decoder, self.specs, loaded.device)
            clock = device_clock(loaded.device)
            runner = sampler = self._recorder = Recorder(runner, sampler, self.costs, clock)
        engine = Engine(runner, sampler, scheduler, self.context)
        end_step = None if self._recorder is None else self._recorder.end_step
        self._loop: EngineLoop | None = EngineLoop(engine, end_step=end_step)
        self._builder = InputProcessor(loaded, self.context)
        self._async_streams = AsyncStreams()
        self._threads = 0  # of torch, in the thread that submitted last
        self._preparing = ThreadPoolExecutor(1, "tokenwright requests")  # astream: tokenising takes time
        loaded.enter()
        self._abandon = finalize(self, _abandon, self._loop, loaded, self._preparing)
        self._abandon.atexit = False  # at exit the loop ends by itself

    def __repr__(self) -> str:
        if self._loop is None:
            return f"<{type(self).__name__}, closed>"
        weights = f"{self.graph.architecture}, {self.weights} weights of {binary(self.weight_bytes)}"
        cache = f"KV cache {self.kv_format} of {binary(self.kv_memory)}"
        return (
            f"<{type(self).__name__} {self.loaded.name}: {weights}; {cache}; {self.kernels} kernels on {self.device}>"
        )

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K and V in the cache for a text of `tokens` tokens."""
        return sum(spec.nbytes(tokens) for spec in self.specs)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return self._model.decoder.weight_bytes

    @property
    def kv_format(self) -> str:
        """The storage format of K and V, and the attention window, for display."""
        options = self.options
        k, v = (self.dtype if name == "native" else name for name in (options.kv.k, options.kv.v))
        form = replace(options.kv, k=k, v=v)
        window = f", window {options.window}" if options.window is not None else ""
        return f"{form}{window}" + (f" and {options.sinks} sinks" if options.sinks else "")

    @property
    def kv_memory(self) -> int:
        """Bytes of the whole KV memory."""
        return self._store.nbytes

    @property
    def model(self) -> Model:
        """The model as a function: `logits, cache = model(tokens, cache)`."""
        self._open_loop()
        return self._model

    @property
    def engine(self) -> Engine[torch.Tensor]:
        """The engine, for inspection while it is idle: the engine thread changes it at any other time."""
        return self._open_loop().engine

    @property
    def costs(self) -> CostModel:
        """The cost of steps of this model with this cache, derived from shapes."""
        return CostModel(self.graph, self.specs)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a text: those of the generation config, the tokenizer and the chat template."""
        return self._requests.eos_ids

    def sampling(self, **overrides: object) -> SamplingParams:
        """The checkpoint's sampling defaults, updated with `overrides`; None overrides nothing.

        With beams > 1 it leaves out defaults for drawing, as beam search draws nothing. Raises RequestError.
        """
        return self._requests.sampling(**overrides)

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template. Raises RequestError if it has none."""
        self._open_loop()
        return self.loaded.template or ChatTemplate(self.tokenizer)

    def save_cache(self, path: str | Path, tokens: Prompt) -> int:
        """Save a text's cached pages to a file; returns the number of tokens, from the text's start, that it covers.

        Below one page it writes no file and returns 0. Raises CacheFileError if the file cannot be written; an existing
        file is then unchanged.
        """
        ids, positions = self._requests.ids(tokens), self.config.positions
        if angle_length(positions, len(ids)) != angle_length(positions, 1):
            return 0  # the RoPE angles depend on the request's length limit, which the file does not store
        return save_pages(Path(path), self._open_loop(), self._store, ids, self._requests.salt(len(ids)), self._about)

    def load_cache(self, path: str | Path) -> int:
        """Load a file of `save_cache` into the prefix index, so that texts with the same prefix reuse its pages.

        Returns the number of tokens of that prefix. Raises CacheFileError for a file that is damaged or was saved with
        another model or KV format, CapacityError if the cache has too few free pages.
        """
        return load_pages(Path(path), self._open_loop(), self._store, self._requests.salt, self._about)

    @cached_property
    def _about(self) -> Mapping[str, str]:
        """The metadata that a cache file must match. Computed once, as it reads all of the checkpoint's weights."""
        copied = f", {len(self.loaded.copies)} as they lie" if self.loaded.copies else ""
        form = {"dtype": self.dtype, "weights' form": f"{self.weights}{copied}", "kernels": self.kernels}
        return about(self.loaded.checkpoint, form, self.specs, self.options.page_size)

    def prepare(self, prompt: Prompt, params: SamplingParams, *, salt: str = "", adapter: str | None = None) -> Request:
        """A request for `submit`: the prompt tokenised, the grammar compiled. Takes time. Raises RequestError."""
        return self._requests.build(prompt, params, salt=salt, adapter=adapter)

    def check_length(self, text: str) -> None:
        """Raises RequestError for a text that by its length cannot fit the context, before it is tokenised."""
        self._requests.check_length(text)

    def prepare_embedding(self, text: Prompt) -> Request:
        """A request for `submit` whose transcript has the text's hidden states. Takes time. Raises RequestError."""
        self.check_pooling()
        return self._requests.embedding(text)

    def check_pooling(self) -> None:
        """Raises RequestError if the checkpoint's embeddings need more than is computed here."""
        self._open_loop()
        if lacking := self.loaded.pooling.lacking:
            raise RequestError(f"the embeddings of this checkpoint need {lacking}, which is not computed here")

    def submit(self, requests: Sequence[Request], listener: Listener, *, paused: bool = False) -> list[RequestHandle]:
        """Hand requests to the engine, whose thread calls `listener` with their events; `transcript` reads them.

        `paused` ones compute nothing until their handles let them. Raises ContextError or CapacityError for one that
        cannot be served, EngineError where the engine has ended.
        """
        return self._submit(requests, listener, paused=paused)

    def inspect(self, function: Callable[[Engine[torch.Tensor]], T]) -> T:
        """`function(engine)`, called by the engine thread between two steps; it must leave the engine as it is.

        Raises what it raises, and EngineError if the engine has ended.
        """
        return self._open_loop().call(function)

    def transcript(self, handle: RequestHandle) -> OutputProcessor:
        """What puts the texts of a submitted request together from its deliveries."""
        return self._transcript(handle)

    def check(self) -> None:
        """Raises EngineError if the engine has failed, or the LLM is closed."""
        self._open_loop().check()

    def longest(self) -> int:
        """The most tokens of one text, prompt included: the context, or what the KV cache holds if that is less."""
        engine, least, most = self._open_loop().engine, 1, self.context
        while least < most:
            middle = (least + most + 1) // 2
            fits = engine.scheduler.fits(engine.scheduler.new(Request((0,)), middle))
            least, most = (middle, most) if fits else (least, middle - 1)
        return least

    def close(self) -> None:
        """Free the memory. Unfinished requests fail; the LLM cannot be used afterwards."""
        loop, self._loop = self._loop, None
        if loop is not None:
            self._abandon.detach()
            if not loop.forked:
                loop.close()
                self._preparing.shutdown(wait=False, cancel_futures=True)
                self.loaded.leave()
            self._recorder = None
            del self._model, self._replay, self._store, self._builder, self.loaded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _submit(self, requests: Sequence[Request], listener: Listener, *, paused: bool = False) -> list[RequestHandle]:
        loop = self._open_loop()
        if (threads := torch.get_num_threads()) != self._threads:  # torch's thread count is per thread
            self._threads = threads
            compute = compute_beside_kernels if isinstance(self.loaded.decoder, NativeDecoder) else compute_with
            loop.post(lambda _: compute(threads))
        return loop.submit(requests, listener, paused=paused)

    def _finish(
        self, requests: Sequence[Request], *, at_end: bool = True, report: Report | None = None
    ) -> list[OutputProcessor]:
        """Submit requests together and wait until all have ended or failed.

        at_end: leave all deliveries unread until then, instead of reading them after each step. report: called after
        each step, if they are read so.
        """
        inbox = Inbox(at_end=len(requests) if at_end else 0)
        handles = self._submit(requests, inbox)
        transcripts = {handle: self._transcript(handle) for handle in handles}
        try:
            ended = tokens = 0
            while ended < len(handles):
                for delivery in inbox.get():
                    tokens += len(transcripts[delivery.handle].add(delivery))
                    ended += delivery.ended
                if report is not None:
                    report(ended, tokens)
        finally:
            for handle in handles:
                handle.cancel()
        return list(transcripts.values())

    async def _prepared(self, prepare: Callable[[], T]) -> T:
        """`prepare()`, called in another thread: tokenising takes time."""
        self._open_loop()
        return await asyncio.get_running_loop().run_in_executor(self._preparing, prepare)

    async def _afinish(self, requests: Sequence[Request]) -> list[OutputProcessor]:
        """`_finish` for asyncio."""
        handles = self._submit(requests, self._async_streams.listener())
        transcripts = {handle: self._transcript(handle) for handle in handles}
        await self._async_streams.read(transcripts)
        return list(transcripts.values())

    def _transcript(self, handle: RequestHandle) -> OutputProcessor:
        return OutputProcessor(handle, self.config.layers, self.kv_bytes)

    def _open_loop(self) -> EngineLoop:
        if self._loop is None:
            raise RequestError(CLOSED)
        self._loop.refuse_forked()
        return self._loop

    @property
    def _requests(self) -> InputProcessor:
        """The builder of requests. Raises RequestError if the LLM is closed, EngineError in a forked process."""
        self._open_loop()  # before it waits for a lock that no thread of this process will release
        return self._builder


def specs_of(options: EngineConfig, graph: Graph, dtype: DType) -> tuple[LayerSpec, ...]:
    """What each layer of a model keeps in the cache. Raises RequestError for what the model does not support."""
    return layer_specs(graph, dtype, options.kv, options.window, options.sinks)


def _abandon(loop: EngineLoop, loaded: LoadedModel, preparing: ThreadPoolExecutor) -> None:
    """`close` without waiting, for an LLM that is garbage-collected unclosed."""
    if loop.forked:
        return
    loop.stop()
    preparing.shutdown(wait=False, cancel_futures=True)
    loaded.leave()
