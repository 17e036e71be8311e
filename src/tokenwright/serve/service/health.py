"""Whether the engine makes tokens: known from those that it makes for clients, or from one more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from tokenwright.engine import Failed, Request, SamplingParams, Token
from tokenwright.engine.port import Delivery, RequestHandle
from tokenwright.errors import EngineError
from tokenwright.serve.service.opening import heard

PROBE_S = 20.0  # the engine is well if it has made a token within this time, or makes one now
FRESH_S = 1.0  # a token that was made within this time proves it without a question
SOON_S = 0.2  # so long does a proof that is that old wait for a new one


class EngineHealth:
    """Watches the deliveries of an engine. submit: hands a request to it. token_at: when it last made a token."""

    def __init__(self, submit: Callable[[Request], Awaitable[RequestHandle]]) -> None:
        self.token_at = -PROBE_S
        self.probe_failed = False
        self._submit = submit
        self._probing: asyncio.Task[None] | None = None

    def add(self, deliveries: Sequence[Delivery]) -> None:
        """Take a step's events."""
        if any(type(event) is Token for delivery in deliveries for event in delivery.events):
            self.token_at = time.monotonic()

    def add_probe(self, delivery: Delivery) -> None:
        """Take the events of the probe's own request."""
        self.probe_failed |= any(type(event) is Failed for event in delivery.events)

    async def prove(self) -> None:
        """Prove that a token can be made. Raises EngineError if the engine makes none.

        A busy engine proves it by the tokens that it makes; an idle one makes one token more. One that is in a long
        step is well for PROBE_S seconds after its last token.
        """
        silent_s = time.monotonic() - self.token_at
        if silent_s < FRESH_S:
            return
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
            self._probing.add_done_callback(heard)
        try:
            async with asyncio.timeout(SOON_S if silent_s < PROBE_S else None):
                await asyncio.shield(self._probing)
        except TimeoutError:
            return

    async def _probe(self) -> None:
        before, self.probe_failed = self.token_at, False
        handle = await self._submit(Request((0,), SamplingParams(temperature=0.0, max_tokens=1), share=False))
        try:
            async with asyncio.timeout(PROBE_S):
                while self.token_at <= before:
                    if self.probe_failed:
                        raise EngineError("the engine has failed to make a token; its log says why")
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise EngineError(f"the engine has made no token for {PROBE_S:g} s") from None
        finally:
            handle.cancel()
