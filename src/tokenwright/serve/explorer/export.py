"""A run as a file for other programs: the page's trace, and a Chrome trace."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from tokenwright.explorer.views.chrome_trace import chrome_trace
from tokenwright.serve.explorer.explorer import HIDDEN, Explorer
from tokenwright.serve.explorer.inside import in_parts
from tokenwright.serve.explorer.player import Player
from tokenwright.serve.http.api import unless_gone
from tokenwright.serve.http.reply_text import dumps_in_parts

if TYPE_CHECKING:  # torch is loaded with the model, not with the server
    from tokenwright.trace.summary import RunHalf


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the routes."""

    def both_ways(player: Player) -> Generator[list[RunHalf] | None, None, None]:
        from tokenwright.explorer.views.run_halves import run_halves

        with explorer.runs.guests([player.run]):  # the lane that goes the other way needs as much again
            yield from run_halves(player.run)

    @app.get("/runs/{identity}/trace.json", **HIDDEN)
    async def trace(identity: str, request: Request, halves: bool = False) -> Response:
        player = explorer.player(identity)
        player.renew()
        found = await unless_gone(request, in_parts(both_ways(player))) if halves else []
        return await asyncio.to_thread(lambda: _file(explorer.trace(player, found), f"trace-{identity}.json"))

    @app.get("/runs/{identity}/perfetto.json", **HIDDEN)
    def perfetto(identity: str) -> Response:
        player = explorer.player(identity)
        return _file(chrome_trace(player.card, list(player.run.frames)), f"perfetto-{identity}.json")


def _file(content: dict[str, Any], name: str) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(dumps_in_parts(content), media_type="application/json", headers=headers)
