"""LLM: the Python API. It loads a model, and generates text from prompts."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenwright.checks import check_bool, check_whole, folders
from tokenwright.config import EngineConfig
from tokenwright.engine import Request, SamplingParams
from tokenwright.engine.loop import Inbox
from tokenwright.errors import EngineError, RequestError
from tokenwright.formats import KVFormat, WeightFormat
from tokenwright.llm.engine import specs_of
from tokenwright.llm.input_processor import Prompt, prompts_of
from tokenwright.llm.model import LoadedModel
from tokenwright.llm.output_processor import OutputProcessor
from tokenwright.llm.outputs import Completion, Piece
from tokenwright.llm.scoring import ScoringModel
from tokenwright.llm.streams import Stream
from tokenwright.progress import progress_bar
from tokenwright.text import Message, Rendered
from tokenwright.text.messages import check_messages
from tokenwright.units import read_bytes

if TYPE_CHECKING:
    from tokenwright.llm.run import Run, Start
    from tokenwright.trace.summary import StepSums


class LLM(ScoringModel):
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
    page_size: tokens of a KV page. pages or kv_memory (bytes, or "2GB"): the size of the cache; by default an eighth of
        the free memory, 4 GiB at most, and no more than `max_sequences` full contexts. swap_memory: bytes of RAM to
        swap out K and V of sequences that are preempted when pages run out; without it they are recomputed.
    token_budget: tokens computed in one step. max_sequences: sequences running at once.
    lora: folders of LoRA adapters (PEFT) that are merged into the weights as they are read.
    adapters: folders of LoRA adapters that are kept beside the weights, by name: a request chooses one, or none.
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
        kv_memory: int | str | None = None,
        swap_memory: int | str = 0,
        token_budget: int = 512,
        max_sequences: int = 64,
        report: Callable[[int, int], None] | None = None,
        trace: bool = False,
        lora: Sequence[str | Path] = (),
        adapters: Mapping[str, str | Path] = MappingProxyType({}),
    ) -> None:
        form = kv if isinstance(kv, KVFormat) else KVFormat.parse(kv)
        kv_memory = read_bytes(kv_memory, "kv_memory") if isinstance(kv_memory, str) else kv_memory
        swap_memory = read_bytes(swap_memory, "swap_memory") if isinstance(swap_memory, str) else swap_memory
        options = EngineConfig(
            page_size, pages, kv_memory, token_budget, max_sequences, form, window, sinks, swap_memory
        )
        if not isinstance(model, LoadedModel):
            model = LoadedModel(
                model,
                revision=revision,
                device=device,
                dtype=dtype,
                weights=weights,
                report=report,
                trace=trace,
                check=partial(specs_of, options),
                lora=folders("lora", lora),
                adapters=adapters,
            )
        elif (revision, device, dtype, weights, report, trace) != (None, "auto", "auto", "native", None, False) or (
            lora or adapters
        ):
            raise RequestError(
                "revision, device, dtype, weights, report, trace, lora and adapters say how a model is loaded, and "
                "this one is; leave them out"
            )
        super().__init__(model, options)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: bool = True,
        salt: str = "",
        adapter: str | None = None,
        **sampling: Any,
    ) -> Stream:
        """Generate text, piece by piece. `cache=False` is the naive loop: every step recomputes all tokens.

        sampling: fields of SamplingParams, such as max_tokens=50: instead of those of `params`, or of the checkpoint's
        defaults.

        With n > 1 the pieces of all texts interleave, each with the number of its text. best_of and beam search know
        their texts only at the end; use `generate` for them.

        A prefix in common with earlier texts is not recomputed; texts of different `salt` share no pages.

        adapter: one of the LLM's `adapters`, by its name; None: the model as it is. Texts of different adapters share
        no pages.

        Raises RequestError, ContextError or CapacityError immediately for a request that cannot be served.
        """
        inbox = Inbox()
        [handle] = self._submit(
            [self._streamed(prompt, self._requests.params(params, sampling), cache, salt, adapter)], inbox
        )
        return Stream(handle, inbox, self._transcript(handle), owner=self)

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: bool = True,
        salt: str = "",
        adapter: str | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[Piece, None]:
        """`stream` for asyncio. The event loop is called once per step, whatever the number of streams.

        A long prompt is tokenised, and a grammar compiled, in another thread.
        """
        its = self._requests.params(params, sampling)
        prepare = partial(self._streamed, prompt, its, cache, salt, adapter)
        request = prepare() if self._requests.quick(prompt, its) else await self._prepared(prepare)
        [handle] = self._submit([request], self._async_streams.listener())
        with self._async_streams.open(handle, self._transcript(handle)) as stream:
            while (pieces := await stream.pieces()) is not None:
                for piece in pieces:
                    yield piece

    def _streamed(self, prompt: Prompt, params: SamplingParams, cache: bool, salt: str, adapter: str | None) -> Request:
        if params.beams > 1 or params.choices > params.n:
            raise RequestError(
                "best_of and beam search know their texts at the end alone; use generate instead of stream"
            )
        return self._requests.build(prompt, params, cache=cache, salt=salt, adapter=adapter)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        cache: bool = True,
        salt: str = "",
        adapter: str | Sequence[str | None] | None = None,
        progress: bool = False,
        **sampling: Any,
    ) -> list[Completion]:
        """Continue every prompt, in one batch; returns the completions in the order of the prompts.

        `params`, `adapter`: one for all prompts or one per prompt; `cache`, `salt` and `sampling` as in `stream`, and
        the same errors. progress: show a bar on stderr. Raises EngineError if a prompt failed in the engine; it has the
        completions of the others.
        """
        requests = self._batch(prompts, params, cache, salt, adapter, sampling)
        if not progress:
            return _completions(self._finish(requests))
        with progress_bar(len(requests)) as report:
            return _completions(self._finish(requests, at_end=False, report=report))

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        cache: bool = True,
        salt: str = "",
        adapter: str | Sequence[str | None] | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """`generate` for asyncio. A task that is cancelled cancels its requests."""
        prepare = partial(self._batch, prompts, params, cache, salt, adapter, sampling)
        return _completions(await self._afinish(await self._prepared(prepare)))

    def _batch(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None,
        cache: bool,
        salt: str,
        adapter: str | Sequence[str | None] | None,
        sampling: Mapping[str, Any],
    ) -> list[Request]:
        texts = prompts_of(prompts)
        if params is None or not isinstance(params, Sequence):
            each = [self._requests.params(params, sampling)] * len(texts)
        else:
            each = [self._requests.params(one, sampling) for one in params]
        if len(each) != len(texts):
            raise RequestError(
                f"{len(texts)} prompts came with {len(each)} sampling params; give one for all or one each"
            )
        if isinstance(adapter, Sequence) and not isinstance(adapter, str):
            adapters = list(adapter)
        else:
            adapters = [adapter] * len(texts)
        if len(adapters) != len(texts):
            raise RequestError(f"{len(texts)} prompts came with {len(adapters)} adapters; give one for all or one each")
        return [
            self._requests.build(text, its, cache=cache, salt=salt, adapter=name)
            for text, its, name in zip(texts, each, adapters, strict=True)
        ]

    def render(self, messages: Sequence[Message], markup: bool = False) -> Rendered:
        """The prompt of a conversation: its text, for display, and its ids. A message has "role" and "content".

        markup: encode control tokens that are written in the messages as control tokens; by default they are text.
        Raises RequestError if the model has no chat template, or if that refuses the messages or fails.
        """
        check_bool("markup", markup)
        template, checked = self.template, check_messages(messages)
        for message in checked:
            self._requests.check_length(message["content"])
        return template.render(checked, markup=markup)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        markup: bool = False,
        salt: str = "",
        adapter: str | None = None,
        **sampling: Any,
    ) -> Completion:
        """The model's answer in a conversation: `generate` with the ids of `render`. Raises the errors of both."""
        [completion] = self.generate(
            [self.render(messages, markup).ids], params, salt=salt, adapter=adapter, **sampling
        )
        return completion

    def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        markup: bool = False,
        salt: str = "",
        adapter: str | None = None,
        **sampling: Any,
    ) -> Stream:
        """The answer of `chat`, piece by piece: `stream` with the ids of `render`. Raises the errors of both."""
        return self.stream(self.render(messages, markup).ids, params, salt=salt, adapter=adapter, **sampling)

    async def achat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        markup: bool = False,
        salt: str = "",
        adapter: str | None = None,
        **sampling: Any,
    ) -> Completion:
        """`chat` for asyncio."""
        rendered = await self._prepared(partial(self.render, messages, markup))
        [completion] = await self.agenerate([rendered.ids], params, salt=salt, adapter=adapter, **sampling)
        return completion

    async def achat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        markup: bool = False,
        salt: str = "",
        adapter: str | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[Piece, None]:
        """`chat_stream` for asyncio."""
        rendered = await self._prepared(partial(self.render, messages, markup))
        async with aclosing(self.astream(rendered.ids, params, salt=salt, adapter=adapter, **sampling)) as pieces:
            async for piece in pieces:
                yield piece

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
        earlier: Sequence[StepSums] = (),
        **sampling: Any,
    ) -> Run:
        """Generate one text step by step, with a frame of every step; the first `Run.step` begins to compute.

        layer, head: the attention row in each frame. written: tokens already generated after the prompt, to continue a
        lost run; with the same seed the rest is the same. first_step: the number of the first frame. earlier: the lost
        run's frames, for the summary. sampling: as in `stream`. Raises RequestError if this LLM was opened without
        trace=True, for a layer or head out of range, for earlier frames of another text, and as `stream` does.
        """
        check_whole("first_step", first_step)
        params = self._of_one_text(params, sampling)
        from tokenwright.llm.run import Start

        ids, salt = self._requests.ids(prompt), secrets.token_hex(8)  # it finds no page of another text
        request = self._requests.build(ids, params, cache=cache, written=written, salt=salt)
        params = replace(params, seed=request.params.seed)
        return self._run(request, Start(tuple(ids), params, salt, (layer, head), first_step, tuple(earlier)))

    def fork(self, run: Run, step: int, token: int | None = None, **sampling: Any) -> Run:
        """Go on from an earlier step of a run, which itself stays as it is: a run of its own, on the same pages.

        The last page of the text up to there is copied when one of the two writes to it, unless it is full. A run whose
        pages were freed is computed again, as far as they are not cached.
        token: what is written at that step, instead of the step's own. sampling: fields of SamplingParams, instead of
        the run's; max_tokens counts from the prompt. Raises RequestError for a step that does not exist or chose no
        token, for a text that would end at once, and for a run of another LLM; and as `run` does.
        """
        params = self._of_one_text(run.start.params, sampling)
        if not run.computed_by(self._open_loop()):
            raise RequestError("this run is another LLM's; fork it with the LLM that made it")
        from tokenwright.llm.run import Start

        start, context = run.start, run.context(step)
        last = run.tokens[context] if token is None else token
        written = self._requests.ids([*run.tokens[len(start.prompt) : context], last])
        if len(written) >= params.max_tokens:
            raise RequestError(f"max_tokens is {params.max_tokens}, which step {step + 1} reaches; raise it")
        request = self._requests.build(start.prompt, params, cache=run.cache, written=written, salt=start.salt)
        if request.stop_checker.stopped is not None or (last in self.eos_ids and not params.ignore_eos):
            raise RequestError(f"the text ends with the token {last} at step {step + 1}; take another token or step")
        request = replace(request, parent=run.sequence, shared=context)
        params = replace(params, seed=request.params.seed)
        return self._run(request, Start(start.prompt, params, start.salt, run.watched, step + 1))

    def _of_one_text(self, params: SamplingParams | None, sampling: Mapping[str, Any]) -> SamplingParams:
        """The parameters of a run. Raises RequestError for several texts, and if this LLM records nothing."""
        its = self._requests.params(params, sampling)
        if max(its.choices, its.beams) > 1 or its.mirostat:  # a fork of a run does not know Mirostat's state
            raise RequestError("a run follows one text from any step; leave n, best_of, beams and mirostat out")
        if self._recorder is None:
            raise RequestError('this LLM records nothing; open it with LLM(..., trace=True), or use "stream"')
        return its

    def _run(self, request: Request, start: Start) -> Run:
        from tokenwright.llm.run import Run
        from tokenwright.llm.run_trace import trace_of

        recorder, replay = self._recorder, self._replay
        assert recorder is not None and replay is not None, "a traced LLM has both"
        inbox = Inbox()
        [handle] = self._submit([request], inbox, paused=True)
        try:
            run = Run(self._open_loop(), handle, inbox, self._transcript(handle), recorder, replay, start)
        except RequestError:
            handle.cancel()
            raise
        run.describe, run.constraints = partial(trace_of, self), self._requests.constraints
        return run


def _completions(written: Sequence[OutputProcessor]) -> list[Completion]:
    """The completions of ended requests. Raises EngineError, with those of the others, if one failed."""
    completions = [None if one.error else one.completion() for one in written]
    for transcript in written:
        if transcript.error is not None:
            raise EngineError(f"a prompt failed: {transcript.error}", completions) from transcript.error
    return [completion for completion in completions if completion is not None]
