"""LLM: the front door in Python. It loads a model, and turns prompts into text."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self, overload

import torch

from tokenwright.backends import ReferenceKernels
from tokenwright.backends.device import resolve_device, resolve_dtype
from tokenwright.backends.memory import make_store
from tokenwright.backends.native.kernels import find_kernels
from tokenwright.backends.runner import Model, TorchRunner
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.cache import LayerSpec, layer_specs
from tokenwright.checkpoints.fingerprint import about
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.positions import LONGEST
from tokenwright.completion import Completion, Piece
from tokenwright.config import DType, DynamicScaling, EngineConfig, KVFormat, Rope, WeightFormat
from tokenwright.decode import BeamSearch, TextGuard, TorchSampler
from tokenwright.driver import Driver, Job, Stream
from tokenwright.engine import Engine, PagePool, Request, SamplingParams, Scheduler
from tokenwright.errors import EngineError, RequestError
from tokenwright.loaded import make_decoder
from tokenwright.models.cost import CostModel
from tokenwright.restore import load_pages, save_pages
from tokenwright.run import Run
from tokenwright.sampling_params import DRAWING, check_unicode, shown
from tokenwright.text import ChatTemplate, Message, Rendered, TextStream, Tokenizer
from tokenwright.trace.counted import CountedKernels
from tokenwright.trace.recorder import Recorder, device_clock
from tokenwright.trace.replay import Looker
from tokenwright.vocabulary import Vocabulary

Prompt = str | Sequence[int]  # text, or token ids


class LLM:
    """A model with its tokenizer and its KV cache, ready to write. Thread-safe; requests of all threads are batched.

    model: a folder, a hub name such as "Qwen/Qwen3-0.6B" (`revision` picks a branch, tag or commit), or "stories",
        the small model that ships inside.
    device: auto, cpu, cuda, cuda:N or mps.
    dtype: auto (the checkpoint's; float32 with reference kernels on the CPU), float32, bfloat16 or float16. Native
        kernels keep weights and cache in it and compute in float32.
    weights: how matrices are kept: native (`dtype`), int8 or int4, or with its group, such as int8:32. What was
        quantised is kept in a cache folder, so that the next time is quick.
    kv: how K and V are kept: native (the dtype that is computed in), float32, bfloat16, float16, fp8, int8 or int4, or
        "k=int8,v=int4"; after it first=64 keeps the first tokens native, native=0+-1 these layers.
    window: the most tokens that a layer reads back, on top of the model's own windows; its pages are given back, and
        rotary models go on past their context. sinks: first tokens that stay in reach all the same.
    page_size: tokens of a KV page. pages or kv_memory (bytes): the size of the cache; by default an eighth of
        the free memory, 4 GiB at most, and no more than `max_sequences` full contexts. swap_memory: bytes of RAM for
        the K and V of texts that are put off when pages run out; without it they are computed again.
    token_budget: tokens computed in one step. max_sequences: texts written at once.
    report: called with (bytes done, bytes in all) while the weights are read; a download then shows its bars too.
    trace: count and time what the engine does, so that `run` can show it.

    Raises CheckpointError for a model that cannot be read as it is, CapacityError where memory does not suffice,
    RequestError for an option out of range.
    """

    def __init__(
        self,
        model: str | Path = "stories",
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
        options = EngineConfig(
            page_size,
            pages,
            kv_memory,
            token_budget,
            max_sequences,
            kv if isinstance(kv, KVFormat) else KVFormat.parse(kv),
            window,
            sinks,
            swap_memory,
        )
        place = resolve_device(device)
        checkpoint = Checkpoint.open(model, revision, progress=report is not None)
        self.config, self.graph = checkpoint.config, checkpoint.graph
        self.generation = checkpoint.generation
        self.device = str(place)
        native = find_kernels() if place.type == "cpu" else None
        self.dtype: DType = resolve_dtype(dtype, self.config.dtype, place, native is not None)
        form = weights if isinstance(weights, WeightFormat) else WeightFormat.parse(weights)
        specs = self._specs_for(options)
        self.tokenizer = Tokenizer.load(checkpoint.path, vocab_size=self.config.vocab_size)
        self._template = None if self.tokenizer.chat_template is None else ChatTemplate(self.tokenizer)
        if self._template is not None:
            self._template.start()  # while the weights are read: its end tokens are asked for by the first text
        self._vocabulary = Vocabulary(self.tokenizer, self.config.vocab_size)
        counted = CountedKernels(native or ReferenceKernels()) if trace else None
        self.weights = (checkpoint.packed or form).resolved(self.dtype)
        self.kernels = "reference" if native is None else native.isa
        decoder = make_decoder(checkpoint, form, self.dtype, place, native, counted, report)
        self._checkpoint = checkpoint
        self._build(decoder, options, specs, counted)

    def beside(
        self,
        *,
        kv: str | KVFormat = "native",
        window: int | None = None,
        sinks: int = 0,
        page_size: int = 16,
        pages: int | None = None,
        token_budget: int = 512,
    ) -> "LLM":
        """A second engine over the same weights, with a KV cache of its own: to compare two ways of keeping it."""
        self._open_driver()
        form = kv if isinstance(kv, KVFormat) else KVFormat.parse(kv)
        options = EngineConfig(page_size, pages, None, token_budget, kv=form, window=window, sinks=sinks)
        other: LLM = object.__new__(type(self))
        shared = ("config", "graph", "generation", "device", "dtype", "weights", "kernels", "tokenizer", "eos_ids")
        for name in (*shared, "_template", "_vocabulary", "_checkpoint"):
            setattr(other, name, getattr(self, name))
        other._build(self._model.decoder, options, other._specs_for(options), None)
        return other

    def _specs_for(self, options: EngineConfig) -> tuple[LayerSpec, ...]:
        return layer_specs(self.graph, self.dtype, options.kv, options.window, options.sinks)

    def _build(
        self, decoder: Decoder, options: EngineConfig, specs: tuple[LayerSpec, ...], counted: CountedKernels | None
    ) -> None:
        """The engine around a decoder, and what looks into it."""
        place = torch.device(self.device)
        self.options = options
        self.specs = specs
        # A window reads no further than itself, so that its text may grow past the context that was trained.
        endless = options.window is not None and isinstance(self.config.positions, Rope)
        self.context = LONGEST if endless else self.config.context
        store, groups = make_store(specs, options, self.context, place)
        pool = PagePool(groups, options.page_size, store, repr(specs).encode(), options.swap_memory)
        scheduler = Scheduler(pool, options.token_budget, options.max_sequences)
        self._model = Model(self.config, decoder, specs, place)
        self._looker = Looker(self.config, decoder, specs, place)
        self._store = store
        runner, sampler = TorchRunner(self.config, decoder, store), TorchSampler()
        self._recorder: Recorder | None = None
        self._driver: Driver | None
        if counted is None:
            engine = Engine(runner, sampler, scheduler, self.context)
            self._driver = Driver(engine, self.config.layers, self.kv_bytes)
        else:
            recorder = self._recorder = Recorder(runner, sampler, counted.counts, self.costs, device_clock(place))
            engine = Engine(recorder, recorder, scheduler, self.context)
            self._driver = Driver(engine, self.config.layers, self.kv_bytes, end_step=recorder.end_step)

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
        self._open_driver()
        return self._model

    @property
    def engine(self) -> Engine[torch.Tensor]:
        """The engine underneath, to look at. It is not thread-safe; requests go through this class."""
        return self._open_driver().engine

    @property
    def costs(self) -> CostModel:
        """What steps of this model cost with this cache, derived from shapes."""
        return CostModel(self.graph, self.specs)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a text: those of the generation config, the tokenizer and the chat template."""
        ends = () if self._template is None else self._template.end_ids
        return frozenset((*self.generation.eos_ids, *self.tokenizer.eos_ids, *ends))

    @property
    def template(self) -> ChatTemplate:
        """What makes prompts of conversations. Raises RequestError for a model without a chat template."""
        return self._template or ChatTemplate(self.tokenizer)

    def sampling(self, **overrides: object) -> SamplingParams:
        """The checkpoint's own suggestions for sampling, with `overrides` in their place; None is no override.

        Beam search draws nothing: what is suggested for drawing is left out there.
        """
        names = {field.name for field in fields(SamplingParams)}
        given = {name: value for name, value in overrides.items() if value is not None}
        if unknown := given.keys() - names:
            raise RequestError(f"unknown sampling parameters: {', '.join(sorted(unknown))}")
        beams = given.get("beams", 1) != 1
        suggested = self.generation.sampling
        kept = {name: value for name, value in suggested.items() if not (beams and name in DRAWING)}
        if "min_tokens" in kept:  # a suggestion gives way to what is asked
            most = given.get("max_tokens", SamplingParams().max_tokens)
            kept["min_tokens"] = min(kept["min_tokens"], max(0, most)) if isinstance(most, int) else 0
        return SamplingParams(**{**kept, **given})

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
        params = self.sampling() if params is None else _params(params)
        if params.beams > 1 or params.choices > params.n:
            raise RequestError(
                "best_of and beam search know their texts at the end alone; use generate instead of stream"
            )
        job = self._submit(prompt, params, cache, salt=salt)
        return Stream(self._open_driver(), job)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache: bool = True, salt: str = ""
    ) -> AsyncIterator[Piece]:
        """`stream` for asyncio: the engine turns in a thread, the event loop stays free."""
        with await asyncio.to_thread(
            self.stream, prompt, params, cache=cache, salt=salt
        ) as stream:  # it may wait for a turn
            while (piece := await asyncio.to_thread(next, stream, None)) is not None:
                yield piece

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
        texts = _prompts(prompts)
        if params is None or not isinstance(params, Sequence):
            each = [self.sampling() if params is None else _params(params)] * len(texts)
        else:
            each = [self.sampling() if one is None else _params(one) for one in params]
        if len(each) != len(texts):
            raise RequestError(
                f"{len(texts)} prompts came with {len(each)} sampling params; give one for all or one each"
            )
        driver = self._open_driver()
        jobs: list[Job] = []
        try:
            for text, its_params in zip(texts, each, strict=True):
                jobs.append(self._submit(text, its_params, cache, salt=salt))
            for job in jobs:
                driver.finish(job)
        finally:
            for job in jobs:
                driver.abort(job)
        completions = [None if job.error else driver.completion(job) for job in jobs]
        for job in jobs:
            if job.error is not None:
                raise EngineError(f"a prompt failed: {job.error}", completions) from job.error
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
        if params is not None and max(_params(params).choices, params.beams) > 1:
            raise RequestError("a run follows one text; leave n, best_of and beams out")
        if self._recorder is None:
            raise RequestError('this LLM records nothing; open it with LLM(..., trace=True), or use "stream"')
        job = self._submit(prompt, params or self.sampling(), cache, written=written, held=True, share=False)
        try:
            return Run(self._open_driver(), job, self._recorder, self._looker, layer, head, first_step)
        except RequestError:
            self._open_driver().abort(job)
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
            return self._scores([self._ids(prompt)], 1)[0]
        if isinstance(continuations, str) or not isinstance(continuations, Sequence):
            raise RequestError("continuations are given as a list, also if it is only one")
        ids = self._ids(prompt)
        if not ids:
            raise RequestError("a continuation is scored after a prompt, and this one has no tokens")
        return self._scores([self._after(prompt, ids, one) for one in continuations], len(ids))

    def _after(self, prompt: Prompt, ids: list[int], continuation: Prompt) -> list[int]:
        """The ids of a prompt and what follows it, as one text where that leaves the prompt's own ids as they are."""
        if isinstance(prompt, str) and isinstance(continuation, str):
            whole = self.tokenizer.encode(prompt + continuation)
            if whole[: len(ids)] == ids:
                return whole
        if isinstance(continuation, str):
            return [*ids, *self.tokenizer.encode(continuation, add_special=False)]
        return [*ids, *self._ids(continuation)]

    def _scores(self, texts: Sequence[list[int]], start: int) -> list[list[float]]:
        """The log-probabilities of the tokens of each text from a position on, all in one batch."""
        driver, jobs = self._open_driver(), list[Job]()
        params = SamplingParams(temperature=0.0, max_tokens=0)
        try:
            jobs += [self._submit(text, params, cache=True, score_from=start) for text in texts]
            for job in jobs:
                driver.finish(job)
        finally:
            for job in jobs:
                driver.abort(job)
        for job in jobs:
            if job.error is not None:
                raise EngineError(f"the text could not be scored: {job.error}") from job.error
        return [job.scores for job in jobs]

    def save_cache(self, path: str | Path, tokens: Prompt) -> int:
        """Write what the cache still has of a text to a file; how many tokens from its start the file spares.

        Less than a page leaves no file, and 0. Raises CacheFileError where it cannot be written; an older file at that
        place is then unchanged.
        """
        ids, scaling = self._ids(tokens), getattr(self.config.positions, "scaling", None)
        if isinstance(scaling, DynamicScaling) and len(ids) > scaling.original_context:
            return 0  # its angles depend on how long it could become, which a file could not tell
        return save_pages(Path(path), self._open_driver(), self._store, ids, self._salt(len(ids)), self._about)

    def load_cache(self, path: str | Path) -> int:
        """Read a file of `save_cache`: texts that begin as its text does are not computed up to there.

        Returns how many tokens that are. Raises CacheFileError for a file that is damaged or was saved by another
        model or another kind of cache, CapacityError where the cache has no room for it.
        """
        return load_pages(Path(path), self._open_driver(), self._store, self._salt, self._about)

    @cached_property
    def _about(self) -> Mapping[str, str]:
        """What a cache file must agree with. Weights are read through once for it; those in memory do not change."""
        form = {"dtype": self.dtype, "weights' form": str(self.weights), "kernels": self.kernels}
        return about(self._checkpoint, form, self.specs, self.options.page_size)

    def close(self) -> None:
        """Give the memory back. Texts that are being written end; the object cannot be used afterwards."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()
            if self._template is not None:
                self._template.close()
            self._recorder = None
            self._vocabulary.close()
            del self._model, self._looker, self._store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        cache: bool,
        *,
        score_from: int | None = None,
        written: Sequence[int] = (),
        held: bool = False,
        share: bool = True,
        salt: str = "",
    ) -> Job:
        ids, more = self._ids(prompt), self._ids(written)
        params = _params(params)
        _check_salt(salt)
        if params.seed is None and not params.greedy and params.beams == 1:
            params = replace(params, seed=secrets.randbits(63))
        if params.prompt_logprobs is not None:
            score_from = 1
        guard = self._guard(params, ids)
        for token in more:
            guard.advance(token)
        guard.take()
        left = max(0, params.max_tokens - len(more))
        params = replace(params, max_tokens=left, min_tokens=min(left, max(0, params.min_tokens - len(more))))
        search = BeamSearch(params, guard) if params.beams > 1 else None
        driver = self._open_driver()
        request = Request(
            prompt=(*ids, *more),
            params=params,
            guard=guard if search is None else search,
            cache=cache,
            score_from=score_from,
            share=share,
            words=self._vocabulary.words(params, self.eos_ids),
            width=params.beams,
            search=search,
        )
        request = replace(request, salt=self._salt(request.limit(driver.engine.context), salt))
        return driver.submit(request, held=held)

    def _guard(self, params: SamplingParams, prompt: Sequence[int]) -> TextGuard:
        """What watches a text of these params behind a prompt."""
        asked = time.monotonic()
        self._vocabulary.check(params)
        constraint = None
        if params.grammar is not None:
            opens = all(self.tokenizer.token_bytes(token) is None for token in prompt)
            constraint = self._vocabulary.grammars(self.eos_ids).compile(params.grammar, opens=opens)
        return TextGuard(
            TextStream(self.tokenizer, params.stop, prompt, include_stop=params.include_stop),
            () if params.ignore_eos else self.eos_ids,
            params.stop_ids,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop,
            deadline=None if params.max_seconds is None else asked + params.max_seconds,
            constraint=constraint,
        )

    def _salt(self, limit: int, salt: str = "") -> bytes:
        """What parts texts with equal tokens: their owner, and angles that depend on how long a text may become."""
        positions = self.config.positions
        if isinstance(positions, Rope) and isinstance(positions.scaling, DynamicScaling):
            return f"{max(limit, positions.scaling.original_context)} {salt}".encode()
        return salt.encode()

    def _ids(self, prompt: object) -> list[int]:
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        for token in ids:
            if type(token) is not int or not 0 <= token < self.config.vocab_size:
                raise RequestError(
                    f"a prompt's token ids must be from 0 to {self.config.vocab_size - 1}, not {shown(token)}"
                )
        return ids

    def _open_driver(self) -> Driver:
        if self._driver is None:
            raise RequestError("this LLM is closed; open a new one")
        return self._driver


def _params(params: object) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
    return params


def _check_salt(salt: object) -> None:
    if not isinstance(salt, str):
        raise RequestError(f"a salt is text, not {type(salt).__name__}")
    check_unicode("the salt", salt)


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, or token ids) or several, as a list of prompts."""
    if isinstance(prompts, str | bytes | bytearray) or not isinstance(prompts, Sequence):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    texts = [item for item in prompts if not isinstance(item, int)]
    if ids and texts:
        raise RequestError("token ids stand beside other prompts; put the ids of each prompt into a list of their own")
    return [ids] if ids else texts
