"""The page's view into the model: a token's way through a layer, all heads, a head's matrix, and the lens.

The drafts of a run's text are beside them. Everything is replayed read-only on the engine. Long work is done in parts,
each in another thread; it ends when the client goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from functools import cache
from typing import TYPE_CHECKING, TypeVar, cast

from fastapi import FastAPI, Request

from tokenwright.errors import RequestError
from tokenwright.explorer.messages.block import BlockView
from tokenwright.explorer.messages.drafting import DraftsCard
from tokenwright.explorer.messages.heads import AtlasCard, LensCard, MatrixCard
from tokenwright.explorer.messages.way import WayView
from tokenwright.serve.explorer.explorer import HIDDEN, Explorer
from tokenwright.serve.http.api import unless_gone
from tokenwright.serve.service.admission import heard

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server
    from tokenwright.decode.drafts.step_costs import StepCosts
    from tokenwright.llm.run import Run

T = TypeVar("T")


async def in_parts(work: Generator[T | None, None, None]) -> T:
    """The last item of `work`, whose items are made one by one in another thread.

    A task that is cancelled lets the part under way end and closes `work`.
    """
    found: T | None = None
    part: asyncio.Future[T | object | None] | None = None
    try:
        while part is None or part.result() is not _END:
            part = asyncio.ensure_future(asyncio.to_thread(next, work, _END))
            part.add_done_callback(heard)
            item = await asyncio.shield(part)
            found = found if item is _END else cast("T | None", item)
    finally:
        if part is not None and not part.done():
            await asyncio.wait([part])
        await asyncio.to_thread(work.close)
    assert found is not None, "the last part is the answer"
    return found


_END: object = object()


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the routes of the panels Block, Heads and Drafts, and of the way into a cell."""

    def watched(identity: str) -> Run:
        player = explorer.player(identity)
        player.renew()
        return player.run

    @app.get("/runs/{identity}/block", **HIDDEN)
    def block(identity: str, step: int, layer: int, position: int | None = None) -> BlockView:
        from tokenwright.explorer.views import block_view  # with NumPy

        run = watched(identity)
        last = run.last_position(step)
        at = last if position is None else position
        if not 0 <= at <= last:
            raise RequestError(f"position must be from 0 to {last}: later tokens are not computed at step {step + 1}")
        run.check(layer, 0)
        return run.look(lambda replay, text: block_view.block(replay, text, at, layer), at)

    @app.get("/runs/{identity}/way", **HIDDEN)
    def way_in(identity: str, step: int, layer: int, head: int, position: int) -> WayView:
        from tokenwright.explorer.views.way_view import way  # with NumPy

        run = watched(identity)
        run.check(layer, head)
        last = run.last_position(step)
        if not 0 <= position <= last:
            raise RequestError(f"position must be from 0 to {last}: later tokens are not computed at step {step + 1}")
        return run.look(lambda replay, text: way(replay, text, last, layer, head, position), last)

    @app.get("/runs/{identity}/lens", **HIDDEN)
    def lens(identity: str, step: int) -> LensCard:
        from tokenwright.explorer.views import heads_view  # with NumPy

        run = watched(identity)
        token = run.frame(step).token
        if token is None:
            raise RequestError(f"step {step + 1} has chosen no token: it computed a part of the prompt")
        return heads_view.lens(run.look, run.last_position(step), step, token, lambda one: explorer.looks([one])[0])

    @app.get("/runs/{identity}/atlas", **HIDDEN)
    async def all_heads(request: Request, identity: str, step: int) -> AtlasCard:
        from tokenwright.explorer.views import heads_view  # with NumPy

        run = watched(identity)
        tokens = run.tokens[: run.last_position(step) + 1]
        config = explorer.llm.config
        return await unless_gone(
            request, in_parts(heads_view.atlas(run.look, tokens, step, config.layers, config.heads))
        )

    @app.get("/runs/{identity}/matrix", **HIDDEN)
    async def matrix(request: Request, identity: str, step: int, layer: int, head: int) -> MatrixCard:
        from tokenwright.explorer.views import heads_view  # with NumPy

        run = watched(identity)
        run.check(layer, head)
        stop = run.last_position(step) + 1
        return await unless_gone(request, in_parts(heads_view.matrix(run.look, stop, step, layer, head)))

    @cache
    def costs() -> StepCosts:
        from tokenwright.explorer.views.run_drafts import step_costs  # with NumPy

        return step_costs(explorer.llm.llm_engine.local("run"))

    @app.get("/runs/{identity}/drafts", **HIDDEN)
    def drafts(identity: str, free: bool = False) -> DraftsCard:
        from tokenwright.explorer.views.run_drafts import drafts_of  # with NumPy

        return drafts_of(watched(identity), costs(), free=free)
