"""LLM, the Python API, loads a model and generates text from prompts."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from tokenwright.checkpoints.files.pooling import Pooling
from tokenwright.checks import check_whole, folders, hinting
from tokenwright.config import EngineConfig
from tokenwright.engine import SamplingParams
from tokenwright.engine.driver import CallersThread, EngineThread
from tokenwright.engine.pictures import Spans
from tokenwright.errors import RequestError
from tokenwright.formats import KVFormat, WeightFormat
from tokenwright.llm import scoring
from tokenwright.llm.asking import ModelEngine, afinish, finish, in_thread, transcript
from tokenwright.llm.chat.chat_view import ChatView
from tokenwright.llm.engine import LLMEngine, specs_of
from tokenwright.llm.input_processor import Prompt, RequestOptions
from tokenwright.llm.model import LoadedModel
from tokenwright.llm.output_processor import Stream, completions_of, progress_bar
from tokenwright.llm.outputs import Completion, Piece
from tokenwright.units import read_bytes

if TYPE_CHECKING:
    from tokenwright.llm.run import Run
    from tokenwright.trace.summary import StepSums


MOST_THREADS = 4096


class LLM(ChatView):
    """A model with its tokenizer and KV cache. Thread-safe; the engine batches the requests of all threads.

    model: a folder, a hub name such as "Qwen/Qwen3-0.6B" (`revision`: a branch, tag or commit), or "stories", the small
        model in the package; or the `loaded` model of another LLM, to open a second engine over it.
    device: auto, cpu, cuda, cuda:N or mps.
    dtype: auto (the checkpoint's; float32 with reference kernels on the CPU), float32, bfloat16 or float16. Native
        kernels store weights and cache in it and compute in float32.
    weights: storage format of matrices: native (`dtype`), int8 or int4, perhaps with a group, such as int8:32.
        Quantised weights are saved in the cache folder for quick loads.
    kv: storage format of K and V: native (the dtype of the computation), float32, bfloat16, float16, fp8, int8 or int4,
        or "k=int8,v=int4"; append first=64 to keep the first tokens native, native=0+-1 for these layers.
    window: attention window in tokens for every layer, besides the model's own; expired pages are freed, and rotary
        models can exceed their context. sinks: first tokens that every token attends to beyond the window.
    page_size: tokens of a KV page. pages or kv_memory (bytes, or "2GB"): size of the cache; by default an eighth of the
        free memory, at most 4 GiB and `max_sequences` full contexts.
    kv_disk: a folder, which processes may share, in which the prefix cache outlives the process, of at most
        kv_disk_size bytes (20 GB). "auto": nameless files that are gone when the process ends.
    pinned: the share of pages for prefixes that clients of a server pin.
    token_budget: tokens computed in one step. max_sequences: sequences running at once.
    speculate: compute tokens ahead where earlier text repeats itself ("suffix"), also those that a layer in the model's
        files guesses (multi-token prediction, "mtp"), or not ("off"). Texts and log-probabilities are equal to the bit.
        draft: a smaller model of the same tokenizer, which drafts where neither earlier text nor a grammar does;
        draft_weights: the storage format of its matrices.
    lora: folders of LoRA adapters (PEFT) that are merged into the weights as they are read. adapters: folders by name,
        kept beside the weights: a request chooses one, or none.
    mmproj: the GGUF file of the tower that reads pictures; None: the one in a GGUF model's folder.
    report: called with (bytes read, bytes in total) while the weights are read; downloads then show progress bars.
    threads: how many compute; None: one per core, or as many as OMP_NUM_THREADS says; 0: the thread that waits for a
        text computes, for platforms without threads; then only one thread may use the LLM and others over its model.
    tensor_parallel: processes that compute the model together, 1, 2, 4 or 8; they divide threads, weights and KV heads.
        All numbers of processes give the same bits.
    expert_memory: bytes (8GB) for the experts of a mixture larger than memory; they are read from a file as tokens need
        them. None: all free memory, if the model does not fit.
    gpu_layers: how many last layers device gpu computes, or a size (8GB) for their weights; the CPU has the others.
    trace: count and time the engine's work, as `run` requires.

    Raises CheckpointError for a model that cannot be read or computed, CapacityError if memory does not suffice,
    RequestError for an option out of range.
    """

    @hinting
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
        kv_disk: str | Path | None = None,
        kv_disk_size: int | str | None = None,
        pinned: float = 0.5,
        token_budget: int = 512,
        max_sequences: int = 64,
        speculate: str = "suffix",
        draft: str | Path | None = None,
        draft_weights: str = "native",
        report: Callable[[int, int], None] | None = None,
        trace: bool = False,
        threads: int | None = None,
        lora: Sequence[str | Path] = (),
        adapters: Mapping[str, str | Path] = MappingProxyType({}),
        tensor_parallel: int = 1,
        mmproj: str | Path | None = None,
        expert_memory: int | str | None = None,
        gpu_layers: int | str | None = None,
    ) -> None:
        if threads is not None:
            check_whole("threads", threads, 0, MOST_THREADS)
        options = EngineConfig(
            page_size=page_size,
            pages=pages,
            kv_memory=None if kv_memory is None else _bytes(kv_memory, "kv_memory"),
            token_budget=token_budget,
            max_sequences=max_sequences,
            kv=kv if isinstance(kv, KVFormat) else KVFormat.parse(kv),
            window=window,
            sinks=sinks,
            kv_disk=str(kv_disk) if isinstance(kv_disk, Path) else kv_disk,
            kv_disk_size=None if kv_disk_size is None else _bytes(kv_disk_size, "kv_disk_size"),
            pinned=pinned,
            speculate=speculate,
            draft=str(draft) if isinstance(draft, Path) else draft,
            draft_weights=draft_weights,
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
                tensor_parallel=tensor_parallel,
                mmproj=mmproj,
                expert_memory=expert_memory,
                gpu_layers=gpu_layers,
                driven=CallersThread if threads == 0 else EngineThread,
            )
        elif (revision, device, dtype, weights, report, trace) != (None, "auto", "auto", "native", None, False) or (
            lora or adapters or mmproj or tensor_parallel != 1 or expert_memory is not None or gpu_layers is not None
        ):
            raise RequestError(
                "revision, device, dtype, weights, report, trace, lora, adapters, mmproj, tensor_parallel, "
                "expert_memory and gpu_layers say how a model is loaded, and this one is; leave them out"
            )
        super().__init__(LLMEngine(model, options, threads))

    @classmethod
    def over(cls, engine: ModelEngine) -> "LLM":
        made = cls.__new__(cls)
        ChatView.__init__(made, engine)
        return made

    @hinting
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

        sampling: fields of SamplingParams, such as max_tokens=50, in place of `params`' or of the checkpoint's
        defaults. adapter: the name of one of the LLM's `adapters`; None: the model as it is. A prefix in common with
        earlier texts of the same salt and adapter is not recomputed. With n > 1 the pieces of all texts interleave,
        each with its text's number; `generate` does best_of and beam search. Raises RequestError, ContextError or
        CapacityError immediately for a request that cannot be served.
        """
        engine, inbox = self.llm_engine, self.llm_engine.inbox()
        params, options = engine.inputs.params(params, sampling), RequestOptions(cache, salt, adapter)
        [handle] = engine.submit([engine.inputs.streamed(prompt, params, options)], inbox)
        return Stream(handle, inbox, transcript(engine, handle), owner=engine)

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
        """`stream` for asyncio. Long prompts are tokenised, and grammars compiled, in another thread."""
        engine, inputs = self.llm_engine, self.llm_engine.inputs
        params = inputs.params(params, sampling)
        prepare = partial(inputs.streamed, prompt, params, RequestOptions(cache, salt, adapter))
        request = prepare() if inputs.quick(prompt, params) else await in_thread(engine, prepare)
        async with aclosing(self._apieces(request)) as pieces:
            async for piece in pieces:
                yield piece

    @hinting
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        cache: bool = True,
        salt: str = "",
        adapter: str | Sequence[str | None] | None = None,
        progress: bool = False,
        observe: bool | Sequence[tuple[int, int]] = False,
        **sampling: Any,
    ) -> list[Completion]:
        """Continue every prompt, in one batch; return the completions in the order of the prompts.

        `params`, `adapter`: one for all prompts or one per prompt; the rest and the errors as in `stream`. observe:
        True, or a list of (layer, head), gives each completion its `observed`: the hidden states of all layers, and the
        attention of these heads, computed once more. progress: show a bar on stderr. Raises EngineError, with the other
        completions, if a prompt failed.
        """
        engine = self.llm_engine
        heads = None
        if observe is not False:
            from tokenwright.trace.observed_text import check_heads  # here: it loads the replay

            heads = check_heads(observe, self.config.layers, self.config.heads, self.llm_engine.facts.graph.recurrent)
        if heads is not None and adapter is not None:
            raise RequestError("observe looks at the model without adapters; merge one with the option lora", "observe")
        requests = engine.inputs.batch(prompts, params, sampling, RequestOptions(cache, salt), adapter)
        if progress:
            with progress_bar(len(requests)) as report:
                ended = finish(engine, requests, at_end=False, report=report)
        else:
            ended = finish(engine, requests)
        done = completions_of(ended)
        if heads is None:
            return done
        return [
            engine.local("generate(observe=...)").observed(request, one, heads)
            for request, one in zip(requests, done, strict=True)
        ]

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
        engine, options = self.llm_engine, RequestOptions(cache, salt)
        requests = partial(engine.inputs.batch, prompts, params, sampling, options, adapter)
        return completions_of(await afinish(engine, await in_thread(engine, requests)))

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
        earlier: "Sequence[StepSums]" = (),
        pictures: Spans = (),
        **sampling: Any,
    ) -> "Run":
        """Generate one text step by step, with a frame of every step; the first `Run.step` begins to compute.

        layer, head: the attention row in each frame. written: tokens already generated after the prompt, to continue a
        lost run; with the same seed the rest is the same. first_step: the number of the first frame. earlier: the lost
        run's frames, for the summary. pictures: in the prompt, as `render` returns them beside the ids. Raises
        RequestError for an LLM without trace=True, for a layer or head out of range, for frames of another text, and as
        `stream`, whose `sampling` it takes.
        """
        from tokenwright.llm.run import start_run  # here: it loads the trace

        return start_run(
            self.llm_engine.local("run"),
            prompt,
            self.llm_engine.inputs.params(params, sampling),
            cache=cache,
            written=written,
            watched=(layer, head),
            first_step=first_step,
            earlier=earlier,
            pictures=pictures,
        )

    def fork(self, run: "Run", step: int, token: int | None = None, **sampling: Any) -> "Run":
        """Go on from an earlier step of a run, which stays as it is: a new run on the same pages.

        The last page up to there is copied before one of the two writes to it; freed pages are recomputed if not
        cached. token: in place of the step's own. sampling: fields of SamplingParams in place of the run's; max_tokens
        counts from the prompt. Raises RequestError for a step that does not exist or chose no token, for a text that
        would end at once, and for a run of another LLM; and as `run` does.
        """
        from tokenwright.llm.run import fork_run

        return fork_run(self.llm_engine.local("fork"), run, step, token, sampling)

    @overload
    def score(self, prompt: Prompt) -> NDArray[np.float64]: ...

    @overload
    def score(self, prompt: Prompt, continuations: Sequence[Prompt]) -> list[NDArray[np.float64]]: ...

    @hinting
    def score(
        self, prompt: Prompt, continuations: Sequence[Prompt] | None = None
    ) -> NDArray[np.float64] | list[NDArray[np.float64]]:
        """The model's log-probability (natural) of each token of the prompt after the first, [tokens - 1].

        With continuations: for each of them the log-probabilities [n] of its n tokens after the prompt, whose pages
        they share. Raises RequestError, EngineError.
        """
        return scoring.score(self.llm_engine, prompt, continuations)

    @hinting
    def embed(
        self, texts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None, normalize: bool | None = None
    ) -> NDArray[np.float32]:
        """The embedding of each text: its tokens' hidden states after the final norm, pooled, [texts, width].

        One batch of independent texts, tokenised as prompts are, with special tokens. pooling: "mean", "last" or
        "first"; None: as the checkpoint's files say, else the mean. normalize: scale the rows to unit length; None: as
        the files say, else not. Raises RequestError for a text without tokens, ContextError or CapacityError for one
        that is too long, EngineError if one failed.
        """
        return scoring.embed(self.llm_engine, texts, pooling, normalize)

    async def aembed(
        self, texts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None, normalize: bool | None = None
    ) -> NDArray[np.float32]:
        """`embed` for asyncio."""
        return await scoring.aembed(self.llm_engine, texts, pooling, normalize)

    @hinting
    def rerank(self, query: str, documents: Sequence[str], *, instruction: str = "") -> NDArray[np.float64]:
        """The relevance of each document to the query, [documents], computed in one batch.

        A reranker that answers yes or no gives the probability of yes; any other model the cosine of the embeddings.
        instruction: the task, for models trained with one. Raises the errors of `embed`.
        """
        return scoring.rerank(self.llm_engine, self.relevance, query, documents, instruction)


def _bytes(size: int | str, name: str) -> int:
    return read_bytes(size, name) if isinstance(size, str) else size
