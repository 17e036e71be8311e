"""LLM: the front door in Python. It loads a model, and turns prompts into text."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from tokenwright.cache import TORCH_DTYPES, KVStore, layer_specs
from tokenwright.completion import Completion, Piece
from tokenwright.config import DTYPE_BYTES, DType, EngineConfig
from tokenwright.decode import TextGuard, TorchSampler
from tokenwright.driver import Driver, Job
from tokenwright.engine import Engine, PagePool, Request, SamplingParams, Scheduler
from tokenwright.errors import CapacityError, EngineError, RequestError
from tokenwright.kernels import ReferenceKernels
from tokenwright.models.checkpoint import Checkpoint
from tokenwright.models.decoder import Decoder
from tokenwright.models.device import free_memory, resolve_device, resolve_dtype
from tokenwright.models.look import Looker
from tokenwright.models.runner import Model, TorchRunner
from tokenwright.run import Run
from tokenwright.text import TextStream, Tokenizer
from tokenwright.trace.cost import CostModel
from tokenwright.trace.counted import CountedKernels
from tokenwright.trace.recorder import Recorder, device_clock

Prompt = str | Sequence[int]  # text, or token ids

_MOST_KV_MEMORY = 4 * 2**30


class Stream:
    """The pieces of one text as they are written. Dropping or closing it early frees its pages.

    `completion` is what has been written so far; it is final once the iteration has ended.
    """

    def __init__(self, driver: Driver, job: Job) -> None:
        self._driver = driver
        self._job = job

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        piece = self._driver.fetch(self._job)
        if piece is None:
            raise StopIteration
        return piece

    @property
    def completion(self) -> Completion:
        return self._driver.completion(self._job)

    def close(self) -> None:
        """End the text here. Pieces that were written already can still be fetched."""
        self._driver.abort(self._job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class LLM:
    """A model with its tokenizer and its KV cache, ready to write. Thread-safe; requests of all threads are batched.

    model: a folder, a hub name such as "Qwen/Qwen3-0.6B" (`revision` picks a branch, tag or commit), or "stories",
        the small model that ships inside.
    device: auto, cpu, cuda, cuda:N or mps.
    dtype: auto (float32 on the CPU, elsewhere the checkpoint's), float32, bfloat16 or float16.
    page_size: tokens of a KV page. pages or kv_memory (bytes): the size of the cache; by default an eighth of
        the free memory, 4 GiB at most, and no more than `max_sequences` full contexts.
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
        page_size: int = 16,
        pages: int | None = None,
        kv_memory: int | None = None,
        token_budget: int = 512,
        max_sequences: int = 64,
        report: Callable[[int, int], None] | None = None,
        trace: bool = False,
    ) -> None:
        options = EngineConfig(page_size, pages, kv_memory, token_budget, max_sequences)
        place = resolve_device(device)
        checkpoint = Checkpoint.open(model, revision, progress=report is not None)
        self.config = checkpoint.config
        self.generation = checkpoint.generation
        self.device = str(place)
        self.dtype: DType = resolve_dtype(dtype, self.config.dtype, place)
        self.tokenizer = Tokenizer.load(checkpoint.path, vocab_size=self.config.vocab_size)
        self.eos_ids = frozenset((*self.generation.eos_ids, *self.tokenizer.eos_ids))
        _refuse_if_too_large(self.config.parameters * DTYPE_BYTES[self.dtype], place, self.dtype)
        weights = checkpoint.tensors(TORCH_DTYPES[self.dtype], place, report)
        counted = CountedKernels(ReferenceKernels()) if trace else None
        decoder = Decoder(self.config, counted or ReferenceKernels(), weights)
        del weights  # the decoder has joined some and holds the others: free what is left before the cache is sized
        self._model = Model(self.config, decoder, self.dtype, place)
        specs = layer_specs(self.config, self.dtype)
        self._bytes_per_token = sum(spec.bytes_per_token for spec in specs)
        self._looker = Looker(self.config, decoder, specs, place)
        runner, scheduler = self._runner(decoder, options, place)
        sampler = TorchSampler()
        self._recorder: Recorder | None = None
        self._driver: Driver | None
        if counted is None:
            engine = Engine(runner, sampler, scheduler, self.config.context)
            self._driver = Driver(engine, self.config.layers, self._bytes_per_token)
        else:
            recorder = self._recorder = Recorder(runner, sampler, counted.counts, self.costs, device_clock(place))
            engine = Engine(recorder, recorder, scheduler, self.config.context)
            self._driver = Driver(engine, self.config.layers, self._bytes_per_token, end_step=recorder.end_step)

    def _runner(self, decoder: Decoder, options: EngineConfig, place: torch.device) -> tuple[TorchRunner, Scheduler]:
        specs = layer_specs(self.config, self.dtype)
        pages = options.pages or self._default_pages(options, place)
        needed, free = pages * options.page_size * self._bytes_per_token, free_memory(place)
        if free is not None and needed > free:  # the system would grant it, and kill us when it is written to
            raise CapacityError(
                f"the KV cache of {pages} pages needs {needed} bytes, which {place} does not have ({free} are free); "
                "grant it less (pages or kv_memory)"
            )
        runner = TorchRunner(self.config, decoder, KVStore(specs, pages, options.page_size, place), place)
        return runner, Scheduler(PagePool(pages, options.page_size), options.token_budget, options.max_sequences)

    def _default_pages(self, options: EngineConfig, place: torch.device) -> int:
        page_bytes = options.page_size * self._bytes_per_token
        memory = options.kv_memory or min((free_memory(place) or _MOST_KV_MEMORY) // 8, _MOST_KV_MEMORY)
        most = options.max_sequences * -(-self.config.context // options.page_size)
        pages = min(memory // page_bytes - 1, most)  # the store has one page of its own
        if pages < 1:
            raise CapacityError(
                f"{memory} bytes hold no page of the KV cache, which takes {page_bytes}; grant more kv_memory"
            )
        return pages

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
        return CostModel(self.config, layer_specs(self.config, self.dtype))

    def sampling(self, **overrides: object) -> SamplingParams:
        """The checkpoint's own suggestions for sampling, with `overrides` in their place; None is no override."""
        suggested = {name: getattr(self.generation, name) for name in ("temperature", "top_k", "top_p")}
        given = {name: value for name, value in overrides.items() if value is not None}
        chosen = {name: value for name, value in (suggested | given).items() if value is not None}
        unknown = chosen.keys() - {field.name for field in fields(SamplingParams)}
        if unknown:
            raise RequestError(f"unknown sampling parameters: {', '.join(sorted(unknown))}")
        return SamplingParams(**chosen)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, cache: bool = True) -> Stream:
        """Write one text, piece by piece. `cache=False` is the naive loop: everything anew for every token.

        Raises RequestError (ContextError, CapacityError) at once for what cannot be served.
        """
        job = self._submit(prompt, params or self.sampling(), cache)
        return Stream(self._open_driver(), job)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache: bool = True
    ) -> AsyncIterator[Piece]:
        """`stream` for asyncio: the engine turns in a thread, the event loop stays free."""
        with await asyncio.to_thread(self.stream, prompt, params, cache=cache) as stream:  # it may wait for a turn
            while (piece := await asyncio.to_thread(next, stream, None)) is not None:
                yield piece

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: bool = True,
    ) -> list[Completion]:
        """Continue every prompt, in one batch; the completions come in the prompts' order.

        `params` is one for all or one for each. Raises EngineError if some prompt failed in the engine, with the
        others' completions in it.
        """
        texts = _prompts(prompts)
        each = [params] * len(texts) if isinstance(params, SamplingParams | None) else list(params)
        if len(each) != len(texts):
            raise RequestError(
                f"{len(texts)} prompts came with {len(each)} sampling params; give one for all or one each"
            )
        driver = self._open_driver()
        jobs: list[Job] = []
        try:
            for text, its_params in zip(texts, each, strict=True):
                jobs.append(self._submit(text, its_params or self.sampling(), cache))
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
        if self._recorder is None:
            raise RequestError('this LLM records nothing; open it with LLM(..., trace=True), or use "stream"')
        job = self._submit(prompt, params or self.sampling(), cache, written=written, held=True)
        try:
            return Run(self._open_driver(), job, self._recorder, self._looker, layer, head, first_step)
        except RequestError:
            self._open_driver().abort(job)
            raise

    def score(self, prompt: Prompt) -> list[float]:
        """The log-probability (natural) that the model gives each token of the prompt after the first."""
        driver = self._open_driver()
        params = SamplingParams(temperature=0.0, max_tokens=0)
        job = self._submit(prompt, params, cache=True, prompt_logprobs=True)
        try:
            driver.finish(job)
        finally:
            driver.abort(job)
        if job.error is not None:
            raise EngineError(f"the prompt could not be scored: {job.error}") from job.error
        return job.scores

    def close(self) -> None:
        """Give the memory back. Texts that are being written end; the object cannot be used afterwards."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()
            self._recorder = None
            del self._model, self._looker

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
        prompt_logprobs: bool = False,
        written: Sequence[int] = (),
        held: bool = False,
    ) -> Job:
        ids, more = self._ids(prompt), self._ids(written)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        if params.seed is None and not params.greedy:
            params = replace(params, seed=secrets.randbits(63))
        stream = TextStream(self.tokenizer, params.stop, ids)
        for token in more:
            stream.push(token)
        params = replace(params, max_tokens=max(0, params.max_tokens - len(more)))
        guard = TextGuard(stream, () if params.ignore_eos else self.eos_ids)
        request = Request((*ids, *more), params, guard, cache, prompt_logprobs)
        return self._open_driver().submit(request, guard, held=held)

    def _ids(self, prompt: object) -> list[int]:
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        for token in ids:
            if type(token) is not int or not 0 <= token < self.config.vocab_size:
                raise RequestError(
                    f"a prompt's token ids must be from 0 to {self.config.vocab_size - 1}, not {token!r}"
                )
        return ids

    def _open_driver(self) -> Driver:
        if self._driver is None:
            raise RequestError("this LLM is closed; open a new one")
        return self._driver


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, or token ids) or several, as a list of prompts."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    texts = [item for item in prompts if not isinstance(item, int)]
    if ids and texts:
        raise RequestError("token ids stand beside other prompts; put the ids of each prompt into a list of their own")
    return [ids] if ids else texts


def _refuse_if_too_large(needed: int, device: torch.device, dtype: DType) -> None:
    free = free_memory(device)
    if free is not None and needed > free:
        hint = "" if dtype != "float32" else "; --dtype bfloat16 halves it"
        raise CapacityError(
            f"the weights need {needed / 2**30:.1f} GiB in {dtype}, and {device} has {free / 2**30:.1f} GiB free{hint}"
        )
