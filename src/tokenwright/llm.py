"""LLM: the front door in Python. It loads a model, and turns prompts into text."""

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
    """A model with its tokenizer and its KV cache, ready to write. Thread-safe; requests of all threads are batched.

    model: a folder, a hub name such as "Qwen/Qwen3-0.6B" (`revision` picks a branch, tag or commit), or "stories",
        the small model that ships inside; or the `loaded` model of another LLM, to open a second engine over it.
    device: auto, cpu, cuda, cuda:N or mps.
    dtype: auto (the checkpoint's; float32 with reference kernels on the CPU), float32, bfloat16 or float16. Native
        kernels keep weights and cache in it and compute in float32.
    weights: how matrices are kept: native (`dtype`), int8 or int4, or with its group, such as int8:32. What was
        quantised is kept in a cache folder, so that the next time is quick.
    kv: how K and V are kept: native (the dtype that is computed in), float32, bfloat16, float16, fp8, int8 or int4, or
        "k=int8,v=int4"; after it first=64 keeps the first tokens native, native=0+-1 these layers.
    window: the most tokens that a layer reads back, on top of the model's own windows; its pages are given back, and
        rotary models go on past their context. sinks: first tokens that every token attends to all the same.
    page_size: tokens of a KV page. pages or kv_memory (bytes): the size of the cache; by default an eighth of
        the free memory, 4 GiB at most, and no more than `max_sequences` full contexts. swap_memory: bytes of RAM for
        the K and V of texts that are preempted when pages run out; without it they are recomputed.
    token_budget: tokens computed in one step. max_sequences: texts written at once.
    report: called with (bytes done, bytes in all) while the weights are read; a download then shows its bars too.
    trace: count and time what the engine does, so that `run` can show it.

    Raises CheckpointError for a model that cannot be read as it is, CapacityError where memory does not suffice,
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
        """The engine over the loaded model, its thread, and what looks into it."""
        loaded, options = self.loaded, self.options
        self.config, self.graph = loaded.config, loaded.graph
        self.generation, self.tokenizer = loaded.generation, loaded.tokenizer
        self.device, self.dtype = str(loaded.device), loaded.dtype
        self.weights, self.kernels = loaded.weights, loaded.kernels
        self.specs = self._specs(loaded.graph, loaded.dtype)
        # An attention window reads no further than itself, so its text may grow past the context that was trained.
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
        self._preparing = ThreadPoolExecutor(1, "tokenwright requests")  # of astream: tokenising takes time
        loaded.enter()
        self._abandon = finalize(self, _abandon, self._loop, loaded, self._preparing)
        self._abandon.atexit = False  # the loop ends itself then

    def _specs(self, graph: Graph, dtype: DType) -> tuple[LayerSpec, ...]:
        options = self.options
        return layer_specs(graph, dtype, options.kv, options.window, options.sinks)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K and V that the cache keeps of a text of so many tokens."""
        return sum(spec.nbytes(tokens) for spec in self.specs)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return self._model.decoder.weight_bytes

    @property
    def kv_format(self) -> str:
        """How K and V are kept, in words."""
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
        """The model as a plain function: `logits, cache = model(tokens, cache)`."""
        self._open_loop()
        return self._model

    @property
    def engine(self) -> Engine[torch.Tensor]:
        """The engine underneath, to look at while it is idle: its own thread changes it."""
        return self._open_loop().engine

    @property
    def costs(self) -> CostModel:
        """What steps of this model cost with this cache, derived from shapes."""
        return CostModel(self.graph, self.specs)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a text: those of the generation config, the tokenizer and the chat template."""
        return self._requests.eos_ids

    @property
    def template(self) -> ChatTemplate:
        """What makes prompts of conversations. Raises RequestError for a model without a chat template."""
        return self.loaded.template or ChatTemplate(self.tokenizer)

    def sampling(self, **overrides: object) -> SamplingParams:
        """The checkpoint's own suggestions for sampling, with `overrides` in their place; None is no override.

        Beam search draws nothing: what is suggested for drawing is left out there.
        """
        return self._requests.sampling(**overrides)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache: bool = True, salt: str = ""
    ) -> Stream:
        """Write one text, piece by piece. `cache=False` is the naive loop: everything anew for every token.

        Of n texts the pieces come side by side, each with the number of its text; which are the best of several, and
        what beam search finds, is known at the end alone, so these are for `generate`.

        What it shares with texts before it, from the start on, is not computed again; texts of another `salt` share
        nothing with it.

        Raises RequestError (ContextError, CapacityError) at once for what cannot be served.
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
        """Continue every prompt, in one batch; the completions come in the prompts' order.

        `params` is one for all or one for each; `salt` as in `stream`. Raises EngineError if some prompt failed in the
        engine, with the others' completions in it.
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
        """The prompt of a conversation, {"role", "content"} each: its text, to look at, and its ids.

        markup: control tokens that are written in the messages count as such; by default they are text. Raises
        RequestError where the model has no chat template, and where that refuses the messages or fails.
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
        """The model's answer in a conversation; as `render`, and `generate` with its ids."""
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
        """Write one text step by step and see all of each step; nothing is computed before the first `Run.step`.

        layer, head: the attention row that comes with each frame. written: tokens that stand after the prompt already,
        so that a run can go on where another was lost: with its seed, it goes on alike. first_step: the number of
        the first frame. Raises RequestError where this LLM was opened without trace=True, and as `stream` does.
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
        """The log-probability (natural) that the model gives each token of the prompt after the first.

        With continuations: for each of them that of its own tokens, after the prompt, whose pages they share. Raises
        RequestError, EngineError.
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
        """The log-probabilities of the tokens of each text from a position on, all in one batch."""
        params = SamplingParams(temperature=0.0, max_tokens=0)
        scored = self._finish([self._requests.build(text, params, prompt_logprobs_from=start) for text in texts])
        for transcript in scored:
            if transcript.error is not None:
                raise EngineError(f"the text could not be scored: {transcript.error}") from transcript.error
        return [transcript.prompt_logprobs for transcript in scored]

    def save_cache(self, path: str | Path, tokens: Prompt) -> int:
        """Write what the cache still has of a text to a file; how many tokens from its start the file spares.

        Less than a page leaves no file, and 0. Raises CacheFileError where it cannot be written; an older file at that
        place is then unchanged.
        """
        ids, scaling = self._requests.ids(tokens), getattr(self.config.positions, "scaling", None)
        if isinstance(scaling, DynamicScaling) and len(ids) > scaling.original_context:
            return 0  # its angles depend on how long it could become, which a file could not tell
        return save_pages(Path(path), self._open_loop(), self._store, ids, self._requests.salt(len(ids)), self._about)

    def load_cache(self, path: str | Path) -> int:
        """Read a file of `save_cache`: texts that begin as its text does are not computed up to there.

        Returns how many tokens that are. Raises CacheFileError for a file that is damaged or was saved by another
        model or another kind of cache, CapacityError where the cache has no room for it.
        """
        return load_pages(Path(path), self._open_loop(), self._store, self._requests.salt, self._about)

    @cached_property
    def _about(self) -> Mapping[str, str]:
        """What a cache file must agree with. Weights are read through once for it; those in memory do not change."""
        form = {"dtype": self.dtype, "weights' form": str(self.weights), "kernels": self.kernels}
        return about(self.loaded.checkpoint, form, self.specs, self.options.page_size)

    def close(self) -> None:
        """Give the memory back. Texts that are being written fail; the object cannot be used afterwards."""
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
        if (threads := torch.get_num_threads()) != self._threads:  # a thread of its own has a number of its own
            self._threads = threads
            loop.post(lambda _: torch.set_num_threads(threads))
        return loop.submit(requests, listener, paused=paused)

    def _finish(self, requests: Sequence[Request]) -> list[Transcript]:
        """Submit requests together and wait until all have ended, well or not."""
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
    """What `close` does, without waiting: for an LLM that is dropped without it."""
    loop.stop()
    preparing.shutdown(wait=False, cancel_futures=True)
    loaded.leave()
