"""The lesson's routes: what its cards need to know, the check of an answer, and one teacher-forced pass over a text.

Checks run one at a time, in a thread, in engines of their own, and end when their client goes away. A few may wait.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, TypeVar

from fastapi import FastAPI, Request
from pydantic import Field

from tokenwright.errors import CapacityError, RequestError
from tokenwright.explorer.messages.learn import Checked, Fact, Lesson, Losses
from tokenwright.serve.explorer.explorer import HIDDEN, Explorer, Strict
from tokenwright.serve.http.api import reads, unless_gone
from tokenwright.serve.http.fields import many, names
from tokenwright.serve.service.types import Missing
from tokenwright.trace.wire import Source

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server
    from tokenwright.explorer.learn import CheckWork
    from tokenwright.llm.llm import LLM

T = TypeVar("T")

MOST_WAITING = 4  # checks that may wait for the one that runs
MOST_TEXT = 2048  # ids of a text to score

Text = Annotated[str, Field(max_length=1000)]


class AnswerBody(Strict):
    """POST /check/CHALLENGE: the fields of an answer, as GET /learn names them."""

    answer: Annotated[dict[Annotated[str, Field(max_length=40)], int | float | Text], names(16)]


class LossesBody(Strict):
    """POST /learn/score: the ids of a text."""

    ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], many(MOST_TEXT, 2)]


class Desk:
    """Does one piece of work after another, in a thread; cancels the one whose client has gone."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self.working: CheckWork | None = None
        self._waiting = 0
        self._turn: asyncio.Lock | None = None  # of the event loop that serves
        self._thread = ThreadPoolExecutor(1, "tokenwright checks")

    def close(self) -> None:
        """Cancel the work under way."""
        if (work := self.working) is not None:
            work.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def do(self, do: Callable[[CheckWork], T]) -> T:
        """`do` with the means of a check. Raises CapacityError if too many wait already."""
        if self._waiting > MOST_WAITING:
            raise CapacityError(f"{MOST_WAITING} checks wait already; try again in a minute")
        self._turn = self._turn or asyncio.Lock()
        self._waiting += 1
        try:
            async with self._turn:
                return await self._done(do)
        finally:
            self._waiting -= 1

    async def _done(self, do: Callable[[CheckWork], T]) -> T:
        from tokenwright.explorer.learn import CheckWork

        work = self.working = CheckWork(self.explorer.llm)
        task = asyncio.get_running_loop().run_in_executor(self._thread, do, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            work.cancel()
            with suppress(Exception):
                await task  # the next one begins when this one has ended
            raise
        finally:
            self.working = None


def losses(llm: LLM, ids: list[int], explorer: Explorer) -> Losses:
    """One teacher-forced pass over a text: the loss of each token after those before it, all under the causal mask."""
    began = time.perf_counter()
    scored = llm.score(ids)
    spent = time.perf_counter() - began
    loss = [None, *(-value for value in scored.tolist())]
    mean = float(-scored.mean())
    facts = (
        Fact("loss", "mean loss", mean, "nat", Source.READ, "mean of -log p, at temperature 1"),
        Fact("perplexity", "perplexity", math.exp(mean), "", Source.DERIVED, "e to the mean loss"),
        Fact("pass_us", "the pass", spent * 1e6, "us", Source.MEASURED, "from the request to the last loss"),
        Fact("rows", "tokens in one pass", float(len(ids)), "tokens", Source.COUNTED, "rows of one pass"),
    )
    return Losses(explorer.looks(ids), tuple(loss), facts)


def add(app: FastAPI, explorer: Explorer) -> Desk:
    """Add the routes of the lesson. Returns what does their work, to be closed with the explorer."""
    desk = Desk(explorer)

    @app.get("/learn", **HIDDEN)
    def learn() -> Lesson:
        from tokenwright.explorer.learn import lesson

        return lesson(explorer.llm)

    @app.post("/check/{challenge}", **HIDDEN)
    async def check(request: Request, challenge: str, body: Annotated[AnswerBody, reads(AnswerBody)]) -> Checked:
        from tokenwright.explorer.learn import CHALLENGES

        asked = CHALLENGES.get(challenge)
        if asked is None:
            raise Missing(f"there is no challenge of this name; there are {', '.join(CHALLENGES)}")
        answer = asked.read(body.answer)
        return await unless_gone(request, desk.do(lambda work: asked.check(work, answer)))

    @app.post("/learn/score", **HIDDEN)
    async def score(request: Request, body: Annotated[LossesBody, reads(LossesBody)]) -> Losses:
        def scored(work: CheckWork) -> Losses:
            size = explorer.llm.config.vocab_size
            if max(body.ids) >= size:
                raise RequestError(f"ids must be below {size}, the size of the vocabulary")
            with work.engine(len(body.ids)) as llm:
                llm.score(body.ids[:2])  # the first call of a fresh engine takes longer
                return losses(llm, body.ids, explorer)

        return await unless_gone(request, desk.do(scored))

    return desk
