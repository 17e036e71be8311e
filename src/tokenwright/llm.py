"""LLM: the Python API. It loads a model, and generates text from prompts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload
from weakref import finalize

import torch

from tokenwright.backends.memory import make_store
from tokenwright.backends.runner import Model, ModelRunner
from tokenwright.cache import LayerSpec, layer_specs
from tokenwright.checkpoints.fingerprint import about
from tokenwright.checks import MAX_TOKENS
from tokenwright.completion import Completion, Piece
from tokenwright.config import DType, DynamicScaling, EngineConfig, KVFormat, Rope, WeightFormat
from tokenwright.decode import TorchSampler
from tokenwright.engine import Engine, PagePool, PrefixIndex, Request, SamplingParams, Scheduler, SwapSpace
from tokenwright.engine.loop import CLOSED, EngineLoop, Inbox, Listener, RequestHandle
from tokenwright.errors import EngineError, RequestError
from tokenwright.loaded import LoadedModel
from tokenwright.models.cost import CostModel
from tokenwright.models.graph import Graph
from tokenwright.requests import Prompt, RequestBuilder, prompts_of
from tokenwright.restore import load_pages, save_pages
from tokenwright.run import Run
from tokenwright.streams import AsyncStreams, Stream
from tokenwright.text import ChatTemplate, Message, Rendered
from tokenwright.trace.recorder import Recorder, device_clock
from tokenwright.trace.replay import AttentionReplay
from tokenwright.transcript import Transcript


class LLM:
    """A model with its tokenizer and KV cache. Thread-safe; the engine batches the requests of all threads.

    model: a folder, a hub name such as "Qwen/Qwen3-0.6B" (`revision` selects a branch, tag or commit), or "stories",
        the small model in the package; or the `loaded` model of another LLM, to open a second engine over it.
    device: auto, cpu, cuda, cuda:N or mps.
    dtype: auto (the checkpoint's; float32 with reference kernels on the CPU), float32, bfloat16 or float16. Native
        kernels store weights and cache in it and compute in float32.
    weights: storage format of matrices: native (`dtype`), int8 or int4, or with its group, such as int8:32. Quantised
        weights are saved in the cache folder, so that later loads are quick.
    kv: storage format of K and V: native (the dtype of the computation), float32, bfloat16, float16, fp8, int8 or int4,
        or "k=int8,v=int4"; append first=64 to keep the first tokens native, native=0+-1 to keep these layers native.
    window: attention window in tokens for every layer, besides the model's own windows; expired pages are freed, and
        rotary models can exceed their context. sinks: first tokens that every token attends to beyond the window.
    page_size: tokens of a KV page. pages or kv_memory (bytes): the size of the cache; by default an eighth of
        the free memory, 4 GiB at most, and no more than `max_sequences` full contexts. swap_memory: bytes of RAM to
        swap out K and V of sequences that are preempted when pages run out; without it they are recomputed.
    token_budget: tokens computed in one step. max_sequences: sequences running at once.
    report: called with (bytes read, bytes in total) while the weights are read; downloads then show progress bars.
    trace: count and time the engine's work, as `run` requires.

    Raises CheckpointError for a model that cannot be read or computed, CapacityError if memory does not suffice,
    RequestError for an option out of range.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "stories",
        *,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        weights: str | WeightFormat = "native",
        kv: str | KVFormat = "native",
        window: int | None = None,
        sinks: int = 0,
        page_size: int = 16,
        pages: int | None = None,
        kv_memory: int | None = None,
        swap_memory: int = 0,
        token_budget: int = 512,
        max_sequences: int = 64,
        report: Callable[[int, int], None] | None = None,
        trace: bool = False,
    ) -> None:
        form = kv if isinstance(kv, KVFormat) else KVFormat.parse(kv)
        self.options = EngineConfig(
            page_size, pages, kv_memory, token_budget, max_sequences, form, window, sinks, swap_memory
        )
        if not isinstance(model, LoadedModel):
            self.loaded = LoadedModel(
                model,
                revision=revision,
                device=device,
                dtype=dtype,
                weights=weights,
                report=report,
                trace=trace,
                check=self._specs,
            )
        elif (revision, device, dtype, weights, report, trace) != (None, "auto", "auto", "native", None, False):
            raise RequestError(
                "revision, device, dtype, weights, report and trace say how a model is loaded, and this one is; "
                "leave them out"
            )
        else:
            self.loaded = model
        self._open()

    def _open(self) -> None:
        """Open the engine over the loaded model, its thread, and the recorder and replay."""
        loaded, options = self.loaded, self.options
        self.config, self.graph = loaded.config, loaded.graph
        self.generation, self.tokenizer = loaded.generation, loaded.tokenizer
        self.device, self.dtype = str(loaded.device), loaded.dtype
        self.weights, self.kernels = loaded.weights, loaded.kernels
        self.specs = self._specs(loaded.graph, loaded.dtype)
        # With an attention window in every layer a text may exceed the context that the model was trained with.
        endless = options.window is not None and isinstance(loaded.config.positions, Rope)
        self.context = MAX_TOKENS if endless else loaded.config.context
        store, groups = make_store(self.specs, options, self.context, loaded.device)
        pool = PagePool(groups, options.page_size, store)
        prefixes, swap = PrefixIndex(pool, repr(self.specs).encode()), SwapSpace(pool, options.swap_memory)
        scheduler = Scheduler(pool, options.token_budget, options.max_sequences, prefixes, swap)
        self._store = store
        self._model = Model(loaded.config, loaded.decoder, self.specs, loaded.device)
        self._replay = AttentionReplay(loaded.config, loaded.decoder, self.specs, loaded.device)
        runner: Any = ModelRunner(loaded.decoder, store)
        sampler: Any = TorchSampler()
        self._recorder: Recorder | None = None
        if loaded.counted is not None:
            clock = device_clock(loaded.device)
            runner = sampler = self._recorder = Recorder(runner, sampler, loaded.counted.counts, self.costs, clock)
        engine = Engine(runner, sampler, scheduler, self.context)
        end_step = None if self._recorder is None else self._recorder.end_step
        self._loop: EngineLoop | None = EngineLoop(engine, end_step=end_step)
        self._requests = RequestBuilder(loaded, self.context)
        self._async_streams = AsyncStreams()
        self._threads = torch.get_num_threads()
        self._preparing = ThreadPoolExecutor(1, "tokenwright requests")  # astream: tokenising takes time
        loaded.enter()
        self._abandon = finalize(self, _abandon, self._loop, loaded, self._preparing)
        self._abandon.atexit = False  # at exit the loop ends by itself

    def _specs(self, graph: Graph, dtype: DType) -> tuple[LayerSpec, ...]:
        options = self.options
        return layer_specs(graph, dtype, options.kv, options.window, options.sinks)

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

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template. Raises RequestError if it has none."""
        return self.loaded.template or ChatTemplate(self.tokenizer)

    def sampling(self, **overrides: object) -> SamplingParams:
        """The checkpoint's sampling defaults, updated with `overrides`; None overrides nothing.

        With beams > 1 it leaves out defaults for drawing, as beam search draws nothing. Raises RequestError.
        """
        return self._requests.sampling(**overrides)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache: bool = True, salt: str = ""
    ) -> Stream:
        """Generate text, piece by piece. `cache=False` is the naive loop: every step recomputes all tokens.

        With n > 1 the pieces of all texts interleave, each with the number of its text. best_of and beam search know
        their texts only at the end; use `generate` for them.

        A prefix in common with earlier texts is not recomputed; texts of different `salt` share no pages.

        Raises RequestError, ContextError or CapacityError immediately for a request that cannot be served.
        """
        inbox = Inbox()
        [handle] = self._submit([self._streamed(prompt, params, cache, salt)], inbox)
        return Stream(handle, inbox, self._transcript(handle), owner=self)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache: bool = True, salt: str = ""
    ) -> AsyncIterator[Piece]:
        """`stream` for asyncio. The event loop is called once per step, whatever the number of streams."""
        self._open_loop()
        prepared = asyncio.get_running_loop().run_in_executor(
            self._preparing, self._streamed, prompt, params, cache, salt
        )
        request = await prepared
        [handle] = self._submit([request], self._async_streams.listener())
        async with aclosing(self._async_streams.pieces(handle, self._transcript(handle))) as pieces:
            async for piece in pieces:
                yield piece

    def _streamed(self, prompt: Prompt, params: SamplingParams | None, cache: bool, salt: str) -> Request:
        params = self._requests.params(params)
        if params.beams > 1 or params.choices > params.n:
            raise RequestError(
                "best_of and beam search know their texts at the end alone; use generate instead of stream"
            )
        return self._requests.build(prompt, params, cache=cache, salt=salt)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        cache: bool = True,
        salt: str = "",
    ) -> list[Completion]:
        """Continue every prompt, in one batch; returns the completions in the order of the prompts.

        `params`: one for all prompts or one per prompt; `cache` and `salt` as in `stream`, and the same errors. Raises
        EngineError if a prompt failed in the engine; it has the completions of the others.
        """
        texts = prompts_of(prompts)
        if params is None or not isinstance(params, Sequence):
            each = [self._requests.params(params)] * len(texts)
        else:
            each = [self._requests.params(one) for one in params]
        if len(each) != len(texts):
            raise RequestError(
                f"{len(texts)} prompts came with {len(each)} sampling params; give one for all or one each"
            )
        pairs = zip(texts, each, strict=True)
        written = self._finish([self._requests.build(text, its, cache=cache, salt=salt) for text, its in pairs])
        completions = [None if one.error else one.completion() for one in written]
        for transcript in written:
            if transcript.error is not None:
                raise EngineError(f"a prompt failed: {transcript.error}", completions) from transcript.error
        return [completion for completion in completions if completion is not None]

    def render(self, messages: Sequence[Message], markup: bool = False) -> Rendered:
        """The prompt of a conversation: its text, for display, and its ids. A message has "role" and "content".

        markup: encode control tokens that are written in the messages as control tokens; by default they are text.
        Raises RequestError if the model has no chat template, or if that refuses the messages or fails.
        """
        return self.template.render(messages, markup=markup)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        markup: bool = False,
        salt: str = "",
    ) -> Completion:
        """The model's answer in a conversation: `generate` with the ids of `render`. Raises the errors of both."""
        [completion] = self.generate([self.render(messages, markup).ids], params, salt=salt)
        return completion

    def run(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: bool = True,
        written: Sequence[int] = (),
        layer: int = 0,
        head: int = 0,
        first_step: int = 0,
    ) -> Run:
        """Generate one text step by step, with a frame of every step; the first `Run.step` begins to compute.

        layer, head: the attention row in each frame. written: tokens already generated after the prompt, to continue a
        lost run; with the same seed the rest is the same. first_step: the number of the first frame. Raises
        RequestError if this LLM was opened without trace=True, for a layer or head out of range, and as `stream` does.
        """
        params = self._requests.params(params)
        if max(params.choices, params.beams) > 1:
            raise RequestError("a run follows one text; leave n, best_of and beams out")
        if self._recorder is None:
            raise RequestError('this LLM records nothing; open it with LLM(..., trace=True), or use "stream"')
        request = self._requests.build(prompt, params, cache=cache, written=written, share=False)
        inbox = Inbox()
        [handle] = self._submit([request], inbox, paused=True)
        try:
            return Run(
                self._open_loop(),
                handle,
                inbox,
                self._transcript(handle),
                self._recorder,
                self._replay,
                (layer, head),
                first_step,
            )
        except RequestError:
            handle.cancel()
            raise

    @overload
    def score(self, prompt: Prompt) -> list[float]: ...

    @overload
    def score(self, prompt: Prompt, continuations: Sequence[Prompt]) -> list[list[float]]: ...

    def score(self, prompt: Prompt, continuations: Sequence[Prompt] | None = None) -> list[float] | list[list[float]]:
        """The model's log-probability (natural) of each token of the prompt after the first.

        With continuations: for each of them the log-probabilities of its tokens after the prompt; they share the
        prompt's pages. Raises RequestError, EngineError.
        """
        if continuations is None:
            return self._scores([self._requests.ids(prompt)], 1)[0]
        if isinstance(continuations, str) or not isinstance(continuations, Sequence):
            raise RequestError("continuations are given as a list, also if it is only one")
        ids = self._requests.ids(prompt)
        if not ids:
            raise RequestError("a continuation is scored after a prompt, and this one has no tokens")
        return self._scores([self._requests.ids_after(prompt, ids, one) for one in continuations], len(ids))

    def _scores(self, texts: Sequence[list[int]], start: int) -> list[list[float]]:
        """The log-probabilities of each text's tokens from position `start` on, all in one batch."""
        params = SamplingParams(temperature=0.0, max_tokens=0)
        scored = self._finish([self._requests.build(text, params, prompt_logprobs_from=start) for text in texts])
        for transcript in scored:
            if transcript.error is not None:
                raise EngineError(f"the text could not be scored: {transcript.error}") from transcript.error
        return [transcript.prompt_logprobs for transcript in scored]

    def save_cache(self, path: str | Path, tokens: Prompt) -> int:
        """Save a text's cached pages to a file; returns the number of tokens, from the text's start, that it covers.

        Below one page it writes no file and returns 0. Raises CacheFileError if the file cannot be written; an existing
        file is then unchanged.
        """
        ids, scaling = self._requests.ids(tokens), getattr(self.config.positions, "scaling", None)
        if isinstance(scaling, DynamicScaling) and len(ids) > scaling.original_context:
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
        form = {"dtype": self.dtype, "weights' form": str(self.weights), "kernels": self.kernels}
        return about(self.loaded.checkpoint, form, self.specs, self.options.page_size)

    def prepare(self, prompt: Prompt, params: SamplingParams, *, salt: str = "") -> Request:
        """A request for `submit`: the prompt tokenised, the grammar compiled. Takes time. Raises RequestError."""
        return self._requests.build(prompt, params, salt=salt)

    def submit(self, requests: Sequence[Request], listener: Listener) -> list[RequestHandle]:
        """Hand requests to the engine, whose thread calls `listener` with their events; `transcript` reads them.

        Raises ContextError or CapacityError for one that cannot be served, EngineError where the engine has ended.
        """
        return self._submit(requests, listener)

    def transcript(self, handle: RequestHandle) -> Transcript:
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
            loop.close()
            self._preparing.shutdown(wait=False, cancel_futures=True)
            self.loaded.leave()
            self._recorder = None
            del self._model, self._replay, self._store, self.loaded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _submit(self, requests: Sequence[Request], listener: Listener, *, paused: bool = False) -> list[RequestHandle]:
        loop = self._open_loop()
        if (threads := torch.get_num_threads()) != self._threads:  # torch's thread count is per thread
            self._threads = threads
            loop.post(lambda _: torch.set_num_threads(threads))
        return loop.submit(requests, listener, paused=paused)

    def _finish(self, requests: Sequence[Request]) -> list[Transcript]:
        """Submit requests together and wait until all have ended or failed."""
        inbox = Inbox(at_end=len(requests))
        handles = self._submit(requests, inbox)
        transcripts = {handle: self._transcript(handle) for handle in handles}
        try:
            for delivery in inbox.get() if handles else ():
                transcripts[delivery.handle].add(delivery)
        finally:
            for handle in handles:
                handle.cancel()
        return list(transcripts.values())

    def _transcript(self, handle: RequestHandle) -> Transcript:
        return Transcript(handle, self.config.layers, self.kv_bytes)

    def _open_loop(self) -> EngineLoop:
        if self._loop is None:
            raise RequestError(CLOSED)
        return self._loop


def _abandon(loop: EngineLoop, loaded: LoadedModel, preparing: ThreadPoolExecutor) -> None:
    """`close` without waiting, for an LLM that is garbage-collected unclosed."""
    loop.stop()
    preparing.shutdown(wait=False, cancel_futures=True)
    loaded.leave()
