"""Submits requests to an engine over a model and awaits their ends, in asyncio too."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from tokenwright.cache import LayerSpec
from tokenwright.engine import Request
from tokenwright.engine.loop import AsyncListener, Inbox
from tokenwright.engine.port import Delivery, EnginePort, RequestHandle
from tokenwright.engine.warming import WarmRules
from tokenwright.llm.input_processor import InputProcessor
from tokenwright.llm.model import ModelFacts, PreparedModel
from tokenwright.llm.output_processor import OutputProcessor, Report
from tokenwright.llm.outputs import Piece
from tokenwright.llm.prompts.kept import KeptText, KeptTokens
from tokenwright.llm.prompts.memory import PromptMemory
from tokenwright.llm.prompts.watch import PromptOrigin, PromptWatch, Watching

if TYPE_CHECKING:
    from tokenwright.llm.engine import LLMEngine

T = TypeVar("T")
UNKNOWN = PromptOrigin()


class AsyncStream(AbstractContextManager["AsyncStream"]):
    """The pieces of a request, step by step, in its event loop. Closing it early cancels the request."""

    def __init__(
        self, receivers: "dict[RequestHandle, AsyncStream]", handle: RequestHandle, transcript: OutputProcessor
    ) -> None:
        self._receivers = receivers
        self._handle = handle
        self._transcript = transcript
        self._deliveries: deque[Delivery] = deque()
        self._waiter: asyncio.Future[None] | None = None
        receivers[handle] = self

    async def pieces(self) -> list[Piece] | None:
        """The pieces of the next step, in order; None after the end. Raises EngineError if the request failed."""
        if self._transcript.ended:
            self._transcript.check()
            return None
        while not self._deliveries:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._transcript.add(self._deliveries.popleft(), split=True)

    async def finish(self) -> None:
        """Read to the end, even if the request fails; its transcript has the error."""
        while not self._transcript.ended:
            await self.pieces()

    def receive(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __exit__(self, *_: object) -> None:
        del self._receivers[self._handle]
        self._handle.cancel()


class AsyncStreams:
    """The asyncio side of one engine: a listener per event loop, and the thread that tokenises their prompts."""

    def __init__(self) -> None:
        self._preparing = ThreadPoolExecutor(1, "tokenwright requests")
        self._listeners: WeakKeyDictionary[Any, AsyncListener] = WeakKeyDictionary()
        self._receivers: dict[RequestHandle, AsyncStream] = {}

    def listener(self) -> AsyncListener:
        event_loop = asyncio.get_running_loop()
        found = self._listeners.get(event_loop)
        if found is None:
            found = self._listeners[event_loop] = AsyncListener(event_loop, self._receive)
        return found

    async def in_thread(self, prepare: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._preparing, prepare)

    def close(self) -> None:
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def open(self, handle: RequestHandle, transcript: OutputProcessor) -> AsyncStream:
        """The stream of a request whose listener is `listener()`. Open it before the event loop runs again."""
        return AsyncStream(self._receivers, handle, transcript)

    def _receive(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            stream = self._receivers.get(delivery.handle)
            if stream is not None:  # else it was closed early
                stream.receive(delivery)

    async def read(self, transcripts: Mapping[RequestHandle, OutputProcessor]) -> None:
        """Read deliveries until all texts have ended. Await it before the event loop runs again, or some are lost."""
        with ExitStack() as stack:
            for stream in [stack.enter_context(self.open(*each)) for each in transcripts.items()]:
                await stream.finish()


class ModelEngine(EnginePort, Protocol):
    """An engine of a model. `facts` and `specs` (of the cache) stay after `close`; `streams` serve asyncio."""

    facts: ModelFacts
    specs: tuple[LayerSpec, ...]
    streams: AsyncStreams
    prompts: PromptMemory

    @property
    def prepared(self) -> PreparedModel:
        """The model without its weights. Raises RequestError if the engine is closed, as `inputs` does."""

    @property
    def inputs(self) -> InputProcessor:
        """The builder of requests. Raises EngineError in a forked process."""

    def inbox(self, at_end: int = 0) -> Inbox:
        """A listener for requests of this engine, for a thread that waits."""

    def local(self, name: str) -> "LLMEngine":
        """This engine, for the method `name` of LLM. Raises RequestError if replicas compute in other processes."""

    def release(self, owner: str, session: str) -> None:
        """End the pins of a client's session."""

    def warm(self, request: Request, rules: WarmRules) -> None:
        """Compute a prompt except its last token while the engine is idle, without waiting; see `Engine.warm`."""

    def kept(self, texts: Sequence[KeptText], owner: str) -> KeptTokens:
        """How much of texts is cached now, and the pins of a client."""

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K and V in the cache for a text of `tokens` tokens, with the draft model's."""

    @property
    def watching(self) -> Watching:
        """The facts about the engine's pages that watches of prompts share."""


def cached_model(engine: ModelEngine) -> str:
    return f"{engine.facts.name} {engine.kv_format}"


def transcript(engine: ModelEngine, handle: RequestHandle, origin: PromptOrigin = UNKNOWN) -> OutputProcessor:
    watch = PromptWatch(engine.watching, handle, origin)
    return OutputProcessor(handle, engine.facts.config.layers, engine.kv_bytes, watch)


def finish(
    engine: ModelEngine,
    requests: Sequence[Request],
    origin: PromptOrigin = UNKNOWN,
    *,
    at_end: bool = True,
    report: Report | None = None,
) -> list[OutputProcessor]:
    """Submit requests together and wait until all have ended or failed. at_end: read no delivery until then."""
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
    handles = engine.submit(requests, engine.streams.listener())
    transcripts = {handle: transcript(engine, handle, origin) for handle in handles}
    await engine.streams.read(transcripts)
    return list(transcripts.values())


async def in_thread(engine: ModelEngine, prepare: Callable[[], T]) -> T:
    """`prepare()`, called in another thread: tokenising takes time."""
    _ = engine.inputs  # raises for a closed engine
    return await engine.streams.in_thread(prepare)
