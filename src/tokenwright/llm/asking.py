"""The port of an engine over a model, and the ways to hand requests to it and wait for their ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from tokenwright.cache import LayerSpec
from tokenwright.engine import Request
from tokenwright.engine.loop import Inbox
from tokenwright.engine.port import EnginePort, RequestHandle
from tokenwright.llm.async_streams import AsyncStreams
from tokenwright.llm.input_processor import InputProcessor
from tokenwright.llm.model import ModelFacts, PreparedModel
from tokenwright.llm.output_processor import OutputProcessor, Report
from tokenwright.llm.prompts.memory import PromptMemory
from tokenwright.llm.prompts.watch import PromptOrigin, PromptWatch, Watching

if TYPE_CHECKING:
    from tokenwright.llm.engine import LLMEngine

T = TypeVar("T")
UNKNOWN = PromptOrigin()


class ModelEngine(EnginePort, Protocol):
    """An engine of a model. facts, specs: of the model as it is computed; they stay after `close`.

    streams: its asyncio side. prompts: that it answered.
    """

    facts: ModelFacts
    specs: tuple[LayerSpec, ...]
    streams: AsyncStreams
    prompts: PromptMemory

    @property
    def prepared(self) -> PreparedModel:
        """The model without its weights. Raises RequestError if the engine is closed, as `inputs`."""

    @property
    def inputs(self) -> InputProcessor:
        """The builder of requests. Raises EngineError in a forked process."""

    def inbox(self, at_end: int = 0) -> Inbox:
        """A listener for requests of this engine, for a thread that waits."""

    def local(self, name: str) -> LLMEngine:
        """This engine, for the method `name` of LLM. Raises RequestError if replicas in other processes compute."""

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K and V in the cache for a text of `tokens` tokens, with the draft model's."""

    def evicted(self, short_hash: bytes) -> float | None:
        """When a page was evicted, as `EvictionLog.when` says."""


def transcript(engine: ModelEngine, handle: RequestHandle, origin: PromptOrigin = UNKNOWN) -> OutputProcessor:
    """The assembler of a submitted request's texts, from its deliveries. origin: of its prompt."""
    facts = engine.facts
    model, states = f"{facts.name} {engine.kv_format}", bool(engine.pool.states)
    watching = Watching(engine.prompts, facts.tokenizer, model, states, engine.evicted)
    watch = PromptWatch(watching, handle, origin)
    return OutputProcessor(handle, facts.config.layers, engine.kv_bytes, watch)


def finish(
    engine: ModelEngine,
    requests: Sequence[Request],
    origin: PromptOrigin = UNKNOWN,
    *,
    at_end: bool = True,
    report: Report | None = None,
) -> list[OutputProcessor]:
    """Submit requests together and wait until all have ended or failed.

    origin: of their prompts. at_end: leave all deliveries unread until then, instead of reading them after each step.
    report: called after each step, if they are read so.
    """
    inbox = engine.inbox(at_end=len(requests) if at_end else 0)
    handles = engine.submit(requests, inbox)
    transcripts = {handle: transcript(engine, handle, origin) for handle in handles}
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


async def afinish(
    engine: ModelEngine, requests: Sequence[Request], origin: PromptOrigin = UNKNOWN
) -> list[OutputProcessor]:
    """`finish` for asyncio."""
    handles = engine.submit(requests, engine.streams.listener())
    transcripts = {handle: transcript(engine, handle, origin) for handle in handles}
    await engine.streams.read(transcripts)
    return list(transcripts.values())


async def in_thread(engine: ModelEngine, prepare: Callable[[], T]) -> T:
    """`prepare()`, called in another thread: tokenising takes time."""
    _ = engine.inputs  # raises for a closed engine
    return await engine.streams.in_thread(prepare)
