"""The attributes and methods of LLM that its engine answers: facts of the model and the cache."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from tokenwright.backends.runner import Model
from tokenwright.checks import no_attribute
from tokenwright.engine import Engine, Request
from tokenwright.engine.port import Listener, RequestHandle
from tokenwright.errors import RequestError
from tokenwright.llm.asking import ModelEngine, transcript
from tokenwright.llm.input_processor import Prompt, RequestOptions
from tokenwright.llm.model import LoadedModel
from tokenwright.llm.output_processor import OutputProcessor
from tokenwright.llm.scoring import Relevance
from tokenwright.models.cost import CostModel
from tokenwright.sampling_params import SamplingParams
from tokenwright.text import ChatTemplate

if TYPE_CHECKING:
    from tokenwright.llm.chat.chat_processor import ChatProcessor

S = TypeVar("S")
T = TypeVar("T")


class EngineValue(Generic[S]):
    """An attribute of an LLM that reads its value from the engine by `read(engine)`. about: its documentation."""

    def __init__(self, read: Callable[[ModelEngine], S], about: str) -> None:
        self._read = read
        self.__doc__ = about

    @overload
    def __get__(self, view: None, owner: type) -> Self: ...

    @overload
    def __get__(self, view: "EngineView", owner: type) -> S: ...

    def __get__(self, view: "EngineView | None", owner: type) -> Self | S:
        return self if view is None else self._read(view.llm_engine)


class EngineView:
    """Has an engine and shows it; it computes nothing and has no other state."""

    def __init__(self, llm_engine: ModelEngine) -> None:
        self.llm_engine = llm_engine

    def __repr__(self) -> str:
        about = str(self.llm_engine)
        return f"<{type(self).__name__}{', ' if about == 'closed' else ' '}{about}>"

    def __getattr__(self, name: str) -> Any:
        raise no_attribute("an LLM", name, "methods")

    def __call__(self, *_: object, **__: object) -> Any:
        """Raises RequestError with the method to call (llama-cpp-python calls the model itself)."""
        raise RequestError("an LLM is no function: generate, stream and chat write texts, and model(ids) gives logits")

    @property
    def loaded(self) -> LoadedModel:
        """The model in memory, over which another LLM can open its own engine."""
        return self.llm_engine.local("loaded").loaded

    prepared = EngineValue(lambda engine: engine.prepared, "The model but for its weights: files, adapters, tokenizer.")
    options = EngineValue(lambda engine: engine.options, "The engine's options.")
    config = EngineValue(lambda engine: engine.facts.config, "The facts of the model's architecture.")
    graph = EngineValue(lambda engine: engine.facts.graph, "The model as a list of ops over named weights.")
    generation = EngineValue(lambda engine: engine.facts.generation, "The checkpoint's defaults for generation.")
    tokenizer = EngineValue(lambda engine: engine.facts.tokenizer, "The model's tokenizer.")
    device = EngineValue(lambda engine: str(engine.facts.device), "The device that computes, such as cpu or cuda:0.")
    dtype = EngineValue(lambda engine: engine.facts.dtype, "The dtype of the computation.")
    weights = EngineValue(lambda engine: engine.facts.weights, "The storage format of the matrices.")
    kernels = EngineValue(
        lambda engine: engine.facts.kernels, 'The instruction set of the native kernels, or "reference".'
    )
    specs = EngineValue(lambda engine: engine.specs, "The cache of each layer.")
    context = EngineValue(lambda engine: engine.context, "The most tokens of one text.")
    weight_bytes = EngineValue(lambda engine: engine.weight_bytes, "Bytes of the weights in memory.")
    kv_format = EngineValue(lambda engine: engine.kv_format, "The storage format of K and V, and the attention window.")
    kv_memory = EngineValue(lambda engine: engine.kv_memory, "Bytes of the whole KV memory.")
    eos_ids = EngineValue(
        lambda engine: engine.inputs.eos_ids, "The tokens that end a text, by the files of the checkpoint."
    )

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K and V in the cache for a text of `tokens` tokens."""
        return self.llm_engine.kv_bytes(tokens)

    @property
    def model(self) -> Model:
        """The model as a function: `logits, cache = model(tokens, cache)`."""
        return self.llm_engine.local("model").model

    @property
    def engine(self) -> Engine:
        """The engine, for inspection while it is idle: the engine thread changes it at any other time."""
        return self.llm_engine.local("engine").loop.engine

    @property
    def costs(self) -> CostModel:
        """The cost of steps of this model with this cache, derived from shapes."""
        return CostModel(self.graph, self.specs)

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template. Raises RequestError if it has none."""
        _ = self.llm_engine.inputs  # raises for a closed engine
        return self.prepared.template or ChatTemplate(self.tokenizer)

    @property
    def conversations(self) -> "ChatProcessor":
        """How the model reads conversations and writes answers, reasoning and tool calls."""
        _ = self.llm_engine.inputs  # raises for a closed engine
        return self._conversations

    @cached_property
    def _conversations(self) -> "ChatProcessor":
        from tokenwright.llm.chat.chat_processor import ChatProcessor  # and the forms of tool calls

        return ChatProcessor(self.prepared)

    def sampling(self, **overrides: object) -> SamplingParams:
        """The checkpoint's sampling defaults, updated with `overrides` other than None. Raises RequestError.

        With beams > 1 it leaves out defaults for drawing, as beam search draws nothing.
        """
        return self.llm_engine.inputs.sampling(**overrides)

    def save_cache(self, path: str | Path, tokens: Prompt) -> int:
        """Save a text's cached pages to a file; return how many of the text's first tokens it covers.

        Below one page it writes no file and returns 0. If writing fails, it raises CacheFileError; an old file stays.
        """
        return self.llm_engine.local("save_cache").save_cache(path, tokens)

    def load_cache(self, path: str | Path) -> int:
        """Load a file of `save_cache`, so that texts with its prefix reuse its pages; return the prefix's tokens.

        Raises CacheFileError for a damaged file or another model or KV format, CapacityError without free pages.
        """
        return self.llm_engine.local("load_cache").load_cache(path)

    def prepare(self, prompt: Prompt, params: SamplingParams, **options: Any) -> Request:
        """A request for `submit`: the prompt tokenised, the grammar compiled. Takes time. Raises RequestError.

        options: fields of RequestOptions.
        """
        return self.llm_engine.inputs.build(prompt, params, RequestOptions(**options))

    @cached_property
    def relevance(self) -> Relevance:
        """How this model compares texts."""
        return Relevance(self.prepared)

    def submit(
        self, requests: Sequence[Request], listener: Listener, *, paused: bool = False
    ) -> Sequence[RequestHandle]:
        """Hand requests to the engine, whose thread calls `listener` with their events; `transcript` reads them.

        `paused` ones compute nothing until their handles resume them. Raises ContextError or CapacityError for one that
        cannot be served, EngineError if the engine has ended.
        """
        return self.llm_engine.submit(requests, listener, paused=paused)

    def transcript(self, handle: RequestHandle) -> OutputProcessor:
        """The object that assembles a submitted request's texts from its deliveries."""
        return transcript(self.llm_engine, handle)

    def inspect(self, function: Callable[[Engine], T]) -> T:
        """`function(engine)`, run by the engine thread between two steps; it must not change it. Raises EngineError."""
        return self.llm_engine.local("inspect").inspect(function)

    def check(self) -> None:
        """Raises EngineError if the engine has failed, or the LLM is closed."""
        self.llm_engine.check()

    def close(self) -> None:
        """Free the memory. Unfinished requests fail; the LLM cannot be used afterwards."""
        self.llm_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
